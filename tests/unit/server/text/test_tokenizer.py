import random
import threading

import pytest

from pilotfish.server.text.tokenizer import WINDOW

PIECES = [
    "The quick brown fox. ",
    " " * 40,
    "x" * 30,
    "ll",
    "o,",
    "😀€",
    "e\u0301",
    "<think>",
    "<|im_start|>",
    "\n\n",
    "12",
]


def texts(count, characters):
    for seed in range(count):
        generator = random.Random(seed)
        yield "".join(generator.choices(PIECES, k=characters // 10))[:characters]


def test_the_batch_of_one_gives_the_ids_of_a_single_text(tokenizer):
    for text in [*texts(20, 3000), "", " ", "\x00", "\ufeff"]:
        for special in (False, True):
            assert tokenizer.encode(text, add_special_tokens=special) == (
                tokenizer._raw.encode(text, add_special_tokens=special).ids
            )


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_no_text(tokenizer, text):
    with pytest.raises(TypeError):
        tokenizer.encode(text, add_special_tokens=False)


def test_a_text_has_at_least_so_many_tokens(tokenizer):
    for text in texts(8, 3 * WINDOW + 17):
        true = len(tokenizer.encode(text, add_special_tokens=False))
        least = tokenizer.at_least(text, 10**9)
        assert 0.95 * true < least <= true


def test_counting_stops_at_the_bound(tokenizer, monkeypatch):
    read = []

    class Counting:
        def encode_batch_fast(self, texts, add_special_tokens):
            read.extend(map(len, texts))
            return raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    raw = tokenizer._raw
    monkeypatch.setattr(tokenizer, "_raw", Counting())
    text = "The quick brown fox. " * WINDOW
    assert tokenizer.at_least(text, 40_000) > 40_000
    assert read == [WINDOW]
    # so long that no look at it is needed
    read.clear()
    assert tokenizer.at_least(text, len(text) // (5 * tokenizer.longest_token)) and read == []


def test_tokenising_lets_other_threads_run(tokenizer):
    ran, ended, text = [], threading.Event(), "xq zv " * 300_000

    def count():
        while not ended.is_set():
            ran.append(1)
            ended.wait(0.001)

    other = threading.Thread(target=count)
    other.start()
    before = len(ran)
    tokenizer.encode(text, add_special_tokens=False)
    during = len(ran) - before
    ended.set()
    other.join()
    # with the lock held it is one, at the end
    assert during > 5
