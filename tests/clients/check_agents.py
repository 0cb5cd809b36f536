"""Agents of other projects against this server: loops of three turns whose tools really run, and calls that are cut.

Not part of the test suite: the clients are installed in environments of their own.
`python tests/clients/check_agents.py agents_openai.py=PYTHON agents_ai_sdk.mjs=FOLDER ...` names for each program the
Python that has its client, the folder with node_modules, or for agents_commands.py the folder with the programs. The
model's text is scripted: each tool's result says what the model writes next. Prints a line a run and exits 1 if one ran
what it should not, or was refused, but for the one question below.
Last run on 2026-11-30: openai-agents 0.24, pydantic-ai 2.68, langchain 1.5, langgraph 1.2, ai 6.0, openai 6.49 (Node),
anthropic 2.14, Claude Code 2.1.197, Codex 0.171, qwen-code 0.15.10, opencode 1.18.33 and aider 0.86.2 pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support")]

import serving  # noqa: E402
from aiohttp import web  # noqa: E402
from byte_model import write_model  # noqa: E402
from serving import make_app, script, serving_in_thread  # noqa: E402

REFUSED: list[str] = []
ASKED = "thread_unsupported_request"
"""The tool runner of `anthropic` asks whether the server keeps the conversation, and goes on without when told no."""


@web.middleware
async def watch(request: web.Request, handler: Any) -> web.StreamResponse:
    """Writes down what was refused, the probes that clients send of themselves included."""
    response = await handler(request)
    if response.status >= 400:
        REFUSED.append(f"{request.method} {request.rel_url} {response.status} {getattr(response, 'body', b'')!r:.300}")
    return response


def make_watched_app(*arguments: Any) -> web.Application:
    app = make_app(*arguments)
    app.middlewares.insert(0, watch)
    return app


def call(name: str, **arguments: object) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


REBOOT = call("reboot", when="never")
LIMITS = (8, 14, 16, 30, 45, 50, 60, len(REBOOT) - 25)
STEPS = [["read_file", {"path": "a.txt"}], ["add", {"a": 2, "b": 3}]]
TYPED = [["read_file", {"path": "b.txt"}]]


def data(url: str) -> dict[str, object]:
    """What a program needs; `typed`: a loop of two turns that ends in JSON."""
    first, second = call("read_file", path="a.txt"), call("add", a=2, b=3)
    return {
        "url": url,
        "prompt": "Go. " + script(reply="I look.\n" + first, runs=[3, 1, 4]),
        "silent_prompt": "Go. " + script(reply=first, runs=[3, 1, 4]),
        "file": "2 3 " + script(reply=second, runs=[2, 5]),
        "sum": "5 " + script(reply="It is 5.", runs=[2]),
        "typed_prompt": "Go. " + script(reply=call("read_file", path="b.txt"), runs=[3]),
        "typed": "3 " + script(reply='{"total": 5}', runs=[4]),
        "cut_prompt": "Go. " + script(reply=REBOOT, runs=[2, 3]),
        "limits": list(LIMITS),
    }


def check(program: str, place: str, server_url: str) -> bool:
    path = HERE / program
    given = data(server_url)
    source = path
    command = [place, str(source)]
    if program.endswith(".mjs"):
        # modules are looked for beside the program
        source = Path(place) / program
        source.write_text(path.read_text())
        command = ["node", str(source)]
    elif program == "agents_commands.py":
        command = [sys.executable, str(source), place]
    environment = {**os.environ, "DATA": json.dumps(given), "OPENAI_API_KEY": "k", "NO_PROXY": "127.0.0.1"}
    REFUSED.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    good = done.returncode == 0
    for line in done.stdout.splitlines():
        name, ran, final = json.loads(line)
        if "cut at" in name:
            fine = ran == []
        elif name.endswith("typed"):
            fine = ran == TYPED and json.loads(final) == {"total": 5}
        else:
            fine = ran == STEPS * (3 if name.endswith("turns") else 1) and final.endswith("It is 5.")
        good &= fine
        print("ok " if fine else "BAD", program, name, "" if fine else (ran, final))
    if done.returncode:
        print("BAD", program, done.stderr[-1500:])
    refused = [line for line in REFUSED if ASKED not in line]
    print(program, "was told", len(REFUSED) - len(refused), "times that no threads are kept")
    for line in refused:
        print("BAD", program, line)
    return good and not refused


def main() -> int:
    good = True
    serving.make_app = make_watched_app
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(
            serving_in_thread(
                write_model(folder),
                core="scripted_core:make_core_with_room",
                engine={"max_model_len": 2_000_000},
            )
        )
        for argument in sys.argv[1:]:
            program, _, place = argument.partition("=")
            good &= check(program, place, server.v1)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
