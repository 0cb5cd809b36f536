"""A second reader of answers, for whole texts: no state, only positions, so that it can be held against the first.

Calls in the form are found by one expression; where a tag stands outside of the form, the rest is `read_drifted`'s.
"""

import json
import re

from pilotfish.server.calls.parameters import Parameters
from pilotfish.server.calls.reading import read_drifted

NAME = r"([^\s<>\"]{1,256})>"
TAG = r"</?tool_call>|</function>|</parameter|<(?:function|parameter)(?: ?=| name ?=)"
VALUE = rf"((?:(?!{TAG}).)*)"
PARAMETER = re.compile(rf"\s*<parameter={NAME}{VALUE}</parameter>", re.DOTALL)
HEAD = re.compile(r"<function=" + NAME)
DRIFTED = re.compile(r"<function(?: ?=| name ?=) ?[\"']?([^\"'<>\n]+?)[\"']? ?(?:>|(?=\n))")


def read_answer(text, tools=None, thinking="none", single=False):
    """(reasoning, content, [(name, arguments)]), calls that are none as text."""
    kind, at, marks, calls = "content", 0, [], []
    if thinking == "open" or (thinking == "look" and (found := re.match(r"\s*<think>", text))):
        kind, at = "reasoning", 0 if thinking == "open" else found.end()
        marks.append((kind, None))
    while at < len(text):
        start, marker = next_marker(text, at, kind, tools)
        marks.append((kind, text[at:start]))
        if not marker:
            break
        at = start + len(marker)
        if marker == "</think>":
            marks += [("reasoning", None), ("content", None)]
            kind = "content"
            continue
        found = read_call(text, start, marker, tools, kind, single)
        if found is None:
            marks.append((kind, marker))
        elif found == "odd":
            for part in read_drifted(text[start:], tools, cut=False):
                if isinstance(part, str):
                    kind = said_after(part, kind, marks)
                elif not (single and calls):
                    calls.append((part.name, json.loads(part.arguments)))
                    marks.append((kind, None))
                    if single:
                        break
            break
        else:
            at, new = found
            calls += new[:1] if single else new
            marks.append((kind, None))
            if single:
                break
    return spoken(marks, "reasoning"), spoken(marks, "content"), calls


def said_after(text, kind, marks):
    """Text that has no calls, but may end the thinking."""
    if kind == "reasoning" and "</think>" in text:
        before, _, text = text.partition("</think>")
        marks += [(kind, before), (kind, None), ("content", None)]
        kind = "content"
    marks.append((kind, text))
    return kind


def next_marker(text, at, kind, tools):
    """Where the next marker is and which; the end and none."""
    wanted = ["<tool_call>", "<function=", "<function "] if tools is not None else []
    wanted += ["</think>"] if kind == "reasoning" else []
    places = [(text.find(marker, at), marker) for marker in wanted]
    return min((place for place in places if place[0] >= 0), default=(len(text), ""))


def read_call(text, start, marker, tools, kind, single=False):
    """Where the call ends and the calls of its wrapper; "odd" for one that is not in the form, None for text."""
    wrapped = marker == "<tool_call>"
    at = re.compile(r"\s*").match(text, start + len(marker)).end() if wrapped else start
    head = HEAD.match(text, at)
    if head is None or not (wrapped or head[1] in tools):
        drifted = DRIFTED.match(text, at)
        odd = (drifted and drifted[1] in tools) or (wrapped and text[at:].startswith("{"))
        return "odd" if odd else None
    calls = []
    while True:
        at, arguments, parameters = head.end(), {}, tools.get(head[1], Parameters())
        while (found := PARAMETER.match(text, at)) and found[1] not in arguments:
            value = found[2].removeprefix("\n").removesuffix("\n")
            arguments[found[1]] = json.loads(parameters.json_of(found[1], value))
            at = found.end()
        end = re.compile(r"\s*(</function>(\s*</tool_call>)?|</tool_call>)").match(text, at)
        if end is None:
            return "odd" if not calls else None
        calls.append((head[1], arguments))
        if single:
            return text.index(">", end.start()) + 1, calls
        return follow(text, end, calls, tools, wrapped, kind)


def follow(text, end, calls, tools, wrapped, kind):
    """The call, if what follows leaves it as it is."""
    closed = "</tool_call>" in end[0]
    at = end.end()
    if wrapped and not closed and (found := re.compile(r"\s*(?=<function(?: ?=| name ?=))").match(text, at)):
        another = read_call(text, found.end(), "<function=", {**tools, **unknown(text, found.end())}, kind)
        if another == "odd" or another is None:
            return at, calls
        return another[0], calls + another[1]
    while found := re.compile(TAG).search(text, at):
        thought = text.find("</think>", end.end()) if kind == "reasoning" else -1
        if 0 <= thought < found.start() or found[0] == "<tool_call>":
            return end.end(), calls
        drifted = DRIFTED.match(text, found.start())
        if found[0].startswith("<function") and not (drifted and drifted[1] in tools):
            at = found.end()
            continue
        return (end.end(), calls) if found[0].startswith("<function") else "odd"
    return end.end(), calls


def unknown(text, at):
    head = HEAD.match(text, at)
    return {head[1]: Parameters()} if head else {}


def spoken(marks, kind):
    """The text of a kind; whitespace beside a marker goes, unless text of the kind stands before and after it."""
    said, space, after_marker, fresh = "", "", False, False
    for its_kind, text in marks:
        if its_kind != kind:
            continue
        if text is None:
            space, after_marker, fresh = "", True, said == ""
            continue
        space += text
        if space.strip():
            said += space.lstrip() if fresh else space
            space, after_marker, fresh = "", False, False
            kept = said.rstrip()
            said, space = kept, said[len(kept) :]
    return said if after_marker else said + space
