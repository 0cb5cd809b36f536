"""docs/architecture.md names what there is: its files, what it says stands in them, every operator."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from pilotfish.engine.round.operators import Operators

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NO_OPERATORS = {"padded", "most_pending", "prompt_rows", "make_scratch", "rows_in", "compile", "take_compiled"}
"""What a table offers beside operators."""


def test_every_path_is_there():
    paths = set(re.findall(r"`([\w/.]+(?:\.\w+|/))`", PAGE))
    assert len(paths) > 50
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_what_is_said_to_stand_in_a_file_stands_there():
    named = re.findall(r"`([\w/]+\.py)` `(\w+)`", PAGE)
    assert len(named) > 15
    assert not [
        (path, name) for path, name in named if not re.search(rf"(def|class) {name}\b", (ROOT / path).read_text())
    ]


def test_every_operator_has_its_row():
    table = PAGE.partition("| operator |")[2].partition("\n\n")[0]
    operators = [name for name, _ in inspect.getmembers(Operators, inspect.isfunction) if not name.startswith("_")]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(set(operators) - NO_OPERATORS)
