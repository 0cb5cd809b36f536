"""The parts of an answer: what was thought or said, and calls of tools, whole or as they are written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal

import msgspec

Kind = Literal["content", "reasoning"]


class Said(msgspec.Struct, frozen=True):
    kind: Kind
    text: str


class Call(msgspec.Struct, frozen=True):
    """A call that is whole. `arguments` is the JSON of an object."""

    index: int
    id: str
    name: str
    arguments: str


class CallOpened(msgspec.Struct, frozen=True):
    """The beginning of a call that may break off yet: only where pieces were asked for, as the next."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments' JSON. A call that breaks off stays without its end, and follows as text."""

    index: int
    text: str


Part = Said | Call | CallOpened | CallArguments


def merge(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one."""
    parts = list(parts)
    if len(parts) < 2:
        # a piece of a stream that is read in time
        return parts
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
