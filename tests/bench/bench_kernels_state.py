"""GatedDeltaNet and attention windows on a GPU against the bytes they must move, and the prompt's operators.

    python -m tests.bench.bench_kernels_state [--models 35B-A3B,27B] [--contexts 1024,32768,131072] [--batches 1,4,16]
        [--widths 1,4,9] [--kv bf16,fp8] [--parts] [--tune] [--prefill]

Regime: one layer of a decoding round; as many layers' states, or contexts, in turn as pass the L2. A time is that of
one call (its two or three launches) among many in a CUDA graph: the median of replays, with and without programmatic
dependent launch. The limit is the state read and written once, or the context's keys and values read once, over the
memory's rate, 4.37 TB/s of an H200. Values and bits are checked first; what fails prints no time. --parts prints each
kernel's own time, by the profiler; --tune tries warps, lanes, buffers and grids. One JSON line a row on stdout, a table
on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product as combinations
from typing import Any

import torch
import triton
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from pilotfish.kernels.attention import PAGE, prefill_attention
from pilotfish.kernels.cuda import attention, delta_net, delta_prefill
from pilotfish.kernels.cuda.attention import AttentionScratch, RowPlan, attention_window, plan_rows
from pilotfish.kernels.cuda.delta_net import DeltaScratch, gdn_window, pending_width
from pilotfish.kernels.norm import rms_norm
from pilotfish.kernels.rope import apply_rope, inverse_frequencies
from tests.bench.bench_kernels_linear import LAUNCHES, PAST_L2, RATE, in_graph
from tests.support.kernel_references import gdn_window_reference

EPS = 1e-6
MOST = 9
DELTA = {"35B-A3B": (16, 32, 128, 128), "27B": (16, 48, 128, 128)}
"""Key heads, value heads, dk, dv."""
ATTENTION = {"35B-A3B": (16, 2, 256, 64), "27B": (24, 4, 256, 64)}
"""Query heads, key-value heads, width, rotary width."""
KV = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
MOST_KV_BYTES = 40e9
Call = Callable[[int, bool], None]


def report(name: str, num_bytes: float, plain: float, pdl: float, **more: Any) -> None:
    floor, best = num_bytes / RATE, min(plain, pdl)
    line = {
        "name": name,
        **more,
        "us": round(plain * 1e6, 2),
        "us_pdl": round(pdl * 1e6, 2),
        "floor_us": round(floor * 1e6, 2),
        "tb_s": round(num_bytes / best / 1e12, 2),
        "over_floor_us": round((best - floor) * 1e6, 2),
        "times_floor": round(best / floor, 2),
    }
    print(json.dumps(line), flush=True)
    about = ", ".join(f"{key} {value}" for key, value in more.items())
    tqdm.write(
        f"{name:24} {about:44} {plain * 1e6:8.2f} us {pdl * 1e6:8.2f} with PDL, floor {floor * 1e6:7.2f},"
        f" {line['tb_s']:5.2f} TB/s, x {line['times_floor']:.2f}",
        file=sys.stderr,
    )


def time_both(call: Call, launches: int = LAUNCHES) -> tuple[float, float]:
    """Seconds of a call without and with programmatic dependent launch."""
    plain, pdl = (in_graph(lambda number, pdl=pdl: call(number, pdl), launches) for pdl in (False, True))
    return plain, pdl


def print_parts(call: Call) -> None:
    """Each kernel's mean time over some calls, without dependent launches, so that none counts its wait for another."""
    for number in range(3):
        call(number, False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for number in range(20):
            call(number, False)
        torch.cuda.synchronize()
    for event in seen.key_averages():
        tqdm.write(f"    {event.key[:60]:60} {event.device_time_total / event.count:8.2f} us", file=sys.stderr)


def numbers(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


# -- GatedDeltaNet -----------------------------------------------------------------------------------------------------


class DeltaLayers:
    """As many layers as pass the L2, each with `batch` sequences whose last `width` rows are pending, all accepted."""

    def __init__(self, sizes: tuple[int, int, int, int], batch: int, width: int):
        key_heads, heads, dk, dv = sizes
        self.width, channels = width, 2 * key_heads * dk + heads * dv
        self.state_bytes = batch * heads * dk * dv * 4
        count = max(2, -(-int(PAST_L2) // self.state_bytes))
        slots = batch + 1
        self.states = numbers(count, slots, heads, dk, dv)
        self.histories = numbers(count, slots, 3, channels, dtype=torch.bfloat16)
        self.pending = numbers(count, slots, MOST, pending_width(channels, heads), dtype=torch.bfloat16)
        self.slots = torch.arange(1, slots, dtype=torch.int32, device="cuda")
        self.counts = torch.full((slots,), width, device="cuda")
        self.weights = (
            numbers(4, channels, scale=0.5),
            -numbers(heads).exp(),
            numbers(heads),
            1 + numbers(dv, scale=0.1),
        )
        rows = batch * width
        self.projected = numbers(rows, channels + heads * dv + 2 * heads, dtype=torch.bfloat16)
        self.scratch = DeltaScratch.empty(rows, heads, dv, torch.device("cuda"))
        self.out = numbers(rows, heads * dv, dtype=torch.bfloat16)
        inputs = rows * (self.projected.shape[1] + self.out.shape[1] + 2 * self.pending.shape[3]) * 2
        self.num_bytes = 2 * self.state_bytes + inputs

    def operands(self, number: int) -> tuple[Any, ...]:
        layer = number % len(self.states)
        memory = (self.states[layer], self.histories[layer], self.pending[layer])
        return (self.projected, self.slots, self.counts, *memory, *self.weights, EPS, self.width, self.scratch)

    def call(self, number: int, pdl: bool) -> None:
        gdn_window(*self.operands(number), self.out, pdl)

    def check(self) -> None:
        """Raises AssertionError on values far from the reference's, or bits that depend on the batch."""
        before = [part[0].clone() for part in (self.states, self.histories, self.pending)]
        wanted = torch.empty_like(self.out)
        gdn_window_reference(*self.operands(0), wanted)
        after = self.states[0].clone()

        def restore() -> None:
            for part, kept in zip((self.states, self.histories, self.pending), before, strict=True):
                part[0] = kept

        restore()
        self.call(0, False)
        assert torch.allclose(self.states[0], after, rtol=1e-3, atol=1e-4), "states"
        assert torch.allclose(self.out.float(), wanted.float(), rtol=3e-2, atol=3e-3), "values"
        restore()
        whole, out = self.out[: self.width].clone(), torch.empty_like(self.out[: self.width])
        projected, _, *rest = self.operands(0)
        gdn_window(projected, self.slots[:1], *rest, out)
        assert torch.equal(out, whole), "bits of a sequence depend on the others"


def bench_delta(models: list[str], batches: list[int], widths: list[int], parts: bool, tune: bool) -> None:
    for model, batch, width in combinations(models, batches, widths):
        layers = DeltaLayers(DELTA[model], batch, width)
        layers.check()
        about = {"B": batch, "W": width}
        report(f"{model} gdn_window", layers.num_bytes, *time_both(layers.call), **about)
        if parts:
            print_parts(layers.call)
        if tune:
            kept = delta_net.WARPS, delta_net.LANES
            for shape in ((4, 8), (2, 8), (8, 8), (4, 4), (4, 16)):
                delta_net.WARPS, delta_net.LANES = shape
                layers.check()
                title = "{} gdn_window, {} warps, {} lanes".format(model, *shape)
                report(title, layers.num_bytes, *time_both(layers.call), **about)
            delta_net.WARPS, delta_net.LANES = kept


# -- attention ---------------------------------------------------------------------------------------------------------


class Contexts:
    """Batches of `batch` sequences at the end of `context` tokens, as many in turn as pass the L2."""

    def __init__(self, sizes: tuple[int, int, int, int], kind: torch.dtype, context: int, batch: int, width: int):
        self.heads, self.kv, self.dim, rotary = sizes
        self.kind, self.context, self.batch, self.width = kind, context, batch, width
        token_bytes = 2 * self.kv * self.dim * kind.itemsize
        self.num_bytes = batch * context * token_bytes
        self.turns = max(1, min(LAUNCHES, -(-int(PAST_L2) // self.num_bytes)))
        pages = -(-(context + width) // PAGE)
        slots = self.turns * batch
        self.num_pages = slots * pages + 1
        cache = torch.empty(self.num_pages, self.kv, PAGE, self.dim, dtype=torch.bfloat16, device="cuda")
        self.caches = [cache.normal_().to(kind, copy=True) for _ in range(2)]
        order = torch.randperm(slots * pages, device="cuda").int() + 1
        self.tables = torch.cat((torch.zeros_like(order[:pages])[None], order.view(slots, pages)))
        self.slots = torch.arange(1, slots + 1, dtype=torch.int32, device="cuda").view(self.turns, batch)
        rows = batch * width
        self.plan = RowPlan.empty(rows, batch, rotary, torch.device("cuda"))
        length = torch.full((slots + 1,), context, device="cuda")
        self.inv_freq = inverse_frequencies(rotary, 1e7, "cuda")
        plan_rows(self.slots[0], length, self.inv_freq, width, 0, self.heads, self.kv, self.plan)
        self.projected = numbers(rows, 2 * (self.heads + self.kv) * self.dim, dtype=torch.bfloat16)
        q_norm, k_norm = 1 + numbers(2, self.dim, scale=0.1)
        self.qk_norm = torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv, -1)))
        self.scratch = AttentionScratch.empty(
            batch, width, context, self.num_pages, self.heads, self.kv, self.dim, torch.device("cuda")
        )
        self.out = numbers(rows, self.heads * self.dim, dtype=torch.bfloat16)

    def call(self, number: int, pdl: bool, num_programs: int | None = None, settled: bool = False) -> None:
        attention_window(
            self.projected, self.slots[number % self.turns], self.plan, self.tables, *self.caches, self.qk_norm, EPS,
            self.width, self.scratch, self.out, num_programs=num_programs, settled=settled, pdl=pdl,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError on values far from float64's, for the last row's first head, or bits by the grid."""
        self.call(0, False)
        whole = self.out.clone()
        self.call(0, False, 7)
        assert torch.equal(self.out, whole), "bits depend on the grid"
        end = self.context + self.width
        pages = self.tables[int(self.slots[0, -1])].long()
        k, v = (c[pages, 0].flatten(0, 1)[:end].double() for c in self.caches)
        last = self.batch * self.width - 1
        heads = self.projected[last].view(-1, self.dim)
        q = rms_norm(heads[:1, None], self.qk_norm[:1], EPS, torch.float32)
        q = apply_rope(q, self.plan.cos[last : last + 1, None], self.plan.sin[last : last + 1, None]).flatten().double()
        mixed = torch.softmax(k @ q * self.dim**-0.5, 0) @ v
        gate = heads[self.heads + 2 * self.kv].double()
        wanted, got = mixed * gate.sigmoid(), whole[-1, : self.dim].double()
        scale = float(wanted.abs().max())
        assert torch.allclose(got, wanted, rtol=0.05, atol=0.03 * scale), "values"


def bench_attention(
    models: list[str], kinds: list[str], contexts: list[int], batches: list[int], widths: list[int], parts: bool,
    tune: bool,
) -> None:  # fmt: skip
    for model, kind, context, batch, width in combinations(models, kinds, contexts, batches, widths):
        _, kv, dim, _ = ATTENTION[model]
        # made in bf16 first
        if batch * context * 2 * kv * dim * (KV[kind].itemsize + 1) > MOST_KV_BYTES:
            tqdm.write(f"{model} {kind} {context} x {batch}: too large, left out", file=sys.stderr)
            continue
        case = Contexts(ATTENTION[model], KV[kind], context, batch, width)
        case.check()
        about = {"kv": kind, "context": context, "B": batch, "W": width}
        launches = LAUNCHES if case.num_bytes < 1e9 else 8
        report(f"{model} attention_window", case.num_bytes, *time_both(case.call, launches), **about)

        def settled_call(number: int, pdl: bool, case: Contexts = case) -> None:
            case.call(number, pdl, settled=pdl)

        report(f"{model} attention_window, settled", case.num_bytes, *time_both(settled_call, launches), **about)
        if parts:
            print_parts(case.call)
        if tune:
            kept = attention.BUFFERS
            for attention.BUFFERS, programs in combinations((1, 2, 3), (132, 264)):

                def call(number: int, pdl: bool, case: Contexts = case, programs: int = programs) -> None:
                    case.call(number, pdl, programs)

                title = f"{model} {attention.BUFFERS} buffers, {programs}"
                report(title, case.num_bytes, *time_both(call, launches), **about)
            attention.BUFFERS = kept
        del case
        if tune:
            kept = attention.ITEM_UNITS
            for attention.ITEM_UNITS in (0, 1, 2, 3, 4, 5, 6, 8, 9, 16):
                other = Contexts(ATTENTION[model], KV[kind], context, batch, width)
                title = f"{model} items of {int(other.plan.items[0]) // attention.UNIT} units"
                report(title, other.num_bytes, *time_both(other.call, launches), **about)
            attention.ITEM_UNITS = kept


# -- prompts -----------------------------------------------------------------------------------------------------------


def bench_prefill(models: list[str]) -> None:
    """A span of 8 192 prompt tokens through one layer's recurrence, and one's attention after 0 and 24 576 tokens."""
    rows = 8192
    for model in models:
        if delta_prefill.is_installed():
            layers = DeltaLayers(DELTA[model], 1, 1)
            projected = numbers(rows, layers.projected.shape[1], dtype=torch.bfloat16)
            place = torch.tensor((1, rows), dtype=torch.int32, device="cuda")
            operands = (projected, layers.states[0], layers.histories[0], place, *layers.weights, EPS)
            seconds = in_graph(lambda number: delta_prefill.gdn_prompt(*operands), 3)  # noqa: B023
            # rows in, rows out, and each of q, k, v and what is read once more each way
            num_bytes = 2 * rows * (projected.shape[1] + 5 * layers.out.shape[1])
            report(f"{model} gdn_prompt", num_bytes, seconds, seconds, rows=rows)
        else:
            tqdm.write("fla-core is not installed: prompts run in plain torch", file=sys.stderr)
        heads, kv, dim, _ = ATTENTION[model]
        for start in (0, 24576):
            pages = (start + rows) // PAGE
            caches = [numbers(pages, kv, PAGE, dim, dtype=torch.bfloat16) for _ in range(2)]
            q, table = numbers(rows, heads, dim), list(range(pages))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for turn in range(4):
                if turn == 1:
                    begin.record()
                prefill_attention(q, *caches, table, start)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 3e3
            operations = 4 * heads * dim * rows * (start + rows / 2)
            report(
                f"{model} prefill_attention", 2 * (start + rows) * kv * dim * 2, seconds, seconds,
                rows=rows, start=start, tflop_s=round(operations / seconds / 1e12),
            )  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="35B-A3B,27B")
    parser.add_argument("--contexts", default="1024,32768,131072")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--widths", default="1,4,9")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--parts", action="store_true", help="each kernel's own time")
    parser.add_argument("--tune", action="store_true", help="try other warps, buffers and grids too")
    parser.add_argument("--prefill", action="store_true", help="the prompt's operators, and nothing else")
    parser.add_argument("--no-delta", action="store_true")
    parser.add_argument("--no-attention", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "triton": triton.__version__}), flush=True)
    models, batches, widths = args.models.split(","), integers(args.batches), integers(args.widths)
    if args.prefill:
        bench_prefill(models)
        return
    if not args.no_delta:
        bench_delta(models, batches, widths, args.parts, args.tune)
    if not args.no_attention:
        contexts = integers(args.contexts)
        bench_attention(models, args.kv.split(","), contexts, batches, widths, args.parts, args.tune)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
