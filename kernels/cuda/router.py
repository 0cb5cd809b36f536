"""The router: from logits to expert weights, ids and the shared expert's gate, one program a row.

Experts are taken by logit, the lower id first among equals; weights are exp(l - l_max) over the sum of the chosen,
added in rank order: the softmax over all experts, renormalised over the chosen, without the denominator that cancels. R
= rows, E = experts, k = experts a token. Launch-bound: a row moves 4 (E + 1) bytes.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _falling(keys, ids):
    """The lane's keys in falling order, its ids with them, of equal keys as they were: neighbours change places."""
    for turn in tl.static_range(len(keys)):
        sorted_keys = keys[: turn % 2]
        sorted_ids = ids[: turn % 2]
        for i in tl.static_range(turn % 2, len(keys) - 1, 2):
            swap = keys[i + 1] > keys[i]
            sorted_keys += (tl.where(swap, keys[i + 1], keys[i]), tl.where(swap, keys[i], keys[i + 1]))
            sorted_ids += (tl.where(swap, ids[i + 1], ids[i]), tl.where(swap, ids[i], ids[i + 1]))
        keys = sorted_keys + keys[len(sorted_keys) :]
        ids = sorted_ids + ids[len(sorted_ids) :]
    return keys, ids


@triton.jit(do_not_specialize=["E"])
def _route_kernel(
    logits,
    weights_out,
    ids_out,
    gate_out,
    stride,
    E,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)
    ranks = tl.arange(0, BLOCK_K)
    each: tl.constexpr = BLOCK // 32
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = logits + row * stride
    gate = tl.load(source + E).to(tl.float32)
    keys = ()
    ids_of = ()
    for i in tl.static_range(each):
        # next to each other in a lane, so that of equal ones the lowest lane has the lowest
        cols = lane * each + i
        value = tl.load(source + cols, cols < E, other=0.0).to(tl.float32)
        # integers in the order of the floats: a NaN is the largest, and what is masked less than -inf
        bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(value == value, key, 0x7FFFFFFF)
        keys += (tl.where(cols < E, key, -0x80000000),)
        ids_of += (cols,)
    # each lane's in order: a choice then looks at the first of each, and takes it away
    keys, ids_of = _falling(keys, ids_of)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    chosen = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(keys[0], 0)
        expert = tl.min(tl.where(keys[0] == best, ids_of[0], BLOCK), 0)
        ids = tl.where(ranks == rank, expert, ids)
        chosen = tl.where(ranks == rank, (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), chosen)
        # expert is not a masked column: there are at least TOP_K experts
        own = ids_of[0] == expert
        left = ()
        left_ids = ()
        for i in tl.static_range(each - 1):
            left += (tl.where(own, keys[i + 1], keys[i]),)
            left_ids += (tl.where(own, ids_of[i + 1], ids_of[i]),)
        keys = left + (tl.where(own, -0x80000000, keys[each - 1]),)
        ids_of = left_ids + (ids_of[each - 1],)
    weights = tl.exp(chosen - tl.sum(tl.where(ranks == 0, chosen, 0.0), 0))
    weights = tl.div_rn(weights, tl.sum(weights, 0))
    kept = ranks < TOP_K
    tl.store(weights_out + row * TOP_K + ranks, weights, kept)
    tl.store(ids_out + row * TOP_K + ranks, ids, kept)
    tl.store(gate_out + row, tl.div_rn(1.0, 1.0 + tl.exp(-gate)))


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
    block = max(32, 1 << (num_experts - 1).bit_length())
    _route_kernel[(rows,)](
        logits,
        weights_Rk,
        ids_Rk,
        gate_R,
        logits.stride(0),
        num_experts,
        TOP_K=top_k,
        BLOCK_K=1 << (top_k - 1).bit_length(),
        BLOCK=block,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def route_reference(
    logits: torch.Tensor, num_experts: int, weights_Rk: torch.Tensor, ids_Rk: torch.Tensor, gate_R: torch.Tensor
) -> None:
    """Plain torch; see `route`. `kernels.moe.route` gives the same but where probabilities round to equal ones."""
    rows, top_k = ids_Rk.shape
    ordered, ids = logits[:rows, :num_experts].float().sort(dim=-1, descending=True, stable=True)
    weights_Rk.copy_(ordered[:, :top_k].softmax(-1))
    ids_Rk.copy_(ids[:, :top_k])
    gate_R.copy_(logits[:rows, num_experts].float().sigmoid())
