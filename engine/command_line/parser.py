"""argparse that says in one line what is wrong, and what a flag of vLLM's or llama.cpp's is here."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

_ONE_DEVICE = "a model is served by one device"
_FIXED_CUTS = "a prompt is cut at fixed places, whatever the load"
_NO_ADAPTERS = "no adapters at run time; pilotfish quantize --merge-lora merges one"
_WHOLE = "a model is on one device as a whole (--device)"
_NOT_LOGGED = "requests are not logged, unless --log-requests asks for it"
ELSEWHERE = {
    "--model": "the model comes first, without a flag",
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--trust-remote-code": "no code of a checkpoint is run",
    "--quantization": "the checkpoint says how it is quantised",
    "-q": "the checkpoint says how it is quantised",
    "--max-num-batched-tokens": _FIXED_CUTS,
    "--enable-chunked-prefill": _FIXED_CUTS,
    "--block-size": "pages hold 256 tokens",
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--limit-mm-per-prompt": "text is read, nothing else",
    "--hf-overrides": "config.json says all that is served; change it there, in a folder of its own",
    "--rope-scaling": "config.json says it, in rope_parameters",
    "--disable-log-requests": _NOT_LOGGED,
    "--no-enable-log-requests": _NOT_LOGGED,
    "-m": "the model comes first, without a flag",
    "-hf": "a hub id comes first, without a flag",
    "--alias": "it is --served-model-name here",
    "-a": "it is --served-model-name here",
    "--ctx-size": "it is --max-model-len here",
    "-c": "it is --max-model-len here",
    "--parallel": "it is --max-num-seqs here",
    "-np": "it is --max-num-seqs here",
    "--threads": "it is --num-threads here",
    "-t": "it is --num-threads here",
    "--n-gpu-layers": _WHOLE,
    "--gpu-layers": _WHOLE,
    "-ngl": _WHOLE,
    "--cache-type-k": "it is --kv-cache-dtype here",
    "--cache-type-v": "it is --kv-cache-dtype here",
    "--model-draft": "a draft head of another checkpoint is --draft-head here",
    "-md": "a draft head of another checkpoint is --draft-head here",
    "--draft-max": "it is --num-speculative-tokens here",
    "--spec-draft-n-max": "it is --num-speculative-tokens here",
    "--flash-attn": "the device decides",
    "-fa": "the device decides",
    "--jinja": "chats always go through the checkpoint's template",
}
"""Flags that units and scripts for vLLM, then llama.cpp's server, often have, and why there is none here."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class Parser(argparse.ArgumentParser):
    """`usage` is shown by --help alone: that of many flags would hide the error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help} | options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists what there is)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Whatever is left over is an error of this parser, not of the one above it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1)
            reason = ELSEWHERE.get(name) or (f"did you mean {near[0]}?" if near else "")
            kind = "flag" if name.startswith("-") else "argument"
            self.error(f"unknown {kind} {name}" + (f": {reason}" if reason else ""))
        return found, unknown


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type of flags: digits alone, both bounds included; raises ArgumentTypeError for others."""
    bounds = f"of at least {least}" if most is None else f"in {least}..{most}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"want a number {bounds}, got {text!r}")
        return int(text)

    return read


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """A type of flags: whole numbers with commas between them, both bounds included, sorted and each once; raises
    ArgumentTypeError for others."""

    def read(text: str) -> list[int]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        values = sorted({int(word) for word in words if word.isdecimal()})
        if not words or not all(map(str.isdecimal, words)) or values[0] < least or values[-1] > most:
            raise argparse.ArgumentTypeError(f"want numbers in {least}..{most}, got {text!r}")
        return values

    return read
