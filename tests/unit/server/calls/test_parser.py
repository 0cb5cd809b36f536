"""Answers told apart: the same parts however the text is cut, and the parts that a reader of the whole text finds."""

import json
import random

import pytest
from answer_reference import read_answer

from pilotfish.server.calls.parser import AnswerParser, AnswerRules, CallArguments, CallClosed, CallOpened, Said, merge

TOOLS = {
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


def call(name="f", **arguments):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parse(pieces, **rules):
    """Parts, merged, and the calls' names; ids are drawn anew each time."""
    parser = AnswerParser(AnswerRules(**{"tools": TOOLS, **rules}))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    names = [(part.index, part.name) for part in parts if isinstance(part, CallOpened)]
    return merge(part for part in parts if not isinstance(part, CallOpened)), names


def answer(pieces, **rules):
    """(reasoning, content, complete calls), as the reference has it."""
    parser = AnswerParser(AnswerRules(**{"tools": TOOLS, **rules}))
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    said = {"reasoning": "", "content": ""}
    names, arguments, calls = {}, {}, []
    for part in parts:
        if isinstance(part, Said):
            said[part.kind] += part.text
        elif isinstance(part, CallOpened):
            assert part.index == len(names)
            names[part.index], arguments[part.index] = part.name, ""
        elif isinstance(part, CallArguments):
            arguments[part.index] += part.text
        elif part.complete:
            calls.append((names[part.index], json.loads(arguments[part.index])))
    assert parser.num_calls == len(calls)
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


def test_an_answer_whose_beginning_stood_in_the_prompt():
    rest = "\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
    assert check_all_splits(rest, forced="<tool_call>\n<function=f>\n") == ("", "", [("f", {"s": "x"})])
    assert check_all_splits("f>" + rest, forced="<tool_call>\n<function=") == ("", "", [("f", {"s": "x"})])
    assert check_all_splits("no, thanks", forced="<tool_call>\n<function=")[1] == "<tool_call>\n<function=no, thanks"


def test_strings_stream_and_names_come_first():
    parser = AnswerParser(AnswerRules(tools=TOOLS))
    assert parser.push("<tool_call>\n<function=f") == []
    (opened,) = parser.push(">")
    assert (opened.index, opened.name) == (0, "f") and opened.id.startswith("call_")
    assert [part.text for part in parser.push("<parameter=s>\nHel")] == ['{"s": "', "Hel"]
    assert [part.text for part in parser.push('lo "\n')] == ['lo \\"']
    assert [part.text for part in parser.push("you</parameter><parameter=i>1")] == ["\\nyou", '"']
    assert [part.text for part in parser.push("2</parameter>")] == [', "i": 12']
    closing = parser.push("</function>")
    assert closing == [CallArguments(0, "}"), CallClosed(0, True)]


def test_a_broken_call_leaves_json_that_nobody_can_run():
    parser = AnswerParser(AnswerRules(tools=TOOLS))
    parts = parser.push("<tool_call>\n<function=f>\n<parameter=s>rm -rf /tmp") + parser.flush()
    streamed = "".join(part.text for part in parts if isinstance(part, CallArguments))
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(streamed)
    assert CallClosed(0, False) in parts


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
