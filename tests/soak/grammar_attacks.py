"""Grammars that would stall or end a server: legs of attacks.py. Each request of a leg has a source of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.soak.attacks import Target

Body = dict[str, Any]
GRAMMAR_ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {}


def fresh(
    name: str, fields: Callable[[int], Body], at_once: int = 4, leaves_after: float | None = None, **more: Any
) -> None:
    """An attack by chats with these fields, made for the number of each request."""

    async def attack(target: Target) -> None:
        numbers = itertools.count(1)

        async def client() -> None:
            while True:
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 1} | more
                sent = json.dumps(body | fields(next(numbers))).encode()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(leaves_after):
                        await target.post("/v1/chat/completions", sent)
                # the attacker shares the machine: it must not be what the victim waits for
                await asyncio.sleep(0.01)

        await asyncio.gather(*(client() for _ in range(at_once)))

    GRAMMAR_ATTACKS[name] = attack


def schema(make: Callable[[int], Body]) -> Callable[[int], Body]:
    return lambda number: {"response_format": {"type": "json_schema", "json_schema": {"schema": make(number)}}}


def text(kind: str, make: Callable[[int], str]) -> Callable[[int], Body]:
    return lambda number: {"structured_outputs": {kind: make(number)}}


def tools(make: Callable[[int], Body]) -> Callable[[int], Body]:
    function = {"type": "function", "function": {"name": "f"}}
    return lambda number: {
        "tools": [function | {"function": {"name": "f", "parameters": make(number)}}],
        "tool_choice": "required",
    }


def chain(count: int) -> Body:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "integer"}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def properties(count: int, number: int) -> Body:
    return {"type": "object", "properties": {f"p{i}x{number}": {"type": "string"} for i in range(count)}}


def parameters(count: int, number: int) -> Body:
    own = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/x"}, {"const": i + number}]} for i in range(count)}
    return {"type": "object", "properties": own, "$defs": {"x": {"type": "integer"}}}


def rules(count: int, number: int, form: str, last: str) -> str:
    return "\n".join(
        [form.format(f"start{number}", "r0"), *(form.format(f"r{i}", f"r{i + 1}") for i in range(count))]
    ) + ("\n" + form.format(f"r{count}", last))


# what others' requests do to a stream without any grammar: to hold the rest against
fresh("chats without a grammar", lambda number: {"seed": number})
fresh("16 chats without a grammar", lambda number: {"seed": number}, at_once=16)
fresh("1 300 references", tools(lambda number: {"properties": {"a": {"$ref": "#/$defs/d0"}}, **chain(1300 + number)}))
fresh("480 references", schema(lambda number: chain(480) | {"title": str(number)}))
fresh("4 000 Lark rules", text("grammar", lambda number: "start: r0\n" + rules(4000, number, "{}: {}", '"a"')))
fresh("950 Lark rules", text("grammar", lambda number: "start: r0\n" + rules(950, number, "{}: {}", '"a"')))
fresh("4 000 GBNF rules", text("grammar", lambda number: "root ::= r0\n" + rules(4000, number, "{} ::= {}", '"a"')))
fresh("a large multipleOf", schema(lambda number: {"type": "integer", "multipleOf": 999_983 + number}), n=4)
fresh("a multipleOf within bounds", schema(lambda number: {"type": "integer", "multipleOf": 19_000 - number}), n=4)
fresh(
    "multiples of two numbers",
    schema(lambda number: {"allOf": [{"type": "integer", "multipleOf": n} for n in (997 + number, 991)]}),
)
fresh(
    "a large multipleOf inside Lark",
    text("grammar", lambda number: f'start: %json {{"type": "integer", "multipleOf": {999_983 + number}}}'),
    at_once=16,
)
fresh(
    "costly ones, hung up",
    text("grammar", lambda number: f'start: %json {{"type": "integer", "multipleOf": {999_983 + number}}}'),
    at_once=16,
    leaves_after=0.1,
)
fresh("9 000 properties", schema(lambda number: properties(9000, number)))
fresh("450 optional properties", schema(lambda number: properties(450, number)))
fresh("1 500 parameters", tools(lambda number: parameters(1500, number)))
fresh("450 parameters", tools(lambda number: parameters(450, number)))
fresh("nested repetitions", text("regex", lambda number: f"(((a{{30}}){{30}}){{30}}){{{30 + number}}}"))
fresh("long repetitions", text("regex", lambda number: f"a{{{19_999 - number}}}"), max_tokens=200)
fresh("slow masks", text("regex", lambda number: f"(.*[a-f].{{30}})+x{number}"), max_tokens=200)
# what must come is long, and begins where no trial comes to
BEGINNING = "start: /[ab]{30}/ "
fresh(
    "rules that repeat rules",
    text("grammar", lambda number: f'{BEGINNING}x{{30}}\nx: y{{100}}\ny: "{"hello world " * 5}{number}"'),
    max_tokens=200,
)
fresh(
    "rules that double rules",
    text(
        "grammar",
        lambda number: "\n".join(
            [BEGINNING + "r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), f'r40: "x{number}"']
        ),
    ),
    max_tokens=200,
)
fresh("rules without an end", text("grammar", lambda number: f'{BEGINNING}a\na: "x{number}" a'), max_tokens=200)
fresh("a long text in a regex", text("regex", lambda number: f"[ab]{{30}}c{{{19_900 - number}}}"), max_tokens=200)
fresh("12 000 values", schema(lambda number: {"enum": [f"value {i * 7919 + number}" for i in range(12_000)]}))
fresh("300 patterns", schema(lambda number: {"patternProperties": {f"^a{i}[a-z]*{number}$": {} for i in range(300)}}))
fresh("small ones", schema(lambda number: properties(3, number)), at_once=16)
