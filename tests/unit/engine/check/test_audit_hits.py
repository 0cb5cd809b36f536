"""Hits beside cold runs: a sound engine passes, and each fault of a prefix cache, planted alone, is named."""

import dataclasses
import json

import msgspec
import pytest
import torch

from pilotfish.engine.cache.prefix import PrefixCache
from pilotfish.engine.cache.snapshots import Snapshots
from pilotfish.engine.cache.tree import PrefixTree
from pilotfish.engine.check.audit.command import make_auditor, parse
from pilotfish.engine.check.audit.hits import Hits, depths_of
from pilotfish.engine.check.audit.prefixes import WAYS
from pilotfish.engine.check.audit.report import Report
from pilotfish.engine.link.messages import StepReport, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.kernels.attention import PAGE
from tests.support.rounds import GREEDY, make_engine, random_prompt
from tests.support.tiny_models import TWO_LAYERS, build_tiny

LOOK_UP = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Room for two boundaries."""
    return build_tiny(tmp_path_factory.mktemp("hits") / "moe", "moe", max_position_embeddings=3 * PAGE, **TWO_LAYERS)


def auditor_of(folder, *more):
    return make_auditor(parse([str(folder), "--max-depth", "4", "--num-prompts", "4", "--max-tokens", "8", *more]))


@pytest.fixture(scope="module")
def auditor(folder):
    return auditor_of(folder)


@torch.inference_mode()
def found(auditor, depth=2, batch=4):
    """What is wrong, by way and tensor."""
    assert {ask.name.split(":")[0] for ask in auditor.hits.script.asks} == set(WAYS)
    findings = auditor.hits.run(auditor, depth, batch).findings
    return {(finding.request.split(":")[0], finding.tensor) for finding in findings}


def ways(findings):
    return {way for way, _ in findings}


@pytest.mark.parametrize("depth", (2, 4))
def test_a_sound_engine_passes(auditor, depth):
    assert found(auditor, depth) == set()


@pytest.mark.parametrize(
    "more", (("--kv-cache-dtype", "fp8"), ("--speculative-config", LOOK_UP)), ids=("fp8", "look-up")
)
def test_a_sound_engine_of_another_kind_passes(folder, more):
    assert found(auditor_of(folder, *more), 3) == set()


def test_a_state_one_boundary_off_is_named(auditor, monkeypatch):
    real, before = Snapshots.save, []

    def save(self, number, slot):
        real(self, number, slot)
        parts = [part[number] for part in (self.s, self.conv, self.last_hidden)]
        now = [part.clone() for part in parts]
        for part, earlier in zip(parts, before or [torch.zeros_like(part) for part in parts], strict=True):
            part.copy_(earlier)
        before[:] = now

    monkeypatch.setattr(Snapshots, "save", save)
    wrong = found(auditor)
    assert ways(wrong) >= {"whole", "longer", "again", "load"} and ("whole", "prefill.logits") in wrong


def spoil_load(monkeypatch, spoil):
    """`spoil` gets the slots' state and the slot that a snapshot has just been copied to."""
    real = Snapshots.load

    def load(self, number, slot):
        real(self, number, slot)
        spoil(self.state, slot)

    monkeypatch.setattr(Snapshots, "load", load)


def test_a_convolution_column_lost_is_named(auditor, monkeypatch):
    spoil_load(monkeypatch, lambda state, slot: state.conv[:, slot, 0].zero_())
    wrong = found(auditor)
    # one that was found whole is wrong in its first round alone
    assert ways(wrong) >= {"whole", "longer", "again"} and ("longer", "prefill.logits") in wrong


def test_a_hidden_row_that_is_not_restored_is_named(auditor, monkeypatch):
    spoil_load(monkeypatch, lambda state, slot: state.last_hidden[slot].zero_())
    wrong = found(auditor)
    # it begins the head's next pair, and a prompt that was found whole is decided by it
    assert ("whole", "prefill.logits") in wrong and ("longer", "head") in wrong


def test_a_narrower_state_is_named(auditor, monkeypatch):
    real = Snapshots.save

    def save(self, number, slot):
        real(self, number, slot)
        self.s[number] = self.s[number].bfloat16()

    monkeypatch.setattr(Snapshots, "save", save)
    assert ways(found(auditor)) >= {"whole", "longer", "again", "load"}


def test_a_head_that_does_not_lag_is_named(auditor):
    """Two that go on from one place write their own pair into the page that they share."""
    head = auditor.model.head
    model = dataclasses.replace(
        auditor.model, head=dataclasses.replace(head, cache=dataclasses.replace(head.cache, lag=0))
    )
    other = auditor_with(auditor, model)
    wrong = found(other)
    assert wrong and ways(wrong) <= {"load", "whole"} and {tensor for _, tensor in wrong} <= {"head", "draft", "drafts"}


def auditor_with(auditor, model):
    other = object.__new__(type(auditor))
    other.__dict__ = auditor.__dict__ | {"model": model, "hits": Hits(auditor.hits.script, auditor.hits.plan)}
    return other


@torch.inference_mode()
def test_what_is_replayed_is_held_against_the_same_cold_runs(auditor, monkeypatch):
    """Without graphs here: with the rows out of view, the rest is compared."""
    hits, real = auditor.hits, auditor.make_loop
    monkeypatch.setattr(auditor, "make_loop", lambda *args: real(*args[:3], False, *args[4:]))
    assert hits.run(auditor, 2, 4, captured=True).findings == []
    spoil_load(monkeypatch, lambda state, slot: state.s[:, slot].neg_())
    result = hits.run(auditor, 2, 4, captured=True)
    assert result.num_rows == 0
    assert {finding.tensor for finding in result.findings} >= {"tokens", "log-probabilities"}


def test_a_page_shared_one_token_too_far_is_named(auditor, monkeypatch):
    real = PrefixCache._chunks
    monkeypatch.setattr(
        PrefixCache, "_chunks", lambda self, prompt: [chunk[:-4] + bytes(4) for chunk in real(self, prompt)]
    )
    wrong = found(auditor)
    assert ways(wrong) == {"parted"} and any(tensor.startswith("what was found") for _, tensor in wrong)
    assert ("parted", "prefill.logits") in wrong


def test_another_tenant_s_salt_is_named(auditor, monkeypatch):
    real = PrefixTree.root
    monkeypatch.setattr(PrefixTree, "root", lambda self, salt: real(self, ""))
    wrong = found(auditor)
    # the bits are right: that something was found is what must not be
    assert {finding for finding in wrong if finding[0] == "salt"} == {
        ("salt", f"what was found ({PAGE} tokens, not 0)")
    }


def test_a_cache_that_finds_nothing_proves_nothing(auditor, monkeypatch):
    monkeypatch.setattr(PrefixCache, "find", lambda self, sequence: None)
    assert all(tensor.startswith("what was found (0 tokens") for _, tensor in found(auditor))


@torch.inference_mode()
def test_the_verdict_says_what_was_compared(auditor, capsys):
    hits = Hits(auditor.hits.script, auditor.hits.plan)
    report = Report(auditor, [2], [3], True, hits)
    report.add(hits.run(auditor, 2, 3))
    assert report.end() == 0
    run, verdict = map(json.loads, capsys.readouterr().out.splitlines())
    assert run["name"] == "k = 2, batch 3, cold beside hit" and run["num_rows"] > 1000
    assert verdict["hits"] == hits.counts()
    assert verdict["hits"]["boundaries"] == [PAGE, 2 * PAGE] and verdict["hits"]["tokens_found"] > 10 * PAGE
    assert verdict["hits"]["ways"] == list(WAYS) and "grammar" in verdict["hits"]["modes"]
    dataclasses.replace(report, as_json=False).end()
    out = capsys.readouterr().out
    assert "boundaries 256, 512, k = 2:" in out
    # read alone, the last line says no more than what was compared
    assert out.endswith(f"; hits are as cold runs: {hits.num_prompts} prompts, {hits.num_found} tokens found\n")


def test_a_model_that_takes_no_boundary_is_not_compared(tmp_path, auditor, capsys):
    short = build_tiny(tmp_path / "short", "moe", max_position_embeddings=PAGE + 30)
    assert auditor_of(short).hits is None
    Report(auditor, [2], [3], False, None).end()
    assert "not compared: hits" in capsys.readouterr().out


def test_a_gpu_compares_few_k():
    depths = list(range(1, 9))
    cuda = torch.device("cuda")
    assert depths_of(depths, 8, torch.device("cpu")) == depths
    assert depths_of(depths, 8, cuda) == [1, 3, 8] and depths_of([1, 2], 2, cuda) == [1, 2]
    # of lists that share them out each has one at least
    assert [depths_of(some, 8, cuda) for some in ([1, 7], [3, 6], [2, 8], [4, 5])] == [[1], [3], [8], [5]]


@torch.inference_mode()
def audited():
    """Requests that differ from their own k = 0, of two that begin alike, once the engine has looked at them."""
    engine = make_engine(depth=2, prefill_chunk=PAGE, num_pages=8, num_snapshots=4)
    loop = EngineLoop(dataclasses.replace(engine, audit_rate=1.0))
    for number, length in enumerate((PAGE + 5, PAGE + 9)):
        prompt = random_prompt(PAGE + 9, seed=4)[:length]
        loop.submit(request_of(str(number), prompt))
        reports = drained(loop)
        assert sum(out.num_cached_tokens or 0 for report in reports for out in report.outputs) == number * PAGE
    return sum(report.stats.num_audit_mismatches for report in reports)


def request_of(name, prompt):
    return Submit(request_id=name, prompt_token_ids=prompt, sampling=msgspec.structs.replace(GREEDY, max_tokens=12))


def drained(loop) -> list[StepReport]:
    reports = []
    while loop.has_work():
        if (report := loop.step()) is not None:
            reports.append(report)
    return reports


def test_a_server_that_audits_itself_reads_what_was_a_hit_from_nothing(monkeypatch):
    assert audited() == 0
    spoil_load(monkeypatch, lambda state, slot: state.s[:, slot].neg_())
    assert audited() == 1
