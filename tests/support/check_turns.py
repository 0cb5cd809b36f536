"""Three turns and more of unmodified Python clients with tools that are really run: none of them may meet a 4xx.

Not part of the test suite: it needs an environment of its own, with litellm, langchain-openai, langchain-anthropic,
langgraph, pydantic-ai-slim[openai,anthropic] and openai-agents. Start a server on the scripted engine, then these:

    python tests/support/check_turns.py serve 8123
    OTHER/bin/python tests/support/check_turns.py clients http://127.0.0.1:8123

Prints a line for each client and exits 1 if one fails. Last run on 2026-11-30 with litellm 1.110.2, langchain-openai
1.7.4, langchain-anthropic 1.7.10, langgraph 1.2.24, pydantic-ai 2.68.0, openai-agents 0.24.0: all pass.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CALL = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
ASK = f"hi @{json.dumps({'reply': CALL})}@"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TURNS = 3


def weather_in(city: str, thinks: bool) -> str:
    """The result tells the scripted engine what comes next."""
    return f"rain in {city} @{json.dumps({'reply': 'Hm.</think>It rains.' if thinks else 'It rains.'})}@"


def serve(port: int) -> None:
    """Any model name, a long context: agents send long prompts, and a byte is a token here."""
    support = Path(__file__).resolve().parent
    sys.path.append(str(support))
    from aiohttp import web
    from byte_model import write_model
    from serving import ENVIRONMENT

    from pilotfish.engine.options import EngineOptions
    from pilotfish.server.http.app import ServerOptions, make_app, make_runner
    from pilotfish.server.model_files import load_model_files

    async def run() -> None:
        folder = write_model(Path(tempfile.mkdtemp()))
        options = ServerOptions(
            served_names=("scripted",),
            any_model_name=True,
            core="scripted_core:make_core",
            engine_environment=ENVIRONMENT,
        )
        app = make_app(options, EngineOptions(model=str(folder), max_model_len=20_000), load_model_files(folder))
        runner = make_runner(app, shutdown_seconds=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def litellm(url: str, model: str, stream: bool, **fields: Any) -> str:
    import litellm

    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Be nice."}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": ASK})
        for _ in range(3):
            answer = litellm.completion(
                model=model, messages=messages, tools=tools, max_tokens=300, stream=stream, api_base=url, **fields
            )
            message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                text = weather_in(json.loads(call.function.arguments)["city"], bool(fields))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                break
    return message.content


def langgraph(model: Any, thinks: bool = False) -> Any:
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    @tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return weather_in(city, thinks)

    agent, state = create_react_agent(model, [weather], prompt="Be nice."), {"messages": []}
    for turn in range(TURNS):
        state["messages"] = [*state["messages"], ("user", ASK)]
        if turn == 1:
            *_, state = agent.stream(state, stream_mode="values")
        else:
            state = agent.invoke(state)
    return state["messages"][-1].content


async def pydantic_ai(model: str, **settings: Any) -> str:
    """Two agents on one history: the second one's instructions are a late system message."""
    from pydantic_ai import Agent

    agent = Agent(model, instructions="Be brief.", system_prompt="You know the weather.", model_settings=settings)

    @agent.tool_plain
    def weather(city: str) -> str:
        return weather_in(city, bool(settings))

    history = None
    for _ in range(TURNS):
        history = (await agent.run(ASK, message_history=history)).all_messages()
    other = Agent(model, instructions="Be long.", system_prompt="You know nothing.", model_settings=settings)
    reply = "Hm.</think>No." if settings else "No."
    return (await other.run(f"and? @{json.dumps({'reply': reply})}@", message_history=history)).output


async def agents(kind: str, stream: bool) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, SQLiteSession, function_tool
    from openai import AsyncOpenAI

    made = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
    model = made(model="scripted", openai_client=AsyncOpenAI())

    @function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return weather_in(city, thinks=False)

    other = Agent(name="other", instructions="Help.", model=model)
    agent = Agent(name="first", instructions="Be nice.", tools=[weather], handoffs=[other], model=model)
    session = SQLiteSession("turns")
    for _ in range(TURNS):
        if stream:
            answer = Runner.run_streamed(agent, ASK, session=session)
            async for _ in answer.stream_events():
                pass
        else:
            answer = await Runner.run(agent, ASK, session=session)
    return answer.final_output


def checks(url: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    v1 = url + "/v1"
    for stream in (False, True):
        for model, base, fields in (
            ("openai/scripted", v1, {}),
            ("hosted_vllm/scripted", v1, {"reasoning_effort": "low"}),
            ("deepseek/scripted", v1, {"thinking": {"type": "enabled"}}),
            ("openrouter/scripted", v1, {"reasoning": {"effort": "low"}}),
            ("anthropic/scripted", url, {}),
        ):
            yield f"litellm {model} {stream=}", lambda a=(base, model, stream), f=fields: litellm(*a, **f)
    effort = {"effort": "low", "summary": "auto"}
    for name, model in (
        ("openai", ChatOpenAI(model="scripted")),
        ("openai streaming", ChatOpenAI(model="scripted", streaming=True)),
        ("openai, an effort", ChatOpenAI(model="scripted", reasoning_effort="low")),
        ("openai, Responses", ChatOpenAI(model="scripted", use_responses_api=True, reasoning=effort)),
        ("anthropic", ChatAnthropic(model="scripted", max_tokens=2000)),
        ("anthropic, thinking", ChatAnthropic(model="scripted", max_tokens=2000, thinking=THINKING)),
    ):
        yield f"langgraph {name}", lambda m=model, n=name: langgraph(m, thinks="," in n)
    for model, settings in (
        ("openai-chat:scripted", {}),
        ("openai-chat:scripted", {"openai_reasoning_effort": "low"}),
        ("openai-responses:scripted", {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"}),
        ("anthropic:scripted", {}),
        ("anthropic:scripted", {"anthropic_thinking": THINKING, "max_tokens": 4000}),
    ):
        yield f"pydantic-ai {model} {settings}", lambda m=model, s=settings: asyncio.run(pydantic_ai(m, **s))
    for kind in ("chat", "responses"):
        for stream in (False, True):
            yield f"openai-agents {kind} {stream=}", lambda k=kind, s=stream: asyncio.run(agents(k, s))


THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def clients(url: str) -> int:
    warnings.filterwarnings("ignore")
    os.environ |= {"OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": "k", "ANTHROPIC_BASE_URL": url}
    os.environ |= {"ANTHROPIC_API_KEY": "k", "DEEPSEEK_API_KEY": "k", "OPENROUTER_API_KEY": "k"}
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    failures = 0
    for name, check in checks(url):
        began = time.monotonic()
        try:
            print(f"{name}: {check()!r:.60} ({time.monotonic() - began:.1f} s)", flush=True)
        except Exception as error:
            failures += 1
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:500]}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        sys.exit(clients(sys.argv[2]))
