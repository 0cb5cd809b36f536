"""A second reader of answers, for whole texts: no state, only positions, so that it can be held against the first."""

import json
import re

from pilotfish.server.calls.tools import argument_json, argument_types

NAME = r"([^\s<>\"]{1,256})>"
HEAD = {"<tool_call>": re.compile(r"\s*<function=" + NAME), "<function=": re.compile(NAME)}
PARAMETER = re.compile(r"\s*<parameter=" + NAME + r"\n?(.*?)\n?</parameter>", re.DOTALL)
NEXT = re.compile(r"\s*(<parameter=|</function>|</tool_call>)")


def read_answer(text, tools=None, thinking="none", single=False):
    """(reasoning, content, [(name, arguments)]), calls that are none as text."""
    kind, at, marks, calls = "content", 0, [], []
    if thinking == "open":
        kind = "reasoning"
        marks.append((kind, None))
    elif thinking == "look" and (found := re.match(r"\s*<think>", text)):
        kind, at = "reasoning", found.end()
        marks.append((kind, None))
    after = ""
    while at < len(text):
        after, before = "", after
        if before and (found := re.compile(r"\s*</tool_call>").match(text, at)):
            at = found.end()
            marks.append((kind, None))
            continue
        if before and "</tool_call>".startswith(text[at:].lstrip()):
            marks.append((kind, None))
            break
        another = re.compile(r"\s*(?=<function=)").match(text, at) if before == "wrapped" else None
        start, marker = (another.end(), "<function=") if another else next_marker(text, at, kind, tools)
        marks.append((kind, text[at:start]))
        at = start + len(marker)
        if marker == "</think>":
            marks += [("reasoning", None), ("content", None)]
            kind = "content"
        elif marker:
            wrapped = bool(another) or marker == "<tool_call>"
            head = HEAD[marker].match(text, at)
            if head is None or not (wrapped or head[1] in tools):
                marks.append((kind, marker))
                continue
            at, arguments = read_parameters(text, head.end(), tools.get(head[1], {}))
            if arguments is None:
                marks.append((kind, text[start:at]))
                continue
            calls.append((head[1], arguments))
            marks.append((kind, None))
            if single:
                break
            if not text[:at].endswith("</tool_call>"):
                after = "wrapped" if wrapped else "bare"
    return spoken(marks, "reasoning"), spoken(marks, "content"), calls


def next_marker(text, at, kind, tools):
    """Where the next marker is and which; the end and none."""
    wanted = ["<tool_call>", "<function="] if tools is not None else []
    wanted += ["</think>"] if kind == "reasoning" else []
    places = [(text.find(marker, at), marker) for marker in wanted]
    return min((place for place in places if place[0] >= 0), default=(len(text), ""))


def read_parameters(text, at, schema):
    """Where the function ends and its arguments, or where it stopped being one and None."""
    arguments = {}
    while True:
        found = NEXT.match(text, at)
        if found is None:
            rest = text[at:].lstrip()
            partial = any(marker.startswith(rest) for marker in ("<parameter=", "</function>", "</tool_call>"))
            return (len(text) if partial else len(text) - len(rest)), None
        if found[1] != "<parameter=":
            return found.end(), arguments
        name = re.compile(NAME).match(text, found.end())
        whole = PARAMETER.match(text, at)
        if name is None:
            partial = re.fullmatch(r"[^\s<>\"]{0,256}", text[found.end() :])
            return (len(text) if partial else found.end()), None
        if name[1] in arguments:
            return found.end(), None
        if whole is None:
            return len(text), None
        arguments[name[1]] = json.loads(argument_json(whole[2], argument_types(schema, name[1])))
        at = whole.end()


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
