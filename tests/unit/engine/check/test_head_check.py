"""The self-test of a head: a sound one passes, each known fault is found and named, an unknown text decides nothing.

The model is a counter: its trunk says t + 1 after t, because every mixer and MLP adds nothing and lm_head's row t + 1
is the embedding of t. Its head does the same by the embedding half of fc, with norms of both signs, so that shifting
them blanks every channel.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from pilotfish.engine.check.head_check import check_head, describe, longest_text, text_of
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.errors import CheckpointError
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import start_engine
from tests.support.tiny_models import VOCAB_SIZE, build_tiny, write_checkpoint

HIDDEN = 64
COUNTING = [i % VOCAB_SIZE for i in range(120)]


def counter(tensors):
    """Turns a random dense model into a counter, head included."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) or "norm" in name:
            tensors[name] = torch.zeros_like(tensor)
    first, second = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
    first[::2], second[1::2] = -2, -2  # 1 + w is -1 in every second channel, the other ones in the other norm
    signs = (1 + first) * (1 + second)
    tensors |= {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.roll(1, 0),
        "mtp.pre_fc_norm_embedding.weight": first,
        "mtp.norm.weight": second,
        "mtp.fc.weight": torch.cat((torch.diag(signs), torch.zeros(HIDDEN, HIDDEN)), dim=1),
    }
    return tensors


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = build_tiny(tmp_path_factory.mktemp("counter"), "dense")
    tensors = counter(load_file(folder / "model.safetensors"))
    return folder, json.loads((folder / "config.json").read_text()), tensors


def change_norms(by, only=""):
    def change(tensors):
        return {n: t + by if n.startswith(f"mtp.{only}") and "norm" in n else t for n, t in tensors.items()}

    return change


def swap_halves(tensors):
    return tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].roll(HIDDEN, 1)}


def random_fc(tensors):
    generator = torch.Generator().manual_seed(1)
    return tensors | {"mtp.fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)}


def start(folder, *, text=None, monkeypatch=None, **options):
    if text is not None:
        monkeypatch.setattr("pilotfish.engine.start.text_of", lambda *_: text)
    return start_engine(EngineOptions(model=str(folder), device="cpu", max_model_len=256, num_threads=1, **options))


def model_of(tmp_path, sound, change=lambda tensors: tensors):
    _, config, tensors = sound
    return write_checkpoint(tmp_path / "model", config, {"model.safetensors": change(dict(tensors))})


def run(core, requests):
    """Tokens of each request, and all drafts offered and accepted."""
    for i, (prompt, params) in enumerate(requests):
        core.submit(Submit(request_id=str(i), prompt_token_ids=prompt, sampling=params))
    tokens = {str(i): [] for i in range(len(requests))}
    drafted = accepted = 0
    while core.has_work():
        for output in core.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            drafted, accepted = drafted + output.num_drafted, accepted + output.num_accepted
    return list(tokens.values()), drafted, accepted


def test_a_sound_head_passes(tmp_path, sound):
    engine = start(model_of(tmp_path, sound))
    check = check_head(engine.executor.model, COUNTING, 3)
    assert (check.verdict, check.reason) == ("ok", "")
    assert check.num_positions == len(COUNTING) - 2
    assert (check.trunk_top1, check.head_top1, check.head_median_rank) == (1.0, (1.0,) * 3, (0,) * 3)
    assert describe(check, VOCAB_SIZE).startswith("of 118 tokens of a known text the trunk ranks 100% first, the head:")


FAULTS = [
    (change_norms(1), r"its norms hold 1 \+ w in a file .* \(shifted twice\); without that draft 1 is right 100%"),
    (change_norms(-1), r"its norms hold w in a file .* \(not shifted\)"),
    (swap_halves, r"its fc expects \[hidden, embedding\]"),
    (random_fc, "its weights are random or of another model"),
]


@pytest.mark.parametrize(("fault", "cause"), FAULTS)
def test_a_dead_head_is_refused_with_its_likely_cause(tmp_path, sound, fault, cause, monkeypatch, caplog):
    folder = model_of(tmp_path, sound, fault)
    with pytest.raises(CheckpointError, match=f"the head is dead: likely cause: {cause}.*--head-check warn"):
        start(folder, text=COUNTING, monkeypatch=monkeypatch)
    engine = start(folder, head_check="warn")
    assert engine.ready.head_check.verdict == "dead" and engine.ready.head_check.head_top1[0] < 0.2
    assert "the head is dead" in caplog.text
    assert start(folder, head_check="off").ready.head_check is None
    assert start(folder, num_speculative_tokens=0).ready.head_check is None


def noisy_fc(tensors):
    noise = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    return tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"] + 0.22 * noise}


def test_a_weak_head_is_served_with_a_warning(tmp_path, sound, monkeypatch, caplog):
    engine = start(model_of(tmp_path, sound, noisy_fc), text=COUNTING, monkeypatch=monkeypatch)
    check = engine.ready.head_check
    assert check.verdict == "weak" and 0.25 < check.head_top1[0] < 0.6
    assert "the head is weak: likely cause: a head of another fine-tune" in caplog.text


@pytest.mark.parametrize(("num_right", "verdict"), [(1, "ok"), (0, "weak")])
def test_a_head_that_fails_from_a_later_draft_on_is_weak(tmp_path, sound, monkeypatch, num_right, verdict):
    later = [torch.zeros(24), (torch.arange(24) >= num_right).int()]
    monkeypatch.setattr("pilotfish.engine.check.head_check._later_ranks", lambda *_: iter(later))
    check = check_head(start(model_of(tmp_path, sound)).executor.model, COUNTING, 3)
    assert check.verdict == verdict and check.head_top1 == pytest.approx((1.0, 1.0, num_right / 24))
    if verdict == "weak":
        assert (
            "from draft 3 on it is never right" in check.reason and "--num-speculative-tokens 2 loses" in check.reason
        )


def test_norms_of_zeros_are_told(tmp_path, sound, monkeypatch, caplog):
    """As a head has them that was never trained, or whose norms were lost: no known fault's undoing names it."""
    start(model_of(tmp_path, sound, random_fc), text=COUNTING, monkeypatch=monkeypatch, head_check="warn")
    assert (
        "norms never trained or lost: zeros, where w of 1 + w is held, in mtp.pre_fc_norm_hidden.weight" in caplog.text
    )


def test_a_text_that_the_trunk_does_not_know_decides_nothing(tmp_path, sound):
    engine = start(model_of(tmp_path, sound, random_fc))
    check = check_head(engine.executor.model, [i * 7 % VOCAB_SIZE for i in range(100)], 2)
    assert (check.verdict, check.reason) == ("untested", "the trunk itself does not know the text")


@pytest.mark.parametrize("ids", [[], COUNTING[:33]])
def test_without_a_text_nothing_is_tested(tmp_path, sound, ids):
    engine = start(model_of(tmp_path, sound))
    check = check_head(engine.executor.model, ids, 2)
    assert check.verdict == "untested" and "no text to test with" in describe(check, VOCAB_SIZE)
    assert engine.ready.head_check.verdict == "untested"  # the folder has no tokenizer
    assert engine.ready.draft_head == "MTP head of the checkpoint"


def test_the_text_comes_from_the_checkpoint_s_tokenizer(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = text_of(tmp_path, VOCAB_SIZE, 200)
    assert len(ids) == 200 and [letters[i] for i in ids[:3]] == list("The")
    assert text_of(tmp_path, 10, 200) == []  # ids that the model lacks
    assert text_of(tmp_path / "elsewhere", VOCAB_SIZE, 200) == []
    assert longest_text(4096, 3) == 252 and longest_text(64, 3) == 60


def test_testing_changes_no_token(tmp_path, sound, monkeypatch):
    folder = model_of(tmp_path, sound)
    requests = [(COUNTING[:20], SamplingParams(temperature=t, seed=3, max_tokens=20)) for t in (0.0, 0.9)]
    untested = run(EngineLoop(start(folder, head_check="off")), requests)
    assert run(EngineLoop(start(folder, text=COUNTING, monkeypatch=monkeypatch)), requests) == untested


def test_a_sidecar_is_tested_and_named(tmp_path, sound, monkeypatch):
    _, config, tensors = sound
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    trunk = {name: tensor for name, tensor in tensors.items() if name not in head}
    folder = write_checkpoint(tmp_path / "trunk", config, {"model.safetensors": trunk})
    write_checkpoint(tmp_path / "head", {}, {"mtp.safetensors": head})
    assert start(folder).ready.num_speculative_tokens == 0
    engine = start(folder, draft_head=str(tmp_path / "head"), text=COUNTING, monkeypatch=monkeypatch)
    assert engine.ready.num_speculative_tokens == 3
    assert engine.ready.draft_head == f"MTP head from {tmp_path / 'head'}"
    assert engine.ready.head_check.head_top1 == (1.0, 1.0, 1.0)
    # the same file said to be MLX's: its norms are then read as 1 + w, and nothing is left of them
    wrong = {name.removeprefix("mtp."): tensor for name, tensor in head.items()}
    save_file(wrong, tmp_path / "bare.safetensors")
    with pytest.raises(CheckpointError, match=r"bare.safetensors: .*dead: likely cause: its norms hold w"):
        start(folder, draft_head=str(tmp_path / "bare.safetensors"))


# The demo model: a small real one.

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
with_demo = pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo model's weights are not here")


@pytest.fixture(scope="module")
def demo():
    """Its checkpoint, its head unpacked, and the text."""
    checkpoint = open_checkpoint(DEMO)
    weights = load_weights(checkpoint, progress=False)
    head = {
        name: weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.bfloat16)
        for name, weight in weights.items()
        if name.startswith("mtp.")
    }
    return checkpoint, head, text_of(DEMO, checkpoint.config.vocab_size, 160)


def check_demo(demo, path, tensors, metadata):
    checkpoint, _, ids = demo
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    attached = attach_head(checkpoint, path)
    weights, sizes = load_weights(attached, progress=False), CacheSizes(2, 2, 3)
    model = build_model(weights, checkpoint.config, sizes, torch.bfloat16, torch.device("cpu"))
    return check_head(model, ids, 2)


def absolute(head):
    return {name: tensor.float() + 1 if "norm" in name else tensor for name, tensor in head.items()}


@with_demo
def test_a_real_head_passes_in_every_container(tmp_path, demo):
    head = demo[1]
    plain = check_demo(demo, tmp_path / "a.safetensors", head, {"format": "pt"})
    assert plain.verdict == "ok" and plain.trunk_top1 > 0.25 and min(plain.head_top1) > 0.25
    by_mlx = check_demo(demo, tmp_path / "b.safetensors", absolute(head), {"format": "mlx"})
    assert by_mlx == plain


@with_demo
@pytest.mark.parametrize(
    ("change", "metadata", "cause"),
    [
        (dict, {"format": "mlx"}, "not shifted"),
        (
            lambda head: head | {"mtp.fc.weight": torch.cat(head["mtp.fc.weight"].chunk(2, 1)[::-1], 1)},
            None,
            "fc expects",
        ),
        (
            lambda head: head | {"mtp.fc.weight": head["mtp.fc.weight"].flip(0)},
            None,
            "random or of another model",
        ),
    ],
)
def test_a_real_head_s_faults_are_named(tmp_path, demo, change, metadata, cause):
    check = check_demo(demo, tmp_path / "x.safetensors", change(demo[1]), metadata)
    assert check.verdict == "dead" and cause in check.reason and check.head_top1[0] < 0.1


@with_demo
def test_the_norms_of_its_layer_alone_are_named(tmp_path, demo):
    def change(name, tensor):
        return tensor.float() + 1 if "norm" in name and "layers.0" in name else tensor

    head = {name: change(name, tensor) for name, tensor in demo[1].items()}
    check = check_demo(demo, tmp_path / "x.safetensors", head, None)
    assert check.verdict in ("weak", "dead") and "its layer's norms alone hold 1 + w" in check.reason


@with_demo
def test_the_text_is_the_same_with_any_head(tmp_path, demo):
    """No head, the checkpoint's, the same one from a file of MLX's, and look-up; greedy and sampled together."""
    save_file(
        {name: t.contiguous() for name, t in absolute(demo[1]).items()}, tmp_path / "m.safetensors", {"format": "mlx"}
    )
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompts = ["for i in range(10):\n    print(i, i)\n\nfor j in", "The sea and the river, the sea and the"]
    sampling = [SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
    requests = [(tokenizer.encode(prompt).ids, params) for prompt, params in zip(prompts, sampling, strict=True)]
    found = {}
    for name, options in {
        "plain": {"num_speculative_tokens": 0},
        "own": {},
        "file": {"draft_head": str(tmp_path / "m.safetensors")},
        "look-up": {"speculative_method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }.items():
        found[name] = run(EngineLoop(start(DEMO, **options)), requests)
    assert all(tokens == found["plain"][0] for tokens, _, _ in found.values())
    assert found["own"] == found["file"]
    assert found["own"][2] > 0 and found["look-up"][2] > 0
