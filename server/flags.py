"""What a word behind a flag must be, and what it becomes: types of the command line. Each raises ArgumentTypeError."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pilotfish.engine.link.messages import LoopRule
from pilotfish.engine.options import MAX_DEPTH

Value = TypeVar("Value")


def root_path(text: str) -> str:
    path = text.rstrip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", path):
        raise argparse.ArgumentTypeError(f"want a path like /llm, got {text!r}")
    return path


def checked(convert: Callable[[str], Value], holds: Callable[[Value], bool], wanted: str) -> Callable[[str], Value]:
    """A type of flags."""

    def read(text: str) -> Value:
        with contextlib.suppress(ValueError):
            if holds(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"want {wanted}, got {text!r}")

    return read


count = checked(int, lambda value: 1 <= value < 1 << 63, "a whole number of at least 1")
count_or_zero = checked(int, lambda value: 0 <= value < 1 << 63, "a whole number of at least 0")
depth = checked(int, lambda value: 0 <= value <= MAX_DEPTH, f"a whole number in 0..{MAX_DEPTH}")
port = checked(int, lambda value: 0 <= value <= 65535, "a port in 0..65535")
share = checked(float, lambda value: 0 < value <= 1, "a share in (0, 1]")
share_or_zero = checked(float, lambda value: 0 <= value <= 1, "a share in [0, 1]")
seconds = checked(float, lambda value: 0 <= value < math.inf, "seconds")


def list_of(pattern: str, wanted: str) -> Callable[[str], list[str]]:
    """A JSON list of such words; "*" is one."""

    def holds(found: Any) -> bool:
        return isinstance(found, list) and all(
            isinstance(word, str) and (word == "*" or re.fullmatch(pattern, word)) for word in found
        )

    return checked(json.loads, holds, wanted)


# as browsers send them: what differs, by a slash at the end, would never be met
origins = list_of(
    r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", 'a JSON list of "*" or origins such as "https://app.example:8443"'
)
hosts = list_of(r"[A-Za-z0-9._:\[\]-]+", 'a JSON list of "*" or hosts such as "llm.example"')
methods = list_of(r"[A-Z]+", 'a JSON list of "*" or methods such as "POST"')
headers = list_of(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", 'a JSON list of "*" or names of headers such as "Authorization"')


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text[:40]!r}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"want an object, got {text[:40]}")
    return found


def loop_rule(text: str) -> LoopRule:
    repeats, _, tokens = text.partition(":")
    if not (repeats.isdecimal() and tokens.isdecimal() and 2 <= int(repeats) <= 1000 and int(tokens) <= 100_000):
        raise argparse.ArgumentTypeError(f"want N:M, N in 2..1000 and M up to 100000, got {text[:40]!r}")
    return LoopRule(int(repeats), int(tokens))


def reasoning_end(text: str) -> str:
    config = json_object(text)
    end, start = config.get("reasoning_end_str"), config.get("reasoning_start_str")
    if not isinstance(end, str) or end.count("</think>") != 1:
        raise argparse.ArgumentTypeError('want "reasoning_end_str", with one </think> in it')
    if config.keys() - {"reasoning_end_str", "reasoning_start_str"} or start not in (None, "<think>"):
        raise argparse.ArgumentTypeError('beside "reasoning_end_str" want at most "reasoning_start_str": "<think>"')
    return end


def overrides(text: str) -> dict[str, Any]:
    from pilotfish.server.model_files import SamplingDefaults

    values, names = json_object(text), SamplingDefaults.__struct_fields__
    if values.keys() - set(names):
        raise argparse.ArgumentTypeError(f"want an object with some of {', '.join(names)}")
    try:
        msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return values
