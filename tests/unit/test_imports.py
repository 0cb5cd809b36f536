"""Imports point one way, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARROW = re.compile(r"^ +([\w/.]+) --> ([\w/.]+)$", re.M)
ROOMS = ("spec", "metrics", "kernels", "draft_heads", "engine", "server", "deploy")
FREE_OF_TORCH = ("server", "metrics", "engine/link", "engine/grammar", "engine/requests", "engine/cache/pool.py")
"""The HTTP process and the scheduler's accounting start without torch."""


def drawn() -> dict[str, set[str]]:
    """Room -> those that it may import beside itself."""
    arrows = defaultdict(set)
    for source, target in ARROW.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8")):
        arrows[source].add(target)
    return arrows


def files(*places: str) -> list[Path]:
    found = [ROOT / place for place in places]
    return sorted(file for place in found for file in ([place] if place.suffix else place.rglob("*.py")))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.removeprefix("pilotfish.") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        # what is imported from a folder may be a module
        yield from (f"{node.module}.{alias.name}".removeprefix("pilotfish.") for alias in node.names)


def imported(file: Path) -> set[str]:
    """Modules that a file names anywhere, those imported inside functions too."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {module for node in nodes if isinstance(node, ast.stmt) for module in modules_of(node)}


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(room.replace("/", ".") + ".")


def test_every_room_is_drawn():
    ends = {end for source, targets in drawn().items() for end in (source, *targets)}
    assert ends >= set(ROOMS)
    assert all((ROOT / end).is_dir() or (ROOT / f"{end}.py").is_file() for end in ends)


def room_of(module: str, rooms: Iterable[str]) -> str:
    """The innermost of the rooms: a tool's or a command line's before its folder's; "" for what is not ours."""
    return max((room for room in rooms if is_in(module, room)), key=len, default="")


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    wrong, arrows = [], drawn()
    rooms = {*arrows, *ROOMS}
    for file in files(room):
        own = room_of(name_of(file), rooms)
        for module in imported(file):
            theirs = room_of(module, rooms)
            allowed = any(is_in(module, target) and len(target) >= len(theirs) for target in arrows[own])
            if theirs not in ("", own) and not allowed:
                wrong.append(f"{file.relative_to(ROOT)} -> {module}")
    assert not wrong


def test_the_scheduler_and_the_http_process_name_no_torch():
    wrong = [file for file in files(*FREE_OF_TORCH) if any(is_in(module, "torch") for module in imported(file))]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    """Imports at the top of files alone: those in functions run later."""
    graph = {}
    for file in files(*ROOMS):
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        targets = {module for node in nodes for module in modules_of(node)}
        graph[name_of(file)] = targets | {module.rpartition(".")[0] for module in targets}
    graph = {name: targets & graph.keys() - {name} for name, targets in graph.items()}
    while leaves := {name for name, targets in graph.items() if not targets}:
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}
    assert not graph, "modules on or above a circle"
