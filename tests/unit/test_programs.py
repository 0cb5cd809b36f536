"""Every program under tests/ and demo/ starts from a checkout that is not installed, as tests/gpu/legs.py starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.gpu import legs

ROOT = Path(__file__).parents[2]
COMMAND = "pilotfish/server/cli.py"
START = """
import os, runpy, sys, traceback
from importlib.machinery import PathFinder
from unittest.mock import MagicMock

# what takes long and says nothing of ours
others = ("anthropic", "openai", "transformers", "transformers.modeling_utils", "transformers.models")
sys.modules |= {name: MagicMock() for name in (*others, "transformers.models.qwen3_5_moe")}
from pilotfish.engine.bench import command
from pilotfish.engine.round import cuda_table
from pilotfish.server.http import app

whole = sys.argv[1]
failed = []
for program in sys.argv[2:]:
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.argv = [program, "--help"]
            # one without a parser would begin
            is_asked = "argparse" in open(program, encoding="utf-8").read()
            runpy.run_path(program, run_name="__main__" if is_asked else "imported")
            status = int(is_asked)
        except SystemExit as end:
            status = int(bool(end.code))
        except BaseException:
            traceback.print_exc()
        finally:
            found = PathFinder.find_spec("pilotfish", sys.path).origin
            if found != whole:
                print(program, "would import", found, file=sys.stderr)
            sys.stderr.flush()
            os._exit(status or found != whole)
    if os.waitpid(child, 0)[1]:
        failed.append(program)
sys.exit(f"do not start: {failed}" if failed else 0)
"""
"""Each in a child of its own, which has most of our modules: that it would have found them is asked at its end."""
MAIN = re.compile(r"^if __name__ == .__main__.:", re.M)


def programs() -> list[str]:
    files = (file for folder in ("tests", "demo") for file in (ROOT / folder).rglob("*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in files if MAIN.search(file.read_text(encoding="utf-8")))


def test_every_program_starts_from_a_checkout(monkeypatch):
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(packages))
    # -S: no .pth file, so no editable installation
    command = [sys.executable, "-S", "-c", START, str(ROOT / "typings/pilotfish/__init__.py"), *programs()]
    started = subprocess.run(command, cwd=ROOT, env=legs.environment(), capture_output=True, text=True)
    assert started.returncode == 0, started.stderr[-4000:]


def test_every_leg_starts_one_of_these_programs():
    commands = [leg.command for what in ("test", "bench", "tools") for leg in legs.legs_of(what) if not leg.is_pytest]
    named = {f"{one[1].replace('.', '/')}.py" if one[0] == "-m" else one[0] for one in commands}
    assert named <= {*programs(), COMMAND}
