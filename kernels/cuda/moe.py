"""Routed experts and the shared one, over the distinct experts of all rows; combined in rank order.

Three launches: gate_up with SwiGLU, down, combine. Up to CHOICE_ROWS rows their programs choose experts from the
router's logits themselves; beyond, the router has a launch of its own before them. A program of the first two takes
some tiles of one expert; the rows that chose the expert are the columns of the product (linear.py: the same
instruction, order and split), the others repeat one of them. Up to FAST_ROWS rows a program is given a pair p = row * k
+ rank and leaves at once unless p is the first pair of its expert (of one row each is), so that nothing has to be
counted before; beyond, the rows of each expert are listed first, as items of up to 8 or 16, and twice as many programs
as there is room for share them, some tiles at a time. The shared expert is one more, chosen by all rows. Results go to
their own (row, rank): nothing is added across experts before `combine`, which adds in rank order.

R = rows, E = experts, k = experts a token, H = hidden, I = expert width.
Reads the weights of each distinct expert once: of E, 1 - (1 - k/E)^R at uniform routing. No atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton

from pilotfish.kernels.cuda import packing
from pilotfish.kernels.cuda.carveout import leave_to_l1
from pilotfish.kernels.cuda.expand import expand
from pilotfish.kernels.cuda.launch_shapes import SM_COUNT, LaunchShape, fill
from pilotfish.kernels.cuda.linear import MAX_ROWS
from pilotfish.kernels.cuda.mma import FORMATS
from pilotfish.kernels.cuda.moe_kernels import (
    combine_kernel,
    experts_kernel,
    groups_kernel,
    list_groups_kernel,
    list_kernel,
    listed_kernel,
)
from pilotfish.kernels.cuda.packing import TILE, Format, Packed
from pilotfish.kernels.cuda.router import blocks, route
from pilotfish.kernels.cuda.tiled_rows import AnyRows, stored

FAST_ROWS = 8
"""The number of rows up to which programs find theirs by themselves: beyond, a second tile of rows would cost more than
lists do."""
CHOICE_ROWS = 4
"""The number of rows, at most FAST_ROWS, up to which programs choose by themselves from the router's logits: each
chooses for all rows, and of 8 rows there are 2 080 for gate_up of the 35B-A3B, by count 5 us of instructions in place
of a launch of 1.4."""
ONE_LIST_PAIRS = 512
"""Up to so many pairs of row and rank one launch lists rows and items: each of its programs counts all of them."""
WAVES = 2
"""How often listed_kernel has the programs that there is room for. They have equal shares of the units of work; the
hardware starts those of the second wave where others end first, which shares alone cannot. When programs took units in
turn, 32 rows with combine took 89.6 us in place of 93.7, 64 rows 126.8 in place of 128.2 (docs/measurements.md)."""
HELD_TO = (72, 104)
"""Registers of a thread for NVFP4 from 5 rows on, of one tile of rows and of two: the assembler would take more."""
REGISTERS = {Format.NVFP4: (88, 128), Format.FP8: (128, 168), Format.BF16: (136, 176)}
"""Of listed_kernel what it takes where it is not held."""


@dataclass(frozen=True)
class ExpertWeights:
    """gate, up [I, H] and down [H, I]: bf16 tensors, NvFp4Weight or Fp8Weight."""

    gate: Any
    up: Any
    down: Any


@dataclass(frozen=True)
class ExpertScratch:
    """What a layer writes between its launches, for up to `rows` rows; layers of one model may share it.

    inner bf16 [rows, k + 1, I]; out bf16 [rows, k + 1, H], rank k the shared expert's; lists int32, for more than
    FAST_ROWS rows: as list_experts says.
    """

    inner: torch.Tensor
    out: torch.Tensor
    lists: torch.Tensor

    @staticmethod
    def make(rows: int, top_k: int, num_experts: int, width: int, hidden: int, device: torch.device) -> ExpertScratch:
        """num_experts, width: the largest of any layer, of the routed experts and the shared one."""
        inner = torch.empty((rows, top_k + 1, width), dtype=torch.bfloat16, device=device)
        out = torch.empty((rows, top_k + 1, hidden), dtype=torch.bfloat16, device=device)
        listed = list_size(rows, top_k, num_experts) if rows > FAST_ROWS else 1
        return ExpertScratch(inner, out, torch.empty(listed, dtype=torch.int32, device=device))

    @property
    def num_bytes(self) -> int:
        return self.inner.nbytes + self.out.nbytes + self.lists.nbytes


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of one shape and format: gate and up in turn, and down, each [experts * tiles, ...]."""

    gate_up: Packed
    down: Packed
    num_experts: int
    width: int

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


class GroupedExperts:
    """E routed experts and a shared one, packed. E may differ from layer to layer.

    The routed experts are of one shape and format; the shared one may be of others, at the price of two launches. The
    weights are not referred to afterwards. Raises ValueError naming the expert that does not fit.
    """

    def __init__(self, experts: Sequence[ExpertWeights], shared: ExpertWeights, top_k: int):
        if not 1 <= top_k <= len(experts):
            raise ValueError(f"want at least {top_k} experts, got {len(experts)}")
        self.top_k, self.num_experts, self.hidden = top_k, len(experts), int(experts[0].gate.shape[1])
        names = [f"expert {number}" for number in range(len(experts))]
        routed = _pack_experts(names, experts, self.hidden)
        for name, group in zip(names, routed, strict=True):
            if _kind(group) != _kind(routed[0]):
                raise ValueError(f"{name}: want the shape and format of expert 0, as for all routed ones")
        (last,) = _pack_experts(["shared expert"], [shared], self.hidden)
        groups = [[*routed, last]] if _kind(last) == _kind(routed[0]) else [routed, [last]]
        self.groups = [_join(group) for group in groups]
        self.num_bytes = sum(group.num_bytes for group in self.groups)

    @staticmethod
    def of(groups: list[ExpertGroup], top_k: int, num_experts: int, hidden: int) -> GroupedExperts:
        """Experts of what is packed already: the routed experts and the shared one in one group, or in one each."""
        made = GroupedExperts.__new__(GroupedExperts)
        made.groups, made.top_k, made.num_experts, made.hidden = groups, top_k, num_experts, hidden
        made.num_bytes = sum(group.num_bytes for group in groups)
        return made

    @property
    def width(self) -> int:
        """The width of an expert, the shared one or the others: what `ExpertScratch` needs."""
        return max(group.width for group in self.groups)

    def rows(
        self,
        x: AnyRows,
        logits: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate: torch.Tensor,
        scratch: ExpertScratch,
        pdl: bool = False,
    ) -> torch.Tensor:
        """bf16 [R, k + 1, H], a view of scratch.out: each row's experts in rank order, then the shared one.

        x: bf16 [>= R, H], contiguous or TiledRows; logits, and what is written of them, weights fp32 and ids int32
        [R, k] and gate fp32 [R]: as `router.route` has them, R of 1 .. linear.MAX_ROWS. Of up to CHOICE_ROWS rows the
        experts' programs choose by themselves.
        """
        num_rows = len(ids)
        assert 1 <= num_rows <= min(MAX_ROWS, len(scratch.out)) and ids.shape[1] == self.top_k, ids.shape
        assert ids.dtype == torch.int32 and ids.is_contiguous(), (ids.dtype, ids.stride())
        assert x.dtype == torch.bfloat16 and len(x) >= num_rows, (x.dtype, x.shape)
        assert x.shape[1] == self.hidden, (x.shape, self.hidden)
        assert scratch.out.shape[1:] == (self.top_k + 1, self.hidden) and scratch.inner.shape[2] >= self.width
        assert gate.shape == (num_rows,) and gate.is_contiguous() and weights.dtype == gate.dtype == torch.float32
        assert weights.shape == ids.shape and weights.is_contiguous(), (weights.shape, weights.stride())
        assert self.num_experts < logits.shape[1] and len(logits) >= num_rows and logits.stride(1) == 1, logits.shape
        if num_rows > CHOICE_ROWS:
            route(logits, self.num_experts, weights, ids, gate, pdl)
        if num_rows > FAST_ROWS:
            list_experts(ids, self.num_experts, scratch.lists, pdl)
        for down in (False, True):
            for group in self.groups:
                self._launch(group, down, x, (logits, weights, ids, gate), scratch, pdl)
        return scratch.out[:num_rows]

    @property
    def scratch_size(self) -> int:
        """Numbers of bf16 that `bulk` needs: the larger of gate_up and down of all experts, expanded."""
        return max(
            TILE * max(group.gate_up.num_tiles * self.hidden, group.down.num_tiles * group.width)
            for group in self.groups
        )

    def bulk(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shared_gate: torch.Tensor,
        scratch: torch.Tensor,
    ) -> torch.Tensor:
        """fp32 [T, H] for prefill: all experts expanded, each over its own rows, summed in rank order.

        x bf16 [T, H]; weights fp32, ids [T, k]; shared_gate fp32 [T]; scratch: bf16, at least `scratch_size` numbers.
        """
        tokens, top_k = ids.shape
        # rows sorted by expert, each expert's in their order; where each ends
        flat, order = ids.reshape(-1).long().sort(stable=True)
        ends = torch.searchsorted(flat, torch.arange(self.num_experts, device=x.device), right=True).int()
        routed, last = self.groups[0], self.groups[-1]
        matrices = _expanded(routed.gate_up, routed.num_experts, self.hidden, scratch, 2)
        inner = _swiglu(F.grouped_mm(x[order // top_k], matrices[: self.num_experts].mT, offs=ends), routed.width)
        if last is not routed:
            matrices = _expanded(last.gate_up, 1, self.hidden, scratch, 2)
        shared = _swiglu(F.linear(x, matrices[-1]), last.width)
        matrices = _expanded(routed.down, routed.num_experts, routed.width, scratch, 1)
        product = F.grouped_mm(inner, matrices[: self.num_experts].mT, offs=ends)[:, : self.hidden]
        if last is not routed:
            matrices = _expanded(last.down, 1, last.width, scratch, 1)
        shared = F.linear(shared, matrices[-1])
        parts = torch.empty_like(product)
        parts[order] = product
        parts = parts.view(tokens, top_k, self.hidden)
        total = parts[:, 0].float() * weights[:, :1]
        for rank in range(1, top_k):
            total = torch.addcmul(total, parts[:, rank].float(), weights[:, rank : rank + 1])
        return torch.addcmul(total, shared[:, : self.hidden].float(), shared_gate[:, None])

    def _launch(
        self,
        group: ExpertGroup,
        down: bool,
        x: AnyRows,
        choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        scratch: ExpertScratch,
        pdl: bool,
    ) -> None:
        """choice: logits, weights, ids and gate."""
        num_rows = len(choice[2])
        memory, tiled = stored(x)
        part = group.down if down else group.gate_up
        tiles = part.num_tiles // group.num_experts
        shape = choose_shape(part.format, tiles, part.num_units, num_rows)
        assert not shape.ring, shape
        routed, lists = group is self.groups[0], num_rows > FAST_ROWS
        num_routed = 0
        if routed:
            num_routed = _num_items(num_rows, self.top_k, self.num_experts) if lists else num_rows * self.top_k
        num_shared = -(-num_rows // (8 * shape.row_tiles)) if group is self.groups[-1] else 0
        grid = (-(-tiles // shape.tiles), num_routed + num_shared)
        chooses = routed and num_rows <= CHOICE_ROWS
        source, target = (scratch.inner, scratch.out) if down else (memory, scratch.inner)
        weights = (
            part.data.view(torch.int32),
            part.number if part.block_scale is None else part.block_scale,
            part.place,
            part.number,
        )
        strides = ((scratch.inner.shape[2] if down else self.hidden) // 8, target.shape[-1])
        constants: dict[str, Any] = {
            "NUM_EXPERTS": self.num_experts,
            "TILES": tiles,
            "K": group.width if down else self.hidden,
            "TILED": tiled and not down,
            "UNITS": part.num_units,
            "MT": shape.tiles,
            "FORMAT": FORMATS[part.format],
            "BLOCKS": part.block_scale is not None,
            "DIVIDES": part.divides,
            "ROW_NUMBERS": part.number.shape[1] > 1,
            "SPAN": 1 if down else 2,
            "DOWN": down,
            "ROUTED": routed,
            "SHARED": group is self.groups[-1],
            "TOP_K": self.top_k,
            "STAGES": shape.stages,
            "X_AHEAD": shape.x_ahead,
            "PINNED": shape.pinned,
            "PDL": pdl,
            "num_warps": shape.warps,
            # variants for more rows are compiled apart, and round alike
            "enable_fp_fusion": False,
            "maxnreg": shape.registers or None,
            "launch_pdl": pdl,
        }
        if lists:
            kernel = listed_kernel[(min(grid[0] * grid[1], num_programs(part.format, shape)),)](
                *weights,
                source.view(torch.int32),
                scratch.lists,
                target,
                num_rows,
                *strides,
                NT=shape.row_tiles,
                **constants,
            )
            leave_to_l1(kernel)
            return
        # of down some more programs write down what was chosen, one a row
        writers = -(-num_rows // grid[0]) if chooses and down else 0
        kernel = experts_kernel[grid[0], grid[1] + writers](
            *weights,
            source.view(torch.int32),
            *choice,
            target,
            num_rows,
            num_routed,
            choice[0].stride(0),
            *strides,
            CHOOSES=chooses,
            ROWS=next(rows for rows in (1, 4, 8) if num_rows <= rows),
            **constants | blocks(self.num_experts, self.top_k),
        )
        # with four rows a round took as long whether down asked or not, and one row's changed nothing by asking
        if not down and num_rows > 1:
            leave_to_l1(kernel)


def row_tiles(num_rows: int) -> int:
    """Rows of x that one program multiplies, in units of 8: with 64 rows an expert of many is chosen by two or
    three."""
    return 2 if num_rows > 64 else 1


def num_programs(format: Format, shape: LaunchShape) -> int:
    """The programs of listed_kernel at most: WAVES times what an H200 has room for; registers come by the 8."""
    registers = shape.registers or REGISTERS[format][shape.row_tiles - 1]
    return WAVES * SM_COUNT * (65536 // (registers * 32 * shape.warps))


def _num_items(num_rows: int, top_k: int, num_experts: int) -> int:
    """The largest number of items: one begun by each expert, and those that are full."""
    pairs = num_rows * top_k
    return min(num_experts, pairs) + pairs // (8 * row_tiles(num_rows))


def list_size(num_rows: int, top_k: int, num_experts: int) -> int:
    """Words of lists that list_experts needs for so many rows, or fewer."""
    return (num_experts + 1) * (num_rows + 2) + num_rows * top_k // 8 + -(-num_rows // 8)


def list_experts(ids: torch.Tensor, num_experts: int, lists: torch.Tensor, pdl: bool = False) -> None:
    """lists int32, flat: [E + 1, R + 1], the number of an expert's rows, then its (row, rank) as row * (k + 1) + rank,
    the shared expert's last; then how many items there are, some rows of an expert each (row_tiles), and the items:
    (expert * 32 + which of them) * 32 + their number. One launch up to ONE_LIST_PAIRS, else two; the same lists."""
    num_rows, top_k = ids.shape
    assert lists.numel() >= list_size(num_rows, top_k, num_experts), lists.shape
    group = 8 * row_tiles(num_rows)
    if ids.numel() <= ONE_LIST_PAIRS:
        list_groups_kernel[(num_experts + 1,)](
            ids,
            lists,
            ids.numel(),
            num_experts,
            TOP_K=top_k,
            GROUP=group,
            BLOCK=triton.next_power_of_2(ids.numel()),
            BLOCK_E=max(32, triton.next_power_of_2(num_experts)),
            GROUPS=triton.next_power_of_2(-(-num_rows // group)),
            PDL=pdl,
            launch_pdl=pdl,
        )
        return
    list_kernel[(num_experts,)](
        ids,
        lists,
        ids.numel(),
        TOP_K=ids.shape[1],
        BLOCK=triton.next_power_of_2(ids.numel()),
        PDL=pdl,
        launch_pdl=pdl,
    )
    groups_kernel[(1,)](
        lists,
        num_rows,
        num_experts,
        TOP_K=top_k,
        GROUP=group,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        PDL=pdl,
        launch_pdl=pdl,
    )


def choose_shape(format: Format, num_tiles: int, num_units: int, num_rows: int) -> LaunchShape:
    """The shape, as launch_shapes.choose_shape gives it, for the tiles of one expert: programs are many, and have few
    units."""
    least = 1 if format is Format.BF16 else 2  # units a warp: of BF16 registers hold no more
    warps = next(warps for warps in (4, 2, 1) if num_units % warps == 0 and (warps == 1 or num_units >= least * warps))
    shape = fill(LaunchShape(warps, 2, row_tiles(num_rows), 0, 0), format, num_units)
    if format is not Format.NVFP4:
        return shape
    # more programs at a time pay more than more on the way of each, the more so where each has a list to read first
    steps = num_units // warps
    if num_rows > 4:
        held = HELD_TO[shape.row_tiles - 1]
        shape = replace(shape, stages=1, x_ahead=0)
        if num_rows > FAST_ROWS:
            # a loop takes fewer registers if its loads stay apart; two steps of four warps would spill
            return replace(shape, pinned=steps > 2, registers=0 if warps == 4 and steps == 2 else held)
        return replace(shape, registers=held) if num_units == 4 else shape
    if num_rows > 1:
        # more tiles share what is loaded of x
        return replace(shape, tiles=4, stages=1, x_ahead=0 if steps < 4 else 1, pinned=steps < 4)
    # of one row all programs run at once, and each has half of what it reads on its way; a loop has no registers for it
    x_ahead = steps // 2 if steps <= 4 else 1
    return replace(shape, stages=1 if steps < 4 else 2, x_ahead=x_ahead, pinned=True)


def _pack_experts(names: Sequence[str], experts: Sequence[ExpertWeights], hidden: int) -> list[ExpertGroup]:
    for name, expert in zip(names, experts, strict=True):
        width = int(expert.gate.shape[0])
        if width % 8 or hidden % 8:
            raise ValueError(f"{name}: want widths that are multiples of 8 (16 bytes of x), got {width} and {hidden}")
        for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            if tuple(getattr(expert, part).shape) != shape:
                raise ValueError(f"{name}: {part}: want {list(shape)}, got {list(getattr(expert, part).shape)}")
    packed: dict[str, list[Packed]] = {}
    for part in ("gate", "up", "down"):
        try:
            packed[part] = packing.pack_all([getattr(expert, part) for expert in experts])
        except ValueError as error:
            raise ValueError(f"{names[0]} to {names[-1]}: {part}: {error}") from error
    groups = []
    for name, expert, gate, up, down in zip(names, experts, *packed.values(), strict=True):
        if gate.kind != up.kind:
            raise ValueError(f"{name}: want gate and up of one format, got {[gate.format.value, up.format.value]}")
        groups.append(ExpertGroup(packing.interleave(gate, up), down, 1, int(expert.gate.shape[0])))
    return groups


def _kind(group: ExpertGroup) -> tuple[object, ...]:
    return (group.width, group.gate_up.kind, group.down.kind)


def _join(groups: Sequence[ExpertGroup]) -> ExpertGroup:
    gate_up = packing.join([group.gate_up for group in groups])
    return ExpertGroup(gate_up, packing.join([group.down for group in groups]), len(groups), groups[0].width)


def _expanded(part: Packed, count: int, width: int, scratch: torch.Tensor, span: int) -> torch.Tensor:
    """bf16 [count, rows, width]: the matrices of `count` experts in scratch; gate's rows, then up's, with span 2."""
    rows = part.num_tiles * TILE
    out = scratch[: rows * width].view(rows, width)
    expand(part, slice(None), out, part.num_tiles // count if span == 2 else 0)
    return out.view(count, -1, width)


def _swiglu(product: torch.Tensor, width: int) -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return (F.silu(gate) * up)[:, :width].contiguous()


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared_gate: torch.Tensor,
    x: torch.Tensor,
    norm_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: AnyRows | None = None,
    pdl: bool = False,
) -> None:
    """x += the sum over ranks of weights * parts, then + shared_gate * the shared part; in rank order, by fma.

    parts: bf16 [R, k + 1, H]; weights fp32 [R, k]; shared_gate fp32 [R]; x fp32 [>= R, H], updated in place. With
    norm_scale fp32 [H] also out = rms_norm(x) * norm_scale, bf16 [>= R, H], which may be TiledRows.
    """
    num_rows, top_k = weights.shape
    hidden = x.shape[1]
    assert parts.shape == (num_rows, top_k + 1, hidden) and parts.is_contiguous() and weights.is_contiguous()
    assert x.dtype == torch.float32 and x.is_contiguous() and (norm_scale is None) == (out is None)
    memory, tiled = (x, False) if out is None else stored(out)
    block = 1 << (hidden - 1).bit_length()
    combine_kernel[(num_rows,)](
        parts,
        weights,
        shared_gate,
        x,
        x if norm_scale is None else norm_scale,
        memory,
        eps,
        H=hidden,
        TOP_K=top_k,
        NORM=norm_scale is not None,
        TILED=tiled,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(16, max(4, block // 256)),
        launch_pdl=pdl,
    )
