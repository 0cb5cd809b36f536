"""The plain `anthropic` client: three turns of one history, by its tool runner and by hand, whole and streamed."""

import json
import os

from anthropic import Anthropic, beta_tool

DATA = json.loads(os.environ["DATA"])
client = Anthropic(base_url=DATA["url"].removesuffix("/v1"), api_key="k", max_retries=0)
ran = []


@beta_tool
def read_file(path: str) -> str:
    """Reads a file."""
    ran.append(["read_file", {"path": path}])
    return DATA["file"]


@beta_tool
def add(a: int, b: int) -> str:
    """Adds."""
    ran.append(["add", {"a": a, "b": b}])
    return DATA["sum"]


@beta_tool
def reboot(when: str = "now") -> str:
    """Reboots."""
    ran.append(["reboot", {"when": when}])
    return "rebooted"


def by_runner(history, tools, stream, **fields):
    """The client keeps the history of one user's turn to itself: what it generated is asked for."""
    runner = client.beta.messages.tool_runner(
        model="scripted", messages=history, tools=tools, stream=stream, **{"max_tokens": 2000, **fields}
    )
    added = []
    for message in runner:
        answer = message.get_final_message() if stream else message
        results = runner.generate_tool_call_response()
        added += [{"role": "assistant", "content": answer.content}, *([results] if results else [])]
    return history + added, answer


def by_hand(history, tools, stream, **fields):
    asked = {"model": "scripted", "tools": [tool.to_dict() for tool in tools], "max_tokens": 2000, **fields}
    functions = {tool.name: tool for tool in tools}
    while True:
        if stream:
            with client.messages.stream(messages=history, **asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=history, **asked)
        assert client.messages.count_tokens(model="scripted", messages=history).input_tokens > 0
        history = [*history, {"role": "assistant", "content": answer.content}]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": functions[block.name].call(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            return history, answer
        history.append({"role": "user", "content": results})


def main():
    for way in (by_runner, by_hand):
        for stream in (False, True):
            for thinking in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
                ran.clear()
                history = []
                for _ in range(3):
                    history.append({"role": "user", "content": DATA["prompt"]})
                    history, answer = way(history, [read_file, add], stream, **thinking)
                final = "".join(getattr(block, block.type) for block in answer.content)
                name = f"{way.__name__} {'streamed' if stream else 'whole'}"
                print(json.dumps([f"{name} {'thinking ' if thinking else ''}turns", list(ran), final]))
            for limit in DATA["limits"]:
                ran.clear()
                way([{"role": "user", "content": DATA["cut_prompt"]}], [reboot], stream, max_tokens=limit)
                print(json.dumps([f"{name} cut at {limit}", list(ran), None]))


main()
