"""The token of every row: greedy, or drawn by keyed Gumbel noise, under the rules of the row's own request.

Meaning as in `spec.sampling.choose`. One launch reads the logits once, in
chunks of the vocabulary; the chunk that arrives last at an integer counter merges the row's partial results, by a
maximum whose order does not matter. Requests with min_p, top_k or top_p need more launches, which return at once for
others: filters.py finds where a row is cut, the last one draws. Products and sums round as torch's do (no contraction
to fma).

R = rows, B = sequences, W = window rows of each, V = vocabulary, N = logits of a row (V, or the draft vocabulary), S =
slots. Reads 4 N R bytes of logits; noise takes some 75 instructions a logit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.filters import (
    COUNT_DIGITS,
    COUNT_STEPS,
    ENTRIES,
    FEW,
    MASS_DIGITS,
    MASS_STEPS,
    clear_sums,
    count_kernel,
    load_scores,
    mass_kernel,
    threshold_kernel,
    tie_kernel,
)
from pilotfish.kernels.cuda.scores import (
    chunk_ids,
    forced,
    index_of,
    key_of,
    noise,
    noise_key,
    pack,
    row_of,
    scaled,
)
from pilotfish.spec import slots
from pilotfish.spec.slots import SlotState

CHUNK = 2048
"""Logits of one program, more for over 128 chunks; no result depends on it."""
PROGRAMS = 256
"""Programs of the launches that most requests have no use for."""
_THINKING = tl.constexpr(slots.THINKING)


class ChoiceScratch(NamedTuple):
    """What one `choose` at a time works in, shared by all graphs of a stream. Counters are zero between launches."""

    partials: torch.Tensor
    """int64 [R, chunks]: the best of each chunk."""
    masses: torch.Tensor
    """int64 [R, chunks]: each chunk's sum of probabilities, or of equal scores, then each program's best draw."""
    counters: torch.Tensor
    """int32 [3, R]: chunks arrived (twice), candidates."""
    threshold: torch.Tensor
    """int64 [R]: what survives min_p, top_k and top_p is not below it."""
    candidates: torch.Tensor
    """int64 [R, FEW]."""
    scores: torch.Tensor
    """fp32 [R, N]: logits after all rules and temperature, of rows with a filter."""
    cut: torch.Tensor
    """int64 [R, ENTRIES, 4]: where the search for a threshold stands."""
    counts: torch.Tensor
    """int32 [R, COUNT_STEPS, COUNT_DIGITS]: scores of each digit."""
    sums: torch.Tensor
    """int64 [R, MASS_STEPS, MASS_DIGITS]: probability of each digit."""

    @classmethod
    def empty(cls, rows: int, num_logits: int, device: torch.device | str) -> ChoiceScratch:
        chunks = triton.cdiv(num_logits, _chunk(num_logits))

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            buffer(rows, chunks),
            buffer(rows, chunks),
            buffer(3, rows, dtype=torch.int32),
            buffer(rows),
            buffer(rows, FEW),
            buffer(rows, num_logits, dtype=torch.float32),
            buffer(rows, ENTRIES, 4),
            buffer(rows, COUNT_STEPS, COUNT_DIGITS, dtype=torch.int32),
            buffer(rows, MASS_STEPS, MASS_DIGITS),
        )


def _chunk(num_logits: int) -> int:
    return max(CHUNK, triton.next_power_of_2(triton.cdiv(num_logits, 128)))


@triton.jit
def _merge_and_store(
    best,
    partials,
    num_programs,
    logits,
    kept,
    out,
    nan_out,
    scratch,
    s,
    row,
    slot,
    flags,
    depth,
    position,
    stride,
    max_depth,
    DRAFT: tl.constexpr,
    MAX_CLOSING: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Adds this program's best; the last program to arrive writes the row's token."""
    tl.store(partials + row * CHUNKS + tl.program_id(1), best)
    tl.debug_barrier()
    if tl.atomic_add(scratch.counters + row, 1, sem="acq_rel") == num_programs - 1:
        programs = tl.arange(0, BLOCK_CHUNKS)
        all_best = tl.load(partials + row * CHUNKS + programs, programs < num_programs, other=-1, cache_modifier=".cg")
        column = index_of(tl.max(all_best, 0), BITS)
        token = column
        if kept is not None:
            token = tl.load(kept + column).to(tl.int64)
        if flags & _THINKING:
            rule = forced(s, slot, depth, position, max_depth, MAX_CLOSING)
            token = tl.where(rule >= 0, rule, token)
            if kept is None:
                column = token
        tl.store(out + row, token)
        if DRAFT:
            tl.store(s.drafts + slot * max_depth + depth, token)
        if nan_out is not None:
            chosen = tl.load(logits + row * stride + column).to(tl.float32)
            tl.store(nan_out + row, (chosen != chosen).to(nan_out.dtype.element_ty))
        tl.store(scratch.counters + row, 0)


@triton.jit(do_not_specialize=["W", "first", "max_depth"])
def _choose_kernel(
    logits,
    allowed,
    kept,
    slots,
    s,
    out,
    nan_out,
    scratch,
    W,
    first,
    num_logits,
    stride,
    max_depth,
    V: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_BAD: tl.constexpr,
    BEFORE: tl.constexpr,
    MAX_CLOSING: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows without a filter get their token; of the others, the scores and each chunk's largest."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, slot, flags, depth, position, temperature, filtered = row_of(slots, s, W, first)
    cols, valid, ids = chunk_ids(kept, tl.program_id(1), num_logits, CHUNK)
    x = scaled(
        logits, allowed, cols, valid, ids, s, row, slot, flags, depth, position, temperature, stride,
        max_depth, V, NUM_STOPS, NUM_BAD, BEFORE,
    )  # fmt: skip
    if (temperature > 0) & (not filtered):
        x += noise(noise_key(s, slot, position), ids)
    best = tl.max(tl.where(valid, pack(key_of(x), cols, BITS), -1), 0)
    if filtered:
        tl.store(scratch.scores + row * num_logits + cols, x, valid)
        tl.store(scratch.partials + row * CHUNKS + tl.program_id(1), best)
        clear_sums(scratch, row, tl.program_id(1), CHUNKS)
    else:
        _merge_and_store(
            best, scratch.partials, CHUNKS, logits, kept, out, nan_out, scratch, s, row, slot, flags, depth, position,
            stride, max_depth, DRAFT, MAX_CLOSING, CHUNKS, BLOCK_CHUNKS, BITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["W", "first", "max_depth"])
def _draw_kernel(
    logits,
    kept,
    slots,
    s,
    out,
    nan_out,
    scratch,
    W,
    first,
    num_logits,
    stride,
    max_depth,
    MAX_CLOSING: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    DRAFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of rows with a filter, drawn among what survived."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, slot, flags, depth, position, _temperature, filtered = row_of(slots, s, W, first)
    if filtered:
        threshold = tl.load(scratch.threshold + row)
        key = noise_key(s, slot, position)
        best = tl.full((), -1, tl.int64)
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            # the chunk's largest score says whether any of it survives
            if tl.load(scratch.partials + row * CHUNKS + chunk) >= threshold:
                cols, valid, ids = chunk_ids(kept, chunk, num_logits, CHUNK)
                x = load_scores(scratch, row, cols, num_logits)
                survives = valid & (pack(key_of(x), cols, BITS) >= threshold)
                x += noise(key, ids)
                best = tl.maximum(best, tl.max(tl.where(survives, pack(key_of(x), cols, BITS), -1), 0))
        _merge_and_store(
            best, scratch.masses, tl.num_programs(1), logits, kept, out, nan_out, scratch, s, row, slot, flags, depth,
            position, stride, max_depth, DRAFT, MAX_CLOSING, CHUNKS, BLOCK_CHUNKS, BITS,
        )  # fmt: skip


def choose(
    logits: torch.Tensor,
    slots_B: torch.Tensor,
    state: SlotState,
    width: int,
    out: torch.Tensor,
    scratch: ChoiceScratch,
    has_nan: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    first: int = 0,
    draft: bool = False,
    filters: bool = True,
    pdl: bool = False,
) -> None:
    """Writes the token int64 of row b * width + j: the one that follows slots_B[b]'s last token and its drafts 0 ..
    first + j - 1, as `state` holds both.

    Verifying: width k + 1, first 0, before the commit. Draft number i: width 1, first i, after it, and `draft`: the
    token is stored in state.drafts[slot, i] too, where the next draft's rules find it. logits fp32 or bf16 [>= R, >=
    N], rows at one stride. kept: int32 [N], rising, the vocabulary ids of the logits (None: all). nan: int32 [R], 1
    where the chosen token's own logit is a NaN, which counts as the largest. allowed: int32 [R, ceil(V / 32)] words
    with a bit for each id that a grammar allows, used by slots with MASKED. `filters` off leaves out the launches that
    min_p, top_k and top_p need: no slot may use them then. scratch: not smaller than R and N.
    """
    rows = len(slots_B) * width
    vocab, max_depth = state.counts.shape[1], state.drafts.shape[1]
    num_logits = vocab if kept is None else len(kept)
    chunk = _chunk(num_logits)
    chunks = triton.cdiv(num_logits, chunk)
    assert logits.stride(1) == 1 and len(logits) >= rows and logits.shape[1] >= num_logits
    assert first >= 0 and first + width <= max_depth + 1 and (not draft or (width == 1 and first < max_depth))
    assert out.dtype == torch.int64 and len(out) >= rows and len(scratch.threshold) >= rows
    assert scratch.partials.numel() >= rows * chunks and scratch.scores.numel() >= rows * num_logits
    rules = {
        "V": vocab,
        "NUM_STOPS": state.stop_ids.shape[1],
        "NUM_BAD": state.bad_lasts.shape[1],
        "BEFORE": state.recent.shape[1],
    }
    how = {"PDL": pdl, "num_warps": 4, "launch_pdl": pdl, "enable_fp_fusion": False}
    chunked = {"CHUNKS": chunks, "CHUNK": chunk}
    packed = {"BLOCK_CHUNKS": max(32, triton.next_power_of_2(chunks)), "BITS": (num_logits - 1).bit_length()}
    ending = {"MAX_CLOSING": state.closing.shape[1], "DRAFT": draft}
    # whether there is a history must not choose the kernel: a model without a look-up head has none
    state = state._replace(history=None)
    sizes = (num_logits, logits.stride(0), max_depth)
    _choose_kernel[(rows, chunks)](
        logits, allowed, kept, slots_B, state, out, has_nan, scratch, width, first, *sizes,
        **rules, **how, **chunked, **packed, **ending,
    )  # fmt: skip
    if filters:
        num_rows = scratch.counters.shape[1]
        # few programs, that all may leave at once: chunks in turn
        grid, halves = ((rows, max(1, min(count, PROGRAMS // rows))) for count in (chunks, 2 * chunks))
        threshold_kernel[grid](slots_B, state, scratch, width, first, num_rows, num_logits, **how, **chunked, **packed)
        for step in range(COUNT_STEPS):
            count_kernel[grid](scratch, step, num_logits, **how, **chunked)
        for step in range(MASS_STEPS):
            mass_kernel[halves](scratch, step, num_logits, **how, CHUNKS=2 * chunks, CHUNK=chunk // 2)
        tie_kernel[grid](scratch, num_rows, num_logits, **how, **chunked, **packed)
        _draw_kernel[grid](
            logits, kept, slots_B, state, out, has_nan, scratch, width, first, *sizes,
            **how, **chunked, **packed, **ending,
        )  # fmt: skip
