"""The comparison of long texts passes on a sound engine, and names the first token that differs in another."""

import re
from pathlib import Path

import pytest

from pilotfish.engine.bench.measure import random_prompts
from pilotfish.engine.config import ModelConfig
from pilotfish.kernels.linear import TILE_ROWS, Linear
from tests.gpu import long_comparison
from tests.gpu.long_comparison import LONGEST, first_of, main, make_requests, read_prompts, shares
from tests.support.tiny_models import TWO_LAYERS, build_tiny

DEMO = Path(__file__).parents[3] / "demo" / "model"
PROMPTS = [prompt for length in (3, 9, 5) for prompt in random_prompts(2, length, 64)]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command on a tiny model: its exit status and what it printed."""
    folder = build_tiny(tmp_path / "moe", "moe", max_position_embeddings=320, **TWO_LAYERS)
    monkeypatch.setattr(long_comparison, "read_prompts", lambda *_: PROMPTS)

    def command(*more):
        status = main([str(folder), "--device", "cpu", "--tokens", "600", "--k", "0,3", "--batch", "1,3", *more])
        return status, capsys.readouterr().out.splitlines()

    return command


def test_a_sound_engine_passes_and_every_token_is_counted(run):
    status, (_, *lines, last) = run()
    assert status == 0 and last.startswith("PASS: ")
    found = [
        re.match(r"(k = \d, batch \d)  ok +(\d+) tokens of (\d+) requests, \d+ rounds of up to (\d)", x) for x in lines
    ]
    assert [match[1] for match in found] == [f"k = {k}, batch {b}" for k in (0, 3) for b in (1, 3)]
    tokens, requests, at_once = ([int(match[n]) for match in found] for n in (2, 3, 4))
    assert tokens[:2] == tokens[2:] and tokens[1] > 2 * tokens[0] and sum(tokens) >= 600
    assert at_once == [1, 3] * 2
    assert f"{sum(tokens)} tokens in " in last
    assert last.endswith(f": {requests[0]} by k = 0, batch 1, {requests[1] - requests[0]} by k = 0, batch 3")


def test_a_row_that_depends_on_the_number_of_rows_is_named(run, monkeypatch):
    real = Linear.rows
    monkeypatch.setattr(Linear, "rows", lambda self, x: real(self, x) * (1 + (x.shape[0] > TILE_ROWS) / 2))
    status, lines = run()
    assert status == 1 and lines[-1].startswith("FAIL: ")
    wrong = [number for number, line in enumerate(lines) if re.match(r"k = \d, batch \d +FAIL", line)]
    # 3 sequences of 4 rows are more than a tile
    assert [lines[number][:14] for number in wrong] == ["k = 3, batch 3"]
    named = r"    k = 3, batch 3: request \d+-(greedy|sampled), token \d+: \d+, but \d+ at k = 0, batch [13]"
    assert re.fullmatch(named, lines[wrong[0] + 1])


def test_requests_fit_the_demo_model_and_half_of_them_are_sampled():
    prompts = read_prompts(DEMO.parent / "prompts", DEMO)
    parts = shares(1_000_000, (0, 3, 8), (1, 5, 16))
    assert 1_000_000 <= 3 * sum(parts.values()) < 1_000_010
    requests = make_requests(prompts, parts[16], 16)
    lengths = [request.sampling.max_tokens for request in requests]
    assert min(lengths) >= 500 and max(lengths) <= LONGEST and sum(lengths) >= parts[16]
    assert max(map(len, prompts)) + LONGEST < ModelConfig.load(DEMO).max_position_embeddings
    sampled = [request for request in requests if request.sampling.temperature > 0]
    assert abs(2 * len(sampled) - len(requests)) <= 1
    # the same prompt is greedy once, and sampled once
    assert len({(tuple(r.prompt_token_ids), r.sampling.temperature > 0) for r in requests}) == len(requests)
    assert first_of(requests, parts[1], 1) == requests[: len(first_of(requests, parts[1], 1))]
    assert len(first_of(requests, 1, 16)) == 16
