"""How long a checkpoint takes from its files to the device, beside what its disk takes to give the same bytes.

    python -m tests.bench.bench_load [--device cpu|cuda] [--gib 5.4] [--layout nvfp4|fp8|bf16] [--folder FOLDER]

Regime: Qwen3.6-35B-A3B's sizes with as many layers as make --gib, experts one by one, head included, shards of 5 GB
whose tensors lie as the safetensors library puts them. The folder is made first, of random bytes, and used again if it
is there. Every load has a process of its own, so that memory is fresh, as at a start; what is imported and made ready
before it does not count. Rows are taken in turn, --runs times: readers that throw the bytes away (one; as many as the
loader has), then the loader. Cold: the files' pages are dropped before. The limit is the disk cold, and memory warm.
Before each row twice the files' size of fresh memory is touched and let go (`memory_seconds`): a virtual machine may
have given what was free back to its host, and to get it again can take longer than the disk, for whoever needs it.
First, uncounted, a sample of what the loader gives is compared with the files. One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from pilotfish.engine.bench.sizes import COMMON, SIZES
from pilotfish.engine.checkpoint.inventory import Expected, ExpertForm, Experts, Inventory, Kind, mtp, trunk
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.stream import NUM_READERS
from pilotfish.engine.config import ModelConfig
from tests.support.packing import fp8_config
from tests.support.tiny_models import NVFP4_PLAIN, nvfp4_config

SHARD = 5_000_000_000
BLOCK = 64 << 20
READ = 16 << 20
ITEM_SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
"""Of the dtypes that are written, in the order in which the safetensors library puts them into a file."""
EVERY = 61  # modules of which one is compared
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


def tensors_of(name: str, expected: Expected, layout: str) -> list[Tensor]:
    shape = expected.shape
    if expected.kind is Kind.LINEAR and layout != "bf16" and not name.endswith(NVFP4_PLAIN):
        if layout == "fp8":
            blocks = tuple(-(-size // 128) for size in shape)
            return [(f"{name}.weight", "F8_E4M3", shape), (f"{name}.weight_scale_inv", "BF16", blocks)]
        return [
            (f"{name}.weight_packed", "U8", (shape[0], shape[1] // 2)),
            (f"{name}.weight_scale", "F8_E4M3", (shape[0], shape[1] // 16)),
            (f"{name}.weight_global_scale", "F32", (1,)),
        ]
    wide = name.endswith(("A_log", "linear_attn.norm"))
    return [(f"{name}{expected.suffix}", "F32" if wide else "BF16", shape)]


def num_bytes(tensor: Tensor) -> int:
    return ITEM_SIZES[tensor[1]] * math.prod(tensor[2])


def inventory(layers: int) -> tuple[dict[str, Any], Inventory]:
    fields = COMMON | SIZES["35B-A3B"] | {"num_hidden_layers": layers}
    config = ModelConfig.from_dict(fields)
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    return fields, trunk(config, lambda _: experts) | mtp(config, lambda _: experts)


def wanted_tensors(gib: float, layout: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The config and the tensors of the fewest layers, at least 4, that make this size."""
    for layers in range(4, 41):
        fields, modules = inventory(layers)
        tensors = [tensor for name, expected in modules.items() for tensor in tensors_of(name, expected, layout)]
        if sum(map(num_bytes, tensors)) >= gib * (1 << 30):
            break
    quantization: dict[str, Any] | None = nvfp4_config() if layout == "nvfp4" else None
    if layout == "fp8":
        quantization = fp8_config([], [name for name in modules if name.endswith(NVFP4_PLAIN)])[0]
    return fields | ({"quantization_config": quantization} if quantization else {}), tensors


def make(folder: Path, gib: float, layout: str) -> None:
    """Writes the checkpoint, unless it is there."""
    done = folder / "made.json"
    args = {"gib": gib, "layout": layout}
    if done.exists() and json.loads(done.read_text()) == args:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    began = time.perf_counter()
    fields, tensors = wanted_tensors(gib, layout)
    (folder / "config.json").write_text(json.dumps(fields))
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled + num_bytes(tensor) > SHARD:
            shards.append([])
            filled = 0
        filled += num_bytes(tensor)
        shards[-1].append(tensor)
    generator = np.random.Generator(np.random.SFC64(0))
    for number, shard in enumerate(shards):
        write(folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors", shard, generator)
    done.write_text(json.dumps(args))
    size, seconds = sum(map(num_bytes, tensors)), time.perf_counter() - began
    print(f"made {size / 1e9:.2f} GB, {len(tensors)} tensors in {seconds:.1f} s", file=sys.stderr)


def write(path: Path, tensors: list[Tensor], generator: np.random.Generator) -> None:
    order = list(ITEM_SIZES)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (order.index(tensor[1]), tensor[0])):
        begin, end = end, end + num_bytes((name, dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    with path.open("wb") as file:
        file.write(len(body).to_bytes(8, "little") + body)
        for begin in range(0, end, BLOCK):
            block = generator.integers(0, 1 << 64, BLOCK // 8, np.uint64)
            # no byte is 0 or has its highest bits set: numbers of every dtype are finite and above 0
            block &= np.uint64(0x7777777777777777)
            block |= np.uint64(0x0101010101010101)
            file.write(memoryview(block).cast("B")[: end - begin])
        file.flush()
        os.fsync(file.fileno())


def drop_pages(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path], threads: int) -> float:
    """Seconds of readers that take pieces of the files in turn and throw them away."""
    places = [(path, at) for path in files for at in range(0, path.stat().st_size, BLOCK)]

    def read(own: list[tuple[Path, int]]) -> None:
        buffer = memoryview(bytearray(READ))
        for path, at in own:
            with path.open("rb", buffering=0) as file:
                file.seek(at)
                for _ in range(BLOCK // READ):
                    file.readinto(buffer)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, (places[i::threads] for i in range(threads))))
    return time.perf_counter() - began


TOUCH = """
import mmap, sys
block = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.madvise(mmap.MADV_HUGEPAGE)
for begin in range(0, len(block), mmap.PAGESIZE):
    block[begin] = 1
"""


def prepare(files: list[Path], cold: bool) -> float:
    """Gets memory for the files and as much again, and drops their pages if cold. Seconds."""
    size = sum(path.stat().st_size for path in files)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", TOUCH, str(2 * size)], check=True)
    seconds = time.perf_counter() - began
    if cold:
        drop_pages(files)
    return seconds


def load_once(folder: Path, device: str, cold: bool) -> dict[str, float]:
    """In a process of its own: seconds of recognising the folder, of loading, and what host memory rose to."""
    if device == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    began = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    opening = time.perf_counter() - began
    memory = prepare(sorted(folder.glob("*.safetensors")), cold)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    weights = load_weights(checkpoint, device, progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert weights
    row = {"seconds": seconds, "opening_seconds": opening, "host_peak_mb": (after - before) * 1024 / 1e6}
    if device == "cuda":
        row["device_mb"] = torch.cuda.memory_allocated() / 1e6
        row["device_reserved_mb"] = torch.cuda.memory_reserved() / 1e6
    return row | {"memory_seconds": memory}


def compare(folder: Path, device: str) -> int:
    """How many stored tensors were compared, byte for byte, with the safetensors library's."""
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint, device, progress=False)
    files = {path: safe_open(path, "pt") for path in {f for m in checkpoint.modules.values() for f in m.files}}
    count = 0
    for module in [*checkpoint.modules.values()][::EVERY]:
        for suffix, info in module.parts.items():
            wanted = files[info.file].get_tensor(info.name)
            weight = weights.get(f"{module.name}.weight", weights.get(module.name))
            if not isinstance(weight, torch.Tensor):
                if suffix.endswith("global_scale"):
                    assert weight.global_scale == float(wanted), info.name
                    count += 1
                    continue
                names = {".weight_packed": "packed", ".weight": "weight"}
                weight = getattr(weight, names.get(suffix, "scale"))
            assert weight.dtype == wanted.dtype and weight.device.type == device, info.name
            bits = wanted.reshape(weight.shape).view(torch.uint8)
            assert torch.equal(weight.cpu().view(torch.uint8), bits), info.name
            count += 1
    return count


def in_own_process(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.bench_load", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(folder: Path, device: str, runs: int, threads: int) -> Iterator[dict[str, Any]]:
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    for run in range(runs):
        for cache in ("cold", "warm"):
            for what in ("read, 1 thread", f"read, {threads} threads", "load"):
                if what == "load":
                    words = ["--once", cache, "--device", device, "--folder", str(folder)]
                    found = in_own_process(*words)
                else:
                    memory = prepare(files, cache == "cold")
                    seconds = read_all(files, 1 if what.endswith("1 thread") else threads)
                    found = {"seconds": seconds, "memory_seconds": memory}
                rate = size / 1e9 / found["seconds"]
                yield {"what": what, "cache": cache, "run": run, "gb_per_s": round(rate, 2)} | {
                    name: round(value, 2) for name, value in found.items()
                }


def bench(folder: Path, args: argparse.Namespace) -> None:
    make(folder, args.gib, args.layout)
    compared = in_own_process("--compare", "--device", args.device, "--folder", str(folder))
    files = sorted(folder.glob("*.safetensors"))
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "commit": git.stdout.strip(),
        "layout": args.layout,
        "bytes": sum(path.stat().st_size for path in files),
        "shards": len(files),
    }
    print(json.dumps(about | compared), flush=True)
    for row in rows(folder, args.device, args.runs, args.threads):
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, default=5.4)
    parser.add_argument("--layout", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument("--folder", type=Path, help="kept, and used again; without it a temporary one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=NUM_READERS, help="of plain readers")
    parser.add_argument("--once", choices=("cold", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("want a CUDA device")
    if args.once:
        print(json.dumps(load_once(args.folder, args.device, args.once == "cold")))
    elif args.compare:
        print(json.dumps({"compared": compare(args.folder, args.device)}))
    elif args.folder is not None:
        bench(args.folder, args)
    else:
        with TemporaryDirectory() as name:
            bench(Path(name), args)


if __name__ == "__main__":
    main()
