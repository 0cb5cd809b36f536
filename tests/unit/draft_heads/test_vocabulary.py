"""A trimmed draft vocabulary: which ids are kept, its file, and that text does not depend on it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from pilotfish.draft_heads.training.draft_vocab import build_draft_vocab, write_draft_vocab
from pilotfish.engine.checkpoint.draft_vocab import read_draft_vocab
from pilotfish.engine.checkpoint.nvfp4 import quantize
from pilotfish.engine.errors import OptionError
from pilotfish.engine.model.build import Builder, CacheSizes
from pilotfish.server import cli
from tests.support.rounds import MODES, Driver, make_engine, transcript
from tests.support.tiny_models import VOCAB_SIZE, build_tiny, write_tokenizer

KEPT = list(range(0, VOCAB_SIZE, 2))
TABLE = [1, 2, 3, 4, 5, 6]


def test_the_most_frequent_ids_are_kept():
    texts = np.random.default_rng(0).zipf(1.3, 4000) % 200
    counts = np.bincount(texts, minlength=300)
    kept = build_draft_vocab(counts, 50, always=(299, 250, 299))
    common = [id for id, _ in sorted(Counter(texts.tolist()).items(), key=lambda item: (-item[1], item[0]))]
    assert kept == sorted([250, 299, *common[:48]])


def test_equal_counts_go_to_the_lower_id():
    assert build_draft_vocab(np.array([0, 7, 0, 7, 7, 0]), 4) == [0, 1, 3, 4]


@pytest.mark.parametrize("size", (1, 7))
def test_a_size_that_cannot_be_is_refused(size):
    with pytest.raises(OptionError, match=r"want 2\.\.6 ids"):
        build_draft_vocab(np.zeros(6), size, always=(1, 2))


def test_the_file_is_read_as_written(tmp_path):
    write_draft_vocab(tmp_path / "vocab.json", [3, 9, 11], 12)
    assert read_draft_vocab(tmp_path / "vocab.json", 12) == [3, 9, 11]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "want JSON"),
        ("{", "want JSON"),
        ("[1]", "want JSON"),
        ('{"ids": [1]}', "want JSON"),
        ('{"ids": [1], "vocab_size": 13}', "want a vocabulary of 12 ids"),
        ('{"ids": [], "vocab_size": 12}', "want a list of whole numbers"),
        ('{"ids": [1, 12], "vocab_size": 12}', "want a list of whole numbers in 0..11"),
        ('{"ids": [1, true], "vocab_size": 12}', "want a list of whole numbers"),
        ('{"ids": [2, 1], "vocab_size": 12}', "want them rising"),
        ('{"ids": [1, 1], "vocab_size": 12}', "want them rising"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "vocab.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=rf"vocab\.json.*{message}"):
        read_draft_vocab(path, 12)


@torch.inference_mode()
@pytest.mark.parametrize("packed", (False, True))
def test_logits_of_kept_ids_are_the_trunk_s(packed):
    torch.manual_seed(0)
    plain = torch.randn(VOCAB_SIZE, 64)
    matrix = quantize(plain) if packed else plain
    builder = Builder({}, None, CacheSizes(1, 1, 1), torch.float32, torch.device("cpu"))
    vocabulary = builder.draft_vocabulary(matrix, KEPT)
    whole = matrix.dequantize(torch.float32) if packed else plain
    x = torch.randn(8, 64)
    assert vocabulary.ids.tolist() == KEPT and vocabulary.ids.dtype == torch.int32
    torch.testing.assert_close(vocabulary.lm_head.rows(x), x @ whole[KEPT].T)


@pytest.mark.parametrize("mode", MODES)
def test_text_does_not_depend_on_it_and_kept_drafts_are_the_same(mode):
    wanted = transcript("hv_gt_hk", "float32", 20, mode=mode)
    driver = Driver(make_engine("hv_gt_hk", max_num_seqs=1, num_pages=6, draft_ids=KEPT))
    driver.start(1, wanted.prompt, TABLE, MODES[mode], max_tokens=len(wanted.tokens), depth=3)
    same = 0
    while not bool(driver.state.done[1]):
        driver.round([1], depth=3, next_depth=3)
        assert not set(driver.state.drafts[1, :3].tolist()) - set(KEPT)
        first = wanted.first_drafts.get(driver.length(1))
        same += first in KEPT and int(driver.state.drafts[1, 0]) == first
        # top_k and top_p keep other ids of a smaller vocabulary
        assert first not in KEPT or mode == "every feature" or int(driver.state.drafts[1, 0]) == first
    assert driver.tokens[1] == wanted.tokens
    assert same > 3


def test_the_command_counts_texts_and_serves_what_it_wrote(tmp_path, capsys):
    folder = build_tiny(tmp_path / "model", "moe")
    write_tokenizer(folder)
    (tmp_path / "text.txt").write_text("aaaa bbb abc " * 20)
    out = tmp_path / "vocab.json"
    command = ["draft-vocab", str(folder), "--text", str(tmp_path / "text.txt"), "--size", "16", "--out", str(out)]
    assert cli.main(command) == 0
    assert "16 ids kept: 100.00% of the tokens" in capsys.readouterr().out
    ids = read_draft_vocab(out, VOCAB_SIZE)
    assert len(ids) == 16
    generate = ["generate", str(folder), "--prompt", "ab", "--max-tokens", "6", "--head-check", "off"]
    texts = []
    for flags in ([], ["--draft-vocab", str(out)]):
        assert cli.main([*generate, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    out.write_text(json.dumps({"vocab_size": VOCAB_SIZE + 1, "ids": [1]}))
    assert cli.main([*generate, "--draft-vocab", str(out)]) == 2
    assert "want a vocabulary of" in capsys.readouterr().err
