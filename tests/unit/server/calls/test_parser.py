"""Answers told apart: the same parts however the text is cut, and the parts that a reader of the whole text finds."""

import json
import random

import pytest
from answer_reference import read_answer

from pilotfish.server.calls.parameters import Parameters
from pilotfish.server.calls.parser import AnswerParser, AnswerRules
from pilotfish.server.calls.parts import Call, CallArguments, CallOpened, Said, merge

SCHEMAS = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "o": {"type": "object"},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "g": {},
}
TOOLS = {name: Parameters(schema) for name, schema in SCHEMAS.items()}


def call(name="f", **arguments):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parse(pieces, cut=False, **rules):
    """Parts, merged; ids are drawn anew each time."""
    parser = AnswerParser(AnswerRules(**{"tools": TOOLS, **rules}))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush(cut=cut)
    assert parser.finished or parser.position == len("".join(pieces))
    return [part if isinstance(part, Said) else (part.index, part.name, part.arguments) for part in merge(parts)]


def answer(pieces, **rules):
    """(reasoning, content, calls), as the reference has it."""
    said, calls = {"reasoning": "", "content": ""}, []
    for part in parse(pieces, **rules):
        if isinstance(part, Said):
            said[part.kind] += part.text
        else:
            assert part[0] == len(calls)
            calls.append((part[1], json.loads(part[2])))
    return said["reasoning"], said["content"], calls


def splits(text, seed):
    """One piece, character by character, every cut in two, some at random."""
    yield [text]
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    rng = random.Random(seed)
    for _ in range(5):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(2, 12))))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_all_splits(text, seed=0, **rules):
    whole = parse([text], **rules)
    for pieces in splits(text, seed):
        assert parse(pieces, **rules) == whole, pieces
    return answer([text], **rules)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ("  spaces stay \n", "  spaces stay \n", []),
        (call(), "", [("f", {})]),
        ("Look:\n\n" + call(s="a b", i="7"), "Look:", [("f", {"s": "a b", "i": 7})]),
        (call(s="1") + "\n" + call("g", x="2") + "\n", "", [("f", {"s": "1"}), ("g", {"x": "2"})]),
        (call(s="l1\nl2\n", o='{"a": [1, 2]}'), "", [("f", {"s": "l1\nl2\n", "o": {"a": [1, 2]}})]),
        (call(s='"quoted" \\ \t <b>&</b> € 😀'), "", [("f", {"s": '"quoted" \\ \t <b>&</b> € 😀'})]),
        (call(s=""), "", [("f", {"s": ""})]),
        (call(s="</function></tool_call><parameter=i>"), "", [("f", {"s": "</function></tool_call><parameter=i>"})]),
        (call(s="a </parameter> b", i="1"), "", [("f", {"s": "a </parameter> b", "i": 1})]),
        (call(s="x\n" + call(s="1", i="2") + "\ny"), "", [("f", {"s": "x\n" + call(s="1", i="2") + "\ny"})]),
        (call(s=call(s="1") + "\n" + call("g")), "", [("f", {"s": call(s="1") + "\n" + call("g")})]),
        (call(s="use <parameter=i> here"), "", [("f", {"s": "use <parameter=i> here"})]),
        (
            call(s="r'<parameter=edits>\n(.*?)\n</parameter>'\nx"),
            "",
            [("f", {"s": "r'<parameter=edits>\n(.*?)\n</parameter>'\nx"})],
        ),
        (call(i="seven", o="{"), "", [("f", {"i": "seven", "o": "{"})]),
        (call(m="null"), "", [("f", {"m": None})]),
        (call("unknown", a="1"), "", [("unknown", {"a": "1"})]),
        # forms that models fall into
        ("x <function=f>\n<parameter=i>1</parameter></function>", "x", [("f", {"i": 1})]),
        ("<function=f></function></tool_call> y", "y", [("f", {})]),
        ("<tool_call><function=f></tool_call>", "", [("f", {})]),
        ("<tool_call><function=f></function><function=g></function></tool_call>", "", [("f", {}), ("g", {})]),
        ("<function=f></function><function=h></function>", "<function=h></function>", [("f", {})]),
        ("before " + call() + "\nafter", "before\nafter", [("f", {})]),
        # no calls: all of it is text
        ("<function=unknown>\n</function>", "<function=unknown>\n</function>", []),
        ("use <tool_call> wisely", "use <tool_call> wisely", []),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
        (
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            [],
        ),
        # a call that is never closed may hold another in its value: none is guessed
        (call(s="a")[:-33] + call("g"), call(s="a")[:-33] + call("g"), []),
        ("<tool_call>\n<function=>", "<tool_call>\n<function=>", []),
        ("<tool_call><function=a b>", "<tool_call><function=a b>", []),
        ("a <tool_call>\n<function=f> what?", "a <tool_call>\n<function=f> what?", []),
        ("<tool_call><function=f><parameter=s", "<tool_call><function=f><parameter=s", []),
        ("<tool_call><tool_call><function=f></function>", "<tool_call>", [("f", {})]),
        ("<tool_call><function=f>?" + call("g"), "<tool_call><function=f>?", [("g", {})]),
        ("<tool_call><function=f>" + call("g"), "<tool_call><function=f>", [("g", {})]),
        ("a < b, a <tool", "a < b, a <tool", []),
    ],
)
def test_calls_and_text(text, content, calls):
    assert check_all_splits(text) == ("", content, calls) == read_answer(text, TOOLS)


def test_a_call_cut_anywhere_is_text_until_its_function_ends():
    whole = "Look: " + call(s="a\nb", i="7")
    complete = whole.index("</function>") + len("</function>")
    for length in range(len(whole)):
        expected = ("", "Look:", [("f", {"s": "a\nb", "i": 7})]) if length >= complete else ("", whole[:length], [])
        assert check_all_splits(whole[:length]) == expected, whole[:length]


def test_a_parameter_given_twice_is_no_call():
    text = "<tool_call><function=f><parameter=s>1</parameter><parameter=s>2</parameter></function></tool_call>"
    assert check_all_splits(text) == ("", text, []) == read_answer(text, TOOLS)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("why\n</think>\n\nBecause.", "open", "why", "Because."),
        ("\nwhy", "open", "why", ""),
        ("why </think", "open", "why </think", ""),
        ("</think>\n\nBecause. ", "open", "", "Because. "),
        ("<think>\nwhy\n</think>\n\nBecause.", "look", "why", "Because."),
        ("\n<think>why</think>x</think>y", "look", "why", "x</think>y"),
        (" x <think>y</think>", "look", "", " x <think>y</think>"),
        ("  <thin", "look", "", "  <thin"),
        ("  ", "look", "", "  "),
        ("why</think>x", "none", "", "why</think>x"),
    ],
)
def test_reasoning_and_content(text, thinking, reasoning, content):
    for tools in (None, TOOLS):
        found = check_all_splits(text, thinking=thinking, tools=tools)
        assert found == (reasoning, content, []) == read_answer(text, tools, thinking)


def test_a_call_inside_thinking_is_a_call():
    text = "I need it. " + call(s="x") + "\nMore.</think>\nDone."
    expected = ("I need it.\nMore.", "Done.", [("f", {"s": "x"})])
    assert check_all_splits(text, thinking="open") == expected == read_answer(text, TOOLS, "open")
    text = "The form is <tool_call>, I know" + call().removesuffix("</function>\n</tool_call>")
    assert check_all_splits(text, thinking="open") == (text, "", [])


def test_without_tools_calls_are_text():
    assert check_all_splits("x " + call(s="a"), tools=None) == ("", "x " + call(s="a"), [])


def test_a_single_call_ends_the_answer():
    text = "x" + call(s="a") + call("g")
    assert (
        check_all_splits(text, single=True) == ("", "x", [("f", {"s": "a"})]) == read_answer(text, TOOLS, single=True)
    )
    parser = AnswerParser(AnswerRules(tools=TOOLS, single=True))
    parser.push(text)
    assert parser.finished


DRIFT = {
    "the last closing tag is missing": ("<parameter=s>\nx\n", {"s": "x"}),
    "a closing tag is missing before the next": (
        "<parameter=s>\nx\n<parameter=i>\n7\n</parameter>\n",
        {"s": "x", "i": 7},
    ),
    "both are": ("<parameter=s>\nx\n<parameter=i>\n7\n", {"s": "x", "i": 7}),
    "one line": ("<parameter=i>7<parameter=s>x</parameter>", {"i": 7, "s": "x"}),
    "quoted names": ('<parameter="s">\nx\n</parameter>\n', {"s": "x"}),
    "names as attributes": ('<parameter name="s">\nx\n</parameter>\n', {"s": "x"}),
    "single quotes": ("<parameter='s'>\nx\n</parameter>\n", {"s": "x"}),
    "spaces": ("<parameter = s>\nx\n</parameter>\n", {"s": "x"}),
    "no end of the tag": ("<parameter=s\nx\n</parameter>\n", {"s": "x"}),
    "closed twice": ("<parameter=s>\nx\n</parameter>\n</parameter>\n", {"s": "x"}),
    "closed by another word": ("<parameter=s>\nx\n</parameter1>\n", {"s": "x"}),
    "closed with a slash": ("<parameter=s>\nx\n</parameter/>\n", {"s": "x"}),
    "closed by its name": ("<parameter=s>\nx\n</s>\n<parameter=i>\n7\n</parameter>\n", {"s": "x", "i": 7}),
    "fused": ("<parameter=s>\nx\n</parameter_function>\n", {"s": "x"}),
    "arguments as JSON": ('\n{"s": "x", "i": 7}\n', {"s": "x", "i": 7}),
    "Python's constants": ("<parameter=o>\n{'a': True, 'b': None}\n</parameter>\n", {"o": {"a": True, "b": None}}),
}


@pytest.mark.parametrize(("body", "arguments"), DRIFT.values(), ids=DRIFT)
def test_drift_with_one_reading_is_read(body, arguments):
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    assert check_all_splits(text) == ("", "", [("f", arguments)])
    assert check_all_splits("a " + text + "\n" + text) == ("", "a", [("f", arguments)] * 2)


@pytest.mark.parametrize(
    "head", ['<function="f">', '<function name="f">', "<function='f'>", "<function = f>", "<function=f"]
)
@pytest.mark.parametrize("wrapper", ["<tool_call>\n", ""])
def test_functions_that_are_misspelt_are_read(head, wrapper):
    text = f"x {wrapper}{head}\n<parameter=i>\n7\n</parameter>\n</function>\n</tool_call>"
    assert check_all_splits(text) == ("", "x", [("f", {"i": 7})])


def test_calls_as_other_templates_teach_them_are_read():
    text = '<tool_call>\n{"name": "f", "arguments": {"s": "x", "i": 7}}\n</tool_call>'
    assert check_all_splits(text) == ("", "", [("f", {"s": "x", "i": 7})])


AMBIGUOUS = [
    # a parameter of the text, or the function's own
    "<parameter=s>\nx\n</parameter>\n<parameter=s>\ny\n</parameter>\n",
    "<parameter=s>\nx\n</parameter>\nand more\n",
    "<parameter=i>\n7\n</parameter>\n<parameter=>\n8\n</parameter>\n",
]


@pytest.mark.parametrize("body", AMBIGUOUS)
def test_what_cannot_be_read_is_text(body):
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    assert check_all_splits(text) == ("", text, [])


def test_what_is_cut_is_read_strictly():
    """The rest might have shown that a tag belongs to a value."""
    value = "print('\n</function>\n</tool_call>"
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{value}"
    assert answer([text], cut=True) == ("", text, [])
    nested = call(s="x\n" + call(s="1") + "\n" + call("g"))
    for length in range(len(nested)):
        complete = length >= nested.rindex("</function>") + len("</function>")
        for cut in (False, True):
            _, content, calls = answer([nested[:length]], cut=cut)
            assert (complete == bool(calls) and complete != bool(content)) or not length, nested[:length]


def test_texts_after_calls_come_when_it_is_certain_that_they_are_none_of_the_call():
    parser = AnswerParser(AnswerRules(tools=TOOLS))
    assert parser.push(call(s="x")) == []
    assert parser.push(" then") == []
    first, text = parser.push("<tool_call>")
    assert (first.name, text) == ("f", Said("content", " then".lstrip()))


def test_a_call_in_pieces_has_its_name_first():
    parser = AnswerParser(AnswerRules(tools=TOOLS, pieces=True))
    assert parser.push("<tool_call>\n<function=f") == []
    (opened,) = parser.push(">")
    assert (opened.index, opened.name) == (0, "f") and opened.id.startswith("call_")
    assert [part.text for part in merge(parser.push("<parameter=s>\nHel"))] == ['{"s": "Hel']
    assert [part.text for part in parser.push('lo "\n')] == ['lo \\"']
    assert [part.text for part in merge(parser.push("you</parameter><parameter=i>1"))] == ['\\nyou", "i": ']
    assert [part.text for part in parser.push("2</parameter>")] == ["12"]
    assert parser.push("</function>") + parser.flush() == [CallArguments(0, "}")]
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    "text", [call(s="x", i="7"), "a " + call(s="") + call("g") + " b", *(call(s="x\n" + call("g"), m="n"),)]
)
def test_pieces_make_the_same_calls(text):
    for pieces in splits(text, 1):
        parser = AnswerParser(AnswerRules(tools=TOOLS, pieces=True))
        parts = merge([part for piece in pieces for part in parser.push(piece)] + parser.flush())
        names = [part.name for part in parts if isinstance(part, CallOpened)]
        told = [part.text for part in parts if isinstance(part, CallArguments)]
        assert [(name, json.loads(arguments)) for name, arguments in zip(names, told, strict=True)] == answer([text])[2]


def test_a_broken_call_in_pieces_leaves_json_that_nobody_can_read():
    parser = AnswerParser(AnswerRules(tools=TOOLS, pieces=True))
    parts = parser.push("<tool_call>\n<function=f>\n<parameter=s>rm -rf /tmp") + parser.flush(cut=True)
    streamed = "".join(part.text for part in parts if isinstance(part, CallArguments))
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(streamed)
    assert parser.num_calls == 0 and not any(isinstance(part, Call) for part in parts)


def test_where_thinking_begins_and_ends():
    for text, thinking, span in [
        ("why\n</think>\n\nx", "open", (0, 4)),
        (" <think>why</think>x", "look", (8, 11)),
        ("why", "open", (0, None)),
        ("x", "look", (None, None)),
    ]:
        for pieces in splits(text, 1):
            parser = AnswerParser(AnswerRules(thinking=thinking, tools=TOOLS))
            for piece in pieces:
                parser.push(piece)
            assert (parser.reasoning_begin, parser.reasoning_end) == span


FRAGMENTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=g>",
        "<function=",
        "</function>",
        "<think>",
        "</think>",
    ),
    *("<parameter=s>", "<parameter=i>", "<parameter=", "</parameter>", call(s="x"), call("g"), "\n", "\n\n", " ", "<"),
    *(">", "a", "b c", "7", "s>", "h>", "€", '"'),
)


@pytest.mark.parametrize("part", range(6))
def test_random_texts_match_a_reader_of_the_whole(part):
    for seed in range(part * 500, part * 500 + 500):
        rng = random.Random(seed)
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 14)))
        rules = {"thinking": rng.choice(["none", "look", "open"]), "tools": rng.choice([TOOLS, TOOLS, None])}
        rules["single"] = rng.random() < 0.2
        expected = read_answer(text, **rules)
        whole = parse([text], **rules)
        for pieces in splits(text, seed) if seed % 20 == 0 else ([text], list(text)):
            assert parse(pieces, **rules) == whole, (seed, text, pieces)
        assert answer([text], **rules) == expected, (seed, text)


def test_long_texts_take_linear_time():
    """Text that looks most like a call, a character at a time."""
    for unit in ("<", "<tool_call>", "<function=f><parameter=s>", " \n", "<tool_call><function="):
        text = unit * (100_000 // len(unit))
        parser = AnswerParser(AnswerRules(tools=TOOLS, thinking="look"))
        parts = [part for character in text for part in parser.push(character)] + parser.flush()
        said = "".join(part.text for part in parts if isinstance(part, Said))
        assert said == text


def test_a_file_full_of_calls_is_written_by_one_and_what_is_too_odd_is_text():
    examples = "\n".join(call(s=str(number)) for number in range(200))
    assert answer([call(s=examples)]) == ("", "", [("f", {"s": examples})])
    odd = call(s="</parameter>\n<parameter=s>\n" * 1500)
    assert answer([odd]) == ("", odd, [])
