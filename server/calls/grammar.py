"""Tool calls as a grammar: the call comes, its form is whole, and its arguments fit the tool's schema.

The prompt ends where the answer begins, so that the model writes the whole form in its own tokens. Parameters come in
the schema's order, each at most once, the required ones always. A value is the JSON that its schema allows, one of the
texts of an enum, or any text where a string may stand; a text has none of the form's own tags, so that what the grammar
takes is read back as it was meant. What the grammar library cannot hold of a schema is left out (`text/schemas.py`).
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar
from pilotfish.server.calls.parameters import Parameters, resolve
from pilotfish.server.calls.parser import CALL, END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from pilotfish.server.calls.tools import INPUT, Custom, FunctionTool, Tools
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.schemas import Held, is_held_pattern
from pilotfish.server.text.tokenizer import Tokenizer

MAX_LENGTH = 2000
"""The longest string that is held: a longer one needs too large a grammar."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords of a schema that allow and forbid nothing."""


class Values:
    """Rules for the JSON of parameters: schemas that are written alike are one rule."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], str] = {}
        self._num_bytes = 0

    def rule(self, schema: dict[str, Any], simpler: dict[str, Any]) -> str:
        """The name of a schema's rule. Raises BadRequest once all of them together are too large."""
        key = json.dumps({**schema, "x-guidance": JSON_OPTIONS}), json.dumps({**simpler, "x-guidance": JSON_OPTIONS})
        if key not in self._rules:
            self._num_bytes += len(key[0]) + len(key[1])
            if self._num_bytes > bounds.MAX_CALLS_BYTES:
                raise BadRequest(
                    f"Want parameters' schemas of at most {bounds.MAX_CALLS_BYTES} bytes for a demanded call, each "
                    "with the definitions that it refers to.",
                    param="tools",
                )
            self._rules[key] = f"v{len(self._rules)}"
        return self._rules[key]

    def all(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((name, schema, simpler) for (schema, simpler), name in self._rules.items())


def call_grammar(
    tools: Tools,
    held: Held,
    tokenizer: Tokenizer,
    *,
    single: bool,
    answer: Grammar | None = None,
    after: int | None = None,
) -> Grammar:
    """One call of the named function, else one or (not `single`) more of any; with `answer` that instead of calls.

    Where nothing is demanded and there is no `answer`, text may stand around calls. In force after the token `after`
    if that is given. Raises BadRequest for schemas that are larger than a grammar may be.
    """
    named, values = tools.choice.named, Values()
    chosen = {name: tool for name, tool in tools.offered.items() if not named or name == named}
    _check_sizes(chosen)
    rules, calls = [f"TEXT: {_lexeme('')}"], []
    for number, (name, tool) in enumerate(chosen.items()):
        # a promise that is made of demanded calls alone
        tool = tool if tools.is_demanded else msgspec.structs.replace(tool, strict=False)
        rules += _body(number, name, tool, held, values)
        calls.append(f"{_literal(name + '>' + chr(10))} body{number}")
    opening, closing = _marker(CALL, tokenizer), _marker(END_CALL, tokenizer)
    rules.append(f"function: {' | '.join(calls)}")
    rules.append(
        f"call: {opening} {_literal(chr(10) + FUNCTION)} function {_literal(END_FUNCTION + chr(10))} {closing}"
    )
    rules.append("calls: call" if named or single else f"calls: call ({_literal(chr(10))} call)*")
    rules += _start(tools, answer, values)
    return Grammar(kind="lark", source="\n".join(rules), schemas=values.all(), after_token_id=after)


def _check_sizes(tools: dict[str, FunctionTool]) -> None:
    try:
        bounds.check_schema([tool.parameters.schema for tool in tools.values()])
        for tool in tools.values():
            if tool.custom is not None and tool.custom.syntax == "lark":
                bounds.check_text(tool.custom.definition)
            elif tool.custom is not None:
                bounds.check_regex(tool.custom.definition)
    except RequestError as error:
        raise BadRequest(str(error), param="tools") from None


def _start(tools: Tools, answer: Grammar | None, values: Values) -> list[str]:
    """What may come first: after a thinking block that is as much white space as models put there."""
    rest = [r"BREAK: /\n{1,2}/"]
    if tools.is_demanded:
        return ["start: BREAK? calls", *rest]
    if answer is not None:
        return [f"answer: {_answer(answer, values)}", "start: BREAK? (calls | answer)", *rest]
    return [f"FREE: /{_without(CALLS)}/", "start: FREE (call FREE)*"]


def _answer(grammar: Grammar, values: Values) -> str:
    """Structured output as a rule of a larger grammar."""
    if grammar.kind in ("json_schema", "json_object"):
        schema: dict[str, Any] = json.loads(grammar.source) if grammar.source else {"type": "object"}
        return values.rule(schema, schema)
    if grammar.kind == "regex":
        return _regex(grammar.source)
    if grammar.kind == "choice":
        return " | ".join(map(_literal, json.loads(grammar.source)))
    if "::=" in grammar.source:
        raise BadRequest("Beside tools a grammar in GBNF is not supported: want it in Lark.", param="tools")
    return f"%lark {{\n{grammar.source}\n}}"


# -- one function --------------------------------------------------------------------------------------------------


def _body(number: int, name: str, tool: FunctionTool, held: Held, values: Values) -> list[str]:
    """The rules of a function's parameters."""
    rules, parts = [], []
    for index, parameter in enumerate(tool.parameters.properties):
        rule = f"p{number}x{index}"
        if tool.custom is not None:
            rules += _custom(rule, tool.custom)
        else:
            rules += _parameter(rule, parameter, tool, held, values, f"{name}.{parameter}")
        parts.append(rule if parameter in tool.parameters.required else rule + "?")
    # an empty rule is written as an empty text
    return [*rules, f"body{number}: {' '.join(parts) or _literal('')}"]


def _parameter(rule: str, name: str, tool: FunctionTool, held: Held, values: Values, where: str) -> list[str]:
    parameters = tool.parameters
    begin, end = _literal(f"{PARAMETER}{name}>\n"), _literal(f"\n{END_PARAMETER}\n")
    schema = _own(parameters, name)
    if parameters.takes_text(name):
        text = _text(schema, parameters, name, held, where, tool.strict)
        lexeme = "TEXT" if text is None else f"{rule.upper()}T"
        rules = [f"{rule}: {begin} {lexeme} {_literal(chr(10))}"]
        return rules if text is None else [*rules, f"{lexeme}: {text}"]
    choices, strings = parameters.choices(name), parameters.strings(name)
    _check_strings(strings, where)
    texts = [_literal(value) for value in strings]
    if choices is not None:
        texts += [_literal(json.dumps(value, ensure_ascii=False)) for value in choices if not isinstance(value, str)]
    else:
        types = sorted(parameters.types(name) - {"string"})
        whole = held.schema(_embedded(parameters, name), where, strict=tool.strict)
        if strings:
            whole = {"allOf": [whole], "type": types, "$defs": whole.pop("$defs", {})}
        texts.append(values.rule(whole, {"type": types}))
    return [f"{rule}: {begin} ({' | '.join(texts)}) {end}"]


def _check_strings(strings: list[str], where: str) -> None:
    """Texts that are given must be readable, too."""
    for value in strings:
        if any(tag in value for tag in (CALL, END_CALL, PARAMETER, END_PARAMETER, FUNCTION, END_FUNCTION)):
            raise BadRequest(
                f"The value {value[:100]!r} of {where} cannot be written in a tool call of this model.", param="tools"
            )


def _own(parameters: Parameters, name: str) -> dict[str, Any]:
    """The parameter's schema, behind its references."""
    own = parameters.properties.get(name)
    for _ in range(8):
        if not isinstance(own, dict) or not isinstance(own.get("$ref"), str):
            break
        own = resolve(own["$ref"], parameters.schema)
    return own if isinstance(own, dict) else {}


def _embedded(parameters: Parameters, name: str) -> dict[str, Any]:
    """The parameter's schema alone, with the definitions that it refers to and no others."""
    own, function = parameters.properties[name], parameters.schema
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    root = _renamed({key: value for key, value in own.items() if key not in ANNOTATIONS}, function, names)
    todo = list(names)
    while todo:
        reference = todo.pop()
        before = len(names)
        definitions[names[reference]] = _renamed(resolve(reference, function), function, names)
        todo += list(names)[before:]
    return {**root, "$defs": definitions} if definitions else root


def _renamed(schema: Any, function: dict[str, Any], names: dict[str, str]) -> Any:
    """The schema with references to definitions by number, which `names` holds; those that lead nowhere stay."""
    if isinstance(schema, list):
        return [_renamed(part, function, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, function, names) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and resolve(reference, function) is not None:
        renamed["$ref"] = "#/$defs/" + names.setdefault(reference, f"d{len(names)}")
    return renamed


# -- texts ---------------------------------------------------------------------------------------------------------


def _text(
    schema: dict[str, Any], parameters: Parameters, name: str, held: Held, where: str, strict: bool
) -> str | None:
    """The lexeme of a string that is bound to a length or a pattern; None for any text."""
    bounds = [schema.get("minLength", 0), schema.get("maxLength")]
    least, most = (value if isinstance(value, int) and value <= MAX_LENGTH else None for value in bounds)
    pattern = schema.get("pattern") if parameters.is_text(name) else None
    if "format" in schema:
        held.leave_out("format", where, strict=strict)
    if not parameters.is_text(name) or (least is None or (bounds[1] is not None and most is None)):
        unheld = [word for word in ("minLength", "maxLength", "pattern") if word in schema]
        for word in unheld:
            held.leave_out(word, where, strict=strict)
        return None
    lexeme = _lexeme(f"(?s:.{{{least},{'' if most is None else most}}})" if least or most is not None else "")
    regex = _unanchored(pattern) if isinstance(pattern, str) else None
    if regex is None and pattern is not None:
        held.leave_out("pattern", where, strict=strict)
    elif regex is not None:
        lexeme += f" & /(?:{_slashed(regex)})\\n<\\/parameter>/"
    return lexeme if least or most is not None or regex is not None else None


def _lexeme(length: str) -> str:
    """Text up to the end of its parameter, without any of the form's tags before that."""
    text = f"/{_without(TAGS)}\\n?<\\/parameter>/"
    return f"{text} & /{length}\\n<\\/parameter>/" if length else text


NAMED = tuple(f"{kind}{rest}" for kind in ("function", "parameter") for rest in ("=", " =", " name=", " name ="))
TAGS = ("tool_call>", "/tool_call>", "/function>", "/parameter", *NAMED)
"""What may not follow a `<` in a text: all that the reader takes for a tag."""
CALLS = ("tool_call>", *(tag for tag in NAMED if tag.startswith("function")))
"""The same of the text around calls."""


def _without(tags: tuple[str, ...]) -> str:
    """A regular expression for texts in which no `<` is followed by one of these; they have no `<` themselves."""
    return f"[^<]*(<{_after(tags)})*"


def _after(tags: tuple[str, ...]) -> str:
    """What may follow where each of the tags may go on with its text, up to the next `<`."""
    heads = sorted({tag[0] for tag in tags})
    ways = [f"[^<{''.join(map(_escaped, heads))}][^<]*"]
    for head in heads:
        rests = tuple(tag[1:] for tag in tags if tag.startswith(head))
        if "" not in rests:
            ways.append(_escaped(head) + _after(rests))
    return f"({'|'.join(ways)})?"


def _escaped(letter: str) -> str:
    return "\\/" if letter == "/" else letter


def _unanchored(pattern: str) -> str | None:
    """A JSON schema's pattern, which may match anywhere, as one that matches all; None where that is not easy."""
    if not is_held_pattern(pattern):
        return None
    head, tail = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1 if head else 0 : len(pattern) - 1 if tail else len(pattern)]
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", inner)
    if "^" in plain or "$" in plain or ((head or tail) and "|" in re.sub(r"\([^()]*\)", "", plain)):
        return None
    return f"{'' if head else '(?s:.*)'}(?:{inner}){'' if tail else '(?s:.*)'}"


def _regex(source: str) -> str:
    return f"/{_slashed(source)}/"


def _slashed(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], regex.replace("\n", "\\n"))


def _custom(rule: str, custom: Custom) -> list[str]:
    """A tool's one text, held to the tool's own grammar."""
    begin, end = _literal(f"{PARAMETER}{INPUT}>\n"), _literal(f"\n{END_PARAMETER}\n")
    if not custom.syntax:
        return [f"{rule}: {begin} TEXT {_literal(chr(10))}"]
    inner = _regex(custom.definition) if custom.syntax == "regex" else f"%lark {{\n{custom.definition}\n}}"
    return [f"{rule}: {begin} {rule}c {end}", f"{rule}c: {inner}"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """The marker's own token, if there is one: the library keeps those apart from text."""
    token_id = tokenizer.token_to_id(text)
    return _literal(text) if token_id is None else f"<[{token_id}]>"
