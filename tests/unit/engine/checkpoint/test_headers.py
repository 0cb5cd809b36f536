"""The safetensors header reader against files that are broken or meant to break it."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from pilotfish.engine.checkpoint import headers
from pilotfish.engine.checkpoint.headers import fingerprint, read_header
from pilotfish.engine.errors import HeaderError

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, data=b"\0" * 24, length=None):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(body) if length is None else length).to_bytes(8, "little") + body + data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_writes(path):
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.0),
        "fp8": torch.zeros(2, 2).to(torch.float8_e4m3fn),
        "flag": torch.zeros(7, dtype=torch.bool),
        "packed": torch.zeros(2, 8, dtype=torch.uint8),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    shapes = {name: (info.dtype, info.shape, info.num_bytes) for name, info in header.tensors.items()}
    assert shapes == {
        "a": ("BF16", (3, 5), 30),
        "empty": ("F32", (0, 4), 0),
        "scalar": ("F32", (), 4),
        "fp8": ("F8_E4M3", (2, 2), 4),
        "flag": ("BOOL", (7,), 7),
        "packed": ("U8", (2, 8), 16),
    }
    assert max(info.end for info in header.tensors.values()) == path.stat().st_size


def test_follows_a_symbolic_link(path, tmp_path):
    target = write(tmp_path / "blob", {"a": ENTRY})
    path.symlink_to(target)
    assert read_header(path).tensors["a"].shape == (2, 3)


def test_offsets_are_counted_from_the_start_of_the_file(path):
    write(path, {"a": ENTRY}, bytes(range(24)))
    info = read_header(path).tensors["a"]
    assert path.read_bytes()[info.start : info.end] == bytes(range(24))


def test_reads_only_the_header(path):
    """A sparse file of 1 TB costs nothing."""
    size = 1 << 40
    write(path, {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, b"")
    os.truncate(path, path.stat().st_size + size)
    assert read_header(path).tensors["a"].num_bytes == size


def entry(**change):
    return {"a": ENTRY | change}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "begins with"),
        (b"\xff\xfe{}", "begins with"),
        (b'{"a": \xff}', "not acceptable JSON"),
        (b"{" + b'"a":[' * 50_000, "not acceptable JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not acceptable JSON"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' occurs twice"),
        ({"__metadata__": {"format": 1}}, "strings to strings"),
        ({"__metadata__": []}, "strings to strings"),
        ({"a": 1}, "a: want exactly dtype, shape and data_offsets"),
        ({"a": ENTRY | {"more": 1}}, "want exactly dtype"),
        ({"a": {"dtype": "F32", "shape": []}}, "want exactly dtype"),
        ({"": ENTRY}, "want printable names"),
        ({"a\nb": ENTRY}, "want printable names"),
        ({"a\x1b[31m": ENTRY}, "want printable names"),
        ({"a" * 513: ENTRY}, "want printable names"),
        (entry(dtype="F33"), "unknown dtype 'F33'"),
        (entry(dtype=["F32"]), "unknown dtype"),
        (entry(shape=6), "want a shape"),
        (entry(shape=[2, -3]), "want a shape"),
        (entry(shape=[2, 3.0]), "want a shape"),
        (entry(shape=[True, 6]), "want a shape"),
        (entry(shape=[1 << 48]), "want a shape"),
        (entry(shape=[1] * 9), "want a shape of at most 8"),
        (entry(data_offsets=[0]), "want data_offsets"),
        (entry(data_offsets=[24, 0]), "want data_offsets"),
        (entry(data_offsets=[-1, 23]), "want data_offsets"),
        (entry(data_offsets="ab"), "want data_offsets"),
        (entry(data_offsets=[0, 23]), r"F32 \[2, 3\] takes 24 bytes, its offsets span 23"),
        (entry(shape=[1 << 40, 1 << 40, 1 << 40]), "its offsets span 24"),
        (entry(dtype="F4", shape=[3], data_offsets=[0, 2]), r"takes 1.5 bytes"),
        (entry(shape=[5], data_offsets=[4, 24]), "leaves a gap after the header"),
        (entry(data_offsets=[1 << 40, (1 << 40) + 24]), "ends at byte"),
        ({"a": ENTRY, "b": ENTRY}, "b overlaps a"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [20, 44]}}, "b ends at byte|b overlaps a"),
        ({}, "24 bytes after the last tensor"),
        (entry(shape=[5], data_offsets=[0, 20]), "4 bytes after the last tensor"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, str) else "",
)
def test_refuses_hostile_headers(path, header, message):
    with pytest.raises(HeaderError, match=message) as caught:
        read_header(write(path, header))
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_refuses_truncated_data(path):
    with pytest.raises(HeaderError, match="ends at byte"):
        read_header(write(path, {"a": ENTRY}, b"\0" * 23))


@pytest.mark.parametrize("content", [b"", b"\0" * 7], ids=["empty", "short"])
def test_refuses_files_without_a_length(path, content):
    path.write_bytes(content)
    with pytest.raises(HeaderError, match="want at least 8 bytes" if content else "empty"):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 10_000, 1 << 63, (1 << 64) - 1])
def test_refuses_lengths_outside_the_file(path, length):
    with pytest.raises(HeaderError, match="want a header length"):
        read_header(write(path, {"a": ENTRY}, length=length))


def test_refuses_headers_above_the_limit(path, monkeypatch):
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 16)
    with pytest.raises(HeaderError, match="want a header length"):
        read_header(write(path, {"a": ENTRY}))


@pytest.mark.parametrize(
    "bomb",
    [b'{"a":[' + b"0," * 10_000 + b"0]}", b'{"a":[' + b"[]" * 3000 + b"]}", b"{" + b'"a":1,' * 3000 + b'"b":1}'],
    ids=["numbers", "lists", "keys"],
)
def test_a_header_with_too_much_in_it_is_not_parsed(path, monkeypatch, bomb):
    monkeypatch.setattr(headers, "MAX_TENSORS", 500)
    monkeypatch.setattr(headers.json, "loads", None)
    with pytest.raises(HeaderError, match="want a header of at most 500 tensors"):
        read_header(write(path, bomb))


def test_as_many_tensors_as_may_be_are_read(path, monkeypatch):
    monkeypatch.setattr(headers, "MAX_TENSORS", 2000)
    monkeypatch.setattr(headers, "MARKS_TO_SPARE", 1)  # the outer brace
    shape = [1] * headers.MAX_DIMS
    many = {f"a.{n}": {"dtype": "U8", "shape": shape, "data_offsets": [n, n + 1]} for n in range(2000)}
    assert len(read_header(write(path, many, bytes(2000))).tensors) == 2000


def test_refuses_what_is_no_file(path, tmp_path):
    os.mkfifo(path)  # opening it would wait for ever
    (tmp_path / "folder").mkdir()
    for what in (path, tmp_path / "folder", tmp_path / "absent"):
        with pytest.raises(HeaderError, match="want a regular file"):
            read_header(what)


def test_fingerprint_is_that_of_header_and_size(tmp_path):
    """Not of the tensors: those are looked at when they are read."""
    path = write(tmp_path / "model.safetensors", {"a": ENTRY})
    first = read_header(path).tensors["a"].fingerprint
    assert fingerprint(path) == first
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert fingerprint(path) == first
    path.write_bytes(raw + b"\0")
    assert fingerprint(path) != first
    path.write_bytes(raw.replace(b'"a"', b'"b"'))
    assert fingerprint(path) != first
    path.write_bytes(raw[:20])
    with pytest.raises(HeaderError):
        fingerprint(path)
