"""The router: from logits to expert weights, ids and the shared expert's gate.

Experts are taken by logit, the lower id first among equals; weights are exp(l - l_max) over the sum of the chosen,
added in rank order: the softmax over all experts, renormalised over the chosen, without the denominator that cancels.
One warp has a row, wherever it is chosen: in `route`, a program a row, and in the experts' kernels of few rows. R =
rows, E = experts, k = experts a token. Launch-bound: a row moves 4 (E + 1) bytes.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def rows_by_warps(warps):
    """Of what a warp has for each of its rows, [rows, lanes]."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _exchanges(count):
    """Batcher's odd-even merge sort: which two places are compared, one after the other."""
    pairs, merged = [], 1
    while merged < count:
        apart = merged
        while apart:
            pairs += [
                (place, place + apart)
                for first in range(apart % merged, count - apart, 2 * apart)
                for place in range(first, min(first + apart, count - apart))
                if place // (2 * merged) == (place + apart) // (2 * merged)
            ]
            apart //= 2
        merged *= 2
    return pairs


@gluon.jit
def _exchanged(keys, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """The larger of two keys in the first one's place; by one comparison, where the compiler would make two."""
    larger, smaller = gl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.gt.s64 p, $3, $2;\nselp.b64 $0, $3, $2, p;\nselp.b64 $1, $2, $3, p;\n}",
        "=&l,=&l,l,l",
        [keys[FIRST], keys[SECOND]],
        dtype=(gl.int64, gl.int64),
        is_pure=True,
        pack=1,
    )
    return keys[:FIRST] + (larger,) + keys[FIRST + 1 : SECOND] + (smaller,) + keys[SECOND + 1 :]


@gluon.jit
def _falling(keys):
    """The lane's keys in falling order."""
    pairs: gl.constexpr = _exchanges(len(keys))
    for i in gl.static_range(len(pairs)):
        keys = _exchanged(keys, pairs[i][0], pairs[i][1])
    return keys


@gluon.jit
def choices(rows, E, TOP_K: gl.constexpr, EACH: gl.constexpr, CACHE: gl.constexpr):
    """For each rank the expert that each row chooses, int32, and its logit, fp32: two tuples of tensors [ROWS].

    rows: where each row's logits begin, [ROWS] of SliceLayout(1, rows by warps). EACH: of 32 lanes each has so many.
    With a NaN among the logits, which is the largest then, the experts of a row are still different ones.
    """
    layout: gl.constexpr = rows_by_warps(gl.num_warps())
    last: gl.constexpr = EACH * 32 - 1
    lane = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    keys = ()
    for i in gl.static_range(EACH):
        column = lane + i * 32
        # a sum has no zero of another sign, and one NaN alone, of all bits
        value = gl.load(rows[:, None] + column, column < E, other=0.0, cache_modifier=CACHE).to(gl.float32) + 0.0
        # integers in the order of the floats, what is masked less than -inf; of equal ones the lower id is more
        bits = value.to(gl.int32, bitcast=True)
        bits = gl.where(column < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
        keys = keys + ((bits.to(gl.int64) << 32) | (last - column),)
    # each lane's in order: a choice then looks at the first of each, and takes it away
    keys = _falling(keys)
    experts = ()
    logits = ()
    for _ in gl.static_range(TOP_K):
        bits = (keys[0] >> 32).to(gl.int32)
        best = gl.max(bits, 1)
        # there are at least TOP_K experts: this is not a masked column
        place = gl.where(bits == best[:, None], keys[0].to(gl.int32), -1)
        first = gl.max(place, 1)
        experts = experts + (last - first,)
        logits = logits + ((best ^ ((best >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True),)
        own = place == first[:, None]
        left = ()
        for i in gl.static_range(EACH - 1):
            left = left + (gl.where(own, keys[i + 1], keys[i]),)
        keys = left + (gl.where(own, -0x8000000000000000, keys[EACH - 1]),)
    return experts, logits


@gluon.jit
def of_ranks(values, ranks):
    """Those of `values`, a tensor [ROWS] for each rank, that are the ranks': [ROWS, n] for [1, n]."""
    out = values[0][:, None] + ranks * 0
    for rank in gl.static_range(1, len(values)):
        out = gl.where(ranks == rank, values[rank][:, None], out)
    return out


@gluon.jit
def choice(logits, E, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr, EACH: gl.constexpr, CACHE: gl.constexpr):
    """What one row's logits choose: ids and weights, [1, BLOCK_K], and the shared expert's gate."""
    layout: gl.constexpr = rows_by_warps(gl.num_warps())
    ranks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    gate = gl.load(logits + E, cache_modifier=CACHE).to(gl.float32)
    row = logits + gl.arange(0, 1, gl.SliceLayout(1, layout))
    experts, chosen = choices(row, E, TOP_K, EACH, CACHE)
    weights = gl.exp(of_ranks(chosen, ranks) - chosen[0][:, None])
    weights = gl.where(ranks < TOP_K, weights, 0.0)
    weights = gl.div_rn(weights, gl.sum(weights, 1)[:, None])
    return of_ranks(experts, ranks), weights, gl.div_rn(1.0, 1.0 + gl.exp(-gate))


@gluon.jit
def store_choice(chosen, weights_out, ids_out, gate_out, row, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr):
    """What `choice` gives, to a row of the outputs."""
    layout: gl.constexpr = rows_by_warps(gl.num_warps())
    ranks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    ids, weights, gate = chosen
    gl.store(ids_out + row * TOP_K + ranks, ids, ranks < TOP_K)
    gl.store(weights_out + row * TOP_K + ranks, weights, ranks < TOP_K)
    gl.store(gate_out + row, gate)


@gluon.jit(do_not_specialize=["E"])
def _route_kernel(
    logits,
    weights_out,
    ids_out,
    gate_out,
    stride,
    E,
    TOP_K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EACH: gl.constexpr,
    PDL: gl.constexpr,
):
    row = gl.program_id(0).to(gl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chosen = choice(logits + row * stride, E, TOP_K, BLOCK_K, EACH, "")
    store_choice(chosen, weights_out, ids_out, gate_out, row, TOP_K, BLOCK_K)


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
        **blocks(num_experts, top_k),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def blocks(num_experts: int, top_k: int) -> dict[str, int]:
    """Constants of kernels that choose."""
    # not by Triton's own function, see norm.py
    each = max(1, (1 << (num_experts - 1).bit_length()) // 32)
    return {"TOP_K": top_k, "BLOCK_K": 1 << (top_k - 1).bit_length(), "EACH": each}


def route_reference(
    logits: torch.Tensor, num_experts: int, weights_Rk: torch.Tensor, ids_Rk: torch.Tensor, gate_R: torch.Tensor
) -> None:
    """Plain torch; see `route`. `kernels.moe.route` gives the same but where probabilities round to equal ones."""
    rows, top_k = ids_Rk.shape
    ordered, ids = logits[:rows, :num_experts].float().sort(dim=-1, descending=True, stable=True)
    weights_Rk.copy_(ordered[:, :top_k].softmax(-1))
    ids_Rk.copy_(ids[:, :top_k])
    gate_R.copy_(logits[:rows, num_experts].float().sigmoid())
