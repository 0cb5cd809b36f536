"""Tokens to text, split anywhere, against the decoding of the whole."""

import itertools
import random

import pytest

from pilotfish.server.text.detokenize import Detokenizer, decode
from pilotfish.server.text.tokenizer import Tokenizer, TokenizerError, byte_alphabet

BYTES = [bytes([value]) for value in range(256)]


def stream(tokens, table, skipped=frozenset()):
    detokenizer = Detokenizer(table, skipped)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def splits(raw):
    for size in range(len(raw)):
        for cuts in itertools.combinations(range(1, len(raw)), size):
            yield [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)])]


@pytest.mark.parametrize("text", ["é€😀", "a€b", "😀😀", "\u0800\uffff", "né", "e\u0301"])
def test_every_split_of_multi_byte_text_gives_the_whole(text):
    for pieces in splits(text.encode()):
        streamed = stream(range(len(pieces)), pieces)
        assert "".join(streamed) == text
        # a prefix shown is a prefix of the whole: no half character ever
        assert all(text.startswith("".join(streamed[:n])) for n in range(len(streamed)))


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"\xe2\x82",
        b"a\xe2\x82b",
        b"\xf0\x9f\x98",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\x80\x80",
    ],
)
def test_broken_bytes_become_replacements_as_in_the_whole(raw):
    whole = raw.decode("utf-8", "replace")
    for pieces in splits(raw):
        assert "".join(stream(range(len(pieces)), pieces)) == whole


def test_random_bytes_match_python_and_the_tokenizer_library(tokenizer):
    for seed in range(500):
        rng = random.Random(seed)
        ids = [rng.randrange(0, 304) for _ in range(rng.randrange(0, 40))]
        for skip in (True, False):
            skipped = tokenizer.special_ids if skip else frozenset()
            text = "".join(stream(ids, tokenizer.token_bytes, skipped))
            assert text == tokenizer._raw.decode(ids, skip_special_tokens=skip), f"seed {seed}"
            assert text == decode(ids, tokenizer.token_bytes, skipped)


def test_an_unfinished_character_waits_and_ends_as_a_replacement():
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in (0xE2, 0x82)] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_and_unknown_ids_have_no_text():
    assert stream([0x41, 0x42, 999, -1], BYTES, frozenset({0x42})) == ["A", "", "", "", ""]


def test_alphabet_is_the_one_the_library_uses():
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 0x20


def test_text_goes_round(tokenizer):
    text = "hello, wörld € 😀 <|im_start|> <think>\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_single_tokens_that_are_no_text_are_spelled_as_bytes(tokenizer):
    assert tokenizer.token_text(0x41) == "A"
    assert tokenizer.token_text(0xE2) == "bytes:\\xe2"
    assert tokenizer.token_text(10**6) == ""


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    from tokenizers import Tokenizer as Raw
    from tokenizers import models

    Raw(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="ByteLevel"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_folder(tmp_path)
