"""A checkpoint's tokenizer.json, for whoever turns texts into ids: the server, training, checks of the head."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from pilotfish.engine.checkpoint.foreign import look_at
from pilotfish.engine.errors import CheckpointError


class TokenizerError(CheckpointError):
    """A folder without a tokenizer.json that can be read; the message names the file."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """The library's tokenizer, which neither pads nor cuts a text."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TokenizerError(f"{path} does not exist: want a tokenizer.json beside the weights") from None
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {look_at(path) or error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
