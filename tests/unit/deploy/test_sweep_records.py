"""What a sweep writes: whole files, resumable folders, one line a measurement."""

import msgspec
import pytest

from pilotfish.deploy.sweep.records import (
    COLUMNS,
    Cell,
    Folder,
    Measurement,
    SettingsDiffer,
    SweepSettings,
    merged,
    tsv,
    write,
)

SETTINGS = SweepSettings(model="m", domains=("code",))


def measurement(**fields):
    base = {"kind": "single", "path": "completions", "via": "direct", "domain": "code", "concurrency": 1, "context": 9}
    base |= {"completion_tokens": 10, "seconds": 2.0, "tokens_per_second": 5.0}
    base |= {"first_token_seconds": 0.5, "slowest_seconds": 2.0}
    return Measurement(**(base | fields))


def test_a_cell_comes_back_as_it_was_written(tmp_path):
    folder = Folder(tmp_path, SETTINGS)
    cell = Cell(k=3, max_num_seqs=4, measurements=(measurement(drafts=4, drafted=12, accepted=6),), notes=("n",))
    folder.add(cell)
    assert Folder(tmp_path, SETTINGS).cells() == [cell]
    assert (tmp_path / "cells" / "k3-mns4.json").exists()


def test_only_whole_cells_are_done_and_failed_ones_are_tried_again(tmp_path):
    folder = Folder(tmp_path, SETTINGS)
    folder.add(Cell(k=0, max_num_seqs=1))
    folder.add(Cell(k=3, max_num_seqs=1, error="no head"))
    # what a killed run leaves behind: a file that never got its name
    (tmp_path / "cells" / ".k5-mns1.json.new").write_text("{")
    assert folder.done() == {"k0-mns1"}


def test_cells_come_in_order_of_numbers(tmp_path):
    folder = Folder(tmp_path, SETTINGS)
    for k, size in ((10, 1), (2, 16), (2, 4), (0, 1)):
        folder.add(Cell(k=k, max_num_seqs=size))
    assert [(cell.k, cell.max_num_seqs) for cell in folder.cells()] == [(0, 1), (2, 4), (2, 16), (10, 1)]


def test_a_folder_of_another_sweep_is_refused_by_name(tmp_path):
    Folder(tmp_path, SETTINGS)
    with pytest.raises(SettingsDiffer, match="single_tokens: 384 there, 100 now"):
        Folder(tmp_path, msgspec.structs.replace(SETTINGS, single_tokens=100))


def test_a_file_is_whole_or_the_one_before(tmp_path):
    path = tmp_path / "deep" / "file"
    write(path, "one")
    write(path, "two")
    assert path.read_text() == "two" and [p.name for p in path.parent.iterdir()] == ["file"]


def test_acceptance_length_is_one_more_than_accepted_a_round():
    assert measurement(drafts=4, drafted=12, accepted=6).acceptance_length == 2.5
    assert measurement(drafts=0, drafted=0, accepted=0).acceptance_length is None
    assert measurement().acceptance_length is None


def test_every_line_of_the_table_has_every_column():
    cells = [Cell(k=0, max_num_seqs=1, measurements=(measurement(), measurement(drafts=2, drafted=6, accepted=3)))]
    head, *lines = tsv(cells).splitlines()
    assert head.split("\t") == list(COLUMNS)
    rows = [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]
    assert [row["acceptance_length"] for row in rows] == ["", "2.5"]
    assert rows[0]["drafts"] == "" and rows[0]["k"] == "0"


def test_runs_of_a_place_become_one_cell():
    cells = [
        Cell(k=1, max_num_seqs=2, start_seconds=4.0, busy_before=0.1, measurements=(measurement(number=1),)),
        Cell(k=1, max_num_seqs=2, run=1, error="it broke", notes=("lost",)),
        Cell(k=1, max_num_seqs=2, run=2, start_seconds=6.0, busy_before=0.4, measurements=(measurement(number=2),)),
        Cell(k=3, max_num_seqs=2, error="no head"),
        Cell(k=3, max_num_seqs=2, run=1, error="no head"),
    ]
    good, bad = merged(cells)
    assert [one.number for one in good.measurements] == [1, 2]
    assert (good.start_seconds, good.busy_before, good.error, good.notes) == (5.0, 0.4, None, ())
    assert (bad.k, bad.error) == (3, "no head")


def test_runs_have_files_of_their_own(tmp_path):
    folder = Folder(tmp_path, SETTINGS)
    for run in range(2):
        folder.add(Cell(k=1, max_num_seqs=2, run=run))
    assert folder.done() == {"k1-mns2", "k1-mns2-run1"}


def test_an_endpoints_failure_gives_way_to_its_cell(tmp_path):
    folder = Folder(tmp_path, SETTINGS)
    asked = Cell(k=None, max_num_seqs=None)
    assert asked.name == "endpoint"
    folder.replace(asked, msgspec.structs.replace(asked, error="refused"))
    folder.replace(asked, Cell(k=3, max_num_seqs=4))
    assert [cell.name for cell in folder.cells()] == ["k3-mns4"]
