"""The router: the norm before it, its product, and from logits to expert weights, ids and the shared expert's gate.

Experts are taken by logit, the lower id first among equals; weights are exp(l - l_max) over the sum of the chosen: the
softmax over all experts, renormalised over the chosen, without the denominator that cancels. R = rows, E = experts, k =
experts a token, H = hidden.

`add_norm_route` is one launch in place of three dependent ones (norm.add_norm, the product of linear.py, `route`), with
their bits: sums and products go in the same order. A program has 8 rows of the router's weight and 8 rows of x, whose
norm it makes for itself: the rows are small, and so a launch is saved. What a launch costs is latency, about 1.1 us; a
row moves 12 H bytes to each of E / 8 + 1 programs.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.launch_shapes import split
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.mma import in_order, over_warps
from pilotfish.kernels.cuda.norm import num_warps
from pilotfish.kernels.cuda.packing import UNIT, Format

FEW_ROWS = 32
"""Rows up to which one launch is predicted to be faster than three: beyond, programs are more than multiprocessors."""
ROWS = gl.constexpr(8)  # of x and of the weight, a program's
WARPS = 8
EMPTY = gl.constexpr(-1)  # a NaN's bits, for which another NaN's are put
LARGEST, LEAST = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)
UNIT_COLUMNS = gl.constexpr(UNIT)

# two steps of 16 columns: rows g of the weight $4..$7, x $8..$11, the sum so far $12..$15, out $0..$3; rows g + 8 are 0
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}"
HALF_MMA_ASM = gl.constexpr(
    "{\n.reg .b32 z;\nmov.b32 z, 0;\n"
    f"{_MMA}, {{$4,z,$5,z}}, {{$8,$9}}, {{$12,$13,$14,$15}};\n"
    f"{_MMA}, {{$6,z,$7,z}}, {{$10,$11}}, {{$0,$1,$2,$3}};\n}}"
)
HALF_MMA_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 8 + ["f"] * 4))


@triton.jit
def _choose(value, gate, cols, ranks, ids, E, top_k, BLOCK: tl.constexpr):
    """Of logits [R, BLOCK], the first E of which count: weights and ids [R, ranks], and the sigmoid of the gate [R].

    cols [1, BLOCK] and ranks [1, a power of two of at least top_k] count from 0; ids [R, ranks] are 0. Ranks past top_k
    are not to be stored.
    """
    # integers in the order of the floats: a NaN is the largest, and what is masked less than -inf
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & LARGEST)
    key = tl.where(value == value, key, LARGEST)
    key = tl.where(cols < E, key, LEAST)
    chosen = ids.to(tl.float32) + float("-inf")
    # a loop, kept by top_k being no constant: instructions that run once are waited for one by one
    for rank in range(top_k):
        best = tl.max(key, 1)[:, None]
        expert = tl.min(tl.where(key == best, cols, BLOCK), 1)[:, None]
        ids = tl.where(ranks == rank, expert, ids)
        logit = (best ^ ((best >> 31) & LARGEST)).to(tl.float32, bitcast=True)
        chosen = tl.where(ranks == rank, logit, chosen)
        # expert is not a masked column: there are at least top_k experts
        key = tl.where(cols == expert, LEAST, key)
    weights = tl.exp(chosen - tl.sum(tl.where(ranks == 0, chosen, 0.0), 1)[:, None])
    weights = tl.div_rn(weights, tl.sum(weights, 1)[:, None])
    return weights, ids, tl.div_rn(1.0, 1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["E", "top_k"])
def _route_kernel(
    logits,
    weights_out,
    ids_out,
    gate_out,
    stride,
    E,
    top_k,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    cols = tl.arange(0, BLOCK)[None, :]
    ranks = tl.arange(0, BLOCK_K)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = logits + row * stride
    value = tl.load(source[:, None] + cols, cols < E, other=0.0).to(tl.float32)
    gate = tl.load(source + E).to(tl.float32)
    weights, ids, gate = _choose(value, gate, cols, ranks, tl.zeros((1, BLOCK_K), tl.int32), E, top_k, BLOCK)
    kept = ranks < top_k
    tl.store(weights_out + row[:, None] * top_k + ranks, weights, kept)
    tl.store(ids_out + row[:, None] * top_k + ranks, ids, kept)
    tl.store(gate_out + row, gate)


def route(
    logits: torch.Tensor,
    num_experts: int,
    weights_Rk: torch.Tensor,
    ids_Rk: torch.Tensor,
    gate_R: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Writes weights fp32 [R, k], expert ids int32 [R, k] in rank order and sigmoid of the shared gate fp32 [R].

    logits fp32 or bf16 [>= R, >= E + 1]: the experts' logits, then the shared expert's gate. R is that of the outputs.
    With a NaN among the logits ids stay valid and weights are NaN.
    """
    rows, top_k = ids_Rk.shape
    assert 1 <= top_k <= num_experts < logits.shape[1] and len(logits) >= rows and logits.stride(1) == 1
    assert weights_Rk.shape == ids_Rk.shape and weights_Rk.is_contiguous() and ids_Rk.is_contiguous()
    _route_kernel[(rows,)](
        logits,
        weights_Rk,
        ids_Rk,
        gate_R,
        logits.stride(0),
        num_experts,
        top_k,
        BLOCK_K=1 << (top_k - 1).bit_length(),
        BLOCK=_block(num_experts),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def _block(num_experts: int) -> int:
    return max(32, 1 << (num_experts - 1).bit_length())


def route_reference(
    logits: torch.Tensor, num_experts: int, weights_Rk: torch.Tensor, ids_Rk: torch.Tensor, gate_R: torch.Tensor
) -> None:
    """Plain torch; see `route`. `kernels.moe.route` gives the same but where probabilities round to equal ones."""
    rows, top_k = ids_Rk.shape
    ordered, ids = logits[:rows, :num_experts].float().sort(dim=-1, descending=True, stable=True)
    weights_Rk.copy_(ordered[:, :top_k].softmax(-1))
    ids_Rk.copy_(ids[:, :top_k])
    gate_R.copy_(logits[:rows, num_experts].float().sigmoid())


# -- with what stands before it ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _bits(number):
    """1, 2, 4, ... below a power of two."""
    return [1 << bit for bit in range((int(number) - 1).bit_length())]


@gluon.constexpr_function
def _fragments(WIDTH, SHARES, WARPS):
    """Where mma has the words of eight rows, [8, WIDTH / 2]: lane 4 g + q row g, in the order of packing.py.

    A lane's registers: word, octet, half, unit of a share, share of the warp.
    """
    apart = WIDTH // 2 // SHARES  # words of a share
    registers = [1, 2, 4, 32, *(64 * unit for unit in _bits(apart // 64))]
    registers += [apart * WARPS * share for share in _bits(SHARES // WARPS)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, word] for word in registers],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, apart * warp] for warp in _bits(WARPS)],
        block_bases=[],
        shape=[8, WIDTH // 2],
    )


@gluon.jit
def _summed(x, delta, row, cols, num_rows, H: gl.constexpr):
    """Where rows of the stream are, whether they are there, and their sum with what is added to them, fp32."""
    place = row[:, None] * H + cols[None, :]
    there = (row < num_rows)[:, None] & (cols < H)[None, :]
    value = gl.load(x + place, mask=there, other=0.0)
    added = gl.load(delta + place, mask=there, other=0.0)
    # all are on their way before one is waited for
    in_order(True)
    return place, there, value + added.to(gl.float32)


@gluon.jit
def _multiplied(units, words, K: gl.constexpr, WIDTH: gl.constexpr, SHARES: gl.constexpr):
    """A warp's sums of 8 rows of the weight with 8 rows of x, fp32 [warps * 32, 4] for each of its shares, the upper
    two of 4 being nothing's: mma has 16 rows. Units: all of the warp's, share by share; words: of `_fragments`.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    shares: gl.constexpr = SHARES // warps
    steps: gl.constexpr = K // UNIT_COLUMNS // SHARES * 4
    room: gl.constexpr = WIDTH // UNIT_COLUMNS // SHARES * 4
    # [row, share, warp, unit, half, q, octet, word]
    words = gl.reshape(words, [8, shares, warps, room // 4, 2, 4, 2, 4])
    words = gl.permute(words, [2, 0, 5, 7, 1, 3, 4, 6])
    size: gl.constexpr = shares * room
    pieces = (gl.reshape(words, [warps * 32, 4, size]),)
    # the lowest bit of the last dimension parts them first
    for bit in gl.static_range(size.bit_length() - 1):
        low = ()
        high = ()
        for i in gl.static_range(len(pieces)):
            even, odd = gl.split(gl.reshape(pieces[i], [warps * 32, 4, size >> (bit + 1), 2]))
            low = low + (even,)
            high = high + (odd,)
        pieces = low + high
    totals = ()
    for _ in gl.static_range(shares):
        totals = totals + (gl.zeros([warps * 32, 4], gl.float32, layout),)
    for step in gl.static_range(steps):
        added = ()
        for share in gl.static_range(shares):
            piece = gl.reshape(pieces[share * room + step], [warps * 32, 4])
            piece = gl.convert_layout(piece, layout, assert_trivial=True)
            total = gl.inline_asm_elementwise(
                HALF_MMA_ASM,
                HALF_MMA_CONSTRAINTS,
                [units[share * steps + step], piece, totals[share]],
                dtype=gl.float32,
                is_pure=False,
                pack=4,
            )
            added = added + (total,)
        totals = added
    return totals


@gluon.jit(do_not_specialize=["num_rows", "num_experts", "top_k", "stride"])
def _add_norm_route_kernel(
    x,
    delta,
    scale,
    weight,
    h_out,
    arrived,
    weights_out,
    ids_out,
    gate_out,
    eps,
    num_rows,
    num_experts,
    top_k,
    stride,
    H: gl.constexpr,
    WIDTH: gl.constexpr,
    SHARES: gl.constexpr,
    NORM_WARPS: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (j, i): rows 8 j ... of x, 8 i ... of the weight. The last of a j waits for the others' logits, chooses,
    and stores the stream, which by then all have read.

    A logit is there when its word in `arrived` is not EMPTY: no fence, no counter. Whoever waits may, because all
    programs it waits for were given out before it, and none of them waits for another. It leaves the words EMPTY.
    CHUNK: rows that are normed at a time, each by NORM_WARPS warps. WIDTH: H, or the next power of two.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    normed_by: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps // NORM_WARPS, NORM_WARPS], [1, 0])
    chosen_by: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    chunks: gl.constexpr = ROWS // CHUNK
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 2, [1, 0])
    if PDL:
        gdc_launch_dependents()
    first_row = gl.program_id(0) * ROWS
    piece = gl.program_id(1)
    thread = gl.arange(0, warps * 32, gl.SliceLayout(1, layout))
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    apart: gl.constexpr = H // UNIT_COLUMNS // SHARES
    # of a tile every other 512 words are a row half's
    base = weight + ((piece // 2).to(gl.int64) * (H // UNIT_COLUMNS * 1024) + piece % 2 * 512)
    offsets = (thread // 32 * (apart * 1024) + thread % 32 * 4)[:, None] + word
    units = ()
    for share in gl.static_range(SHARES // warps):
        for unit in gl.static_range(apart):
            for load in gl.static_range(4):
                start = (share * warps * apart + unit) * 1024 + load * 128
                units = units + (gl.load(base + (offsets + start), eviction_policy="evict_first"),)
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, normed_by))
    factor = gl.load(scale + cols, mask=cols < H, other=0.0)[None, :]
    normed_rows = gl.allocate_shared_memory(gl.int32, [ROWS, WIDTH // 2], swizzled)
    for chunk in gl.static_range(1, chunks):
        normed_rows.slice(chunk * CHUNK, CHUNK).store(gl.zeros([CHUNK, WIDTH // 2], gl.int32, normed_by))
    in_order()
    if PDL:
        gdc_wait()
    rows = first_row + gl.arange(0, CHUNK, gl.SliceLayout(1, normed_by))
    for chunk in gl.static_range(chunks):
        if first_row + chunk * CHUNK < num_rows:
            place, there, value = _summed(x, delta, rows + chunk * CHUNK, cols, num_rows, H)
            normed = value * gl.rsqrt(gl.sum(value * value, 1) / H + eps)[:, None] * factor
            gl.store(h_out + place, normed.to(gl.bfloat16), mask=there & (piece == 0))
            even, odd = gl.split(gl.reshape(normed, [CHUNK, WIDTH // 2, 2]))
            pair = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
            )
            normed_rows.slice(chunk * CHUNK, CHUNK).store(pair)
    words = normed_rows.load(_fragments(WIDTH, SHARES, warps))
    total = over_warps(_multiplied(units, words, H, WIDTH, SHARES), warps, False)
    index = gl.arange(0, 128, flat)
    expert = piece * 8 + index % 32 // 4
    row = first_row + index % 4 * 2 + index // 64
    there = (index // 32 % 2 == 0) & (expert <= num_experts) & (row < num_rows)
    logit = total.to(gl.int32, bitcast=True)
    logit = gl.where(logit == EMPTY, LARGEST, logit)
    gl.atomic_xchg(arrived + (row * stride + expert), logit, mask=there, sem="relaxed", scope="gpu")
    if piece < gl.num_programs(1) - 1:
        return
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, chosen_by))
    is_row = row < num_rows
    experts = gl.arange(0, BLOCK, gl.SliceLayout(0, chosen_by))[None, :]
    ranks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, chosen_by))[None, :]
    logits = arrived + (row[:, None] * stride + experts)
    gates = arrived + (row * stride + num_experts)
    there = is_row[:, None] & (experts < num_experts)
    logit = gl.load(logits, mask=there, other=0, volatile=True)
    gate = gl.load(gates, mask=is_row, other=0, volatile=True)
    while gl.min(gl.minimum(gl.min(_is_there(logit), 1), _is_there(gate)), 0) == 0:
        logit = gl.load(logits, mask=there, other=0, volatile=True)
        gate = gl.load(gates, mask=is_row, other=0, volatile=True)
    gl.store(logits, EMPTY, mask=there)
    gl.store(gates, EMPTY, mask=is_row)
    logit = logit.to(gl.float32, bitcast=True)
    gate = gate.to(gl.float32, bitcast=True)
    none = gl.zeros([ROWS, BLOCK_K], gl.int32, chosen_by)
    weights, ids, gate = _choose(logit, gate, experts, ranks, none, num_experts, top_k, BLOCK)
    kept = is_row[:, None] & (ranks < top_k)
    gl.store(weights_out + (row[:, None] * top_k + ranks), weights, mask=kept)
    gl.store(ids_out + (row[:, None] * top_k + ranks), ids, mask=kept)
    gl.store(gate_out + row, gate, mask=is_row)
    for chunk in range(0, (gl.minimum(num_rows - first_row, ROWS) + CHUNK - 1) // CHUNK):
        place, stored, value = _summed(x, delta, rows + chunk * CHUNK, cols, num_rows, H)
        gl.store(x + place, value, mask=stored)


@gluon.jit
def _is_there(word):
    return (word != EMPTY).to(gl.int32)


@dataclass(frozen=True)
class RouterScratch:
    """Where the programs of a launch leave logits for the one that chooses: int32 [FEW_ROWS, E + 1], EMPTY between
    launches, which follow each other."""

    arrived: torch.Tensor

    @staticmethod
    def make(num_experts: int, device: torch.device) -> RouterScratch:
        """num_experts: the largest of any layer."""
        shape = (FEW_ROWS, num_experts + 1)
        return RouterScratch(torch.full(shape, EMPTY.value, dtype=torch.int32, device=device))


def takes(weight: PackedLinear, num_rows: int) -> bool:
    """Whether `add_norm_route` has a router's weight and so many rows: by the shape and the format alone."""
    hidden, (part, *others) = weight.in_features, weight.ranges
    # shares are found by the bits of a column's number, but for one share
    fits = hidden & (hidden - 1) == 0 or (hidden % UNIT == 0 and split(part.num_tiles, part.num_units) == 1)
    few = 256 <= hidden <= 4096 and num_rows <= FEW_ROWS
    return few and fits and not others and part.format is Format.BF16


def add_norm_route(
    x: torch.Tensor,
    delta: torch.Tensor,
    scale_H: torch.Tensor,
    eps: float,
    weight: PackedLinear,
    h: torch.Tensor,
    weights_Rk: torch.Tensor,
    ids_Rk: torch.Tensor,
    gate_R: torch.Tensor,
    scratch: RouterScratch,
    pdl: bool = False,
) -> None:
    """x += delta, h = rms_norm(x) * scale, then `route` of h times the router's weight [E + 1, H]. Bits are those of
    norm.add_norm, weight.rows and `route`.

    x fp32, delta and h bf16 [>= R, H], contiguous; only R rows, those of the outputs, are read and written. Of weights
    and numbers of rows that `takes` names.
    """
    (rows, top_k), hidden, num_experts = ids_Rk.shape, weight.in_features, weight.out_features - 1
    assert takes(weight, rows) and 1 <= top_k <= num_experts, (rows, weight.in_features)
    assert x.dtype == torch.float32 and delta.dtype == h.dtype == torch.bfloat16
    assert all(t.shape[1] == hidden and len(t) >= rows and t.is_contiguous() for t in (x, delta, h))
    assert weights_Rk.shape == ids_Rk.shape and weights_Rk.is_contiguous() and ids_Rk.is_contiguous()
    assert scratch.arrived.shape[1] > num_experts
    (part,) = weight.ranges
    shares = split(part.num_tiles, part.num_units)
    warps = min(WARPS, shares)
    width = 1 << (hidden - 1).bit_length()
    _add_norm_route_kernel[(-(-rows // ROWS.value), -(-(num_experts + 1) // 8))](
        x,
        delta,
        scale_H,
        part.data.view(torch.int32),
        h,
        scratch.arrived,
        weights_Rk,
        ids_Rk,
        gate_R,
        eps,
        rows,
        num_experts,
        top_k,
        scratch.arrived.stride(0),
        H=hidden,
        WIDTH=width,
        SHARES=shares,
        NORM_WARPS=num_warps(hidden),
        # 32 numbers a thread
        CHUNK=min(ROWS.value, warps * 1024 // width),
        BLOCK_K=1 << (top_k - 1).bit_length(),
        BLOCK=_block(num_experts),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
