"""`pilotfish bench --conversation`: what turns must read, what fails, and what is shown of it."""

import dataclasses
import json
from pathlib import Path

import pytest

from pilotfish.deploy.sweep import plots
from pilotfish.engine.bench import command, conversation, picture
from pilotfish.engine.bench.complaints import complaints
from pilotfish.engine.bench.conversation import Conversation, required_reads
from pilotfish.engine.bench.show import TURN_COLUMNS, TURN_LEGEND, show
from pilotfish.engine.cache.grid import Grid

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"


@pytest.mark.parametrize(("chunk", "page"), [(2048, 256), (256, 256), (512, 256), (64, 256), (96, 64)])
@pytest.mark.parametrize("growth", [1, 37, 546, 2048])
def test_what_must_be_read_is_what_lies_past_the_last_boundary_of_the_turn_before(chunk, page, growth):
    grid, lengths = Grid(chunk, page), Conversation(turns=9, system=700, growth=growth).lengths
    for turn, required in enumerate(required_reads(lengths, grid)):
        known = [end for end in range(1, lengths[turn - 1] + 1) if grid.is_boundary(end)] if turn else []
        assert required == lengths[turn] - max(known, default=0)


def test_the_session_of_an_agent():
    """50 turns from 6 k to 32 k, as docs/prefix-cache.md has them but for rounding."""
    lengths = Conversation(turns=50, system=5454, growth=546).lengths
    assert (lengths[0], lengths[-1], sum(lengths)) == (6000, 32754, 968850)
    assert sum(required_reads(lengths, Grid(2048, 256))) < sum(lengths) / 11


@pytest.mark.parametrize(
    ("every", "turns"), [(1, [0, 1, 2, 3, 4, 5]), (4, [0, 4, 5]), (5, [0, 5]), (9, [0, 5]), (0, [])]
)
def test_turns_that_are_read_cold(every, turns):
    conversation = Conversation(turns=6, system=1, growth=1, cold_every=every)
    assert [turn for turn in range(6) if conversation.is_cold(turn)] == turns


def row_of(**fields):
    row = {
        "kind": "turn", "k": 3, "turn": 2, "prompt": 900, "cached": 512, "read": 388, "required": 388,
        "first_token_ms": 10.0, "cold_read": 900, "cold_first_token_ms": 45.0, "resident_bytes": 1, "packed_bytes": 1,
        "prefill_scratch_bytes": 0, "start_seconds": {}, "num_graphs": 0, "synthetic": False, "num_compiled": 0,
    }  # fmt: skip
    return row | fields


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"read": 389, "cached": 511}, "389 tokens of 900 were read (want 388)"),
        # fewer are as wrong: something was shared that no boundary allows
        ({"read": 387, "cached": 513}, "387 tokens of 900 were read (want 388)"),
        ({"cached": 256}, "256 tokens are said to be cached (want 512)"),
        ({"num_compiled": 2}, "2 kernels compiled while it waited (want 0)"),
        ({"cold_read": 388}, "388 tokens were read cold (want 900)"),
    ],
)
def test_another_number_of_tokens_is_named_and_fails(fields, said, monkeypatch, capsys):
    found = complaints([row_of(**fields)])
    assert found == ([] if said is None else [f"k = 3, turn 2: {said}"])
    monkeypatch.setattr(command, "measure_all", lambda args: iter([row_of(**fields)]))
    assert command.main(["model", "--conversation"]) == (said is not None)
    assert (said or "") in capsys.readouterr().err


def test_the_table_explains_itself_and_adds_up():
    assert [title for _, title in TURN_COLUMNS] == list(TURN_LEGEND)
    lines = list(show([row_of(turn=1, cached=0, read=900, required=900), row_of()]))
    assert lines[0].split() == ["k", "turn", "prompt", "cached", "read", "required", "first", "ms", "cold", "ms"]
    total = "k = 3: 1800 tokens of prompts, 1288 read, 1288 required"
    assert f"{total}; first token of the last turn: 4.5 times as fast as cold" in lines


@pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed (extra `plots`)")
def test_a_picture_is_drawn_with_and_without_cold_turns(tmp_path):
    rows = [row_of(turn=1), row_of(turn=2)]
    del rows[0]["cold_first_token_ms"]
    picture.draw(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("flags", [["--admission", "9"], ["--profile"], ["--first-requests"], ["--prompts-once"]])
def test_what_is_about_batches_has_no_conversation(flags, capsys):
    with pytest.raises(SystemExit):
        command.main(["model", "--conversation", *flags])
    assert f"{flags[0]}: is about batches" in capsys.readouterr().err


def test_a_picture_wants_a_conversation_and_matplotlib(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["model", "--picture", "x.png"])
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    assert command.main(["model", "--conversation", "--picture", str(tmp_path / "x.png")]) == 2
    assert "pilotfish[plots]" in capsys.readouterr().err


ARGS = ["--conversation", "--turns", "3", "--system", "300", "--growth", "150", "--k", "3", "--num-threads", "1"]


def test_a_conversation_of_the_demo_model_reads_what_the_boundaries_leave(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert command.main([str(DEMO), *ARGS, "--cold-every", "2", "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["cached"], row["read"]) for row in rows] == [
        (450, 0, 450),
        (600, 256, 344),
        (750, 512, 238),
    ]
    assert ["cold_read" in row for row in rows] == [True, False, True]
    assert all(row["first_token_ms"] > 0 for row in rows)
    assert "1800 tokens of prompts, 1032 read, 1032 required" in capsys.readouterr().out


def test_a_conversation_that_is_read_anew_each_turn_fails(monkeypatch, capsys):
    monkeypatch.setattr(command, "NUM_SNAPSHOTS", 0)
    assert command.main([str(DEMO), *ARGS, "--cold-every", "0", "--turns", "2"]) == 1
    assert "k = 3, turn 2: 600 tokens of 600 were read (want 344)" in capsys.readouterr().err


def test_another_text_than_cold_gives_no_figures(monkeypatch, capsys):
    """A hit that changes the text is no figure's frame."""
    real = conversation.read

    def wrong(loop, prompt, whole, seed, salt):
        found = real(loop, prompt, whole, seed, salt)
        return dataclasses.replace(found, text=[*found.text[:-1], -1]) if salt == "cold 1" else found

    monkeypatch.setattr(conversation, "read", wrong)
    assert command.main([str(DEMO), *ARGS, "--cold-every", "1", "--turns", "2"]) == 1
    assert "turn 2: other text than the same prompt read cold" in capsys.readouterr().err
