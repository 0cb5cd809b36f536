"""`pilotfish bench` on a small model: its oracle, its floor, and that it gives no figures for a wrong text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pilotfish.engine import ledger
from pilotfish.engine.bench import admission, command, first, profile
from pilotfish.engine.bench.experts import ExpertCounts, count_experts
from pilotfish.engine.bench.measure import Case, live_batch, live_tokens, random_prompts, run_batch
from pilotfish.engine.bench.oracle import Oracle, acceptance_rate
from pilotfish.engine.bench.roof import Frame, distinct_experts, round_bytes
from pilotfish.engine.bench.show import show
from pilotfish.engine.bench.sizes import released_config
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.scheduler import PrefillStep, RoundStep
from tests.support.rounds import CPU, make_engine
from tests.support.tiny_models import build_tiny
from tests.unit.engine.device_round.test_rounds import device_engine

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


def test_fp8_keys_and_values_are_fewer_bytes_at_the_floor(folder, tmp_path):
    names = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
    exact, narrow = (rows_of(folder, tmp_path / name, "--kv-cache-dtype", name) for name in names)
    for rows, dtype in zip((exact, narrow), names.values(), strict=True):
        assert {row["kv_dtype"] for row in rows} == {dtype}
    assert all(less["floor_bytes"] < more["floor_bytes"] for less, more in zip(narrow, exact, strict=True))


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
        config = loop.runner.model.config
        found[depth] = count_experts(loop, random_prompts(1, 20, config.vocab_size), 24, 0)
        assert len(found[depth]) == config.num_hidden_layers and not loop.runner.observers
    assert found[0] == [config.num_experts_per_tok] * config.num_hidden_layers
    assert all(config.num_experts_per_tok < count <= config.num_experts for count in found[3])


def test_measured_experts_stand_beside_the_uniform_expectation(folder, tmp_path, capsys):
    for row in rows_of(folder, tmp_path / "out"):
        assert row["distinct_experts"] == pytest.approx(sum(row["distinct_experts_by_layer"]) / 4)
        assert row["distinct_experts_uniform"] > 0
    assert {"experts", "uniform"} <= set(capsys.readouterr().out.splitlines()[0].split())


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
    model = make_engine("moe", depth=3).runner.model
    assert command._resident_bytes(model) == ledger.tensor_bytes(model)


def test_scratch_for_prompts_is_no_weight():
    pytest.importorskip("triton")
    config = released_config("35B-A3B")
    config = dataclasses.replace(
        config, num_hidden_layers=1, layer_types=config.layer_types[:1], num_experts=8, vocab_size=512
    )
    weights = dummy_weights(config, "nvfp4", CPU, with_head=False)
    packed = ledger.tensor_bytes(weights)
    model = build_model(weights, config, CacheSizes(1, 1, 0), torch.bfloat16, CPU, fused=True)
    # eight experts and the shared one, gate and up of each [1024, 2048] in bf16, are less than q|k|v|z [12288, 2048]
    assert ledger.scratch_bytes(model) == 12288 * 2048 * 2
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
    return EngineLoop(make_engine("moe", depth=depth, max_num_seqs=5, num_pages=20, prefill_chunk=64))


@pytest.mark.parametrize("depth", (0, 3))
@pytest.mark.parametrize("ahead", (False, True), ids=("read at once", "run ahead"))
def test_a_stream_waits_for_a_chunk_and_a_round(depth, ahead, monkeypatch):
    loop = admission_loop(depth)
    loop.rounds = dataclasses.replace(loop.rounds, asynchronous=ahead)
    StepClock(loop, monkeypatch)
    found = admission.measure_admission(loop, 20, 300)
    assert found.round == 1 and found.chunks == [10] * 5 and found.first_token_alone == 50
    # five chunks, and a round before the first one and between two
    assert found.gap == 11 and found.first_token in (54, 55)
    assert not loop.has_work()
    loop.scheduler.check()


def test_a_scheduler_that_starves_the_streams_shows(monkeypatch):
    loop = admission_loop()
    scheduler, fair = loop.scheduler, loop.scheduler.next_step

    def prompts_first():
        step = fair()
        waiting = [sequence for sequence in scheduler.running if not sequence.is_prefilled]
        if isinstance(step, RoundStep) and waiting:
            scheduler._last_was_prefill = False
            step = fair()
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
            assert row["largest_gap_ms"] >= row["round_ms"] > 0 and row["first_token_ms"] > row["chunk_ms"] > 0
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
    def run(loop, prompts, num_tokens, seed):
        asked.append((len(prompts), num_tokens))
        return run_batch(loop, prompts, num_tokens, seed)

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


def oracle_loop(depth=3, prompts=()):
    """With drafts from the known text of these prompts."""
    loop = EngineLoop(make_engine("moe", depth=depth, max_num_seqs=4, num_pages=20))
    texts = run_batch(EngineLoop(make_engine("moe", depth=0)), prompts, 60, 0).texts
    state = loop.runner.state
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
    if depth:
        loop.runner.state.oracle.rates.fill_(1.0)
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
    loop = EngineLoop(device_engine("moe", depth))
    state, slots = loop.runner.state, loop.rounds.body.buffers.slots
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
    assert command.main([str(folder), *ARGS, "--profile"]) == 1
    assert "profile: want a CUDA device" in capsys.readouterr().err


def test_a_profile_s_kernels_are_shown_with_their_share_and_number():
    traced = profile.summary([(0.0, 30.0, "products"), (40.0, 100.0, "experts")], 1) | {
        "driver_calls": [{"name": "cudaStreamSynchronize", "us": 25.0, "calls": 5.0}]
    }
    row = {
        "kind": "round", "k": 3, "batch": 4, "context": 64, "resident_bytes": 1, "packed_bytes": 1, "synthetic": False,
        "prefill_scratch_bytes": 0,
        "start_seconds": {}, "num_graphs": 0, "profile": {"round": traced, "prompt": traced},
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in show([row])]
    kernels = [
        "60.0 us 60.0% 1.0 of 60.00 us experts",
        "30.0 us 30.0% 1.0 of 30.00 us products",
        "25.0 us 25.0% 5.0 of 5.00 us cudaStreamSynchronize",
    ]
    whole = "2 launches, 0.100 ms from first to last, idle 10.0%"
    at = lines.index(f"a round at k = 3, batch 4, context 64: {whole}")
    assert lines[at + 1 : at + 4] == kernels
    assert lines[at + 4 : at + 8] == [f"a prompt of 64 tokens at k = 3: {whole}", *kernels]


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
