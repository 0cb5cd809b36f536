"""`pilotfish bench --conversation`: what turns must read, what fails, and what is shown of it."""

import pytest

from pilotfish.deploy.sweep import plots
from pilotfish.engine.bench import command, picture
from pilotfish.engine.bench.complaints import complaints
from pilotfish.engine.bench.conversation import Conversation, required_reads
from pilotfish.engine.bench.show import TURN_COLUMNS, TURN_LEGEND, show
from pilotfish.engine.cache.grid import Grid


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
        "prefill_scratch_bytes": 0, "start_seconds": {}, "num_graphs": 0, "synthetic": False,
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


def test_a_picture_wants_a_conversation_and_matplotlib(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["model", "--picture", "x.png"])
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    assert command.main(["model", "--conversation", "--picture", str(tmp_path / "x.png")]) == 2
    assert "pilotfish[plots]" in capsys.readouterr().err
