"""Starts the server on the demo model, asks it two things over the OpenAI endpoint, and shows what speculation gave.

    python demo/try_it.py [--model DIR] [--k 3] [--max-tokens 160]

Everything it does a client could do: it waits for /ready, streams one completion and one chat, and reads /metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from pilotfish.deploy.ports import free_port

MODEL = Path(__file__).resolve().parent / "model"
CODE = '''class Stack:
    """A simple stack."""

    def __init__(self):
'''
QUESTION = "Write a function that reads a JSON file."
LOAD_SECONDS = 300
SPEC = "pilotfish_spec_decode_"
answering = threading.Event()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--k", type=int, default=3, help="drafted tokens a round, 0 for plain decoding")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="more flags for pilotfish serve")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-P", "-m", "pilotfish.server.cli", "serve", str(args.model), "--port", str(port)]
    # rounds are timed for dashboards, and nobody looks at one here
    command += ["--num-speculative-tokens", str(args.k), "--no-cost-table", *args.server_flags]
    say(f"$ pilotfish serve {args.model} --port {port} --num-speculative-tokens {args.k}")
    with running(command) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, server)
        model = get_json(url + "/v1/models")["data"][0]["id"]
        code = {"model": model, "prompt": CODE, "max_tokens": args.max_tokens, "temperature": 0}
        show(f"POST {url}/v1/completions", CODE, ask(url + "/v1/completions", code), url)
        chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        chat["max_tokens"] = args.max_tokens
        show(f"POST {url}/v1/chat/completions", QUESTION + "\n", ask(url + "/v1/chat/completions", chat), url)
        say("\nTo go on:")
        say("  make chat                        talk with it in the terminal")
        say("  make serve                       the same server on port 8000; any OpenAI client can talk to it")
        say("  docs/quickstart.md               requests by curl and by clients, for every API")
        say("  make serve K=0                   the same text, without speculation")
        say("  curl localhost:8000/metrics      acceptance, latency and queue series for Prometheus")
        say("  make audit                       proof that speculation changes no token")
    return server.returncode or 0


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen]:
    """The server, ended by SIGTERM as a service manager would."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        threading.Thread(target=show_log, args=(server.stderr,), daemon=True).start()
        try:
            yield server
        except KeyboardInterrupt:
            say("\nstopping")
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def show_log(lines: Iterable[str]) -> None:
    """All that the server says, but for how it does while an answer is being written."""
    for line in lines:
        if not (answering.is_set() and " INFO " in line):
            print(line, end="", file=sys.stderr, flush=True)


def wait_until_ready(url: str, server: subprocess.Popen) -> None:
    """The server itself shows how far it is."""
    began = time.monotonic()
    while time.monotonic() - began < LOAD_SECONDS:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode} while loading; its messages are above")
        with contextlib.suppress(OSError):
            get_json(url + "/ready")
            say(f"ready after {time.monotonic() - began:.1f} s")
            return
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {LOAD_SECONDS} s")


def ask(url: str, body: dict) -> Iterator[str]:
    """The pieces of text of a streamed answer."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        response = urllib.request.urlopen(request, timeout=LOAD_SECONDS)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answered {error.code}: {error.read().decode()}") from None
    with response:
        for line in response:
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise SystemExit(f"{url}: {chunk['error']['message']}")
            choice = chunk["choices"][0]
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""


def show(title: str, prompt: str, pieces: Iterator[str], url: str) -> None:
    """Prompt dim, answer bright as it arrives, then what the metrics say about it."""
    before = metrics(url)
    say(f"\n--- {title}")
    answering.set()
    print(dim(prompt), end="", flush=True)
    first = 0.0
    for piece in pieces:
        first = first or time.monotonic()
        print(piece, end="", flush=True)
    seconds = time.monotonic() - first
    answering.clear()
    after = metrics(url)
    print()
    say("--- " + summary(before, after, seconds))


def summary(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    tokens = gained("pilotfish_generation_tokens_total")
    text = f"{tokens:.0f} tokens"
    if seconds > 0 and tokens > 1:
        text += f", {(tokens - 1) / seconds:.0f} tokens/s"
    drafts = gained(SPEC + "num_drafts_total")
    if drafts:
        accepted, drafted = gained(SPEC + "num_accepted_tokens_total"), gained(SPEC + "num_draft_tokens_total")
        text += f", acceptance length {1 + accepted / drafts:.2f} ({accepted:.0f} of {drafted:.0f} drafts accepted)"
    return text


def metrics(url: str) -> dict[str, float]:
    """Series by name, label sets added up."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    totals: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{", 1)[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def get_json(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
