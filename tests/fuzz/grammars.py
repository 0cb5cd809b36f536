"""Grammars drawn at random, through the engine's whole path: bounds, trial, compiling, masks of some windows.

    python -m tests.fuzz.grammars --count 50000 --seed 1

Schemas, regular expressions, Lark, GBNF and choices: nested, recursive, wide, deep, with huge numbers, and with pieces
cut out, doubled or swapped. Each must end as a constraint or as a refusal in words within DEADLINE; the worker process
is never lost, and nothing is open at the end. Prints how many there were of each kind, what was refused and by whom,
and the largest CPU times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.engine.grammar.library import GrammarLibrary, Ticket
from pilotfish.engine.link.messages import Grammar

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
EOS, VOCAB = (8179,), 8192
DEADLINE = 120.0
"""Seconds by the clock until a grammar must have ended, whatever waits before it."""
AT_ONCE = 16
WINDOW = 4

LETTERS = "abcxyz019 _-.,:;!?\"'\\/(){}[]|*+^$~\n\té߀💡\x00"
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 3, 7, 10, 100, 997, 9973, 65_536, 999_983, 2**31, 2**53 - 1, 2**64, 10**30)
NUMBERS += (0.01, 0.5, 1e-9, 2.5e-300, 1e308, -0.0, 123.456)
FORMATS = ("date-time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname", "time", "date", "duration", "nonsense")
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")

Draw = random.Random


def count(draw: Draw, most: int) -> int:
    """Small ones often, large ones sometimes."""
    return int(most ** draw.random())


def word(draw: Draw) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(draw.randint(0, 6)))


# -- regular expressions -----------------------------------------------------------------------------------------------


def regex(draw: Draw, depth: int = 3) -> str:
    return "|".join(
        "".join(_regex_part(draw, depth) for _ in range(count(draw, 6))) for _ in range(1 + (draw.random() < 0.3))
    )


def _regex_part(draw: Draw, depth: int) -> str:
    atoms: list[Callable[[], str]] = [
        lambda: draw.choice("abcxyz019 "),
        lambda: draw.choice((".", r"\d", r"\w", r"\s", r"\S", r"\p{L}", r"\n", r"\x41", r"[^\x00-\x1f]", "[a-z0-9_]")),
        lambda: draw.choice(("^", "$", r"\b", "(?=a)", "(?!b)", "(?<=c)", r"\1", "(?i:ab)", "(?P<n>a)", "[[:alpha:]]")),
    ]
    if depth:
        atoms += [lambda: f"({regex(draw, depth - 1)})", lambda: f"(?:{regex(draw, depth - 1)})"]
    part = atoms[draw.choices(range(len(atoms)), [6, 4, 0.3, 3, 3][: len(atoms)])[0]]()
    return part + draw.choices(("", "*", "+", "?", "*?", _times(draw)), [8, 2, 2, 2, 0.2, 1.5])[0]


def _times(draw: Draw) -> str:
    low = count(draw, 3000)
    return draw.choice((f"{{{low}}}", f"{{{low},}}", f"{{{low // 2},{low}}}", f"{{,{low}}}", f"{{0,{low * low}}}"))


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def schema(draw: Draw) -> str:
    shape = draw.choice((_any_schema, _any_schema, _any_schema, _chain, _wide, _nested, _numbers, _combined))
    return json.dumps(shape(draw))


def _any_schema(draw: Draw) -> Any:
    names = [f"d{i}" for i in range(draw.randint(0, 4))]
    root = _schema(draw, 4, names)
    if isinstance(root, dict) and names:
        root["$defs"] = {name: _schema(draw, 3, names) for name in names}
    return root


def _schema(draw: Draw, depth: int, names: list[str]) -> Any:
    if draw.random() < 0.05:
        return draw.choice((True, False, {}, None, [], 3, "x"))
    if names and draw.random() < 0.2:
        target = draw.choice((*names, "nowhere"))
        return {"$ref": draw.choice((f"#/$defs/{target}", "#", f"#/properties/{target}", target))}
    kind = draw.choice(TYPES)
    made: dict[str, Any] = {"type": kind if draw.random() < 0.9 else [kind, draw.choice(TYPES)]}
    _KEYWORDS[kind](draw, made, depth, names)
    if depth and draw.random() < 0.15:
        group = draw.choice(("anyOf", "oneOf", "allOf"))
        made[group] = [_schema(draw, depth - 1, names) for _ in range(draw.randint(0, 4))]
    if draw.random() < 0.05:
        made[draw.choice(("not", "if", "then", "contains", "propertyNames", "unknown"))] = _schema(draw, 0, names)
    if draw.random() < 0.1:
        made["enum"] = [draw.choice((word(draw), draw.choice(NUMBERS), None, [1])) for _ in range(count(draw, 200))]
    if draw.random() < 0.03:
        made["x-guidance"] = {"whitespace_pattern": regex(draw, 1), "lenient": True}
    return made


def _object(draw: Draw, made: dict[str, Any], depth: int, names: list[str]) -> None:
    own = {word(draw) or "a": _schema(draw, depth - 1, names) for _ in range(count(draw, 8) if depth else 0)}
    made["properties"] = own
    if draw.random() < 0.5:
        made["required"] = [name for name in own if draw.random() < 0.6] + ["more"] * (draw.random() < 0.1)
    if draw.random() < 0.3:
        made["additionalProperties"] = _schema(draw, max(0, depth - 2), names) if depth else False
    if draw.random() < 0.1:
        made["patternProperties"] = {regex(draw, 1): {"type": "integer"} for _ in range(count(draw, 8))}
    if draw.random() < 0.1:
        made[draw.choice(("minProperties", "maxProperties"))] = draw.choice(NUMBERS)


def _array(draw: Draw, made: dict[str, Any], depth: int, names: list[str]) -> None:
    if depth:
        made["items"] = _schema(draw, depth - 1, names)
    if draw.random() < 0.2:
        made["prefixItems"] = [_schema(draw, 0, names) for _ in range(count(draw, 30))]
    for key in ("minItems", "maxItems", "uniqueItems"):
        if draw.random() < 0.2:
            made[key] = draw.choice(NUMBERS)


def _string(draw: Draw, made: dict[str, Any], depth: int, names: list[str]) -> None:
    for key, value in (
        ("pattern", regex(draw)),
        ("format", draw.choice(FORMATS)),
        ("minLength", draw.choice(NUMBERS)),
        ("maxLength", draw.choice(NUMBERS)),
    ):
        if draw.random() < 0.2:
            made[key] = value


def _number(draw: Draw, made: dict[str, Any], depth: int, names: list[str]) -> None:
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if draw.random() < 0.2:
            made[key] = draw.choice(NUMBERS)


_KEYWORDS: dict[str, Callable[[Draw, dict[str, Any], int, list[str]], None]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": lambda *_: None,
    "null": lambda *_: None,
}


def _chain(draw: Draw) -> Any:
    """References that follow one another, alone or with an object between them; the last one may lead back."""
    length = count(draw, 3000)

    def link(name: str) -> Any:
        reference = {"$ref": f"#/$defs/{name}"}
        return draw.choice((reference, {"type": "object", "properties": {"a": reference}}, {"anyOf": [reference] * 2}))

    definitions = {f"d{i}": link(f"d{i + 1}") for i in range(length)}
    end = draw.choice(({"type": "integer"}, {"$ref": "#/$defs/d0"}, {"$ref": "#"}))
    return {"$defs": definitions | {f"d{length}": end}, "$ref": "#/$defs/d0"}


def _wide(draw: Draw) -> Any:
    width = count(draw, 4000)
    part, names = _schema(draw, 1, []), [f"p{i}" for i in range(width)]
    return draw.choice(
        (
            {"type": "object", "properties": dict.fromkeys(names, part)},
            {"type": "object", "properties": dict.fromkeys(names, part), "required": names},
            {"type": "object", "required": names},
            {"anyOf": [{"const": i} for i in range(width)]},
            {"anyOf": [{"type": "object", "properties": {f"p{i}": part}, "required": [f"p{i}"]} for i in range(width)]},
            {"allOf": [{"properties": {f"p{i}": part}} for i in range(width)]},
            {"enum": [word(draw) for _ in range(width)]},
            {"type": "array", "prefixItems": [part] * width},
            {"type": "object", "patternProperties": {f"^{i}{regex(draw, 1)}": part for i in range(width // 20)}},
        )
    )


def _nested(draw: Draw) -> Any:
    made: Any = {"type": "integer"}
    for _ in range(count(draw, 300)):
        inner = {"type": "object", "properties": {"a": made}, "required": ["a"]}
        made = draw.choice((inner, {"type": "array", "items": made}, {"anyOf": [made]}))
    return made


def _numbers(draw: Draw) -> Any:
    own = {f"p{i}": {"type": draw.choice(("integer", "number"))} for i in range(count(draw, 20))}
    for part in own.values():
        _number(draw, part, 0, [])
        if draw.random() < 0.5:
            part["multipleOf"] = count(draw, 10**6)  # type: ignore[assignment]
    return {"type": "object", "properties": own, "required": [*own]}


def _combined(draw: Draw) -> Any:
    """Products: all of some of some."""
    some = [[_schema(draw, 1, []) for _ in range(count(draw, 8))] for _ in range(count(draw, 6))]
    return {"allOf": [{draw.choice(("anyOf", "oneOf")): parts} for parts in some]}


# -- Lark, GBNF, choices -----------------------------------------------------------------------------------------------


def lark(draw: Draw) -> str:
    length, chained = count(draw, 1500), draw.random() < 0.2
    lines = ["start: r0"]
    for i in range(length):
        lines.append(f"r{i}: r{i + 1}" if chained else f"r{i}: {_lark_rule(draw, length)}")
    lines.append(f"r{length}: {_lark_rule(draw, 0)}")
    lines.append(f"T{draw.choice(('', '[lazy]'))}: /{regex(draw, 2)}/")
    lines += draw.choice(([], ["%ignore / +/"], ["%import common.INT"], ["%llguidance {}"], ["%nonsense"]))
    return "\n".join(lines)


def _lark_rule(draw: Draw, length: int) -> str:
    parts: list[Callable[[], str]] = [
        lambda: json.dumps(word(draw)),
        lambda: f"r{draw.randint(0, length)}",
        lambda: "T",
        lambda: f"/{regex(draw, 1)}/",
        lambda: f"({_lark_rule(draw, length)})" if draw.random() < 0.5 else '("a"?)*',
        lambda: f"%json {json.dumps(_any_schema(draw))}",
        lambda: f"<[{count(draw, 10_000)}]>",
    ]
    made = []
    for _ in range(count(draw, 5)):
        part = parts[draw.choices(range(len(parts)), [5, 4, 2, 2, 2, 0.3, 0.3])[0]]()
        made.append(
            part + draw.choices(("", "*", "+", "?", _times(draw), f"~{count(draw, 3000)}"), [8, 1, 1, 1, 0.5, 0.3])[0]
        )
        if draw.random() < 0.25:
            made.append("|")
    return " ".join(made)


def gbnf(draw: Draw) -> str:
    length, chained = count(draw, 1500), draw.random() < 0.2
    lines = ["root ::= r0"]
    for i in range(length):
        lines.append(f"r{i} ::= r{i + 1}" if chained else f"r{i} ::= {_gbnf_rule(draw, length)}")
    return "\n".join([*lines, f'r{length} ::= "a" | [a-z]{draw.choice(("", "+", _times(draw)))}'])


def _gbnf_rule(draw: Draw, length: int) -> str:
    parts = [json.dumps(word(draw)), f"r{draw.randint(0, length)}", "[^a-z\\n]", "[a-c]", '("x" | "y")', "."]
    made = []
    for _ in range(count(draw, 5)):
        made.append(draw.choice(parts) + draw.choices(("", "*", "+", "?", _times(draw)), [8, 1, 1, 1, 0.5])[0])
        if draw.random() < 0.25:
            made.append("|")
    return " ".join(made)


def choice(draw: Draw) -> str:
    return json.dumps([word(draw) * count(draw, 50) for _ in range(count(draw, 2500))])


# -- all ---------------------------------------------------------------------------------------------------------------


def spoiled(draw: Draw, text: str) -> str:
    """A piece is cut out, doubled, nested in itself many times, or another one comes in."""
    first, last = sorted(draw.randint(0, len(text)) for _ in range(2))
    last = min(last, first + 60)
    piece = text[first:last]
    return draw.choice(
        (
            text[:first] + text[last:],
            text[:first] + piece * count(draw, 200) + text[last:],
            text[:first] + draw.choice(("(", "[", "{", ")", "\\", '"', "/", "|")) * count(draw, 3000) + text[first:],
            text[:first] + word(draw) + text[last:],
        )
    )


KINDS: dict[str, Callable[[Draw], str]] = {
    "json_schema": schema,
    "regex": regex,
    "grammar": lambda draw: draw.choice((lark, gbnf))(draw),
    "choice": choice,
}


def grammar(draw: Draw) -> Grammar:
    kind: Any = draw.choices(list(KINDS), [5, 3, 3, 0.5])[0]
    source = KINDS[kind](draw)
    return Grammar(kind=kind, source=spoiled(draw, source) if draw.random() < 0.15 else source)


@dataclass
class Tally:
    """How grammars ended, by kind and by the first words of why; the largest CPU seconds of counting one."""

    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    checking: float = 0.0


class Campaign:
    """Raises AssertionError at the first grammar that ends otherwise than it may."""

    def __init__(self, seed: int):
        self.draw, self.tally = random.Random(seed), Tally()
        self.library = GrammarLibrary(MODEL / "tokenizer.json", VOCAB)
        self._open: list[tuple[Grammar, Ticket, float]] = []
        self._pid: int | None = None

    def run(self, number: int) -> None:
        for _ in range(number):
            self._begin(grammar(self.draw))
            while len(self._open) >= AT_ONCE:
                self._take()
        while self._open:
            self._take()
        assert not self.library._numbered and not self.library._trials._open

    def _begin(self, made: Grammar) -> None:
        self.tally.kinds[made.kind] += 1
        began = time.thread_time()
        try:
            bounds.check(made)
        except RequestError as error:
            assert 0 < len(str(error)) < 1000, made
            self.tally.ends["refused by its size"] += 1
            return
        finally:
            self.tally.checking = max(self.tally.checking, time.thread_time() - began)
        self._open.append((made, self.library.ask(made, EOS), time.monotonic()))

    def _take(self) -> None:
        self.library.wait(0.05)
        self._pid = self._pid or self.library.worker_pid
        assert self.library.worker_pid == self._pid, "the worker was lost"
        for entry in [entry for entry in self._open if entry[1].done]:
            self._open.remove(entry)
            self._end(*entry[:2])
        for made, _, began in self._open:
            assert time.monotonic() - began < DEADLINE, made

    def _end(self, made: Grammar, ticket: Ticket) -> None:
        assert ticket.fault is None, (made, ticket.fault)
        if ticket.constraint is None:
            assert ticket.error and len(ticket.error) < 1000, made
            known = [words for words in ("CPU time", "MiB", "deeply", "at most 0.1 s") if words in ticket.error]
            self.tally.ends[f"refused: {known[0]}" if known else "refused in the library's words"] += 1
            return
        self.tally.ends["passed"] += 1
        # a few windows of drafts that nobody meant
        words = np.zeros((WINDOW, -(-VOCAB // 32)), dtype=np.int32)
        for _ in range(2):
            ticket.constraint.mask_rows([self.draw.randrange(VOCAB) for _ in range(WINDOW - 1)], words)
            forced = ticket.constraint.forced(WINDOW, words.shape[1])
            ticket.constraint.advance(forced[:4])
            if ticket.constraint.error is not None:
                return
            assert words[0].any() or not forced, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    began, campaign = time.monotonic(), Campaign(args.seed)
    campaign.run(args.count)
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{campaign.library.worker_pid}/stat").read_text().rpartition(")")[2].split()
    worker = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    tally = campaign.tally
    print(f"{args.count} grammars, seed {args.seed}, in {time.monotonic() - began:.0f} s")
    for name, number in (*tally.kinds.most_common(), *tally.ends.most_common()):
        print(f"| {name} | {number} |")
    print(f"CPU seconds: {own.ru_utime + own.ru_stime:.1f} here, {worker:.1f} of the worker and its children")
    print(f"counting one took {tally.checking:.3f} s at most")
    campaign.library.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
