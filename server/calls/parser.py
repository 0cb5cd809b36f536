"""What a model has written, told apart as it arrives: reasoning, content, and tool calls in the Qwen XML form.

    <think>REASONING</think>CONTENT<tool_call><function=NAME><parameter=P>VALUE</parameter></function></tool_call>

The parts do not depend on how the text is cut into pieces: each state acts only on what no later text can change,
and every character is looked at a bounded number of times. What turns out to be no call is text, where it stood.
Whitespace around the markers is the format's, not the answer's, and goes with them.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from pilotfish.server.calls.tools import NAME, Schema, argument_json, argument_types, is_text

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MARKERS = (THINK, END_THINK, CALL, END_CALL)
"""Those that tokenizers have a token for. A bare `<function=` is a call too: models forget the wrapper."""

Kind = Literal["content", "reasoning"]


class Said(msgspec.Struct, frozen=True):
    kind: Kind
    text: str


class CallOpened(msgspec.Struct, frozen=True):
    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments' JSON."""

    index: int
    text: str


class CallClosed(msgspec.Struct, frozen=True):
    """Not `complete`: the text broke off or was no call after all; all of it follows as text."""

    index: int
    complete: bool


Part = Said | CallOpened | CallArguments | CallClosed


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True):
    """How to read an answer. `thinking`: "open" where the prompt ends inside the block, "look" where the model may
    open it, "none" where there is none. `tools`: schemas by function, or no calls. `forced`: the beginning of the
    answer that stood in the prompt, of a call of `named` if that is given. `single`: it ends with its first call."""

    thinking: Literal["none", "look", "open"] = "none"
    tools: dict[str, Schema] | None = None
    forced: str = ""
    named: str = ""
    single: bool = False


class AnswerParser:
    """Feed text with `push`, end with `flush`."""

    def __init__(self, rules: AnswerRules) -> None:
        self._rules = rules
        self._parts: list[Part] = []
        self._buffer = ""
        self._num_pushed = -len(rules.forced)
        self._kind: Kind = "content"
        # of the kind at hand: whether its whitespace waits, has nothing before it, follows a marker
        self._space: list[str] = []
        self._fresh = self._after_marker = False
        self._has_said: set[Kind] = set()
        self._call = _Call()
        self._num_opened = 0
        self.num_calls = 0
        self.finished = False
        self.reasoning_begin: int | None = None
        self.reasoning_end: int | None = None
        self._state: Callable[[], bool] = self._look_for_think if rules.thinking == "look" else self._read_text
        if rules.thinking == "open":
            self._think()
        self._parts = self.push(rules.forced)

    @property
    def position(self) -> int:
        """Characters of the answer that have been told apart."""
        return self._num_pushed - len(self._buffer)

    def push(self, text: str) -> list[Part]:
        """The parts that are now certain."""
        if not self.finished:
            self._buffer += text
        self._num_pushed += len(text)
        while self._buffer and not self.finished and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> list[Part]:
        """The text ends here: what was held back is text after all."""
        if not self.finished:
            self._end()
        parts, self._parts = self._parts, []
        return parts

    def _end(self) -> None:
        if self._state in (self._open_call, self._read_name):
            self._say_call()
        elif self._state in (self._read_body, self._read_parameter, self._read_value):
            self._break_call()
        elif self._state == self._after_function and END_CALL.startswith(self._buffer):
            self._take(len(self._buffer))
        self._say(self._take(len(self._buffer)))
        if not self._after_marker:
            self._emit("".join(self._space))

    # -- text --------------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _take_space(self) -> str:
        return self._take(len(self._buffer) - len(self._buffer.lstrip()))

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(Said(self._kind, text))

    def _say(self, text: str) -> None:
        """Text of the kind at hand; whitespace waits where a marker may follow."""
        if not text:
            return
        body = text.rstrip() if self._markers() or self._fresh else text
        if not body:
            self._space.append(text)
            return
        whole = "".join(self._space) + body
        self._emit(whole.lstrip() if self._fresh else whole)
        self._space = [text[len(body) :]]
        if not self._markers():
            self._emit(self._space.pop())
        self._fresh = self._after_marker = False
        self._has_said.add(self._kind)

    def _enter(self, kind: Kind) -> None:
        """Right after a marker."""
        self._kind, self._space, self._after_marker = kind, [], True
        self._fresh = kind not in self._has_said
        self._state = self._read_text

    def _markers(self) -> tuple[str, ...]:
        calls = (CALL, FUNCTION) if self._rules.tools is not None else ()
        return (*calls, END_THINK) if self._kind == "reasoning" else calls

    def _look_for_think(self) -> bool:
        """Only at the beginning: later it is a word like any other."""
        self._space.append(self._take_space())
        if self._buffer.startswith(THINK):
            self._take(len(THINK))
            self._think()
            return True
        if THINK.startswith(self._buffer):
            return False
        self._buffer = "".join(self._space) + self._buffer
        self._space = []
        self._state = self._read_text
        return True

    def _think(self) -> None:
        self.reasoning_begin = max(self.position, 0)
        self._enter("reasoning")

    def _read_text(self) -> bool:
        found = [(at, marker) for marker in self._markers() if (at := self._buffer.find(marker)) >= 0]
        if not found:
            self._say(self._take(len(self._buffer) - _held(self._buffer, self._markers())))
            return False
        at, marker = min(found)
        self._say(self._take(at))
        if marker == END_THINK:
            self.reasoning_end = self.position
            self._take(len(marker))
            self._enter("content")
            return True
        wrapped = marker == CALL
        self._begin_call(self._take(len(marker)), wrapped)
        return True

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin_call(self, opener: str, wrapped: bool) -> None:
        self._call = _Call(opener, "".join(self._space), wrapped)
        self._space = []
        self._state = self._open_call if opener == CALL else self._read_name

    def _open_call(self) -> bool:
        """Between `<tool_call>` and `<function=`."""
        self._call.raw.append(self._take_space())
        if self._buffer.startswith(FUNCTION):
            self._call.raw.append(self._take(len(FUNCTION)))
            self._state = self._read_name
            return True
        return not FUNCTION.startswith(self._buffer) and self._give_back()

    def _read_name(self) -> bool:
        call = self._call
        name = _name_in(self._buffer)
        if name is None:
            return False
        if not name or not (call.wrapped or name in (self._rules.tools or {})):
            return self._give_back()
        call.raw.append(self._take(len(name) + 1))
        call.index, call.schema = self._num_opened, (self._rules.tools or {}).get(name, {})
        self._num_opened += 1
        self._parts.append(CallOpened(call.index, f"call_{secrets.token_hex(12)}", name))
        self._state = self._read_body
        return True

    def _give_back(self) -> bool:
        """The opener was text; what came after it is looked at again."""
        opener, *rest = self._call.raw
        self._buffer = "".join(rest) + self._buffer
        self._call.raw = [opener]
        self._say_call()
        return True

    def _say_call(self) -> None:
        self._space = [self._call.space]
        self._state = self._read_text
        self._say("".join(self._call.raw))

    def _break_call(self) -> bool:
        self._parts.append(CallClosed(self._call.index, False))
        self._say_call()
        return True

    def _read_body(self) -> bool:
        """Between parameters."""
        call = self._call
        call.raw.append(self._take_space())
        for marker in (PARAMETER, END_FUNCTION, END_CALL):
            if self._buffer.startswith(marker):
                call.raw.append(self._take(len(marker)))
                if marker == PARAMETER:
                    self._state = self._read_parameter
                else:
                    self._complete_call(marker)
                return True
            if marker.startswith(self._buffer):
                return False
        return self._break_call()

    def _read_parameter(self) -> bool:
        call = self._call
        name = _name_in(self._buffer)
        if name is None:
            return False
        if not name or name in call.seen:
            return self._break_call()
        call.raw.append(self._take(len(name) + 1))
        call.open_value(name)
        if call.streams:
            self._argue(call.key + '"')
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        """One newline after `<parameter=P>` and one before `</parameter>` are the form's."""
        call = self._call
        if not call.has_begun:
            call.has_begun = True
            if self._buffer[0] == "\n":
                call.raw.append(self._take(1))
                return True
        at = self._buffer.find(END_PARAMETER)
        text = self._take(at if at >= 0 else len(self._buffer) - _held(self._buffer, (END_PARAMETER,)))
        call.raw.append(text)
        if sure := call.add(text):
            self._argue(json.dumps(sure, ensure_ascii=False)[1:-1])
        if at < 0:
            return False
        call.raw.append(self._take(len(END_PARAMETER)))
        self._argue('"' if call.streams else call.key + argument_json("".join(call.value), call.types))
        self._state = self._read_body
        return True

    def _argue(self, text: str) -> None:
        self._parts.append(CallArguments(self._call.index, text))

    def _complete_call(self, marker: str) -> None:
        self._argue("}" if self._call.seen else "{}")
        self._parts.append(CallClosed(self._call.index, True))
        self.num_calls += 1
        self.finished = self._rules.single
        self._enter(self._kind)
        if marker == END_FUNCTION:
            self._state = self._after_function

    def _after_function(self) -> bool:
        """`</tool_call>`, or another function in the same wrapper."""
        self._space.append(self._take_space())
        if self._buffer.startswith(END_CALL):
            self._take(len(END_CALL))
            self._enter(self._kind)
            return True
        if self._call.wrapped and self._buffer.startswith(FUNCTION):
            self._begin_call(self._take(len(FUNCTION)), wrapped=True)
            return True
        if END_CALL.startswith(self._buffer) or (self._call.wrapped and FUNCTION.startswith(self._buffer)):
            return False
        self._state = self._read_text
        return True


class _Call:
    """The call at hand: all its text, in case it is none, and the value that is being read."""

    def __init__(self, opener: str = "", space: str = "", wrapped: bool = False) -> None:
        self.raw = [opener]
        self.space = space
        self.wrapped = wrapped
        self.index = 0
        self.schema: Schema = {}
        self.seen: set[str] = set()

    def open_value(self, name: str) -> None:
        self.key = ("{" if not self.seen else ", ") + json.dumps(name, ensure_ascii=False) + ": "
        self.seen.add(name)
        self.types = argument_types(self.schema, name)
        self.streams = is_text(self.types)
        self.value: list[str] = []
        self.newline = ""
        self.has_begun = False

    def add(self, text: str) -> str:
        """More of the value. Returns what of it can be written now: all of a string but a last newline."""
        if not text:
            return ""
        text = self.newline + text
        self.newline = "\n" if text.endswith("\n") else ""
        sure = text.removesuffix("\n")
        if self.streams:
            return sure
        self.value.append(sure)
        return ""


def _held(text: str, markers: Iterable[str]) -> int:
    """How many last characters may be the beginning of a marker; each has one `<`, its first."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in markers) else 0


def _name_in(text: str) -> str | None:
    """The name that `>` ends, "" if it cannot be one, None if that is not known yet."""
    found = NAME.match(text)
    name = found[0] if found else ""
    if len(name) == len(text):
        return None
    return name if text[len(name)] == ">" else ""


def merge(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    merged: list[Part] = []
    for _, group in itertools.groupby(parts, _merge_key):
        first, *others = group
        if others and isinstance(first, Said | CallArguments):
            texts = [part.text for part in (first, *others) if isinstance(part, Said | CallArguments)]
            first = msgspec.structs.replace(first, text="".join(texts))
        merged.append(first)
    return merged


def _merge_key(part: Part) -> tuple[object, ...]:
    if isinstance(part, Said):
        return (Said, part.kind)
    return (CallArguments, part.index) if isinstance(part, CallArguments) else (id(part),)
