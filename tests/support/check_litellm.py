"""LiteLLM's proxy in front of this server, asked by the official clients through each API, towards each API.

Not part of the test suite: it needs LiteLLM (pip install 'litellm[proxy]' in an environment of its own).
`python tests/support/check_litellm.py LITELLM` takes its command, prints a line for each way through and exits 1 if one
fails. Last run with litellm 1.108.7, openai 3.57 and anthropic 2.14: all ways pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import openai

SUPPORT = Path(__file__).resolve().parent
sys.path[:0] = [str(SUPPORT)]

from byte_model import write_model  # noqa: E402
from serving import Server, script, serving_in_thread  # noqa: E402

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
KEY = "sk-proxy"


@contextlib.contextmanager
def proxy(command: str, server: Server, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = [
        ("chat", {"model": "openai/scripted", "api_base": server.v1, "api_key": "k"}),
        ("claude", {"model": "anthropic/scripted", "api_base": server.url, "api_key": "k"}),
    ]
    config = {
        "model_list": [{"model_name": name, "litellm_params": params} for name, params in models],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"telemetry": False},
    }
    # JSON is YAML
    (folder / "proxy.yaml").write_text(json.dumps(config))
    arguments = [command, "--config", str(folder / "proxy.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url + "/health/liveliness", process)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def _wait(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    raise SystemExit("the proxy does not come up")


def chat(client: openai.OpenAI, model: str) -> None:
    messages: list = [{"role": "user", "content": script(reply=f"I look.\n{CALL}", runs=[3])}]
    fields: dict = {"model": model, "tools": [CHAT_TOOL], "max_tokens": 300}
    message = client.chat.completions.create(messages=messages, **fields).choices[0].message
    assert message.content == "I look." and json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}
    text, arguments = "", ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
    assert text == "I look." and json.loads(arguments) == {"city": "Bern"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages += [message.model_dump(exclude_none=True), result]
    messages.append({"role": "user", "content": script(reply="Rain €.")})
    assert client.chat.completions.create(messages=messages, **fields).choices[0].message.content == "Rain €."


def responses(client: openai.OpenAI, model: str) -> None:
    tool: dict = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    fields: dict = {"model": model, "input": script(reply=f"I look.\n{CALL}", runs=[3]), "tools": [tool]}
    fields["max_output_tokens"] = 300
    whole = client.responses.create(**fields)
    assert whole.output_text == "I look." and json.loads(whole.output[-1].arguments) == {"city": "Bern"}
    with client.responses.stream(**fields) as stream:
        assert stream.until_done().get_final_response().output_text == "I look."


def messages(client: anthropic.Anthropic, model: str) -> None:
    asked: dict = {"role": "user", "content": script(reply=f"I look.\n{CALL}", runs=[3])}
    fields: dict = {"model": model, "max_tokens": 300, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    whole = client.messages.create(messages=[asked], **fields)
    assert [block.type for block in whole.content] == ["text", "tool_use"] and whole.stop_reason == "tool_use"
    with client.messages.stream(messages=[asked], **fields) as stream:
        assert stream.get_final_message().content[-1].input == {"city": "Bern"}


def thinking(client: anthropic.Anthropic, model: str) -> None:
    asked: dict = {"role": "user", "content": script(reply="Hm.</think>Yes.", runs=[3])}
    budget: dict = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=model, max_tokens=2000, messages=[asked], thinking=budget) as stream:
        blocks = stream.get_final_message().content
    assert [block.type for block in blocks] == ["thinking", "text"]


def refusal(client: openai.OpenAI, model: str) -> None:
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], temperature=3)
    except openai.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("want a 400")


def main() -> int:
    failures = 0

    def attempt(name: str, check: Callable, *arguments: object) -> None:
        nonlocal failures
        try:
            check(*arguments)
            print(f"{name}: ok")
        except Exception as error:
            failures += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}")

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch))
        with serving_in_thread(folder) as server, proxy(sys.argv[1], server, folder) as url:
            ours = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)
            theirs = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60)
            for model in ("chat", "claude"):
                for check, client in ((chat, ours), (responses, ours), (messages, theirs)):
                    attempt(f"{check.__name__} to {model}", check, client, model)
            # LiteLLM itself refuses thinking towards models that its price list does not know to think
            attempt("thinking to claude", thinking, theirs, "claude")
            attempt("a refusal", refusal, ours, "chat")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
