"""A checkpoint's tokenizer.json: text to ids, and the bytes behind each id.

Only byte-level tokenizers (GPT-2's alphabet, as all Qwen models have) are read: their bytes are known token by
token, which is what streaming needs.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer

from pilotfish.engine.checkpoint.tokenizer import TokenizerError, read_tokenizer
from pilotfish.engine.config import MAX_SIZE
from pilotfish.server.lane import without_lock
from pilotfish.server.text.detokenize import decode


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary, letter -> byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


WINDOW = 65536
"""Characters at a time where tokens are only counted."""
MAX_COMPOSED = 4
"""Characters that a normaliser may join into one."""


class Tokenizer:
    """Thread-safe. `encode` and `at_least` do not hold the interpreter's lock while they work."""

    def __init__(self, raw: RawTokenizer, special_ids: frozenset[int]) -> None:
        self._raw = raw
        self.special_ids = special_ids
        self.token_bytes = _token_bytes(raw)
        self.longest_token = max(map(len, self.token_bytes), default=1)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        raw, path = read_tokenizer(folder), folder / "tokenizer.json"
        description = json.loads(path.read_text(encoding="utf-8"))
        if not _is_byte_level(description.get("decoder")):
            raise TokenizerError(f"{path}: want a ByteLevel decoder, got {_decoder_name(description.get('decoder'))}")
        if (largest := max(raw.get_vocab().values(), default=0)) >= MAX_SIZE:
            raise TokenizerError(f"{path}: want ids below {MAX_SIZE}, got {largest}")
        special = {entry["id"] for entry in description.get("added_tokens", ()) if entry.get("special")}
        return cls(raw, frozenset(special))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encode(text, add_special_tokens).ids

    def at_least(self, text: str, limit: int) -> int:
        """A number of tokens that the text has at least, looked for until it passes `limit`.

        It works through windows, so that a giant text costs no more than `limit` tokens and a window. A cut between two
        of them may break one token, into as many as it has bytes; twice as many are not counted.
        """
        count = len(text) // (MAX_COMPOSED * self.longest_token)
        if count > limit or len(text) <= WINDOW:
            return count
        found = 0
        for start in range(0, len(text), WINDOW):
            window = self._encode(text[start : start + WINDOW], False)
            found += max(0, len(window) - 2 * self.longest_token)
            if found > limit:
                break
        return max(count, found)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        # a batch of one: the library gives the lock away for batches only
        with without_lock():
            return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return decode(token_ids, self.token_bytes, self.special_ids if skip_special_tokens else frozenset())

    def token_to_id(self, token: str) -> int | None:
        return self._raw.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """How a single token is written in log-probabilities: its text, or `bytes:\\xe2\\x82` if it is not text."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""


def _token_bytes(raw: RawTokenizer) -> list[bytes]:
    vocabulary = raw.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = byte_alphabet()
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes([alphabet[letter] for letter in token])
        except KeyError:
            # an added token outside the alphabet is plain text
            table[token_id] = token.encode("utf-8")
    return table


def _is_byte_level(decoder: dict | None) -> bool:
    if not decoder:
        return False
    if decoder.get("type") == "Sequence":
        return [_is_byte_level(part) for part in decoder.get("decoders", ())] == [True]
    return decoder.get("type") == "ByteLevel"


def _decoder_name(decoder: dict | None) -> str:
    return str(decoder.get("type")) if decoder else "none"
