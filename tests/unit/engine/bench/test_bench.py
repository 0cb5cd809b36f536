"""`pilotfish bench` on a small model: its oracle, its floor, and that it gives no figures for a wrong text."""

from __future__ import annotations

import json

import pytest
import torch

from pilotfish.engine.bench import command
from pilotfish.engine.bench.oracle import Oracle, acceptance_rate
from pilotfish.engine.bench.roof import Frame, distinct_experts, round_bytes
from tests.support.rounds import CPU, make_engine
from tests.support.tiny_models import build_tiny

ARGS = ["--device", "cpu", "--context", "20", "--tokens", "40", "--k", "0,3", "--batch", "1,2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("bench") / "moe", "moe")


def rows_of(folder, out, *more):
    assert command.main([str(folder), *ARGS, "--json", str(out), *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("length", (1.0, 2.2, 3.2, 4.0))
def test_the_rate_gives_the_length(length):
    rate = acceptance_rate(length, 3)
    assert sum(rate**j for j in range(4)) == pytest.approx(length)


@pytest.mark.parametrize("length", (0.9, 4.1))
def test_a_length_that_k_cannot_reach_is_refused(length):
    with pytest.raises(ValueError, match=r"1\.\.4"):
        acceptance_rate(length, 3)


def test_drafts_are_the_text_s_or_wrong_by_one():
    oracle = Oracle(3, 500, 100, [0.7, 0.7], CPU)
    text = [i * 7 % 100 for i in range(500)]
    oracle.tell(text[:5], text[5:])
    oracle.admit(2, text[:5])
    drafts, lengths = torch.zeros((3, 4), dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    right = 0
    for length in range(20, 480):
        lengths[2] = length
        oracle.replace(drafts, torch.tensor([2]), lengths, 2)
        for j, draft in enumerate(drafts[2, :2].tolist()):
            assert draft in (text[length + 1 + j], (text[length + 1 + j] + 1) % 100)
            right += draft == text[length + 1 + j]
    assert right / 920 == pytest.approx(0.7, abs=0.05)


def test_a_synthetic_length_is_reached_and_said_to_be_synthetic(folder, tmp_path):
    rows = rows_of(folder, tmp_path / "out", "--synthetic-acceptance-length", "3.2", "--tokens", "160")
    assert [(row["k"], row["batch"]) for row in rows] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    for row in rows:
        assert row["synthetic"] and row["graph_hits"] == 0 and row["graph_misses"] > 0
        assert row["acceptance_length"] == pytest.approx(1.0 if row["k"] == 0 else 3.2, abs=0.25)
        assert sum(row["accepted_counts"].values()) > 0 and row["tokens_per_second"] > 0


def test_the_head_s_own_drafts_are_not_synthetic(folder, tmp_path):
    assert [row["synthetic"] for row in rows_of(folder, tmp_path / "out")] == [False] * 4


def test_other_text_than_k_0_gives_no_figures(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "random_prompts", _worse_each_time())
    assert command.main([str(folder), *ARGS]) == 1
    assert "other text than k = 0" in capsys.readouterr().err


def _worse_each_time():
    calls = iter(range(1000))
    return lambda count, length, vocab: [[next(calls) % vocab] * length for _ in range(count)]


def test_random_weights_by_config(folder, tmp_path):
    rows = rows_of(folder, tmp_path / "out", "--load-format", "dummy", "--dummy-layout", "mixed", "--batch", "1")
    assert all(row["synthetic"] and row["layout"] == "mixed" for row in rows)


def test_a_name_that_is_no_size_is_explained(capsys):
    assert command.main(["Qwen3.6-28B", "--load-format", "dummy", *ARGS]) == 1
    assert "35B-A3B" in capsys.readouterr().err


def test_the_floor_counts_every_matrix_once_and_the_head_by_pass():
    engine = make_engine("hv_gt_hk", depth=3)
    model, trunk = engine.runner.model, engine.runner.model.trunk
    linears = 0
    for layer in (*trunk.layers, model.head.layer):
        mixer = layer.mixer
        first = mixer.qkvg if hasattr(mixer, "qkvg") else mixer.in_proj
        own = first.num_bytes + mixer.output.num_bytes + layer.mlp.mlp.gate_up.num_bytes + layer.mlp.mlp.down.num_bytes
        linears += own
    head = own + model.head.fc.num_bytes
    state = 2 * (trunk.state.s[:, 0].nbytes + trunk.state.conv[:, 0].nbytes)
    kv = trunk.kv[0].k[0, :, 0].nbytes * 2
    frame = Frame(batch=1, depth=2, context=100)
    expected = linears + head + model.head.fc.num_bytes + 3 * trunk.lm_head.num_bytes + state
    assert round_bytes(model, frame) == expected + kv * 100 * (len(trunk.kv) + 2)


def test_distinct_experts_of_uniform_routing():
    assert distinct_experts(256, 8, 4) == pytest.approx(30.5, abs=0.05)
