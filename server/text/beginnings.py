"""Where a chat's prompt leaves system prompt and tools: the tokens that other conversations are likely to begin with.

The index is made by comparing ids, so whatever it is, the prompt does begin with those tokens. What it is compared with
is the rendering of the same system prompt and tools before an unknown user's message; of that, the ids that do not
depend on how the message begins. Renderings are kept by what goes into them: tools and system prompts are long, and
come with every request.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from pilotfish.server.errors import BadRequest
from pilotfish.server.text.chat_template import MARK, ChatTemplate
from pilotfish.server.text.tokenizer import Tokenizer

MAX_KEPT_TOKENS = 1 << 21
"""Ids that are kept in all, 4 bytes each."""
MAX_KEPT = 256
MOST_JOINED = 64
"""Characters at the end of what the template writes whose ids may depend on how the message begins."""
OTHER_MESSAGES = ("x", "\n", " ")
"""How messages may begin: with a letter, or with space that could join what the template writes before it."""


class Beginnings:
    """Thread-safe."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_tokens = 0

    def measure(
        self,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> int | None:
        """How many of the prompt's first ids are system prompt and tools; None where it has neither of them."""
        system = [message for message in messages[:1] if message["role"] == "system"]
        if not system and not tools:
            return None
        try:
            written = msgspec.json.encode((system, tools, values))
        except (RecursionError, TypeError, ValueError):
            # nesting at the edge of what could be decoded: the prompt is read all the same
            return None
        key = blake2b(written, digest_size=16).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            kept = self._read(system, tools, values)
            self._keep(key, kept)
        return num_common(kept, array("I", ids[: len(kept)])) or None

    def _read(
        self,
        system: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> array[int]:
        """The ids that come before any message; none where the template does not say where that is."""
        probe = [*map(dict, system), {"role": "user", "content": MARK}]
        try:
            before, mark, _ = self._template.render(probe, tools=tools, values=dict(values)).rpartition(MARK)
        except BadRequest:
            return array("I")
        if not mark:
            return array("I")
        # the whole of it once: it may be as long as the context
        ids = self._encode(before + OTHER_MESSAGES[0])
        first, *others = (self._encode(before[-MOST_JOINED:] + message) for message in OTHER_MESSAGES)
        num_joined = len(first) - min(num_common(first, other) for other in others)
        return ids[: max(0, len(ids) - num_joined)]

    def _encode(self, text: str) -> array[int]:
        return array("I", self._tokenizer.encode(text, add_special_tokens=False))

    def _keep(self, key: bytes, ids: array[int]) -> None:
        with self._lock:
            if key in self._kept or len(ids) > MAX_KEPT_TOKENS:
                return
            self._kept[key] = ids
            self._num_tokens += len(ids)
            while self._num_tokens > MAX_KEPT_TOKENS or len(self._kept) > MAX_KEPT:
                _, forgotten = self._kept.popitem(last=False)
                self._num_tokens -= len(forgotten)


def num_common(one: array[int], other: array[int]) -> int:
    """The length of the longest beginning that both have."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length
    # the beginnings of length `low` are equal, those of length `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
