"""What a model has written, told apart as it arrives: reasoning, content, and tool calls in the Qwen XML form.

    <think>REASONING</think>CONTENT<tool_call><function=NAME><parameter=P>VALUE</parameter></function></tool_call>

The parts do not depend on how the text is cut into pieces: each state acts only on what no later text can change,
and every character is looked at a bounded number of times. A call that is formed as above is certain once what follows
cannot belong to it: another call, or the end. At the first tag that is not where the form has it, the rest is kept and
read as a whole when it has ended (`reading.py`). What turns out to be no call is text, where it stood.
Whitespace around the markers is the format's, not the answer's, and goes with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from pilotfish.server.calls.parameters import Parameters
from pilotfish.server.calls.parts import Call, CallArguments, CallOpened, Kind, Part, Said
from pilotfish.server.calls.reading import UNKNOWN, ReadCall, read_drifted
from pilotfish.server.calls.tools import NAME
from pilotfish.server.calls.written import WrittenCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MARKERS = (THINK, END_THINK, CALL, END_CALL)
"""Those that tokenizers have a token for. A bare `<function=` is a call too: models forget the wrapper."""

TAG = re.compile(r"</?tool_call>|</function>|</parameter|<(?:function|parameter)(?: ?=| name ?=)")
"""Whatever may be a part of a call's form, well written or not."""
WORDS = (CALL, END_CALL, END_FUNCTION, END_PARAMETER[:-1], FUNCTION[:-1], PARAMETER[:-1])
NAMED_FUNCTION = re.compile(r"<function=([^<>\n]{1,256})>")
NAMED_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>")
DRIFTED = re.compile(r"<function(?: ?=| name ?=) ?([\"']?)([^\"'<>\n]{1,256}?)\1 ?(?:>|(?=\n))")
"""A function's beginning as models misspell it."""
OPENED = re.compile(r"\s*(?:<function(?: ?=| name ?=)|\{)")
UNFINISHED = re.compile(
    r"<(?:function|parameter)"
    r"(?:(?: ?=| name ?=)[^<>\n]{0,280}|(?: (?:n(?:a(?:m(?:e ?)?)?)?)?)?)"
)


class AnswerRules(msgspec.Struct, frozen=True, kw_only=True):
    """How to read an answer. `thinking`: "open" where the prompt ends inside the block, "look" where the model may
    open it, "none" where there is none. `tools`: parameters by function, or no calls. `single`: it ends with its first
    call. `pieces`: calls are told as they are written, before it is certain that they are any."""

    thinking: Literal["none", "look", "open"] = "none"
    tools: dict[str, Parameters] | None = None
    single: bool = False
    pieces: bool = False


class AnswerParser:
    """Feed text with `push`, end with `flush`."""

    def __init__(self, rules: AnswerRules) -> None:
        self._rules = rules
        self._tools = rules.tools or {}
        self._parts: list[Part] = []
        self._buffer = ""
        self._num_pushed = 0
        self._kind: Kind = "content"
        # of the kind at hand: whether its whitespace waits, has nothing before it, follows a marker
        self._space: list[str] = []
        self._fresh = self._after_marker = False
        self._has_said: set[Kind] = set()
        self._call = WrittenCall()
        self._reads_calls = rules.tools is not None
        self._num_opened = self._num_kept = 0
        self.num_calls = 0
        self.finished = False
        self.reasoning_begin: int | None = None
        self.reasoning_end: int | None = None
        self._state: Callable[[], bool] = self._look_for_think if rules.thinking == "look" else self._read_text
        if rules.thinking == "open":
            self._think()

    @property
    def position(self) -> int:
        """Characters of the answer that have been told apart."""
        return self._num_pushed - len(self._buffer) - self._call.size - self._num_kept

    @property
    def in_call(self) -> bool:
        """Whether what comes next may belong to a call that has begun."""
        if self._state == self._after_call:
            return self._call.wrapped and not self._call.closed and not self._call.has_trail
        return self._state in (self._read_head, self._read_body, self._read_value, self._keep)

    @property
    def is_opening(self) -> bool:
        """Whether a wrapper has just been opened, which may yet be a word of the text."""
        return self._state == self._read_head and self._call.wrapped and self._call.size == len(CALL)

    def deny_call(self) -> list[Part]:
        """The wrapper that is opening is a word of the text: whoever holds what follows knows."""
        assert self.is_opening
        self._give_back()
        return self.push("")

    def push(self, text: str) -> list[Part]:
        """The parts that are now certain."""
        if not self.finished:
            self._buffer += text
        self._num_pushed += len(text)
        while self._buffer and not self.finished and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self, *, cut: bool = False) -> list[Part]:
        """The text ends here: what was held back is text after all. `cut`: it did not end by itself."""
        if not self.finished:
            self._end(cut)
        parts, self._parts = self._parts, []
        return parts

    def _end(self, cut: bool) -> None:
        if self._state == self._after_call:
            if not self._call.closed and not self._call.has_trail and END_CALL.startswith(self._buffer):
                self._take(len(self._buffer))
            self._settle()
            while self._buffer and self._state():
                pass
        if self._state == self._keep:
            self._tell(read_drifted(self._call.take(), self._tools, cut=cut))
        elif self._state not in (self._read_text, self._look_for_think):
            self._tell([self._call.take() + self._take(len(self._buffer))])
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
        body = text.rstrip() if self._waits() or self._fresh else text
        if not body:
            self._space.append(text)
            return
        whole = "".join(self._space) + body
        self._emit(whole.lstrip() if self._fresh else whole)
        self._space = [text[len(body) :]]
        if not self._waits():
            self._emit(self._space.pop())
        self._fresh = self._after_marker = False
        self._has_said.add(self._kind)

    def _enter(self, kind: Kind) -> None:
        """Right after a marker."""
        self._kind, self._space, self._after_marker = kind, [], True
        self._fresh = kind not in self._has_said
        self._state = self._read_text

    def _waits(self) -> bool:
        return self._rules.tools is not None or self._kind == "reasoning"

    def _markers(self) -> tuple[str, ...]:
        calls = (CALL, FUNCTION, FUNCTION[:-1] + " ") if self._reads_calls else ()
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
        self._begin_call(wrapped=marker == CALL)
        return True

    def _tell(self, said: list[str | ReadCall]) -> None:
        """Texts and calls of an answer that has ended."""
        self._reads_calls = False
        self._num_kept = sum(len(part) if isinstance(part, str) else part.size for part in said)
        self._state = self._read_text
        for part in said:
            if self.finished:
                break
            if isinstance(part, str):
                self._num_kept -= len(part)
                self._buffer = part
                while self._buffer and self._state():
                    pass
                self._say(self._take(len(self._buffer)))
            else:
                self._num_kept -= part.size
                self._tell_call(part.name, part.arguments)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin_call(self, *, wrapped: bool) -> None:
        self._call = WrittenCall(wrapped)
        if wrapped and self._buffer.startswith(CALL):
            self._call.add(self._take(len(CALL)))
        self._state = self._read_head

    def _read_head(self) -> bool:
        """Reads up to the function's name."""
        call = self._call
        if call.wrapped:
            call.add(self._take_space())
        found = NAMED_FUNCTION.match(self._buffer)
        if found and (found[1] in self._tools or (call.wrapped and NAME.fullmatch(found[1]))):
            call.add(self._take(found.end()))
            self._open(found[1])
            return True
        drifted = DRIFTED.match(self._buffer)
        if (drifted and drifted[2] in self._tools) or (call.wrapped and self._buffer.startswith("{")):
            return self._odd()
        if UNFINISHED.fullmatch(self._buffer) or FUNCTION.startswith(self._buffer):
            return False
        return self._give_back()

    def _open(self, name: str) -> None:
        self._call.name, self._call.parameters = name, self._tools.get(name, UNKNOWN)
        self._state = self._read_body
        if self._rules.pieces:
            self._call.index = self._num_opened
            self._num_opened += 1
            self._parts.append(CallOpened(self._call.index, self._call.id, name))

    def _give_back(self) -> bool:
        """The opener was text; what came after it is looked at again."""
        text = self._call.take() + self._buffer
        opener = CALL if self._call.wrapped and text.startswith(CALL) else FUNCTION[:-1]
        self._state, self._buffer = self._read_text, text
        self._say(self._take(len(opener)))
        return True

    def _read_body(self) -> bool:
        """Reads what stands between parameters."""
        call = self._call
        call.add(self._take_space())
        for marker in (END_FUNCTION, END_CALL):
            if self._buffer.startswith(marker):
                call.add(self._take(len(marker)))
                self._complete(closed=marker == END_CALL)
                return True
        found = NAMED_PARAMETER.match(self._buffer)
        if found and found[1] not in call.seen and (found[1] in call.parameters.properties or NAME.fullmatch(found[1])):
            call.add(self._take(found.end()))
            call.open_value(found[1])
            self._state = self._read_value
            return True
        if found is None and (_may_begin(self._buffer, (PARAMETER, END_FUNCTION, END_CALL)) or self._is_unfinished()):
            return False
        return self._odd()

    def _is_unfinished(self) -> bool:
        return self._buffer.startswith(PARAMETER) and UNFINISHED.fullmatch(self._buffer) is not None

    def _read_value(self) -> bool:
        found = TAG.search(self._buffer)
        sure = found.start() if found else len(self._buffer) - _tag_length(self._buffer)
        self._call.add_value(self._take(sure))
        self._tell_pieces()
        if found is None or self._buffer == END_PARAMETER[:-1]:
            return False
        if not self._buffer.startswith(END_PARAMETER):
            return self._odd()
        self._call.add(self._take(len(END_PARAMETER)))
        self._call.close_value()
        self._tell_pieces()
        self._state = self._read_body
        return True

    def _tell_pieces(self) -> None:
        if self._call.index is not None and (text := self._call.news()):
            self._parts.append(CallArguments(self._call.index, text))

    def _odd(self) -> bool:
        """Takes text that is not as the form has it: the rest of the answer is read when all of it is
        there."""
        self._state = self._keep
        return True

    def _keep(self) -> bool:
        self._call.add(self._take(len(self._buffer)))
        return False

    def _complete(self, *, closed: bool) -> None:
        """The function has ended. `closed`: its wrapper has, too."""
        self._call.closed = closed
        self._state = self._after_call
        if self._rules.single:
            self._settle()

    def _after_call(self) -> bool:
        """Whether what follows leaves the call as it is: the wrapper's end, text, another call, or the answer's end."""
        call = self._call
        found = TAG.search(self._buffer)
        end = self._buffer.find(END_THINK) if self._kind == "reasoning" else -1
        if end >= 0 and (found is None or end < found.start()):
            call.add_trail(self._take(end))
            return self._settle()
        kept = max(_tag_length(self._buffer), _held(self._buffer, self._markers()))
        call.add_trail(self._take(found.start() if found else len(self._buffer) - kept))
        if found is None:
            return False
        if found[0] == END_CALL and not call.closed and not call.has_trail:
            call.close(self._take(len(END_CALL)))
            return True
        if found[0] == CALL:
            return self._settle()
        if found[0].startswith(FUNCTION[:-1]):
            return self._follow_function()
        return self._odd()

    def _follow_function(self) -> bool:
        """Another function: in the same wrapper, without one, or a word of the text."""
        call = self._call
        if UNFINISHED.fullmatch(self._buffer):
            return False
        named, drifted = NAMED_FUNCTION.match(self._buffer), DRIFTED.match(self._buffer)
        if call.wrapped and not call.closed and not call.has_trail:
            self._settle()
            self._take_space()
            self._begin_call(wrapped=True)
        elif (named and named[1] in self._tools) or (drifted and drifted[2] in self._tools):
            self._settle()
        else:
            call.add_trail(self._take(len(FUNCTION[:-1])))
        return True

    def _settle(self) -> bool:
        """The call is certain, and what came after it is looked at again."""
        call = self._call
        trail = call.trail
        call.take()
        self._tell_call(call.name, call.arguments())
        if not self.finished:
            self._buffer = trail + self._buffer
        return True

    def _tell_call(self, name: str, arguments: str) -> None:
        call, self._call = self._call, WrittenCall()
        self.num_calls += 1
        self.finished = self._rules.single
        self._enter(self._kind)
        if call.index is not None and call.name == name and arguments.startswith(call.told):
            if rest := arguments[len(call.told) :]:
                self._parts.append(CallArguments(call.index, rest))
            return
        self._parts.append(Call(self._num_opened, call.id, name, arguments))
        self._num_opened += 1


def _tag_length(text: str) -> int:
    """How many last characters may be the beginning of a tag."""
    at = text.rfind("<")
    if at < 0 or not (_may_begin(text[at:], WORDS) or UNFINISHED.fullmatch(text, at)):
        return 0
    return len(text) - at


def _may_begin(text: str, words: Iterable[str]) -> bool:
    return any(word.startswith(text) for word in words)


def _held(text: str, markers: Iterable[str]) -> int:
    """How many last characters may be the beginning of a marker; each has one `<`, its first."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in markers) else 0


def begins_call(text: str) -> bool | None:
    """Whether this is a call, right after the wrapper's opening tag; None if that is not known yet."""
    if OPENED.match(text):
        return True
    rest = text.lstrip()
    return None if "<function".startswith(rest) or UNFINISHED.fullmatch(rest) else False
