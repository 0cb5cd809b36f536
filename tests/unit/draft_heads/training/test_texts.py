"""Text to rows, and the trunk's hidden states of rows on disk."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pilotfish.draft_heads.training import hidden as hidden_module
from pilotfish.draft_heads.training.hidden import HiddenCache, HiddenStates
from pilotfish.draft_heads.training.texts import MIN_DOCUMENTS, cut_rows, make_rows, read_documents, stream_of
from pilotfish.engine.errors import OptionError
from pilotfish.engine.round.prompt import PromptPass, read_text
from pilotfish.kernels.attention import PAGE
from tests.support.rounds import make_engine


def render(messages):
    return "|".join(message["content"] for message in messages)


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_every_form_of_a_line_is_a_text(tmp_path):
    file = write_lines(
        tmp_path / "log.jsonl",
        {"text": "one"},
        "",
        {"prompt": "two ", "completion": "three"},
        {"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "five"}]},
        {"time": "t", "endpoint": "/v1/completions", "prompts": ["six", "seven"]},
        {"time": "t", "endpoint": "/v1/completions", "status": 400},
    )
    assert read_documents([file], render) == ["one", "two three", "four|five", "six", "seven"]


@pytest.mark.parametrize("line", ["{", '{"texts": "a"}', '{"messages": ["a"]}', '{"text": 1}', "[1]"])
def test_a_line_of_another_form_is_named(tmp_path, line):
    file = write_lines(tmp_path / "log.jsonl", {"text": "one"}, line)
    with pytest.raises(OptionError, match=r"log\.jsonl, line 2: "):
        read_documents([file], render)


def test_a_folder_gives_its_texts_in_order(tmp_path):
    for name in ("b.txt", "a/deep.py", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_documents([tmp_path], render) == ["a/deep.py", "b.txt"]


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "bytes.txt", tmp_path / "missing.txt"):
        with pytest.raises(OptionError, match=path.name):
            read_documents([path], render)


def test_rows_hold_the_documents_and_share_none():
    documents = [[i] * 10 for i in range(1, MIN_DOCUMENTS * 3 + 1)]
    rows = make_rows(documents, 0, 11, seed=3)
    both = np.concatenate([rows.train, rows.heldout])
    assert sorted(map(tuple, both.tolist())) == [(*ids, 0) for ids in documents]
    assert len(rows.heldout) == MIN_DOCUMENTS * 3 // 20
    assert not np.array_equal(rows.train, make_rows(documents, 0, 11, seed=4).train)


def test_of_one_document_the_end_is_held_out():
    rows = make_rows([list(range(1000))], None, 10, seed=0)
    assert rows.train.max() < rows.heldout.min()
    assert len(rows.train) == 95 and len(rows.heldout) == 5


def test_too_little_text_is_refused():
    with pytest.raises(OptionError, match="19 tokens, want two rows of 10"):
        make_rows([list(range(19))], None, 10, seed=0)


@pytest.fixture(scope="module")
def trunk():
    return make_engine("moe", "bfloat16", depth=0).executor.model


class TestHiddenStates:
    ROWS = cut_rows(stream_of([list(range(2 * (PAGE + 30)))], None) % 320, PAGE + 30)

    @torch.inference_mode()
    def test_are_those_that_prefill_gives(self, trunk):
        tokens = torch.from_numpy(self.ROWS[0]).long()
        trunk.trunk.state.reset(2)
        prompt = PromptPass(trunk)
        parts = [
            prompt.trunk(tokens[a:b], prompt.span(2, a, b - a, [3, 4])) for a, b in ((0, PAGE), (PAGE, len(tokens)))
        ]
        assert torch.equal(read_text(trunk, tokens), torch.cat(parts))

    @pytest.mark.parametrize("num_own", [0, 5])
    def test_come_back_from_disk_without_the_trunk(self, trunk, tmp_path, num_own, monkeypatch):
        wanted = [1, 0, 1], [0, 1]
        tokens, hidden = HiddenStates(trunk, self.ROWS, num_own).take(*wanted)
        assert tokens.shape == (3, PAGE + 30 + num_own) and hidden.shape == (*tokens.shape, trunk.config.hidden_size)
        assert np.array_equal(tokens[:, : PAGE + 30], self.ROWS[wanted[0]])
        for _ in range(2):
            cache = HiddenCache(tmp_path, self.ROWS, num_own, hidden.shape[2], torch.bfloat16, "trunk")
            again = HiddenStates(trunk, self.ROWS, num_own, cache).take(*wanted)
            assert torch.equal(again[0], tokens) and torch.equal(again[1], hidden)
            monkeypatch.setattr(hidden_module, "write_on", None)
            monkeypatch.setattr(hidden_module, "read_text", None)
        for part in cache.read(0):
            part[:] = 0  # copies
        assert torch.equal(cache.read(0)[1], hidden[1]) and torch.equal(cache.read(0)[0], tokens[1])

    def test_of_another_text_or_trunk_are_refused(self, trunk, tmp_path):
        HiddenCache(tmp_path, self.ROWS, 0, 64, torch.bfloat16, "trunk")
        for rows, own, source in ((self.ROWS[:1], 0, "trunk"), (self.ROWS, 0, "other"), (self.ROWS, 1, "trunk")):
            with pytest.raises(OptionError, match="of another text, trunk or row length"):
                HiddenCache(tmp_path, rows, own, 64, torch.bfloat16, source)
