"""Unmodified Claude Code and Codex, five turns each: what they send lets a prefix cache hit as far as its cuts allow.

Not part of the test suite: the programs come from npm. `python tests/clients/check_cache.py FOLDER`, FOLDER with
`claude` and `codex` (or one of them), serves the demo model and runs sessions of five turns against it. For each prompt
a line says how many tokens it has, how many the cuts would allow to be cached of what came before, computed here from
the ids alone, and how many the engine had. Exit status 1 where it had fewer or more.
Last run on 2026-12-01, Claude Code 2.1.197, Codex 0.171.0: all as computed (the table stands in docs/prefix-cache.md).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support")]

from cached_turns import Sent, allowed, grid_of, record, shared  # noqa: E402
from serving import Server, serving_in_thread  # noqa: E402

DEMO = HERE.parents[1] / "demo" / "model"
QUESTIONS = ("What is a pilot fish?", "And a shark?", "Which is larger?", "Why?", "Say it in one word.")


def claude(program: str, home: Path, url: str) -> None:
    environment = environment_of(home) | {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "k",
        "ANTHROPIC_MODEL": "demo",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    for turn, question in enumerate(QUESTIONS):
        run([program, "-p", question, *(["--continue"] if turn else [])], environment, home)


def codex(program: str, home: Path, url: str) -> None:
    folder = home / ".codex"
    folder.mkdir()
    folder.joinpath("config.toml").write_text(
        'model = "demo"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\nwire_api = "responses"\n'
        f'base_url = "{url}/v1"\nstream_idle_timeout_ms = 600000\n'
    )
    environment = environment_of(home) | {"OPENAI_API_KEY": "k"}
    for turn, question in enumerate(QUESTIONS):
        words = [program, "exec", "--skip-git-repo-check", "-s", "read-only"]
        run([*words, *(["resume", "--last"] if turn else []), question], environment, home)


def environment_of(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "PWD": str(home), "NO_PROXY": "127.0.0.1"}


def run(words: list[str], environment: dict[str, str], home: Path) -> None:
    done = subprocess.run(words, env=environment, cwd=home, input="", capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


CLIENTS: dict[str, Callable[[str, Path, str], None]] = {"claude": claude, "codex": codex}


def check(name: str, program: str, server: Server, sent: list[Sent]) -> bool:
    grid, good, first = grid_of(server), True, len(sent)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        CLIENTS[name](program, Path(home), server.url)
    print(f"{name}: cuts every {grid.chunk} tokens\n  prompt  system   shared  allowed  cached")
    for number in range(first, len(sent)):
        one, may = sent[number], allowed(sent, number, grid)
        mark = "" if one.cached == may else " BAD"
        good &= not mark
        print(f"{len(one.ids):8} {one.system or 0:7} {shared(sent, number):8} {may:8} {one.cached!s:>7}{mark}")
    return good


def longer_demo(folder: Path) -> Path:
    """The demo model, that takes longer prompts than it was trained on: what it writes does not matter here."""
    for file in DEMO.iterdir():
        folder.joinpath(file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text())
    (config.get("text_config") or config)["max_position_embeddings"] = 262_144
    folder.joinpath("config.json").unlink()
    folder.joinpath("config.json").write_text(json.dumps(config))
    return folder


def main() -> int:
    good = True
    engine = {"max_model_len": 131_072, "num_speculative_tokens": 0, "kv_cache_tokens": 524_288, "cost_table": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving_in_thread(
            longer_demo(Path(folder)), core="capped_core:make_core", engine=engine, any_model_name=True
        ) as server,
    ):
        sent = record(server)
        for name in CLIENTS:
            program = shutil.which(name, path=sys.argv[1])
            if program is not None:
                good &= check(name, program, server, sent)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
