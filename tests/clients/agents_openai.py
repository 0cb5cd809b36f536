"""openai-agents: a loop of three turns over Responses and chat, whole and streamed."""

import asyncio
import contextlib
import json
import os

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

DATA = json.loads(os.environ["DATA"])
set_tracing_disabled(True)
ran = []


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    ran.append(["read_file", {"path": path}])
    return DATA["file" if path == "a.txt" else "typed"]


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    ran.append(["add", {"a": a, "b": b}])
    return DATA["sum"]


@function_tool
def reboot(when: str = "now") -> str:
    """Reboots."""
    ran.append(["reboot", {"when": when}])
    return "rebooted"


class Sum(BaseModel):
    total: int


async def run(agent, prompt, stream):
    ran.clear()
    if stream:
        result = Runner.run_streamed(agent, prompt)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, prompt)
    return result.final_output


async def main():
    client = AsyncOpenAI(base_url=DATA["url"], api_key="k")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="scripted", openai_client=client)
        for stream in (False, True):
            name = f"{kind.__name__} {'streamed' if stream else 'whole'}"
            final = await run(Agent(name="a", model=model, tools=[read_file, add]), DATA["prompt"], stream)
            print(json.dumps([name, list(ran), final]))
            agent = Agent(name="a", model=model, tools=[read_file, add], output_type=Sum)
            final = await run(agent, DATA["typed_prompt"], stream)
            print(json.dumps([name + " typed", list(ran), final.model_dump_json()]))
            for limit in DATA["limits"]:
                settings = ModelSettings(max_tokens=limit)
                agent = Agent(name="a", model=model, tools=[reboot], model_settings=settings)
                # that an answer was cut may be told as an error
                with contextlib.suppress(ModelBehaviorError):
                    await run(agent, DATA["cut_prompt"], stream)
                print(json.dumps([f"{name} cut at {limit}", list(ran), None]))


asyncio.run(main())
