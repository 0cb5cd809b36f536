"""pydantic-ai: a loop of three turns over chat, Responses and Messages, whole and streamed."""

import asyncio
import json
import os

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

DATA = json.loads(os.environ["DATA"])
ran = []


def read_file(path: str) -> str:
    """Reads a file."""
    ran.append(["read_file", {"path": path}])
    return DATA["file" if path == "a.txt" else "typed"]


def add(a: int, b: int) -> str:
    """Adds."""
    ran.append(["add", {"a": a, "b": b}])
    return DATA["sum"]


def reboot(when: str = "now") -> str:
    """Reboots."""
    ran.append(["reboot", {"when": when}])
    return "rebooted"


class Sum(BaseModel):
    total: int


async def run(agent, prompt, stream, **fields):
    ran.clear()
    if not stream:
        return (await agent.run(prompt, **fields)).output
    async with agent.run_stream(prompt, **fields) as result:
        return await result.get_output()


async def main():
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=DATA["url"], api_key="k"))
    other = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=DATA["url"].removesuffix("/v1"), api_key="k"))
    models = [
        OpenAIChatModel("scripted", provider=provider),
        OpenAIResponsesModel("scripted", provider=provider),
        AnthropicModel("scripted", provider=other),
    ]
    for model in models:
        for stream in (False, True):
            name = f"{type(model).__name__} {'streamed' if stream else 'whole'}"
            # a stream of this client ends at the first text
            prompt = DATA["silent_prompt" if stream else "prompt"]
            final = await run(Agent(model, tools=[read_file, add]), prompt, stream)
            print(json.dumps([name, list(ran), final]))
            if not isinstance(model, AnthropicModel):
                agent = Agent(model, tools=[read_file, add], output_type=NativeOutput(Sum))
                final = await run(agent, DATA["typed_prompt"], stream)
                print(json.dumps([name + " typed", list(ran), final.model_dump_json()]))
            for limit in DATA["limits"]:
                agent = Agent(model, tools=[reboot])
                try:
                    await run(agent, DATA["cut_prompt"], stream, model_settings={"max_tokens": limit})
                except Exception as error:
                    # that the answer was cut is told to the user, as it should be
                    assert "token" in str(error).lower() or "limit" in str(error).lower(), error
                print(json.dumps([f"{name} cut at {limit}", list(ran), None]))


asyncio.run(main())
