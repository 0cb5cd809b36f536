"""`pilotfish train-head`: it learns, goes on after an interruption to the same bytes, and what it writes is served."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.draft_heads.training import command, fit
from pilotfish.draft_heads.training.fit import Fit
from pilotfish.engine.check.acceptance import Acceptance
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.server import cli
from pilotfish.server.model_files import render_chat
from tests.support.tiny_models import build_tiny, write_tokenizer

SMALL = ("--row-tokens", "32", "--batch-size", "4", "--depths", "2", "--eval-rows", "4", "--eval-every", "100")


@pytest.fixture(scope="module", autouse=True)
def short_measurement():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "NUM_PROMPTS", 4)
        patch.setattr(command, "NUM_TOKENS", 24)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(97 + int(i)) for i in torch.randint(0, 8, (3000,), generator=generator)))
    return path


@pytest.fixture(scope="module", params=["hv_gt_hk", "moe"])
def model(request, tmp_path_factory):
    """A trunk that can be foretold: its layers add nothing, so it says the last token again."""
    folder = build_tiny(tmp_path_factory.mktemp("model"), request.param, dtype="bfloat16", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if not name.startswith("mtp.") and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith("experts.down_proj"):
            tensor.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def train(model, text, out, *flags):
    return cli.main(["train-head", str(model), "--text", str(text), "--out", str(out), *SMALL, *flags])


@pytest.fixture(scope="module")
def trained(model, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "head"
    assert train(model, text, out, "--init", "scratch", "--steps", "30", "--cache", str(out.parent / "cache")) == 0
    return out


def test_from_scratch_it_drafts_what_the_trunk_chooses(trained):
    report = json.loads((trained / "training.json").read_text())
    # the tiny models' own heads are random
    assert report["before, with the head that was there"]["shares"][0] < 0.1
    assert min(report["after"]["shares"]) > 0.9
    assert report["after"]["num_rounds"] > 5
    assert sorted(file.name for file in trained.iterdir()) == ["mtp.safetensors", "training.json"]


def test_what_it_writes_is_a_sidecar(model, trained):
    checkpoint = attach_head(open_checkpoint(model), trained)
    weights = {n: w for n, w in load_weights(checkpoint, progress=False).items() if n.startswith("mtp.")}
    written = load_file(trained / "mtp.safetensors")
    assert weights.keys() == written.keys()
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("own_tokens", ["0", "7"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(model, text, tmp_path, monkeypatch, capsys, own_tokens):
    # rows that the trunk wrote for several steps at once, and not yet trained on, are written again
    monkeypatch.setattr(fit, "WRITTEN_TOGETHER", 9)
    flags = ("--init", "scratch", "--steps", "6", "--save-every", "2", "--dtype", "float32", "--own-tokens", own_tokens)
    assert train(model, text, tmp_path / "whole", *flags) == 0
    step = Fit.step

    def interrupted(self):
        if self.step_number == 5:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "step", interrupted)
        assert train(model, text, tmp_path / "parts", *flags) == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert train(model, text, tmp_path / "parts", *flags) == 2
    assert "--resume goes on with the run" in capsys.readouterr().err
    assert train(model, text, tmp_path / "parts", *flags, "--resume", "--seed", "1") == 2
    assert "another trunk, text or other options" in capsys.readouterr().err
    assert train(model, text, tmp_path / "parts", *flags, "--resume") == 0
    for name in ("mtp.safetensors", "training.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_random_weights_learn_the_first_draft_first(model, text, tmp_path, monkeypatch):
    depths, step = [], Fit.step

    def seen(self):
        figures = step(self)
        depths.append(len(figures.losses))
        return figures

    monkeypatch.setattr(Fit, "step", seen)
    assert train(model, text, tmp_path / "scratch", "--init", "scratch", "--steps", "5") in (0, 1)
    assert train(model, text, tmp_path / "head", "--steps", "2") in (0, 1)
    assert depths == [1, 1, 2, 2, 2, 2, 2]


def test_it_learns_from_what_the_trunk_writes(model, text, tmp_path):
    flags = ("--init", "scratch", "--steps", "30", "--row-tokens", "6", "--own-tokens", "26")
    assert train(model, text, tmp_path / "head", *flags) == 0
    assert min(json.loads((tmp_path / "head" / "training.json").read_text())["after"]["shares"]) > 0.9


def test_a_head_that_is_there_is_where_it_starts(model, text, trained, tmp_path, capsys):
    flags = ["--draft-head", str(trained), "--steps", "1", "--learning-rate", "1e-14", "--optimizer", "adamw"]
    # another head, the same hidden states
    flags += ["--cache", str(trained.parent / "cache"), "--target", "text"]
    assert train(model, text, tmp_path / "same", *flags) == 0
    first, second = (load_file(folder / "mtp.safetensors") for folder in (trained, tmp_path / "same"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    report = json.loads((tmp_path / "same" / "training.json").read_text())
    assert report["before, with the head that was there"] == report["after"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "0"), "--steps: want at least 1"),
        (("--depths", "9"), "--depths: want 1..8"),
        (("--row-tokens", "3"), "--row-tokens: want at least 4"),
        (("--learning-rate", "nan"), "--learning-rate: want above 0"),
        (("--learning-rate", "1e30", "--steps", "4"), "--learning-rate: the loss of step"),
        (("--row-tokens", "4096"), "--row-tokens: the model takes 2048"),
        (("--own-tokens", "2017"), "the model takes 2048, got 2049 with --own-tokens 2017"),
        (("--own-tokens", "-1"), "--own-tokens: want at least 0, got -1"),
        (("--resume",), "has no interrupted run"),
        (("--heldout-text", "missing.txt"), "missing.txt: cannot be read"),
    ],
)
def test_refuses_with_one_line(model, text, tmp_path, capsys, flags, message):
    assert train(model, text, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pilotfish: ") and message in error


def test_refuses_to_refine_a_head_that_is_not_there(text, tmp_path, capsys):
    folder = build_tiny(tmp_path / "model", "tied", mtp=False)
    write_tokenizer(folder)
    assert train(folder, text, tmp_path / "out") == 2
    assert "no MTP head; want scratch" in capsys.readouterr().err
    assert train(folder, text, tmp_path / "out", "--init", "scratch", "--steps", "1") in (0, 1)
    assert attach_head(open_checkpoint(folder), tmp_path / "out").has_mtp


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (Acceptance(9, (0.5, 0.4)), Acceptance(9, (0.5, 0.4)), None),
        (Acceptance(9, (0.0, 0.0)), Acceptance(9, (0.2, 0.1)), None),
        (Acceptance(9, (0.5, 0.4)), Acceptance(9, (0.5, 0.3)), "acceptance fell from 1.900 to 1.800 tokens a round"),
        (Acceptance(9, (0.0, 0.0)), Acceptance(9, (0.0, 0.0)), "none of its drafts was accepted"),
        (Acceptance(9, (0.5, 0.4)), Acceptance(0, (0.0, 0.0)), "its acceptance could not be measured"),
    ],
)
def test_a_head_that_is_no_better_is_not_recommended(text, tmp_path, monkeypatch, capsys, before, after, why):
    folder = build_tiny(tmp_path / "model", "tied")
    write_tokenizer(folder)
    measured = [before, after]
    monkeypatch.setattr(command.FrozenTrunk, "acceptance", lambda *_: measured.pop(0))
    status = train(folder, text, tmp_path / "out", "--steps", "1")
    said = capsys.readouterr().out
    assert status == (1 if why else 0) and ("served by: pilotfish serve" in said) is (why is None)
    assert why is None or f"NOT TO BE SERVED: {why}" in said
    assert (tmp_path / "out" / "mtp.safetensors").exists()


def test_a_disk_that_fills_up_ends_training_in_one_line(text, tmp_path, monkeypatch, capsys):
    folder = build_tiny(tmp_path / "model", "tied")
    write_tokenizer(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out" / "state"))

    monkeypatch.setattr(fit, "write_tensors", full)
    assert train(folder, text, tmp_path / "out", "--steps", "1") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"pilotfish: {tmp_path}/out/state: No space left on device; --resume goes on from what was saved"


def test_refuses_a_tokenizer_with_more_ids_than_the_model(text, tmp_path, capsys):
    folder = build_tiny(tmp_path / "model", "tied", vocab_size=70)
    write_tokenizer(folder)
    assert train(folder, text, tmp_path / "out") == 2
    assert "the model has 70" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_chat_is_read_through_the_checkpoints_template(model, tmp_path):
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert render_chat(model, [{"role": "user", "content": "hi"}]) == "<user>hi"
