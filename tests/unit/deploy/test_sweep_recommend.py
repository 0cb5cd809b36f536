"""The recommendation on planted cells, and the report that carries it."""

import pytest

from pilotfish.deploy.sweep import plots
from pilotfish.deploy.sweep.recommend import acceptance, long_figures, rate_at, recommend, single_rate
from pilotfish.deploy.sweep.records import Cell, Measurement, SweepSettings
from pilotfish.deploy.sweep.report import markdown

SETTINGS = SweepSettings(
    model="/models/a b", domains=("code", "prose"), concurrency=(2, 8), server_flags=("--dtype", "auto")
)


def one(kind, rate, concurrency=1, domain="code", **fields):
    base = {"path": "completions", "via": "direct", "context": 100, "completion_tokens": 100, "seconds": 100 / rate}
    base |= {"first_token_seconds": 0.1, "slowest_seconds": 100 / rate}
    return Measurement(kind=kind, tokens_per_second=rate, concurrency=concurrency, domain=domain, **(base | fields))


def cell(k, size, at_8, single=100.0, prose=None, accepted=0):
    ones = [one("single", single, drafts=50 if k else 0, drafted=50 * k, accepted=accepted)]
    ones += [one("single", single if prose is None else prose, domain="prose")]
    ones += [one("concurrent", at_8 / 2, 2, "mixed"), one("concurrent", at_8, 8, "mixed")]
    return Cell(k=k, max_num_seqs=size, measurements=tuple(ones))


def test_the_most_tokens_at_the_largest_concurrency_win():
    cells = [cell(0, 8, 300), cell(3, 4, 500, accepted=100), cell(5, 2, 400)]
    advice = recommend(cells, SETTINGS)
    assert (advice.cell.k, advice.cell.max_num_seqs, advice.concurrency) == (3, 4, 8)
    assert advice.reasons[0] == "500.0 tokens/s with 8 requests at once, the most of all cells."
    assert advice.reasons[1] == "1.67 times the best cell at k = 0 (300.0)."
    assert advice.reasons[2] == "Acceptance length 3.00 of at most 4 on single streams."
    assert advice.command == ("pilotfish serve '/models/a b' --num-speculative-tokens 3 --max-num-seqs 4 --dtype auto")


def test_among_equals_the_faster_single_stream_then_the_smaller_k():
    cells = [cell(2, 4, 500, 90), cell(3, 4, 490, 130), cell(5, 4, 495, 128), cell(1, 4, 300, 200)]
    assert recommend(cells, SETTINGS).cell.k == 3
    assert "within 3% of the most (500.0)" in recommend(cells, SETTINGS).reasons[0]


def test_plain_decoding_may_win_and_is_then_said_to():
    advice = recommend([cell(0, 8, 600), cell(3, 4, 500)], SETTINGS)
    assert advice.cell.k == 0
    assert "Speculation does not pay here: the best cell with drafts gives 500.0." in advice.reasons


def test_what_is_worse_elsewhere_is_warned_of():
    cells = [cell(0, 8, 300, 100, prose=80), cell(3, 4, 500, 150, prose=60), cell(5, 1, 200, 300, prose=200)]
    reasons = recommend(cells, SETTINGS).reasons
    assert any("For one stream alone k = 5 with --max-num-seqs 1 decodes faster" in reason for reason in reasons)
    assert "On prose plain decoding is faster: 80.0 against 60.0 tokens/s." in reasons
    assert not any("On code" in reason for reason in reasons)


def test_another_concurrency_may_be_asked_for():
    cells = [cell(0, 8, 600, 50), cell(3, 1, 300, 150)]
    assert recommend(cells, SETTINGS, 8).cell.k == 0
    assert recommend(cells, SETTINGS, 1).cell.k == 3


def test_failed_cells_and_none_at_all():
    failed = Cell(k=3, max_num_seqs=4, error="no head")
    assert recommend([failed, cell(0, 8, 300)], SETTINGS).cell.k == 0
    assert recommend([failed], SETTINGS) is None


def test_acceptance_adds_counts_before_it_divides():
    ones = (
        one("single", 10, drafts=10, drafted=30, accepted=30),
        one("single", 10, drafts=90, drafted=270, accepted=0),
    )
    assert acceptance(Cell(k=3, max_num_seqs=1, measurements=ones)) == pytest.approx(1.3)
    assert acceptance(Cell(k=0, max_num_seqs=1)) is None


def test_what_went_through_the_relay_is_not_mixed_in():
    ones = (one("single", 100), one("single", 10, via="relay"))
    mixed = Cell(k=3, max_num_seqs=1, measurements=ones)
    assert single_rate(mixed) == 100 and rate_at(mixed, 1) == pytest.approx(100)


def whole():
    cells = [cell(0, 1, 100), cell(0, 4, 300), cell(3, 1, 200, accepted=100), cell(3, 4, 500, accepted=100)]
    long = (one("long", 40, context=3000, domain="mixed"), one("long", 20, context=12000, domain="mixed"))
    cells = [Cell(k=c.k, max_num_seqs=c.max_num_seqs, measurements=c.measurements + long) for c in cells]
    return [*cells, Cell(k=9, max_num_seqs=4, error="want 0..8 | got 9")]


def test_the_report_has_the_advice_first_and_every_table_is_square():
    cells = whole()
    text = markdown(cells, SETTINGS, recommend(cells, SETTINGS), {"machine": "x"}, ["a.png"])
    assert text.index("## Recommended: k = 3, --max-num-seqs 4") < text.index("## 2 requests at once")
    assert "| 3 | 200.0 (0.5 s) | 500.0 (0.2 s) |" in text
    assert "![a.png](a.png)" in text and "want 0..8 \\| got 9" in text
    for block in text.split("\n\n"):
        lines = [line.replace("\\|", "") for line in block.splitlines()]
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1, block


def test_a_report_of_nothing_says_so():
    assert "nothing was measured" in markdown([], SETTINGS, None, {})


@pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed (extra `plots`)")
def test_pictures_are_drawn_and_small(tmp_path):
    names = plots.draw(whole(), SETTINGS, 4, tmp_path)
    assert names == ["sweep-speed.png", "sweep-domains.png", "sweep-context.png"]
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 120_000
    assert plots.draw([Cell(k=0, max_num_seqs=1, error="x")], SETTINGS, 1, tmp_path) == []


def test_figures_of_repeats_are_medians():
    ones = tuple(one("concurrent", rate, 8, "mixed") for rate in (100, 10, 120))
    ones += tuple(one("long", rate, context=3000, first_token_seconds=rate / 10) for rate in (5, 50, 7))
    repeated = Cell(k=3, max_num_seqs=1, measurements=ones)
    assert rate_at(repeated, 8) == 100
    assert long_figures(repeated) == {3000: (7, 0.7)}


def test_a_busy_machine_is_named():
    cells = [Cell(k=0, max_num_seqs=1, busy_before=0.65, measurements=cell(0, 1, 100).measurements)]
    assert "Others used up to 65% of the processor" in recommend(cells, SETTINGS).reasons[-1]
    assert "| 65% |" in markdown(cells, SETTINGS, recommend(cells, SETTINGS), {})


def test_a_draw_with_plain_decoding_is_called_one():
    cells = [cell(0, 4, 500, single=80), cell(3, 4, 495, single=120)]
    advice = recommend(cells, SETTINGS)
    assert advice.cell.k == 3
    assert "No more than the best cell at k = 0 (500.0), but faster for one stream." in advice.reasons


def test_the_relay_has_columns_of_its_own():
    ones = (one("single", 100), one("single", 80, via="relay"), one("single", 90, path="chat"))
    cells = [Cell(k=3, max_num_seqs=1, measurements=ones)]
    text = markdown(cells, SETTINGS, recommend(cells, SETTINGS, 1), {})
    assert "| k | chat | completions | completions through the relay |" in text
    assert "| 3 | 90.0 (100 ms) | 100.0 (100 ms) | 80.0 (100 ms) |" in text
