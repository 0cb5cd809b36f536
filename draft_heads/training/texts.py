"""Text to train on, as rows of token ids of one length: own files, folders, or logged traffic.

T = tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.engine.errors import OptionError

LINES = ".jsonl"
SUFFIXES = frozenset(
    {LINES, ".txt", ".md", ".rst", ".py", ".js", ".ts", ".java", ".go", ".rs", ".c", ".h", ".cpp", ".sh"}
)
"""What is read of a folder. A file that is named itself may be called anything."""
HELDOUT_SHARE = 0.05
MIN_DOCUMENTS = 20
"""The number of documents below which the last tokens are held out in place of whole documents."""

Render = Callable[[list[dict[str, Any]]], str]
"""Chat messages to text, by a checkpoint's own template."""
RenderChat = Callable[[Path, list[dict[str, Any]]], str]
"""The same for any checkpoint folder; the caller's, so that training does not import the server."""


@dataclass(frozen=True)
class TextRows:
    """Token ids int32 [rows, T] to train on and to test with."""

    train: np.ndarray
    heldout: np.ndarray


def read_documents(paths: Iterable[Path], render: Render) -> list[str]:
    """Texts of files and folders, in the order of their names. Raises OptionError naming file and line."""
    documents = [text for path in paths for file in _files(path) for text in _texts(file, render) if text]
    if not documents:
        raise OptionError(f"{', '.join(map(str, paths))}: holds no text")
    return documents


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return [path]


def _texts(file: Path, render: Render) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file}: cannot be read as text: {error}") from error
    if file.suffix != LINES:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield from _texts_of_line(line, render, f"{file}, line {number}")


def _texts_of_line(line: str, render: Render, where: str) -> Iterator[str]:
    """A line is a text, a prompt with its completion, a chat, or a line of our own request log with prompts."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}: not JSON: {error}") from None
    match fields:
        case {"text": str(text)}:
            yield text
        case {"prompt": str(prompt), "completion": str(completion)}:
            yield prompt + completion
        case {"messages": [*messages]} if all(isinstance(message, dict) for message in messages):
            yield render(messages)
        case {"prompts": [*prompts]} if all(isinstance(prompt, str) for prompt in prompts):
            yield from prompts
        case {"endpoint": str()}:
            return  # of the request log, a line without prompts
        case _:
            raise OptionError(f'{where}: want "text", "prompt" and "completion", "messages" or "prompts"')


def make_rows(documents: Sequence[list[int]], separator: int | None, length: int, seed: int) -> TextRows:
    """Documents in a random order, one behind the other, cut into rows; whole ones are held out where there are enough.

    Raises OptionError if there are not tokens for a row of each kind.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    num_heldout = int(len(documents) * HELDOUT_SHARE) if len(documents) >= MIN_DOCUMENTS else 0
    streams = [stream_of([documents[i] for i in part], separator) for part in np.split(order, [num_heldout])]
    if not num_heldout:
        cut = min(len(streams[1]) - length, int(len(streams[1]) * (1 - HELDOUT_SHARE)))
        streams = [streams[1][max(0, cut) :], streams[1][: max(0, cut)]]
    heldout, train = (cut_rows(stream, length) for stream in streams)
    if not len(train) or not len(heldout):
        count = sum(map(len, streams))
        raise OptionError(f"--text: {count} tokens, want two rows of {length} at least, one of them held out")
    return TextRows(train, heldout)


def stream_of(documents: Sequence[list[int]], separator: int | None) -> np.ndarray:
    """int32 ids of all documents, the separator behind each."""
    end = [] if separator is None else [separator]
    return np.fromiter((token for ids in documents for token in (*ids, *end)), dtype=np.int32)


def cut_rows(stream: np.ndarray, length: int) -> np.ndarray:
    """[rows, T]; what is left at the end is dropped."""
    return stream[: len(stream) // length * length].reshape(-1, length)
