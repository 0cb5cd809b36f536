"""The audit passes on a sound engine and names what is wrong with an unsound one: one planted fault a test."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import pilotfish.engine.cache.tensors as cache_tensors
import pilotfish.spec.sampling as sampling
from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.check.audit import command
from pilotfish.engine.check.audit import run as audit_module
from pilotfish.engine.check.audit.command import main, make_auditor, parse
from pilotfish.engine.check.audit.rules import LITERAL
from pilotfish.engine.check.audit.run import audit
from pilotfish.engine.check.audit.transcript import BOOK, Finding
from pilotfish.engine.check.audit.yardstick import HeadReport
from pilotfish.engine.round import torch_table
from pilotfish.engine.round.body import RoundBody
from pilotfish.kernels.linear import TILE_ROWS, Linear
from pilotfish.spec import rules
from tests.support.tiny_models import TWO_LAYERS, build_tiny

DEMO = Path(__file__).parents[4] / "demo" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Too short for a boundary: hits are held against cold runs in test_audit_hits.py."""
    return build_tiny(tmp_path_factory.mktemp("audit") / "moe", "moe", max_position_embeddings=320, **TWO_LAYERS)


def auditor_of(folder, *more, rules=False):
    args = [str(folder), "--max-depth", "4", "--num-prompts", "1", "--max-tokens", "16", *more]
    auditor = make_auditor(parse(args))
    if not rules:
        auditor.make_rules = None
    return auditor


@torch.inference_mode()
def run_audit(folder, depths=(3,), batches=(2,), more=(), rules=False):
    return list(audit(auditor_of(folder, *more, rules=rules), list(depths), list(batches)))


def findings(results):
    return [finding for result in results for finding in result.findings]


def rows_of(found):
    """Names of the rows that differ first; what follows from them in later drafts stands beside."""
    return {finding.tensor for finding in found if not finding.tensor.startswith("draft ")}


def test_a_sound_engine_passes_at_the_ends_of_depth_and_batch(folder):
    results = run_audit(folder, depths=(1, 4), batches=(1, 3), more=("--num-prompts", "2"))
    assert findings(results) == []
    assert results[0].name == "k = 0, batch 1, head off" and results[-1].name == "from scratch"
    assert all(result.num_rows > 500 and result.num_tokens == 6 * 16 for result in results[:-1])
    forced = [result for result in results if "forced" in result.name]
    # n = 0..k in turn: the mean of accepted drafts is near k / 2
    assert all(result.num_accepted > result.num_rounds / 3 for result in forced)
    # pauses let nobody's neighbours end before a batch is full
    assert [result.most_at_once for result in forced] == [1, 3] * 2


def test_a_look_up_and_a_head_from_a_file_are_audited(folder, tmp_path, capsys):
    bare = build_tiny(tmp_path / "bare", "moe", mtp=False, max_position_embeddings=320, **TWO_LAYERS)
    by_look_up = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
    # what is looked up is seldom found
    for flags in (["--draft-head", str(folder)], ["--speculative-config", by_look_up, "--num-prompts", "4"]):
        results = run_audit(bare, (2,), (2,), flags)
        own = results[1]
        assert findings(results) == [] and own.num_drafted > 25, flags
    small = ("--max-depth", "1", "--max-batch", "1", "--num-prompts", "1", "--max-tokens", "4", "--json")
    assert main([str(bare), *small]) == 0
    out, err = capsys.readouterr()
    assert "no head to audit" in err and json.loads(out.splitlines()[-1])["drafts"] == [
        "forced drafts",
        "from scratch",
        "head off",
    ]


@torch.inference_mode()
def test_own_and_forced_drafts_have_one_captured_engine(folder, monkeypatch):
    made, auditor = [], auditor_of(folder, "--k", "1,2", "--batch", "3")
    real = auditor.make_loop
    monkeypatch.setattr(auditor, "make_loop", lambda *args, **more: made.append(args[:2]) or real(*args, **more))
    auditor.run_reference()
    made.clear()
    results = [auditor.run(k, 3, forced, captured=True) for k in (1, 2) for forced in (False, True)]
    assert findings(results) == [] and made == [(1, 3), (2, 3)]
    assert all(result.num_tokens == 3 * 16 and result.most_at_once == 3 for result in results)


def test_k_and_batch_are_lists_or_all_up_to_the_largest(folder):
    args = parse([str(folder), "--k", "7,1", "--batch", "2,8"])
    assert (args.k, args.batch, args.max_depth, args.max_batch) == ([1, 7], [2, 8], 8, 8)
    args = parse([str(folder), "--max-depth", "3"])
    assert (args.k, args.batch) == ([1, 2, 3], [1, 2, 3, 4])
    with pytest.raises(SystemExit):
        parse([str(folder), "--max-depth", "3", "--k", "4"])


@pytest.fixture
def once(monkeypatch):
    """The command audits once, and tells of that whenever it is called."""
    made, results = [], []

    def make(args):
        made.extend([] if made else [make_auditor(args)])
        return made[0]

    def audited(*args):
        results.extend([] if results else audit(*args))
        return results

    monkeypatch.setattr(command, "make_auditor", make)
    monkeypatch.setattr(command, "audit", audited)


def test_the_verdict_says_what_was_compared_and_its_digest(folder, capsys, once):
    small = ("--max-depth", "2", "--max-batch", "1", "--num-prompts", "1", "--max-tokens", "6")
    assert main([str(folder), *small]) == 0
    out = capsys.readouterr().out
    assert "6 runs over k = 1 .. 2 and 1 at once" in out and "greedy, sampled, penalised, pages, stop, " in out
    assert main([str(folder), *small, "--json"]) == 0
    *runs, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert f"digest: {summary['digest']}\n" in out and len(summary["digest"]) == 32
    for key in ("rows", "tokens"):
        assert summary[key] == sum(run[f"num_{key}"] for run in runs) and f"{summary[key]} {key}" in out, key
    assert f"{summary['by_book']} tokens of k = 0 by the book" in out and summary["by_book"] == runs[0]["num_tokens"]
    assert {"text", "logits", "head", "draft", "layers.mlp", "history"} <= summary["digests"].keys()
    # a verdict that is read alone says no more than what was compared
    span = f"k = 1 .. 2, 1 at once, {summary['tokens']} tokens, {summary['rows']} rows"
    assert out.endswith(f"PASS: the tokens and bits of k = 0 in all that was compared: {span}\n")


def test_the_digest_knows_neither_the_order_of_runs_nor_how_often_a_row_was_met(folder, monkeypatch):
    def digest(depths, batches):
        auditor = auditor_of(folder, "--num-prompts", "2", "--max-tokens", "8")
        assert findings(audit(auditor, depths, batches)) == []
        return auditor.compared.digest()

    with torch.inference_mode():
        whole = digest([1, 3], [2])
        assert digest([3, 1, 3], [2]) == whole
        real = Linear.rows
        monkeypatch.setattr(Linear, "rows", lambda self, x: real(self, x) * (1 + 2.0**-20))
        # wrong everywhere alike: nothing differs from k = 0, and the digest is another
        assert digest([1, 3], [2]) != whole


def test_the_demo_model_passes_with_keys_and_values_in_fp8():
    auditor = auditor_of(DEMO, "--kv-cache-dtype", "fp8", "--num-prompts", "1", "--max-tokens", "12")
    assert auditor.plan.cache_sizes.kv_dtype == torch.float8_e4m3fn
    with torch.inference_mode():
        assert findings(audit(auditor, [2], [2])) == []


def test_rows_that_attend_to_what_their_cache_does_not_hold_are_named(folder, monkeypatch):
    """The fault that a narrow cache invites: a window's own keys unrounded, those before it rounded."""
    exact = []

    def write_kv(k_cache, v_cache, pages, offsets, k, v, *scales):
        real_write(k_cache, v_cache, pages, offsets, k, v, *scales)
        exact[:] = k_cache.float(), v_cache.float()
        for cache, values in zip(exact, (k, v), strict=True):
            cache[pages, :, offsets] = values.float()

    real_write, real_attend = torch_table.write_kv, torch_table.window_attention
    monkeypatch.setattr(torch_table, "write_kv", write_kv)
    monkeypatch.setattr(
        torch_table, "window_attention", lambda q, k, v, tiles, *scales: real_attend(q, *exact, tiles, *scales)
    )
    assert findings(run_audit(folder)) == []
    found = findings(run_audit(folder, more=("--kv-cache-dtype", "fp8")))
    assert rows_of(found) and rows_of(found) == {"layers.1.self_attn"}


def test_conv_history_off_by_one_is_named(folder, monkeypatch):
    real = cache_tensors._advance_conv
    monkeypatch.setattr(
        cache_tensors, "_advance_conv", lambda conv, u, counts: real(conv, u, [c - (c > 1) for c in counts])
    )
    found = findings(run_audit(folder))
    assert rows_of(found) and rows_of(found) == {"layers.0.linear_attn"}


def test_one_replayed_row_lost_is_named(folder, monkeypatch):
    real = cache_tensors.delta_replay
    monkeypatch.setattr(cache_tensors, "delta_replay", lambda *args: real(*args[:-1], [c - (c > 1) for c in args[-1]]))
    found = findings(run_audit(folder))
    assert rows_of(found) and rows_of(found) == {"layers.0.linear_attn"}


def test_a_key_that_a_row_must_not_read_is_named(folder, monkeypatch):
    real = torch_table.row_tiles

    def one_column_too_far(starts, tables, width, device, lag):
        tiles = real(starts, tables, width, device, lag)
        if width == 1 or lag:
            return tiles
        return [dataclasses.replace(t, hidden={c: h & h.roll(1, -1) for c, h in t.hidden.items()}) for t in tiles]

    monkeypatch.setattr(torch_table, "row_tiles", one_column_too_far)
    found = findings(run_audit(folder))
    # layer 1 is the one with full attention
    assert rows_of(found) and rows_of(found) == {"layers.1.self_attn"}


def test_a_head_that_is_not_repaired_is_named_and_changes_no_token(folder, monkeypatch):
    real = MtpHead.rows

    def forgetful(self, round, tokens, hidden, count, width, *out):
        before = self.cache.k.clone(), self.cache.v.clone()
        real(self, round, tokens, hidden, count, width, *out)
        if width > 1:
            self.cache.k.copy_(before[0])
            self.cache.v.copy_(before[1])

    monkeypatch.setattr(MtpHead, "rows", forgetful)
    found = findings(run_audit(folder))
    assert rows_of(found) and rows_of(found) <= {"head", "draft"}


def test_later_drafts_from_another_hidden_state_are_named(folder, monkeypatch):
    """They change no token, and are the same for every k and batch."""

    def choose_blindly(self, count, number, flags):
        kept = self.buffers.head_hidden.clone()
        if number:
            self.buffers.head_hidden.zero_()
        real(self, count, number, flags)
        self.buffers.head_hidden.copy_(kept)

    real = RoundBody.choose_draft
    monkeypatch.setattr(RoundBody, "choose_draft", choose_blindly)
    *runs, last = run_audit(folder)
    assert findings(runs) == [] and {f.tensor.split(",")[0] for f in last.findings} == {"draft 2", "draft 3"}


def test_a_head_whose_prompts_are_off_by_one_is_named(folder, monkeypatch):
    """Its own rows at k = 0 are off too: only a head that shares nothing with it can tell."""
    real = MtpHead.enter
    monkeypatch.setattr(
        MtpHead,
        "enter",
        lambda self, prompt, tokens, hidden, span: real(self, prompt, torch.roll(tokens, 1), hidden, span),
    )
    *runs, last = run_audit(folder)
    assert findings(runs) == [] and {f.tensor.split(",")[0] for f in last.findings} >= {"draft 1", "draft 2"}


def test_acceptance_far_below_a_sound_head_is_named():
    report = HeadReport(rounds=[3, 2, 4, 1] * 8)
    assert report.too_few("r", 3, 2.3) == [] and HeadReport(rounds=[2] * 8).too_few("r", 3, 1.0) == []
    (found,) = report.too_few("r", 3, 1.8)
    assert "acceptance length 1.80 at k = 3, a sound head reaches 2.50" in str(found)


def test_decoding_that_is_not_what_one_pass_gives_is_named(folder, monkeypatch):
    """Wrong at every k alike: a window's rows stand one place too far."""
    real = torch_table.rope_angles
    monkeypatch.setattr(torch_table, "rope_angles", lambda at, freq: real(at + (at.numel() % 8 == 0), freq))
    results = run_audit(folder)
    assert any("from one pass" in f.tensor for f in results[-1].findings)


def test_a_row_count_dependent_product_is_named(folder, monkeypatch):
    real = Linear.rows

    def uneven(self, x):
        result = real(self, x)
        return result * (1 + 2.0**-20) if x.shape[0] > TILE_ROWS else result

    monkeypatch.setattr(Linear, "rows", uneven)
    assert findings(run_audit(folder, depths=(3,), batches=(2,))) == []
    found = findings(run_audit(folder, depths=(3,), batches=(3,)))
    assert rows_of(found) and rows_of(found) <= {"layers.0.linear_attn", "layers.0.mlp"}


def test_noise_keyed_by_step_is_named(folder, monkeypatch):
    real, calls = sampling.gumbel_noise, iter(range(1 << 30))
    monkeypatch.setattr(
        sampling,
        "gumbel_noise",
        lambda seed, choice, position, vocab: real(seed, choice, position * 0 + next(calls), vocab),
    )
    # the reference runs each request twice, and already they disagree
    assert {f.tensor for f in run_audit(folder)[0].findings} >= {BOOK, "tokens"}


def test_rules_fire_in_what_the_checkpoint_itself_writes(folder):
    auditor = auditor_of(folder, rules=True)
    with torch.inference_mode():
        assert auditor.run_reference().findings == []
    assert auditor.rules.silent == []
    texts = {request.request_id: auditor.reference[request.request_id].tokens for request in auditor.requests}
    stop = next(request for request in auditor.requests if request.request_id == "stop-1")
    assert texts["stop-1"][-1] == stop.sampling.stop_token_ids[0] and len(texts["stop-1"]) < 12
    bad = next(request for request in auditor.requests if request.request_id == "bad-words-1")
    assert len(bad.sampling.bad_words_token_ids) >= 3
    assert texts["choice-1"] != texts["choice-2"]
    letters = Tokenizer.from_str(auditor.matchers.text)
    assert letters.decode(texts["forced-run"])[1:] == LITERAL[: len(texts["forced-run"]) - 1]
    assert re.fullmatch("([0-4][a-m]|[5-9][n-z])+", letters.decode(texts["regex"]))
    assert 0 not in texts["min-tokens-2"][:5] and texts["min-tokens-2"][5:] == [0]
    least = texts["grammar-least"]
    assert least[-1] not in least[:-1] and len(least) == 6
    assert len(texts["thinking-prompt"]) == 6 and texts["choice-2"] != texts["own-k"]
    # its end, and with it the request's, comes inside windows
    assert len(texts["grammar-end"]) == 6


def test_what_is_wrong_at_every_k_alike_is_named_by_the_book(folder, monkeypatch):
    def without_repetition(logits, counts, seen, repetition, presence, frequency):
        return real(logits, counts, seen, repetition**0, presence, frequency)

    real = sampling.penalise
    monkeypatch.setattr(sampling, "penalise", without_repetition)
    auditor = auditor_of(folder, rules=True)
    with torch.inference_mode():
        found = auditor.run_reference().findings
        assert found and {f.tensor for f in found} == {BOOK}
        assert {f.request for f in found} <= {*(f"{n}-penalised" for n in range(2)), "penalties"}
        assert auditor.run(3, 2, forced=True).findings == []


def test_penalty_history_that_misses_a_draft_is_named(folder, monkeypatch):
    def without_drafts(rows):
        return rows.each(rows.state.counts), rows.each(rows.state.seen).bool()

    monkeypatch.setattr(rules, "history", without_drafts)
    found = findings(run_audit(folder))
    assert rows_of(found) and rows_of(found) == {"history"}
    assert all(f.request.endswith("-penalised") for f in found)


def test_exit_status_says_fail_and_cannot_run(folder, monkeypatch, capsys, tmp_path):
    """0 is above."""
    small = ["--max-depth", "1", "--max-batch", "1", "--num-prompts", "1", "--max-tokens", "4"]
    assert main([str(tmp_path), *small]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    broken = Finding("k = 1", "0-greedy", 7, "logits")
    monkeypatch.setattr(audit_module, "compare", lambda run, *_: [broken] if run.startswith("k = 1") else [])
    assert main([str(folder), *small]) == 1
    out = capsys.readouterr().out
    assert "request 0-greedy, position 7: logits differs" in out and "FAIL" in out
