"""LangChain and LangGraph: a loop of three turns, whole and streamed."""

import json
import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

DATA = json.loads(os.environ["DATA"])
ran = []


@tool
def read_file(path: str) -> str:
    """Reads a file."""
    ran.append(["read_file", {"path": path}])
    return DATA["file" if path == "a.txt" else "typed"]


@tool
def add(a: int, b: int) -> str:
    """Adds."""
    ran.append(["add", {"a": a, "b": b}])
    return DATA["sum"]


@tool
def reboot(when: str = "now") -> str:
    """Reboots."""
    ran.append(["reboot", {"when": when}])
    return "rebooted"


def run(agent, prompt, stream):
    ran.clear()
    state = {"messages": [{"role": "user", "content": prompt}]}
    if not stream:
        return agent.invoke(state)["messages"][-1].text
    text = ""
    for message, _ in agent.stream(state, stream_mode="messages"):
        text = text + message.text if message.type == "AIMessageChunk" else ""
    return text


for responses in (False, True):
    for stream in (False, True):
        name = f"{'Responses' if responses else 'chat'} {'streamed' if stream else 'whole'}"
        fields = {"model": "scripted", "base_url": DATA["url"], "api_key": "k", "use_responses_api": responses}
        fields["streaming"] = stream
        final = run(create_agent(ChatOpenAI(**fields), [read_file, add]), DATA["prompt"], stream)
        print(json.dumps([name, list(ran), final]))
        for limit in DATA["limits"]:
            run(create_agent(ChatOpenAI(**fields, max_tokens=limit), [reboot]), DATA["cut_prompt"], stream)
            print(json.dumps([f"{name} cut at {limit}", list(ran), None]))
