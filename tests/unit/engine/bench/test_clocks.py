"""Clocks and power beside timed rounds, by a program that prints what nvidia-smi prints."""

from __future__ import annotations

import json
import sys
from time import perf_counter, sleep

import pytest
import torch

from pilotfish.engine.bench import command
from pilotfish.engine.bench.clocks import Clocks
from pilotfish.engine.errors import OptionError
from tests.support.tiny_models import build_tiny

PRINTS = """
import itertools, time
for number in itertools.count():
    print(("1980, 700.5", "[N/A], 700.0", "1200, 100.0", "1980, 702.5")[number % 4], flush=True)
    time.sleep(0.002)
"""


def fake() -> Clocks:
    return Clocks([sys.executable, "-c", PRINTS])


def test_samples_are_taken_while_it_is_entered_and_medians_are_of_their_time():
    clocks, before = fake(), perf_counter()
    with clocks:
        until = perf_counter() + 30
        while len(clocks.between(before, perf_counter())) == 0 and perf_counter() < until:
            sleep(0.01)
        sleep(0.3)
    end = perf_counter()
    found = clocks.between(before, end)
    assert found["clock_mhz"] == 1980 and 100 <= found["power_w"] <= 702.5
    sleep(0.05)
    assert clocks.between(end, perf_counter()) == {} == clocks.between(0.0, before)


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
def test_its_program_ends_with_what_fails_beside_it(error):
    clocks = fake()
    with pytest.raises(error), clocks:
        raise error
    assert clocks._process is not None and clocks._process.poll() is not None


def test_without_a_gpu_it_is_refused(tmp_path, capsys):
    with pytest.raises(OptionError, match="clocks: want a CUDA device and nvidia-smi"):
        Clocks.of(torch.device("cpu"))
    folder = build_tiny(tmp_path / "moe", "moe")
    assert command.main([str(folder), "--device", "cpu", "--clocks"]) == 2
    assert "clocks: want a CUDA device" in capsys.readouterr().err


def test_rows_say_the_clock_and_power_of_their_timed_rounds(tmp_path, monkeypatch, capsys):
    class Slow(Clocks):
        def __enter__(self) -> Clocks:
            entered = super().__enter__()
            # until its program runs: rounds of so small a model are done sooner
            while not self._samples:
                sleep(0.01)
            return entered

    monkeypatch.setattr(command.Clocks, "of", lambda device: Slow([sys.executable, "-c", PRINTS]))
    folder, out = build_tiny(tmp_path / "moe", "moe"), tmp_path / "rows.jsonl"
    flags = ["--device", "cpu", "--context", "20", "--tokens", "200", "--k", "0", "--json", str(out), "--clocks"]
    assert command.main([str(folder), *flags]) == 0
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert 1200 <= row["clock_mhz"] <= 1980 and 100 <= row["power_w"] <= 702.5
    shown = " ".join(capsys.readouterr().out.split())
    assert " MHz W " in shown and "MHz: the card's clock in timed rounds, median" in shown
