"""`pilotfish acceptance`: figures of several texts as one, tables, and the command on a model."""

import json

import pytest

from pilotfish.deploy import acceptance
from pilotfish.deploy.acceptance import TextAcceptance, cost_lines, text_row, text_table
from pilotfish.engine.check.cost_table import Cost
from pilotfish.engine.check.teacher_forcing import Agreement

T, F = True, False


def test_places_and_rounds_of_several_texts_are_added_up():
    one = Agreement([[T, T]] * 6, trunk_top1=0.5)
    other = Agreement([[F, T]] * 2, trunk_top1=1.0)
    row = text_row("all", [one, other], [1, 2])
    assert row.tokens == 8 and row.trunk_top1 == pytest.approx((6 * 0.5 + 2 * 1.0) / 8)
    assert row.agreement == pytest.approx((6 / 8, 1.0))
    # k = 1: three rounds of 2, two of 1; k = 2: two rounds of 3, two of 1
    assert row.lengths == pytest.approx({1: 8 / 5, 2: 8 / 4})


def test_tables():
    text = TextAcceptance("all", 8, 0.62, (0.75, 1.0), {1: 1.6, 2: 2.0})
    first, second, legend = text_table([text], [1, 2]).splitlines()
    assert first.split() == ["text", "places", "trunk", "draft", "1", "draft", "2", "k", "=", "1", "k", "=", "2"]
    assert second.split() == ["all", "8", "62%", "75%", "100%", "1.60", "2.00"] and "tokens a round" in legend
    _, row, legend = cost_lines([Cost(2, 4, 256, seconds=0.03, plain_seconds=0.02)], text).splitlines()
    assert "break-even: tokens that it must commit to gain" in legend
    assert row.split() == ["2", "4", "256", "20.00", "ms", "30.00", "ms", "1.50", "2.00", "1.33"]


@pytest.mark.parametrize(
    ("args", "words"),
    [(["m", "--k", "0,1"], "in 1..8"), (["m", "--k", "9"], "in 1..8"), (["m", "--k", "x"], "got x"), ([], "MODEL")],
)
def test_wrong_flags_are_explained(args, words, capsys):
    with pytest.raises(SystemExit):
        acceptance.parse(args)
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.support.tiny_models import build_tiny

    return build_tiny(_with_tokenizer(tmp_path_factory.mktemp("tiny")), "dense")


def _with_tokenizer(folder):
    """Bytes as tokens, ids within the tiny models' vocabulary."""
    import sys
    from pathlib import Path

    support = str(Path(__file__).resolve().parents[2] / "support")
    sys.path.append(support)
    try:
        from byte_model import write_model
    finally:
        sys.path.remove(support)
    return write_model(folder)


def test_a_model_is_measured(model, tmp_path, capsys):
    """A random head agrees with a random trunk on nothing, so nothing pays."""
    note = tmp_path / "note.txt"
    note.write_text("def add(a, b):\n    return a + b\n" * 4)
    file = tmp_path / "figures.json"
    flags = ["--k", "1,2", "--max-tokens", "60", "--batch", "1,2", "--contexts", "40", "--num-threads", "1", "--quiet"]
    assert acceptance.main([str(model), "--text", "code", str(note), *flags, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert [text["name"] for text in report["texts"]] == ["code", str(note), "all"]
    assert [text["places"] for text in report["texts"]] == [57, 57, 114]
    whole = report["texts"][-1]
    assert len(whole["agreement"]) == 2 and set(whole["acceptance_length"]) == {"1", "2"}
    assert 1.0 <= whole["acceptance_length"]["1"] <= whole["acceptance_length"]["2"] < 1.5
    assert [(c["k"], c["sequences"]) for c in report["costs"]] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    for cost in report["costs"]:
        ratio = cost["round_seconds"] / cost["plain_round_seconds"]
        assert cost["break_even_acceptance_length"] == pytest.approx(ratio)
    assert said.count("\n") == 4 + 1 + 1 + 1 + 4 + 1 and "break-even" in said


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (None, [], "nowhere.txt: want a file, or one of essay, code, prose, chinese: "),
        ("abc", ["--k", "8"], "want at least 10 tokens, got 3"),
        ("abc " * 600, ["--max-tokens", "4000"], "--max-tokens: want at most 2044 for this model, got a text of 2400"),
    ],
)
def test_a_text_that_cannot_be_used_is_told_before_the_work(model, tmp_path, capsys, text, flags, words):
    file = tmp_path / ("there.txt" if text else "nowhere.txt")
    if text:
        file.write_text(text)
    assert acceptance.main([str(model), "--text", str(file), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_checkpoint_without_a_head(tmp_path, capsys):
    from tests.support.tiny_models import build_tiny

    folder = tmp_path / "plain"
    folder.mkdir()
    bare = build_tiny(_with_tokenizer(folder), "dense", mtp=False)
    assert acceptance.main([str(bare), "--text", "code", "--no-cost"]) == 2
    assert "no head to measure" in capsys.readouterr().err
