"""Outputs are looked at before work begins: by the helper, and by every command that writes one."""

from __future__ import annotations

import errno
import os
import re
import stat

import pytest

from pilotfish.engine.command_line.output import check_file, check_folder, write_file
from pilotfish.engine.errors import OptionError
from pilotfish.server import cli


def only(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    file = tmp_path / "there.json"
    file.write_bytes(b"kept")
    check_file(file, "--json")
    check_file(tmp_path / "new.json", "--json")
    check_folder(tmp_path, "--out")
    check_folder(tmp_path / "new" / "deeper", "--out")
    check_file(None, "--json")
    check_folder(None, "--out")
    check_file(tmp_path / os.devnull, "--json")
    assert only(tmp_path) == ["there.json"] and file.read_bytes() == b"kept"


def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match=r"--json .*pipe: cannot be written: No such device or address"):
        check_file(tmp_path / "pipe", "--json")


@pytest.mark.parametrize(
    ("check", "place", "message"),
    [
        (check_file, ".", "is a folder; want a file"),
        (check_file, "absent/x.json", "there is no folder .*absent"),
        (check_file, "file/x.json", "(.*file is a file; want a folder|cannot be written: Not a directory)"),
        (check_file, "x" * 300, "cannot be written: File name too long"),
        (check_folder, "file", "is a file; want a folder"),
        (check_folder, "file/deeper/x", "(.*file is a file; want a folder|cannot be written: Not a directory)"),
        (check_folder, "x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_wrong_path_is_named(tmp_path, check, place, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=f"--flag {re.escape(str(tmp_path / place))}: {message}") as caught:
        check(tmp_path / place, "--flag")
    assert "\n" not in str(caught.value) and only(tmp_path) == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("there", [False, True])
def test_what_the_system_says_is_told_and_nothing_is_left(tmp_path, monkeypatch, number, there):
    """A full disk shows when bytes reach it, and what was there stays as it was."""
    file = tmp_path / "x.json"
    if there:
        file.write_bytes(b"kept")

    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OptionError, match=f"--json {file}: cannot be written: {os.strerror(number)}"):
        check_file(file, "--json")
    with pytest.raises(OptionError, match=f"--out .*: cannot be written: {os.strerror(number)}"):
        check_folder(tmp_path / "new", "--out")
    assert only(tmp_path) == (["x.json"] if there else [])
    assert not there or file.read_bytes() == b"kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    for check in (check_file, check_folder):
        with pytest.raises(OptionError, match="Permission denied"):
            check(tmp_path / "x", "--flag")


def test_a_write_that_fails_after_all_is_one_line(tmp_path):
    with pytest.raises(OptionError, match="--json /dev/full: cannot be written: No space left on device"):
        write_file(type(tmp_path)("/dev/full"), "x" * 100_000, "--json")


COMMANDS = {
    "train-head": ["MODEL", "--text", "TEXT", "--out", "FOLDER"],
    "train-head --cache": ["MODEL", "--text", "TEXT", "--out", "head", "--cache", "FOLDER"],
    "sweep": ["MODEL", "--out", "FOLDER"],
    "gate": ["MODEL", "--json", "FILE"],
    "gate --log": ["MODEL", "--log", "FOLDER/server.log"],
    "eval": ["MODEL", "--client", "own", "--json", "FILE"],
    "bench": ["MODEL", "--json", "FILE"],
    "acceptance": ["MODEL", "--json", "FILE"],
    "draft-vocab": ["MODEL", "--text", "TEXT", "--size", "8", "--out", "FILE"],
    "quantize": ["MODEL", "FOLDER/out"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_looks_at_its_output_first(tmp_path, monkeypatch, capsys, command):
    """Before the model, which is not there either, and so before any work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    names = {"MODEL": "absent", "TEXT": "absent.txt", "FOLDER": "taken", "FILE": "nowhere/x.json"}
    argv = [re.sub("MODEL|TEXT|FOLDER|FILE", lambda found: names[found[0]], word) for word in COMMANDS[command]]
    assert cli.main([command.split()[0], *argv]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and re.search(r"taken|nowhere/x\.json", said.err) and "absent" not in said.err
    assert only(tmp_path) == ["taken"]
