"""`pilotfish bench` on a small model: its oracle, its floor, and that it gives no figures for a wrong text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pilotfish.engine import ledger
from pilotfish.engine.bench import admission, command, first, flags, profile
from pilotfish.engine.bench.complaints import complaints
from pilotfish.engine.bench.experts import ExpertCounts, count_experts
from pilotfish.engine.bench.measure import Case, live_batch, live_tokens, random_prompts, run_batch
from pilotfish.engine.bench.oracle import Oracle
from pilotfish.engine.bench.roof import Frame, distinct_experts, round_bytes, stored_share
from pilotfish.engine.bench.show import ADMISSION_COLUMNS, ADMISSION_LEGEND, COLUMNS, LEGEND, show
from pilotfish.engine.bench.sizes import released_config
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.requests.scheduler import PrefillStep, RoundStep
from pilotfish.engine.round.shapes import Shape, Shapes
from pilotfish.engine.round.synthetic import acceptance_rate
from pilotfish.spec.accept import rows_left
from tests.support.fixed_shapes import fixed_engine
from tests.support.rounds import CPU, make_engine
from tests.support.tiny_models import build_tiny

ARGS = ["--device", "cpu", "--context", "20", "--tokens", "40", "--k", "0,3", "--batch", "1,2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("bench") / "moe", "moe")


def rows_of(folder, out, *more, status=0):
    assert command.main([str(folder), *ARGS, "--json", str(out), *more]) == status
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("length", (1.0, 2.2, 3.2, 4.0))
def test_the_rate_gives_the_length(length):
    rate = acceptance_rate(length, 3)
    assert sum(rate**j for j in range(4)) == pytest.approx(length)


@pytest.mark.parametrize("length", (0.9, 4.1))
def test_a_length_that_k_cannot_reach_is_refused(length):
    with pytest.raises(ValueError, match=r"1\.\.4"):
        acceptance_rate(length, 3)


def told(prompts=((1, 2, 3, 4, 5),), rates=(0.7, 0.7), length=500):
    """An oracle with a text of ids 0..99 in each slot from 1 on."""
    oracle = Oracle(len(prompts) + 1, length, 100, list(rates), CPU)
    texts = {}
    for slot, prompt in enumerate(map(list, prompts), start=1):
        texts[slot] = [*prompt, *((i * 7 + slot) % 100 for i in range(length))][:length]
        oracle.tell(prompt, texts[slot][len(prompt) :])
        oracle.admit(slot, prompt)
    return oracle, texts


def test_drafts_are_the_text_s_or_wrong_by_one():
    oracle, texts = told()
    text, counts = texts[1], [0, 0]
    drafts, lengths = torch.zeros((2, 4), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for length in range(20, 480):
        lengths[1] = length
        oracle.replace(drafts, torch.tensor([1]), lengths, 2)
        right = [draft == text[length + 1 + j] for j, draft in enumerate(drafts[1, :2].tolist())]
        assert all(
            draft == (text[length + 1 + j] + (not right[j])) % 100 for j, draft in enumerate(drafts[1, :2].tolist())
        )
        counts[0] += right[0]
        counts[1] += all(right)
    assert counts[0] / 460 == pytest.approx(0.7, abs=0.01) and counts[1] / 460 == pytest.approx(0.49, abs=0.01)


def test_sequences_of_a_batch_err_at_rounds_of_their_own():
    """Prompts of one length: not all of them at the same positions."""
    oracle, texts = told([[i] * 5 for i in range(4)])
    lengths, drafts = torch.full((5,), 20), torch.zeros((5, 2), dtype=torch.int64)
    slots = torch.arange(1, 5)
    wrong = []
    for _ in range(40):
        oracle.replace(drafts, slots, lengths, 2)
        wrong.append([int(drafts[slot, 0]) != texts[slot][21] for slot in range(1, 5)])
    assert any(0 < sum(row) < 4 for row in wrong)
    assert all(11 <= sum(column) <= 13 for column in zip(*wrong, strict=True))


def test_drafts_past_what_is_known_differ_from_each_other():
    """As a text's do: equal rows would go to equal experts."""
    oracle = Oracle(3, 200, 100, [0.5, 0.5], CPU)
    for slot in (1, 2):
        oracle.tell([slot] * 5, [7])
        oracle.admit(slot, [slot] * 5)
    assert all(len(set(oracle.texts[slot, 6:].tolist())) > 50 for slot in (1, 2))
    assert (oracle.texts[1, 6:] == oracle.texts[2, 6:]).float().mean() < 0.1


def accepted_of(oracle, texts, depth, num_tokens):
    """Drafts accepted in each round of all drafts, decoding every text for so many tokens."""
    found = []
    for slot, text in texts.items():
        drafts, lengths = torch.zeros((len(texts) + 1, depth), dtype=torch.int64), torch.zeros(len(texts) + 1).long()
        last = 20 + num_tokens - 1
        lengths[slot] = 20
        while (at := int(lengths[slot])) + depth < last:
            oracle.replace(drafts, torch.tensor([slot]), lengths, depth)
            right = [draft == text[at + 1 + j] for j, draft in enumerate(drafts[slot].tolist())]
            found.append([*right, False].index(False))
            lengths[slot] += found[-1] + 1
    return found


@pytest.mark.parametrize(("wanted", "depth"), [(3.2, 3), (2.2, 3), (1.5, 3), (1.6, 1), (5.0, 8)])
@pytest.mark.parametrize(("batch", "num_tokens"), [(1, 1200), (4, 300), (8, 192), (16, 96)])
def test_a_length_is_met_within_two_percent_over_two_hundred_rounds(wanted, depth, batch, num_tokens):
    oracle, texts = told([[i] * 5 for i in range(batch)], [acceptance_rate(wanted, depth)] * depth, 1400)
    found = accepted_of(oracle, texts, depth, num_tokens)
    assert len(found) >= 150
    tolerance = 0.02 if len(found) >= 200 else 0.03
    assert 1 + sum(found) / len(found) == pytest.approx(wanted, rel=tolerance), len(found)


def test_a_synthetic_length_is_reached_and_said_to_be_synthetic(folder, tmp_path):
    flags = ["--synthetic-acceptance-length", "3.2", "--tokens", "176", "--batch", "1,4"]
    rows = rows_of(folder, tmp_path / "out", *flags)
    assert [(row["k"], row["batch"]) for row in rows] == [(0, 1), (0, 4), (3, 1), (3, 4)]
    for row in rows:
        assert row["synthetic"] and row["graph_hits"] == row["graph_misses"] == row["num_compiled"] == 0
        # some 50 rounds, and 200
        tolerance = 0.06 if row["batch"] == 1 else 0.02
        assert row["acceptance_length"] == pytest.approx(1.0 if row["k"] == 0 else 3.2, rel=tolerance)
        assert sum(row["accepted_counts"].values()) > 0 and row["tokens_per_second"] > 0


def test_rounds_near_the_limit_do_not_lower_the_length():
    """They offer fewer drafts: of 12 tokens after the first, three rounds of four; of 10, the third has one draft."""
    prompts = random_prompts(1, 20, 320)
    loop = oracle_loop(3, prompts)
    loop.executor.state.oracle.places.shares.fill_(1.0)
    for num_tokens, counts in ((13, {3: 3}), (11, {3: 2, 1: 1})):
        run = run_batch(loop, prompts, num_tokens, 0)
        assert run.accepted_counts == counts and run.acceptance_length == 4


def test_the_head_s_own_drafts_are_not_synthetic(folder, tmp_path):
    assert [row["synthetic"] for row in rows_of(folder, tmp_path / "out")] == [False] * 4


def test_other_text_than_k_0_gives_no_figures(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "random_prompts", _worse_each_time())
    assert command.main([str(folder), *ARGS]) == 1
    assert "other text than k = 0" in capsys.readouterr().err


def _worse_each_time():
    calls = iter(range(1000))
    return lambda count, length, vocab: [[next(calls) % vocab] * length for _ in range(count)]


def test_fp8_keys_and_values_are_fewer_bytes_at_the_floor(folder, tmp_path):
    names = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
    exact, narrow = (rows_of(folder, tmp_path / name, "--kv-cache-dtype", name, "--batch", "1") for name in names)
    for rows, dtype in zip((exact, narrow), names.values(), strict=True):
        assert {row["kv_dtype"] for row in rows} == {dtype}
    assert all(less["floor_bytes"] < more["floor_bytes"] for less, more in zip(narrow, exact, strict=True))


def test_random_weights_by_config(folder, tmp_path):
    rows = rows_of(folder, tmp_path / "out", "--load-format", "dummy", "--dummy-layout", "mixed", "--batch", "1")
    assert all(row["synthetic"] and row["layout"] == "mixed" for row in rows)


def test_a_name_that_is_no_size_is_explained(capsys):
    assert command.main(["Qwen3.6-28B", "--load-format", "dummy", *ARGS]) == 2
    assert "35B-A3B" in capsys.readouterr().err


def test_the_floor_counts_every_matrix_once_and_the_head_by_pass():
    engine = make_engine("hv_gt_hk", depth=3)
    model, trunk = engine.executor.model, engine.executor.model.trunk
    linears = 0
    for layer in (*trunk.layers, model.head.layer):
        mixer = layer.mixer
        first = mixer.qkvg if hasattr(mixer, "qkvg") else mixer.in_proj
        own = first.num_bytes + mixer.output.num_bytes + layer.mlp.gate_up.num_bytes + layer.mlp.down.num_bytes
        linears += own
    head = own + model.head.fc.num_bytes
    state = 2 * (trunk.state.s[:, 0].nbytes + trunk.state.conv[:, 0].nbytes)
    kv = trunk.kv[0].k[0, :, 0].nbytes * 2
    frame = Frame(batch=1, depth=2, context=100)
    expected = linears + head + model.head.fc.num_bytes + 3 * trunk.lm_head.num_bytes + state
    assert round_bytes(model, frame) == expected + kv * 100 * (len(trunk.kv) + 2)
    assert round_bytes(model, dataclasses.replace(frame, stored=0.25)) == round_bytes(model, frame) - 0.375 * state


@pytest.mark.parametrize(
    ("width", "accepted", "most", "share"),
    [(1, 1, 0, 1), (1, 1, 4, 1 / 4), (4, 3.2, 8, 1 / 2), (4, 1.9, 8, 1 / 3), (9, 4, 8, 1)],
)
def test_how_often_a_state_is_stored(width, accepted, most, share):
    """As rounds do it by whole rows, of which as many are accepted on average."""
    assert stored_share(width, accepted, most) == share
    count = stored = 0
    for number in range(1000):
        left = int(rows_left(torch.tensor(count), width, most))
        stored += count > 0 and left == 0
        count = left + int((number + 1) * accepted) - int(number * accepted)
    assert stored / 1000 == pytest.approx(share, abs=0.06)


def test_distinct_experts_of_uniform_routing():
    assert distinct_experts(256, 8, 4) == pytest.approx(30.5, abs=0.05)


def test_experts_are_counted_by_layer_over_the_rounds_of_the_whole_batch():
    counts = ExpertCounts(2)
    counts.observe("layers.0.experts", torch.tensor([[1, 2], [2, 3]]), [1, 2], [7, 9])
    counts.observe("layers.1.experts", torch.tensor([[4, 5], [5, 4]]), [1, 2], [7, 9])
    counts.observe("layers.0.experts", torch.tensor([[1, 2], [3, 4]]), [1, 2], [8, 10])
    counts.observe("layers.0.experts", torch.tensor([[1, 2]]), [2], [11])
    counts.observe("layers.0.mlp", torch.zeros(2, 4), [1, 2], [8, 10])
    assert counts.by_layer == [3.5, 2.0]


def test_a_row_alone_takes_top_k_experts_and_more_rows_take_more():
    found = {}
    for depth in (0, 3):
        loop = EngineLoop(make_engine("moe", depth=depth))
        config = loop.executor.model.config
        found[depth] = count_experts(loop, random_prompts(1, 20, config.vocab_size))
        assert len(found[depth]) == config.num_hidden_layers and not loop.executor.observers
    assert found[0] == [config.num_experts_per_tok] * config.num_hidden_layers
    assert all(config.num_experts_per_tok < count <= config.num_experts for count in found[3])


def test_experts_are_counted_while_all_sequences_live():
    """Prompts of five chunks, a round of the others between two: the first has 16 tokens before the last is read."""
    loop = EngineLoop(make_engine("moe", depth=0, max_num_seqs=4, num_pages=20))
    config = loop.executor.model.config
    prompts = random_prompts(4, 300, config.vocab_size)
    assert not run_batch(loop, prompts, 16, 0).round_seconds
    found = count_experts(loop, prompts)
    assert len(found) == config.num_hidden_layers
    assert all(config.num_experts_per_tok < count <= config.num_experts for count in found)
    assert not loop.has_work() and not loop.executor.observers
    loop.scheduler.check()


def test_requests_too_short_to_run_together_give_no_figures_of_rounds_and_fail(folder, tmp_path, capsys):
    flags = ["--k", "0", "--batch", "4", "--context", "300", "--prefill-chunk", "64", "--tokens", "16"]
    (row,) = rows_of(folder, tmp_path / "out", *flags, status=1)
    assert row["round_ms"] is row["tokens_per_second"] is row["share_of_roof"] is None
    assert row["distinct_experts"] > 0 and row["first_token_ms"] > 0 and row["acceptance_length"] == 1
    said = capsys.readouterr()
    assert "nan" not in said.out and "want more --tokens" in said.err


@pytest.mark.parametrize(("depth", "ends", "missed"), [(0, (1, 8), 12), (3, (1, 8), 6), (0, (1, 2, 4, 8), 8)])
def test_a_batch_that_grows_and_shrinks_finds_a_graph_for_every_round(depth, ends, missed):
    """Captured alone the shapes of the batches asked for miss as many as seen on an H200."""
    prompts = random_prompts(8, 20, 320)
    texts = []
    for whole in (True, False):
        loop = EngineLoop(fixed_engine("hv_gt_hk", depth, max_num_seqs=8, captured=False))
        shapes = loop.executor.shapes
        args = flags.parse(["model", "--batch", ",".join(map(str, ends))])
        own = {shapes.fit(batch, depth) for batch in ends}
        with torch.inference_mode():
            loop.executor.capture(command._shapes(args, shapes, depth) if whole else own, progress=False)
        # all drafts are wrong or right for all: each ends a round after the one before
        state = loop.executor.state
        if depth:
            state.oracle = Oracle(state.num_slots, 2048, state.vocab_size, [0.0] * depth, CPU)
            for prompt in prompts:
                state.oracle.tell(prompt, [0])
        run = run_batch(loop, prompts, 24, 0)
        assert run.graph_misses == (0 if whole else missed) and run.graph_hits > 0
        texts.append(run.texts)
    assert texts[0] == texts[1]


def test_shapes_of_a_bench_are_those_that_its_batches_may_become():
    def sizes(depth, *argv):
        args = flags.parse(["model", *argv])
        return [shape.num_sequences for shape in command._shapes(args, Shapes((0, depth), 16, max(args.batch)), depth)]

    assert sizes(3, "--batch", "1,8") == [1, 2, 3, 4, 8]
    assert sizes(3, "--batch", "2") == [1, 2] and sizes(0, "--batch", "16") == list(range(1, 17))
    # 128 sequences at k = 3 are more rows than a round takes: that row is left out
    assert sizes(3, "--batch", "4,128") == [1, 2, 3, 4]
    args = flags.parse(["model", "--batch", "1", "--admission", "100"])
    assert command._shapes(args, Shapes((0, 3), 16, 5), 3) == [Shape(count, 3) for count in range(1, 6)]


def test_measured_experts_stand_beside_the_uniform_expectation(folder, tmp_path, capsys):
    for row in rows_of(folder, tmp_path / "out"):
        assert row["distinct_experts"] == pytest.approx(sum(row["distinct_experts_by_layer"]) / 4)
        assert row["distinct_experts_uniform"] > 0
    assert {"experts", "uniform"} <= set(capsys.readouterr().out.splitlines()[0].split())


def test_prompts_that_are_read_once_have_no_experts_counted_and_no_replays(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "count_experts", lambda *_: pytest.fail("reads a batch's prompts"))
    monkeypatch.setattr(command, "_device_times", lambda *_: pytest.fail("reads a batch's prompts"))
    for row in rows_of(folder, tmp_path / "out", "--prompts-once"):
        assert row["tokens_per_second"] > 0 and "distinct_experts" not in row


@pytest.mark.parametrize("pauses", [True, False])
def test_a_prompt_that_is_read_once_is_read_without_pauses(pauses, monkeypatch):
    loop = EngineLoop(make_engine("moe", depth=0, max_num_seqs=4, num_pages=20))
    steps_at_a_time, asked = loop.executor.steps_at_a_time, []

    def counted(*about):
        asked.append(about)
        return steps_at_a_time(*about)

    monkeypatch.setattr(loop.executor, "steps_at_a_time", counted)
    prompts = random_prompts(2, 300, 320)
    # a round's time is known
    run_batch(loop, prompts[:1], 40, 0)
    run_batch(loop, prompts, 40, 0, pauses=pauses)
    assert bool(asked) == pauses and loop.pauses_after is None


def test_a_trace_reads_prompts_again(capsys):
    with pytest.raises(SystemExit):
        flags.parse(["model", "--prompts-once", "--profile"])
    assert "--profile: want no --prompts-once" in capsys.readouterr().err


def test_the_weights_bytes_are_the_files_and_what_is_resident_is_told(folder, tmp_path, capsys):
    checkpoint = open_checkpoint(folder)
    row = rows_of(folder, tmp_path / "with", "--k", "3", "--batch", "1")[-1]
    assert row["packed_bytes"] == checkpoint.num_bytes
    assert row["resident_bytes"] == pytest.approx(row["packed_bytes"], rel=0.5)
    assert "as packed in the checkpoint" in capsys.readouterr().out
    without = rows_of(folder, tmp_path / "without", "--k", "0", "--batch", "1")[-1]
    assert without["packed_bytes"] < row["packed_bytes"] and without["resident_bytes"] < row["resident_bytes"]
    assert set(row["start_seconds"]) == {"weights"} and row["start_seconds"]["weights"] > 0


def test_every_weight_that_stays_is_counted():
    model = make_engine("moe", depth=3).executor.model
    assert command._resident_bytes(model) == ledger.tensor_bytes(model)


def test_scratch_for_prompts_is_no_weight():
    pytest.importorskip("triton")
    config = released_config("35B-A3B")
    config = dataclasses.replace(
        config, num_hidden_layers=1, layer_types=config.layer_types[:1], num_experts=8, vocab_size=16384
    )
    weights = dummy_weights(config, "nvfp4", CPU, with_head=False)
    packed = ledger.tensor_bytes(weights)
    model = build_model(weights, config, CacheSizes(1, 1, 0), torch.bfloat16, CPU, fused=True)
    # eight experts and the shared one, gate and up of each [1024, 2048] in bf16, are less than q|k|v|z|b|a, and
    # no prompt expands lm_head, which is more
    assert ledger.scratch_bytes(model) == (12288 + 64) * 2048 * 2
    assert command._resident_bytes(model) == pytest.approx(packed, rel=0.02)
    assert ledger.tensor_bytes(model) == command._resident_bytes(model) + ledger.scratch_bytes(model)


class StepClock:
    """A second passes in each step of a loop; a chunk of the prompt takes nine more."""

    def __init__(self, loop, monkeypatch):
        self.now, self.step = 0.0, loop.step
        monkeypatch.setattr(loop, "step", self._tick)
        monkeypatch.setattr(admission, "perf_counter", lambda: self.now)

    def _tick(self):
        report = self.step()
        self.now += 1 + 9 * bool(report and report.stats.num_prefill_tokens)
        return report


def admission_loop(depth=3):
    loop = EngineLoop(make_engine("moe", depth=depth, max_num_seqs=5, num_pages=20, prefill_chunk=64))
    # rounds and chunks take what StepClock says, in truth next to nothing
    loop.pauses_after = loop.UNBROKEN
    return loop


@pytest.mark.parametrize("depth", (0, 3))
@pytest.mark.parametrize("ahead", (False, True), ids=("read at once", "run ahead"))
def test_a_stream_waits_for_a_chunk_and_a_round(depth, ahead, monkeypatch):
    loop = admission_loop(depth)
    loop.executor.run_ahead = ahead
    StepClock(loop, monkeypatch)
    found = admission.measure_admission(loop, 20, 300)
    # run ahead, the first token is read a step later
    assert found.round == 1 and found.chunks == [10] * 4 + [10 + ahead] and found.first_token_alone == 50 + ahead
    # five chunks, and a round before the first one and between two
    assert found.gap == 11 and found.first_token in (54, 55)
    assert not loop.has_work()
    loop.scheduler.check()


@pytest.mark.parametrize("depth", (0, 3))
def test_streams_outlast_prompts_that_pause_after_every_step(depth):
    loop = admission_loop(depth)
    loop.pauses_after = 1
    assert admission.measure_admission(loop, 100, 300).gap > 0
    loop.scheduler.check()


def test_a_scheduler_that_starves_the_streams_shows(monkeypatch):
    loop = admission_loop()
    scheduler, fair = loop.scheduler, loop.scheduler.next_step

    def prompts_first(held):
        step = fair(held)
        waiting = [sequence for sequence in scheduler.running if not sequence.is_prefilled]
        if isinstance(step, RoundStep) and waiting:
            scheduler._last_was_prefill = False
            step = fair(held)
            assert isinstance(step, PrefillStep)
        return step

    monkeypatch.setattr(scheduler, "next_step", prompts_first)
    StepClock(loop, monkeypatch)
    assert admission.measure_admission(loop, 20, 300).gap == 51


def test_an_admission_is_a_row_of_its_own(folder, tmp_path, capsys):
    flags = ["--admission", "100", "--prefill-chunk", "32", "--batch", "1"]
    for more in ([], ["--synthetic-acceptance-length", "2"]):
        out = tmp_path / f"out{len(more)}"
        rows = rows_of(folder, out, *flags, *more)
        assert [(row["kind"], row["k"]) for row in rows] == [
            ("round", 0), ("admission", 0), ("round", 3), ("admission", 3)
        ]  # fmt: skip
        for row in rows[1::2]:
            assert row["streams"] == 4 and row["prompt"] == 100 and row["prefill_chunk"] == 32
            assert all(row[time] > 0 for time in ("largest_gap_ms", "round_ms", "first_token_ms", "chunk_ms"))
        assert "longest wait" in capsys.readouterr().out


@pytest.mark.parametrize("value", ("0", "-1", "many"))
def test_a_prompt_that_is_no_length_is_refused(folder, value, capsys):
    with pytest.raises(SystemExit):
        command.main([str(folder), *ARGS, f"--admission={value}"])
    assert "--admission: want a number in 1" in capsys.readouterr().err


@pytest.mark.parametrize("more", ([], ["--synthetic-acceptance-length", "2"]), ids=("own drafts", "synthetic"))
def test_first_requests_are_timed_before_any_other(folder, tmp_path, monkeypatch, more):
    asked = []
    monkeypatch.setattr(first, "run_batch", _recorded(first.run_batch, asked))
    monkeypatch.setattr(command, "run_batch", _recorded(command.run_batch, asked))
    monkeypatch.setattr(command, "complaints", lambda rows: [])
    rows = rows_of(folder, tmp_path / "out", "--first-requests", *more)
    assert asked == [(1, 32), (1, 32), (1, 40), (2, 32), (2, 32), (2, 40)] * 2
    for row in rows:
        assert row["first_request_ms"] > 0 and row["second_request_ms"] > 0 and row["num_compiled"] == 0


def _recorded(run_batch, asked):
    def run(loop, prompts, num_tokens, seed, **how):
        asked.append((len(prompts), num_tokens))
        return run_batch(loop, prompts, num_tokens, seed, **how)

    return run


@pytest.mark.parametrize(
    ("first_ms", "compiled", "complaint"),
    ((109.0, 0, None), (50.0, 0, None), (112.0, 0, "112.0 ms, the second 100.0 ms (+12%"), (90.0, 2, "2 kernels")),
)
def test_a_slow_first_request_is_named_and_fails(folder, capsys, monkeypatch, first_ms, compiled, complaint):
    values = {"first_request_ms": first_ms, "second_request_ms": 100.0, "num_compiled": compiled}
    monkeypatch.setattr(command, "first_and_second", lambda *_: dict(values))
    status = command.main([str(folder), *ARGS, "--k", "3", "--batch", "2", "--first-requests"])
    output = capsys.readouterr()
    assert status == (complaint is not None)
    assert "1st request ms" in output.out
    if complaint is None:
        assert "first request" not in output.err
    else:
        assert complaint in output.err and "k = 3, batch 2, context 20" in output.err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"num_graphs": 0, "graph_misses": 40}, []),
        ({"graph_misses": 6}, ["k = 3, batch 8, context 64: 6 rounds had no graph (want 0 of them)"]),
        ({"num_compiled": 7}, ["k = 3, batch 8, context 64: 7 kernels compiled while requests waited (want 0)"]),
        (
            {"round_ms": None},
            [
                "k = 3, batch 8, context 64: no round of all sequences was timed, the first of them ended before "
                "(want more --tokens)"
            ],
        ),
    ],
)
def test_a_round_without_a_graph_and_a_kernel_that_is_waited_for_fail(fields, said, monkeypatch, capsys):
    row = {
        "kind": "round", "k": 3, "batch": 8, "context": 64, "num_graphs": 20, "graph_hits": 30, "graph_misses": 0,
        "num_compiled": 0, "round_ms": 1.0, "resident_bytes": 1, "packed_bytes": 1, "prefill_scratch_bytes": 0,
        "graph_bytes": 0, "start_seconds": {}, "synthetic": False,
    }  # fmt: skip
    admission_row = {"kind": "admission", "k": 3, **{name: row[name] for name in ("num_graphs", "synthetic")}}
    assert complaints([row | fields, admission_row]) == said
    monkeypatch.setattr(command, "measure_all", lambda args: [row | fields])
    assert command.main(["model"]) == bool(said)
    assert capsys.readouterr().err.splitlines() == [f"pilotfish bench: {line}" for line in said]


def oracle_loop(depth=3, prompts=()):
    """With drafts from the known text of these prompts."""
    loop = EngineLoop(make_engine("moe", depth=depth, max_num_seqs=4, num_pages=20))
    texts = run_batch(EngineLoop(make_engine("moe", depth=0)), prompts, 60, 0).texts
    state = loop.executor.state
    state.oracle = Oracle(state.num_slots, 2048, state.vocab_size, [0.8] * depth, CPU)
    for prompt, text in zip(prompts, texts.values(), strict=True):
        state.oracle.tell(prompt, text)
    return loop


def test_a_profile_runs_the_prompts_whose_text_the_oracle_knows(monkeypatch):
    case = Case(depth=3, batch=2, context=20)
    loop = oracle_loop(3, random_prompts(2, 20, 320))
    seen = []

    def traced(work, times):
        seen.append(times)
        report_counts.append([])
        work()
        return {"launches": 7.0}

    report_counts, step = [], loop.step

    def counted():
        report = step()
        if report_counts:
            report_counts[-1].append(len([output for output in report.outputs if output.round]))
        return report

    monkeypatch.setattr(loop, "step", counted)
    monkeypatch.setattr(profile, "traced", traced)
    found = profile.profile(loop, case)
    assert seen == [profile.ROUNDS, 1]
    # of each traced round both sequences; then the batch ends, and a prompt is read alone
    assert report_counts[0][: profile.ROUNDS] == [2] * profile.ROUNDS
    assert report_counts[1] == [0]
    assert found == {"round": {"launches": 7.0}, "prompt": {"launches": 7.0, "tokens": 20, "chunks": 1}}
    assert not loop.has_work()
    loop.scheduler.check()


@pytest.mark.parametrize("depth", (0, 3))
def test_a_live_batch_outlasts_its_rounds_whatever_is_accepted(depth):
    prompts = random_prompts(4, 100, 320)
    loop = oracle_loop(depth, prompts) if depth else EngineLoop(make_engine("moe", depth=0, num_pages=20))
    # chunks that paused, as they may on a GPU, would let more rounds run than are counted below
    loop.executor.steps_at_a_time = lambda num_rows, round_seconds, read_seconds: 1
    loop.scheduler.pause = lambda step: pytest.fail("a chunk pauses")
    if depth:
        loop.executor.state.oracle.places.shares.fill_(1.0)
    # the second one knows how long rounds take, and would pause for them
    for _ in range(2):
        with live_batch(loop, prompts, 8):
            for _ in range(8):
                assert [output.finish_reason for output in loop.step().outputs if output.round] == [None] * 4
            assert len(loop.scheduler.running) == 4
        assert not loop.has_work()
        loop.scheduler.check()
    # the first sequence had a round before each other chunk: four prompts of two chunks
    assert live_tokens(8, depth, 4, 2) == (8 + 4 + 8 + 2) * (depth + 1)


@pytest.mark.parametrize("depth", (0, 3))
def test_device_time_is_of_rounds_that_move_live_sequences_on(depth, monkeypatch):
    loop = EngineLoop(fixed_engine("moe", depth))
    state, slots = loop.executor.state, loop.executor.body.buffers.slots
    seen = []

    def replay_times(replay):
        lengths = [state.length.clone()]
        for _ in range(command.REPLAYS):
            replay()
            lengths.append(state.length.clone())
        seen.append((slots[:2].tolist(), torch.stack(lengths).diff(dim=0)))
        return [2.5]

    monkeypatch.setattr(command, "_replay_times", torch.inference_mode()(replay_times))
    found = command._device_times(loop, Case(depth, 2, 20))
    assert found == {"device_round_ms": 2.5, "device_plain_ms": 2.5, "device_verify_ms": 2.5}
    for (own, moved), commits in zip(seen, (True, True, False), strict=True):
        assert 0 not in own and len(set(own)) == 2
        assert bool((moved[:, own] > 0).all()) == commits and bool((moved[:, own] == 0).all()) == (not commits)
    assert not loop.has_work()
    loop.scheduler.check()


def test_waiting_kernels_time_belongs_to_those_they_wait_for():
    """b and c began while a still ran, and waited: what is theirs begins where the one before them ended."""
    spans = [(0.0, 10.0, "a"), (1.0, 14.0, "b"), (2.0, 20.0, "c"), (21.0, 30.0, "a")]
    found = profile.summary(spans, 1)
    assert {line["name"]: line["us"] for line in found["kernels"]} == {"a": 19.0, "b": 4.0, "c": 6.0}
    assert {line["name"]: line["launches"] for line in found["kernels"]} == {"a": 2.0, "b": 1.0, "c": 1.0}
    assert found["gpu_us"] == 30 and found["launches"] == 4 and found["gpu_idle_share"] == pytest.approx(1 / 30)


def test_a_kernel_that_is_slow_in_some_places_shows_there():
    """A product that takes 5 us behind a norm takes 9 where attention has run before."""
    spans, now = [], 0.0
    for name, length in [("norm", 1), ("product", 5)] * 10 + [("attention", 7), ("product", 9), ("norm", 2)]:
        spans.append((now, now + length, name))
        now += length
    (first, *others) = profile.summary(spans, 1)["places"]
    assert (first["before"], first["name"], first["after"]) == ("norm", "product", "norm")
    assert first["us"] == 45 and first["launches"] == 9
    assert first["low_us"] == first["median_us"] == first["high_us"] == 5
    slow = next(line for line in others if line["before"] == "attention")
    assert (slow["name"], slow["after"], slow["median_us"]) == ("product", "norm", 9)
    # neither the first launch nor the last has two others beside it
    assert sum(line["launches"] for line in (first, *others)) == len(spans) - 2


def test_a_place_s_times_are_those_of_its_tenth_middle_and_nine_tenth_launch():
    spans, now = [], 0.0
    for length in range(1, 12):
        spans += [(now, now + 1, "a"), (now + 1, now + 1 + length, "b"), (now + 1 + length, now + 2 + length, "c")]
        now += 2 + length
    place = next(line for line in profile.summary(spans, 11)["places"] if line["name"] == "b")
    assert (place["low_us"], place["median_us"], place["high_us"]) == (2, 6, 10)
    assert place["us"] == pytest.approx(6) and place["launches"] == 1


def test_own_times_and_idle_ones_are_the_whole():
    generator = torch.Generator().manual_seed(0)
    begins = (torch.rand(200, generator=generator) * 1000).tolist()
    lengths = (torch.rand(200, generator=generator) * 8).tolist()
    spans = [
        (begin, begin + length, f"k{i % 7}") for i, (begin, length) in enumerate(zip(begins, lengths, strict=True))
    ]
    found = profile.summary(spans, 4)
    total = sum(line["us"] for line in found["kernels"])
    assert total + found["gpu_us"] * found["gpu_idle_share"] == pytest.approx(found["gpu_us"])
    # instants in steps of a thousandth: in how many of them a kernel runs
    steps = torch.linspace(min(begins), max(end for _, end, _ in spans), 100_000)
    busy = torch.zeros_like(steps, dtype=torch.bool)
    for begin, end, _ in spans:
        busy |= (steps >= begin) & (steps <= end)
    assert found["gpu_idle_share"] == pytest.approx(1 - busy.float().mean().item(), abs=1e-3)


def test_a_profile_wants_a_gpu(folder, capsys):
    assert command.main([str(folder), *ARGS, "--profile"]) == 2
    assert "profile: want a CUDA device" in capsys.readouterr().err


def test_a_profile_s_kernels_are_shown_with_their_share_and_number():
    traced = profile.summary([(0.0, 30.0, "products"), (40.0, 90.0, "experts"), (90.0, 100.0, "norm")], 1) | {
        "driver_calls": [{"name": "cudaStreamSynchronize", "us": 25.0, "calls": 5.0}]
    }
    row = {
        "kind": "round", "k": 3, "batch": 4, "context": 64, "resident_bytes": 1, "packed_bytes": 1, "synthetic": False,
        "prefill_scratch_bytes": 0,
        "start_seconds": {}, "num_graphs": 0, "profile": {"round": traced, "prompt": traced},
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in show([row])]
    kernels = [
        "50.0 us 50.0% 1.0 of 50.00 us experts",
        "30.0 us 30.0% 1.0 of 30.00 us products",
        "10.0 us 10.0% 1.0 of 10.00 us norm",
        "25.0 us 25.0% 5.0 of 5.00 us cudaStreamSynchronize",
        "50.0 us 50.0% 1.0 of 50.00 us, 50.00 to 50.00: experts between products and norm",
    ]
    whole = "3 launches, 0.100 ms from first to last, idle 10.0%"
    at = lines.index(f"a round at k = 3, batch 4, context 64: {whole}")
    assert lines[at + 1 : at + 6] == kernels
    assert lines[at + 6 : at + 12] == [f"a prompt of 64 tokens at k = 3: {whole}", *kernels]


def test_every_column_is_explained_where_it_is_shown():
    for columns, legend in ((COLUMNS, LEGEND), (ADMISSION_COLUMNS, ADMISSION_LEGEND)):
        assert [title for _, title in columns] == list(legend)
    row = {
        "kind": "round", "k": 3, "batch": 4, "round_ms": 1.5, "resident_bytes": 1, "packed_bytes": 1,
        "prefill_scratch_bytes": 0, "start_seconds": {}, "num_graphs": 0, "synthetic": False,
    }  # fmt: skip
    text = " ".join(show([row]))
    assert "B: sequences at once; round ms: median from one report to the next" in text and "floor ms:" not in text


def test_threads_are_those_that_were_asked_for(monkeypatch, tmp_path, capsys):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    assert command.main([str(tmp_path / "absent"), "--num-threads", "3"]) == 2
    assert given == [3] and "config.json" in capsys.readouterr().err


def test_graphs_stand_beside_what_the_start_took():
    row = {
        "kind": "round", "k": 3, "resident_bytes": 3 << 20, "packed_bytes": 2 << 20, "synthetic": False,
        "prefill_scratch_bytes": 7 << 20,
        "start_seconds": {"weights": 2.0, "kernels": 30.5, "graphs": 1.5}, "num_graphs": 32, "graph_bytes": 5 << 20,
    }  # fmt: skip
    lines = list(show([row]))
    assert lines[-2:] == [
        "weights: 3.0 MiB resident, 2.0 MiB as packed in the checkpoint (+50.0%); "
        "beside them 7.0 MiB of scratch for prompts",
        "start to ready at k = 3: 34.0 s (weights 2.0, kernels 30.5, graphs 1.5, 32 graphs of 5.0 MiB)",
    ]
