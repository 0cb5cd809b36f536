"""Reading in pieces: every byte arrives where it belongs, whatever the file's order, and a changed file is told."""

from __future__ import annotations

import json
import os
import random
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from pilotfish.engine.checkpoint import stream as module
from pilotfish.engine.checkpoint.headers import TensorInfo, read_header
from pilotfish.engine.checkpoint.layouts import Layout, Module
from pilotfish.engine.checkpoint.stream import (
    ALIGNMENT,
    MAX_GAP,
    TORCH_DTYPES,
    StagedMemory,
    TensorPart,
    TensorPlace,
    cut,
    stream,
)
from pilotfish.engine.errors import CheckpointError

CPU = torch.device("cpu")
LIMIT = 64 << 10
ITEM_SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "F16": 2}


def part(info: TensorInfo, place: TensorPlace = TensorPlace.OWN, checked: bool = False) -> TensorPart:
    return TensorPart(
        Module(info.name, info.name, Layout.PLAIN, info.shape, info.dtype, {"": info}), "", info, place, checked
    )


def write_file(path: Path, shapes: list[tuple[str, tuple[int, ...]]], pad: int = 0) -> dict[str, bytes]:
    """A file of these dtypes and shapes, named 0, 1, ..; `pad` spaces end its header."""
    generator = np.random.default_rng(len(shapes))
    contents, header, end = {}, {}, 0
    for number, (dtype, shape) in enumerate(shapes):
        raw = generator.bytes(ITEM_SIZES[dtype] * int(np.prod(shape)))
        contents[str(number)] = raw
        header[str(number)] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    body = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(body).to_bytes(8, "little") + body + b"".join(contents.values()))
    return contents


def many_shapes(count: int = 300) -> list[tuple[str, tuple[int, ...]]]:
    """Of all dtypes and sizes: none, one number, odd ones, more than a piece."""
    choices = random.Random(0)
    dtypes = list(ITEM_SIZES)
    some = [
        (choices.choice(dtypes), (choices.choice([1, 3, 40]), choices.choice([1, 7, 64, 129]))) for _ in range(count)
    ]
    some[5], some[50], some[70] = ("F32", ()), ("BF16", (0, 4)), ("U8", (3 * LIMIT + 77,))
    some[90], some[91] = ("BF16", (2 * LIMIT, 3)), ("F32", (LIMIT // 4,))
    return some


def parts_of(path: Path) -> list[TensorPart]:
    """Every third one is left; places alternate."""
    kept = [info for number, info in enumerate(read_header(path).tensors.values()) if number % 3]
    places = [TensorPlace.SHARED, TensorPlace.OWN, TensorPlace.HOST, TensorPlace.OWN]
    return [part(info, places[i % 4] if info.num_bytes < LIMIT else TensorPlace.OWN) for i, info in enumerate(kept)]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", LIMIT)
    monkeypatch.setattr(module, "SMALLEST_PIECE", LIMIT)
    monkeypatch.setattr(module, "HUGE", LIMIT)


@pytest.fixture
def staged(monkeypatch, small_pieces):
    """The CPU, by way of buffers, as for a device with memory of its own."""
    monkeypatch.setattr(module, "HostMemory", lambda: StagedMemory(CPU, LIMIT))


def no_check(part: TensorPart, raw: memoryview) -> None:
    raise AssertionError(part.info.name)


def read(files: dict[Path, list[TensorPart]], check=no_check) -> dict[str, torch.Tensor]:
    with closing(stream(files, CPU, check)) as tensors:
        return {f"{part.info.file.name} {part.info.name}": tensor for part, tensor in tensors}


def assert_arrived(files: dict[Path, list[TensorPart]], contents: dict[Path, dict[str, bytes]]) -> None:
    got = read(files)
    assert list(got) == [f"{path.name} {part.info.name}" for path, parts in files.items() for part in parts]
    for path, parts in files.items():
        for some in parts:
            tensor = got[f"{path.name} {some.info.name}"]
            assert tensor.shape == some.info.shape and tensor.dtype == TORCH_DTYPES[some.info.dtype]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == contents[path][some.info.name]


@pytest.mark.parametrize("memory", ["small_pieces", "staged"])
@pytest.mark.parametrize("pad", [0, 1])
def test_every_byte_arrives(tmp_path, request, memory, pad):
    """Also of files whose numbers lie at odd addresses."""
    request.getfixturevalue(memory)
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    contents = {path: write_file(path, many_shapes(), pad) for path in paths}
    files = {path: parts_of(path) for path in paths}
    num_pieces = sum(len(list(cut(parts, (), LIMIT))) for parts in files.values())
    assert num_pieces > 2 * module.NUM_PIECES  # so that buffers are used again
    assert_arrived(files, contents)


def test_reads_that_stop_short_go_on(tmp_path, monkeypatch, small_pieces):
    """As network file systems may."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:5000]], at))
    path = tmp_path / "0.safetensors"
    contents = {path: write_file(path, many_shapes())}
    assert_arrived({path: parts_of(path)}, contents)


def test_more_tensors_than_one_call_takes(tmp_path):
    path = tmp_path / "0.safetensors"
    contents = {path: write_file(path, [("F32", (1,))] * (2 * module.MAX_BUFFERS + 5))}
    files = {path: [part(info, TensorPlace.HOST) for info in read_header(path).tensors.values()]}
    assert len(list(cut(files[path], (), LIMIT))) > 1 and len(list(cut(files[path], (), module.PIECE))) == 1
    assert_arrived(files, contents)


def test_pieces_cover_the_parts_in_order(tmp_path):
    path = tmp_path / "0.safetensors"
    write_file(path, many_shapes())
    parts = parts_of(path)
    pieces = list(cut(parts, (), LIMIT))
    spans = [span for piece in pieces for span in piece.spans]
    assert all(piece.size <= LIMIT and piece.size % ALIGNMENT == 0 for piece in pieces)
    assert all(len(piece.spans) > 0 for piece in pieces)
    for some in parts:
        own = [span for span in spans if span.part is some]
        assert [span.begin for span in own] == [sum(span.size for span in own[:i]) for i in range(len(own))]
        assert sum(span.size for span in own) == some.info.num_bytes and own[-1].is_last
        assert len(own) == 1 or some.place is TensorPlace.OWN
    order = [(span.part.info.start + span.begin, span.size) for span in spans]
    assert order == sorted(order)


def test_what_is_left_out_is_passed_over_if_large(tmp_path):
    path = tmp_path / "0.safetensors"
    write_file(path, [("U8", (9,)), ("U8", (MAX_GAP,)), ("U8", (9,)), ("U8", (MAX_GAP + 1,)), ("U8", (9,))])
    infos = list(read_header(path).tensors.values())
    pieces = list(cut([part(infos[i]) for i in (0, 2, 4)], (), LIMIT))
    assert [[span.part.info.name for span in piece.spans] for piece in pieces] == [["0", "2"], ["4"]]


def test_who_shares_memory(tmp_path):
    """Parts that say so with those of their piece, at whole multiples of the alignment; others lie by themselves."""
    path = tmp_path / "0.safetensors"
    write_file(path, [("U8", (100,))] * 6)
    infos = list(read_header(path).tensors.values())
    places = [
        TensorPlace.SHARED,
        TensorPlace.OWN,
        TensorPlace.SHARED,
        TensorPlace.HOST,
        TensorPlace.OWN,
        TensorPlace.HOST,
    ]
    got = list(read({path: [part(info, place) for info, place in zip(infos, places, strict=True)]}).values())
    storages = [tensor.untyped_storage() for tensor in got]
    pointers = [storage.data_ptr() for storage in storages]
    assert pointers[0] == pointers[2] and pointers[3] == pointers[5] and len(set(pointers)) == 4
    assert storages[1].nbytes() == storages[4].nbytes() == 100
    assert [tensor.storage_offset() for tensor in got] == [0, 0, ALIGNMENT, 0, 0, ALIGNMENT]


@pytest.mark.parametrize("memory", ["small_pieces", "staged"])
def test_checked_parts_are_shown_and_no_others(tmp_path, request, memory):
    request.getfixturevalue(memory)
    path = tmp_path / "0.safetensors"
    contents = write_file(path, [("U8", (LIMIT,))] * 3 + [("U8", (5,))] * 3)
    infos = list(read_header(path).tensors.values())
    shown: dict[str, list[bytes]] = {}

    def check(part: TensorPart, raw: memoryview) -> None:
        shown.setdefault(part.info.name, []).append(bytes(raw))

    read({path: [part(info, checked=info.name in ("1", "4")) for info in infos]}, check)
    assert set(shown) == {"1", "4"}
    assert sorted(shown["1"]) == sorted([contents["1"][:LIMIT]]) and shown["4"] == [contents["4"]]


def test_what_a_check_raises_is_raised_and_ends_the_threads(tmp_path, small_pieces):
    path = tmp_path / "0.safetensors"
    write_file(path, many_shapes())

    def check(part: TensorPart, raw: memoryview) -> None:
        raise CheckpointError("no such scale")

    parts = parts_of(path)
    parts[20] = part(parts[20].info, parts[20].place, checked=True)
    with pytest.raises(CheckpointError, match="no such scale"):
        read({path: parts}, check)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint reader")]


@pytest.mark.parametrize("change", ["replaced", "cut off", "deleted"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, small_pieces, change):
    path = tmp_path / "0.safetensors"
    write_file(path, [("U8", (LIMIT,))] * 100)
    whole = path.read_bytes()
    with closing(stream({path: [part(info) for info in read_header(path).tensors.values()]}, CPU, no_check)) as tensors:
        next(tensors)
        if change == "cut off":
            os.truncate(path, LIMIT)
        else:
            path.unlink()
        if change == "replaced":
            path.write_bytes(whole)
        with pytest.raises(CheckpointError, match="since it was opened"):
            list(tensors)


def test_a_file_that_ends_early_is_refused(tmp_path):
    """Even if what is known of the file says otherwise."""
    path = tmp_path / "0.safetensors"
    path.write_bytes(b"short")
    with path.open("rb") as file, pytest.raises(OSError, match="ends at byte 5"):
        module._fill(file.fileno(), 0, [memoryview(bytearray(8))])


def test_nothing_to_read():
    assert read({}) == {}
