"""Where the memory went and what caps concurrency, as facts a person can add up.

    weights + prefill scratch + KV cache + recurrent state + snapshots + pending + buffers + rounds + other + free
    = total

The first eight are the bytes of tensors that this process holds; prefill's scratch has room for one layer's weights in
bf16, `snapshots` are the prefix cache's (the pages that it keeps are the KV cache's), `rounds` are the static buffers
of captured rounds and prompts, and their graphs. On a GPU `other` is all else that is in use there (the CUDA context,
the allocator's reserve, other processes). On a CPU it is what the process has resident beyond its tensors, and `total`
is what the process has or could get: pages that were allocated and never touched count as used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.link.messages import Ready
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.batch_state import BatchState

PARTS = (
    *("weights", "prefill_scratch", "kv_cache", "recurrent_state", "snapshots", "pending", "buffers", "rounds"),
    *("other", "free"),
)
"""The ledger's lines in the order in which they are shown; `total` is their sum."""
GIB = 1 << 30
MIB = 1 << 20


class RoundMemory(Protocol):
    """What rounds hold: pending rows of their own, static buffers, graphs."""

    @property
    def pending_bytes(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    @property
    def graph_bytes(self) -> int: ...


def measure(
    model: Model, state: BatchState, rounds: RoundMemory, device: torch.device, snapshots_bytes: int = 0
) -> dict[str, int]:
    """Bytes by part, as `<part>_bytes`, and `total_bytes`."""
    trunk = model.trunk
    pending = trunk.state.pending
    caches = caches_of(model)
    held = {
        "weights": tensor_bytes(model) - scratch_bytes(model),
        "prefill_scratch": scratch_bytes(model),
        "kv_cache": sum(cache.k.nbytes + cache.v.nbytes for cache in caches),
        "recurrent_state": trunk.state.s.nbytes + trunk.state.conv.nbytes,
        "snapshots": snapshots_bytes,
        "pending": sum(t.nbytes for t in (pending.k, pending.v, pending.beta, pending.decay, pending.u))
        + rounds.pending_bytes,
        "buffers": tensor_bytes(state),
        "rounds": rounds.buffer_bytes + rounds.graph_bytes,
    }
    other, free = _rest(sum(held.values()), device)
    parts = held | {"other": other, "free": free}
    return {f"{name}_bytes": parts[name] for name in PARTS} | {"total_bytes": sum(parts.values())}


def scratch_bytes(model: Model) -> int:
    """What packed weights are expanded into for prompts; all products of a model share it. 0 where none is packed."""
    return 0 if model.scratch is None else model.scratch.num_bytes


def caches_of(model: Model) -> list[KvCache]:
    """Every attention layer's, the head's included."""
    return [*model.trunk.kv, *(model.head.caches if model.head else ())]


def bytes_per_token(model: Model) -> int:
    """Key-value cache of one token, the head's included."""
    caches = caches_of(model)
    return sum((cache.k.nbytes + cache.v.nbytes) // (cache.k.shape[0] * cache.k.shape[2]) for cache in caches)


def used(device: torch.device) -> int:
    """Bytes in use now, of all that the ledger counts: resident in this process, or on the device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return _resident_bytes()


def bytes_per_sequence(ledger: dict[str, int], num_slots: int) -> int:
    """What a running sequence takes beside its tokens: recurrent state, pending rows, its row of the buffers."""
    return sum(ledger[f"{name}_bytes"] for name in ("recurrent_state", "pending", "buffers")) // num_slots


def show(ready: Ready) -> Iterator[str]:
    """The ledger and the limits, as lines for the start-up log."""
    yield "memory:"
    for name in PARTS:
        yield f"  {name.replace('_', ' '):<16} {_amount(ready.ledger[f'{name}_bytes'])}"
    yield f"  {'= total':<16} {_amount(ready.ledger['total_bytes'])}"
    num_tokens = ready.kv_pages_total * ready.page_size
    kv_cache = f"KV cache in {ready.execution.kv_dtype}" if ready.execution else "KV cache"
    yield f"  {'a token':<16} {_amount(ready.kv_bytes_per_token)} of {kv_cache}, which holds {num_tokens} tokens"
    yield f"  {'a sequence':<16} {_amount(ready.bytes_per_sequence)} of state, pending and buffers"
    yield f"sequences that may run at once: {ready.max_num_seqs}; what each limit allows:"
    for name, count in ready.limits.items():
        yield f"  {name:<16} {count:>6}{'   <- sets the cap' if name == ready.binding_limit else ''}"


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object reaches, each storage once; the caches are left out."""
    seen: set[int] = set()
    total, todo = 0, [root]
    while todo:
        item = todo.pop()
        if isinstance(item, KvCache | RecurrentState) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            # a matrix packed for oneDNN has no storage that can be asked
            key = id(item) if item.is_mkldnn else item.untyped_storage().data_ptr()
            total += 0 if key in seen and not item.is_mkldnn else _own_bytes(item)
            seen.add(key)
        elif isinstance(item, list | tuple):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif type(item).__module__.startswith("pilotfish."):
            todo += getattr(item, "__dict__", {}).values()
    return total


def _own_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_mkldnn:
        return tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes()


def _rest(held: int, device: torch.device) -> tuple[int, int]:
    """Bytes of (other, free) such that held + other + free is all there is."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - held), free
    resident, available = _resident_bytes(), _available_bytes()
    return max(0, resident - held), max(0, available - max(0, held - resident))


def _resident_bytes() -> int:
    """0 where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _amount(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:10.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:10.2f} MiB"
    return f"{count / 1024:10.2f} KiB"
