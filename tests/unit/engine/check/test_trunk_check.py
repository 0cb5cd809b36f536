"""A trunk that does not know a known text is told at load, with what was found in its weights or is likely."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.check.trunk_check import CAUSES, SHIFTS, describe
from pilotfish.engine.errors import CheckpointError
from pilotfish.engine.link.messages import TrunkCheck
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import start_engine
from tests.support.tiny_models import VOCAB_SIZE, build_tiny, split_experts, write_checkpoint

HIDDEN = 64
COUNTING = [i % VOCAB_SIZE for i in range(120)]


def counter(tensors):
    """A trunk that counts: each token's embedding passes through, and the output head is the next one's."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    zeros = {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith(silent) or "norm" in n}
    return tensors | zeros | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(1, 0)}


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    folder = build_tiny(tmp_path_factory.mktemp("counter"), "dense")
    return json.loads((folder / "config.json").read_text()), counter(load_file(folder / "model.safetensors"))


def start(tmp_path, counting, monkeypatch, change=None, **options):
    config, tensors = counting
    folder = write_checkpoint(tmp_path / "model", config, {"model.safetensors": (change or dict)(dict(tensors))})
    monkeypatch.setattr("pilotfish.engine.start.text_of", lambda *_: COUNTING)
    fields = {"device": "cpu", "max_model_len": 256, "num_threads": 1, "head_check": "warn"} | options
    return start_engine(EngineOptions(model=str(folder), **fields)).ready


def random_output(tensors):
    generator = torch.Generator().manual_seed(3)
    return tensors | {"lm_head.weight": torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)}


def poisoned(name, value):
    def change(tensors):
        spoiled = tensors[name].clone()
        spoiled.view(-1)[7] = value
        return tensors | {name: spoiled}

    return change


SPECULATION = [{}, {"num_speculative_tokens": 0}, {"speculative_method": "ngram"}]


@pytest.mark.parametrize("options", SPECULATION, ids=["head", "k = 0", "look-up"])
def test_the_trunk_is_tested_whatever_drafts(tmp_path, counting, monkeypatch, caplog, options):
    with caplog.at_level(logging.INFO):
        sound = start(tmp_path, counting, monkeypatch, **options).trunk_check
    assert sound == TrunkCheck(verdict="ok", num_positions=118, top1=1.0)
    assert sum("the trunk ranks 100% first" in message for message in caplog.messages) == 1
    with caplog.at_level(logging.WARNING):
        failed = start(tmp_path, counting, monkeypatch, random_output, **options).trunk_check
    assert failed.verdict == "failed" and failed.top1 < 0.05 and failed.reason.startswith(CAUSES)
    assert "THE MODEL DOES NOT KNOW A PLAIN TEXT: of 118 tokens" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
)
def test_values_that_are_not_finite_are_named(tmp_path, counting, monkeypatch, name, value):
    check = start(tmp_path, counting, monkeypatch, poisoned(name, value), num_speculative_tokens=0).trunk_check
    assert check.verdict == "failed" and check.reason.startswith(f"NaN or infinite values in {name}")


def test_norms_of_another_convention_are_named(tmp_path, counting, monkeypatch):
    def not_shifted(tensors):
        return {n: t - 1.0 if "norm" in n and "linear_attn.norm" not in n else t for n, t in tensors.items()}

    check = start(tmp_path, counting, monkeypatch, not_shifted, num_speculative_tokens=0).trunk_check
    assert check.verdict == "failed" and check.reason.startswith(f"likely cause: {SHIFTS[1.0]}")


def test_a_trunk_of_zeros_is_named(tmp_path, counting, monkeypatch):
    def zeros(tensors):
        return tensors | {"lm_head.weight": torch.zeros(VOCAB_SIZE, HIDDEN)}

    check = start(tmp_path, counting, monkeypatch, zeros, num_speculative_tokens=0).trunk_check
    assert check.verdict == "failed" and "zeros alone in lm_head.weight" in check.reason


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_in_a_head_is_no_random_head(tmp_path, counting, monkeypatch, value):
    change = poisoned("mtp.layers.0.mlp.gate_proj.weight", value)

    def spoil(tensors):
        # so that what is spoiled is seen
        ones = {"mtp.layers.0.mlp.down_proj.weight": torch.ones(HIDDEN, 96)}
        return change(tensors | ones)

    says = r"the head is dead: NaN or infinite values in mtp.layers.0.mlp.gate_proj.weight"
    with pytest.raises(CheckpointError, match=says):
        start(tmp_path, counting, monkeypatch, spoil, head_check="refuse")


def test_untested_where_there_is_no_text(tmp_path, counting, monkeypatch):
    config, tensors = counting
    folder = write_checkpoint(tmp_path / "model", config, {"model.safetensors": split_experts(tensors)})
    options = EngineOptions(model=str(folder), device="cpu", max_model_len=256, num_threads=1)
    check = start_engine(options).ready.trunk_check
    assert check.verdict == "untested" and "no tokenizer.json" in describe(check)
    off = EngineOptions(model=str(folder), device="cpu", max_model_len=256, num_threads=1, head_check="off")
    assert start_engine(off).ready.trunk_check is None
