"""min_p, top_k and top_p over a whole row: where the scores that survive end.

All three keep a prefix of the row in falling order, ties by index. Chunks list what may end it: everything from a
bound up that at least top_k scores reach, the top_k-th largest chunk maximum. The chunk that arrives last finds the end
in the list, from all pairs of up to 256, else bit by bit; if the list is too short (a top_k above three quarters of the
chunks, or a flat distribution under top_p alone) it first reads the row again and lists all that can be drawn at all,
most of a millisecond's work.

Probabilities are summed as integers, exp(l - l_max) in units of 2^-40: no order shows, and the result differs from a
sum of floats only where that sum lies within its own rounding error of top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda import slots
from pilotfish.kernels.cuda.scores import chunk_ids, key_of, pack, row_of, scaled, value_of

_MIN_P = tl.constexpr(slots.MIN_P)
_TOP_K = tl.constexpr(slots.TOP_K)
_TOP_P = tl.constexpr(slots.TOP_P)
# noise is -2.9 .. 16.7: a score that far below the row's largest is never drawn
_REACH = tl.constexpr(21.0)
_FEW = tl.constexpr(256)
_TILE = tl.constexpr(512)


@triton.jit
def _mass(key, top):
    """exp(value - top) in units of 2^-40."""
    return (tl.exp(value_of(key) - top) * 1099511627776.0).to(tl.int64)


@triton.jit
def _share(part, mass):
    """What the scores before one must not reach, if that is to be kept; the first always is."""
    return tl.maximum(tl.ceil(part * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _at_least(candidates, num_candidates, low, top, BITS: tl.constexpr, MASS: tl.constexpr):
    """Number of the candidates that are not below `low`, or their mass."""
    lanes = tl.arange(0, _TILE)
    total = tl.zeros((_TILE,), tl.int64)
    for start in range(0, num_candidates, _TILE):
        packed = tl.load(candidates + start + lanes, start + lanes < num_candidates, other=-1, cache_modifier=".cg")
        total += tl.where(packed >= low, _mass(packed >> BITS, top) if MASS else 1, 0)
    return tl.sum(total, 0)


@triton.jit
def _last_kept(candidates, num_candidates, highest, lowest, limit, top, BITS: tl.constexpr, MASS: tl.constexpr):
    """The candidate that, counted from the top, first reaches the limit of number or mass; bit by bit, from the highest
    bit in which candidates differ. At most all of them if none does."""
    num_bits = 0
    while ((highest ^ lowest) >> num_bits) != 0:
        num_bits += 1
    found = (highest >> num_bits) << num_bits
    for i in range(num_bits):
        step = found | (tl.full((), 1, tl.int64) << (num_bits - 1 - i))
        found = tl.where(_at_least(candidates, num_candidates, step, top, BITS, MASS) >= limit, step, found)
    return found


@triton.jit
def _last_of_few(candidates, num_candidates, max_count, max_mass, share, top, BITS: tl.constexpr):
    """The same for a short list: what stands before each candidate, from all pairs. A share below 1 is one of what
    max_count leaves, and replaces max_mass."""
    lanes = tl.arange(0, _FEW)
    others = tl.arange(0, 32)
    packed = tl.load(candidates + lanes, lanes < num_candidates, other=-1, cache_modifier=".cg")
    counts = tl.zeros((_FEW,), tl.int32)
    masses = tl.zeros((_FEW,), tl.int64)
    for start in range(0, num_candidates, 32):
        other = tl.load(candidates + start + others, start + others < num_candidates, other=-1, cache_modifier=".cg")
        mass = tl.where(other >= 0, _mass(other >> BITS, top), 0)
        is_before = other[None, :] > packed[:, None]
        counts += tl.sum(is_before.to(tl.int32), 1)
        masses += tl.sum(tl.where(is_before, mass[None, :], 0), 1)
    kept = (packed >= 0) & (counts < max_count)
    if share < 1:
        max_mass = _share(share, tl.sum(tl.where(kept, _mass(packed >> BITS, top), 0), 0))
    kept = kept & (masses < max_mass)
    return tl.min(tl.where(kept, packed, 1 << 62), 0)


@triton.jit
def _ranked(partials, maxima, top_k, BITS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """The top_k-th largest chunk maximum, or that of three quarters of the chunks."""
    lanes = tl.arange(0, 32)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    # how many stand before each one; equal ones in order
    before = tl.zeros((BLOCK_CHUNKS,), tl.int32)
    for start in tl.static_range(0, BLOCK_CHUNKS, 32):
        others = start + lanes
        other = (tl.load(partials + others, others < CHUNKS, other=-1) >> BITS)[None, :]
        is_before = (other > maxima[:, None]) | ((other == maxima[:, None]) & (others[None, :] < chunks[:, None]))
        before += tl.sum(is_before.to(tl.int32), 1)
    rank = tl.minimum(top_k, (3 * CHUNKS + 3) // 4) - 1
    return tl.sum(tl.where(before == rank, maxima, 0), 0)


@triton.jit(do_not_specialize=["W", "first", "num_rows", "max_depth"])
def threshold_kernel(
    logits,
    allowed,
    kept,
    slots,
    s,
    scratch,
    W,
    first,
    num_rows,
    num_logits,
    stride,
    max_depth,
    V: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_BAD: tl.constexpr,
    BEFORE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the least packed score that survives, for rows that use a filter."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, slot, flags, depth, position, temperature, filtered = row_of(slots, s, W, first)
    if filtered:
        chunks = tl.arange(0, BLOCK_CHUNKS)
        maxima = tl.load(scratch.partials + row * CHUNKS + chunks, chunks < CHUNKS, other=-1) >> BITS
        top_key = tl.max(maxima, 0)
        top = value_of(top_key)
        top_k = tl.full((), 1 << 40, tl.int64)
        if flags & _TOP_K:
            top_k = tl.load(s.top_k + slot)
        floor = tl.full((), 0, tl.int64)
        if flags & _MIN_P:
            floor = key_of(top + tl.log(tl.load(s.min_p + slot)))
        bound = _ranked(scratch.partials + row * CHUNKS, maxima, top_k, BITS, CHUNKS, BLOCK_CHUNKS)
        bound = tl.maximum(bound, floor)

        candidates = scratch.candidates + row * num_logits
        # of a chunk without a candidate only the sum may be wanted, where top_p is one of the whole row
        needs_sum = (flags & (_TOP_K | _TOP_P)) == _TOP_P
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            own = row * CHUNKS + chunk
            if needs_sum | ((tl.load(scratch.partials + own) >> BITS) >= bound):
                cols, valid, ids = chunk_ids(kept, chunk, num_logits, CHUNK)
                x = scaled(
                    logits, allowed, cols, valid, ids, s, row, slot, flags, depth, position, temperature, stride,
                    max_depth, V, NUM_STOPS, NUM_BAD, BEFORE,
                )  # fmt: skip
                key = key_of(x)
                valid = valid & (key >= floor)
                tl.store(scratch.masses + own, tl.sum(tl.where(valid, _mass(key, top), 0), 0))
                listed = valid & (key >= bound)
                count = listed.to(tl.int32)
                start = tl.atomic_add(scratch.counters + 2 * num_rows + row, tl.sum(count, 0))
                tl.store(candidates + start + tl.cumsum(count, 0) - 1, pack(key, cols, BITS), listed)
        tl.debug_barrier()
        if tl.atomic_add(scratch.counters + num_rows + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            num_candidates = tl.load(scratch.counters + 2 * num_rows + row, volatile=True)
            threshold = floor << BITS
            # no probabilities where the largest is infinite or NaN: it is chosen whatever is cut
            if (tl.abs(top) < float("inf")) & ((flags & (_TOP_K | _TOP_P)) != 0):
                share = tl.full((), 1.0, tl.float64)
                if flags & _TOP_P:
                    share = tl.load(s.top_p + slot).to(tl.float64)
                max_mass = tl.full((), 1 << 62, tl.int64)
                is_short = num_candidates < top_k
                if (flags & _TOP_K) == 0:
                    masses = tl.load(
                        scratch.masses + row * CHUNKS + chunks, chunks < CHUNKS, other=0, cache_modifier=".cg"
                    )
                    max_mass = _share(share, tl.sum(masses, 0))
                    share = tl.full((), 1.0, tl.float64)
                    is_short = _at_least(candidates, num_candidates, 0, top, BITS, True) < max_mass
                lowest = bound
                if is_short & (bound > floor):
                    lowest = tl.maximum(key_of(top - _REACH), floor)
                    for chunk in range(CHUNKS):
                        cols, valid, ids = chunk_ids(kept, chunk, num_logits, CHUNK)
                        x = scaled(
                            logits, allowed, cols, valid, ids, s, row, slot, flags, depth, position, temperature,
                            stride, max_depth, V, NUM_STOPS, NUM_BAD, BEFORE,
                        )  # fmt: skip
                        key = key_of(x)
                        listed = valid & (key >= lowest) & (key < bound)
                        count = listed.to(tl.int32)
                        place = num_candidates + tl.cumsum(count, 0) - 1
                        tl.store(candidates + place, pack(key, cols, BITS), listed)
                        num_candidates += tl.sum(count, 0)
                    tl.debug_barrier()
                if num_candidates <= _FEW:
                    last = _last_of_few(candidates, num_candidates, top_k, max_mass, share, top, BITS)
                    threshold = tl.maximum(threshold, last)
                else:
                    highest = (top_key << BITS) | ((1 << BITS) - 1)
                    lowest = lowest << BITS
                    if flags & _TOP_K:
                        last = _last_kept(candidates, num_candidates, highest, lowest, top_k, top, BITS, False)
                        threshold = tl.maximum(threshold, last)
                        if share < 1:
                            max_mass = _share(share, _at_least(candidates, num_candidates, last, top, BITS, True))
                    if flags & _TOP_P:
                        last = _last_kept(candidates, num_candidates, highest, lowest, max_mass, top, BITS, True)
                        threshold = tl.maximum(threshold, last)
            tl.store(scratch.threshold + row, threshold)
            tl.store(scratch.counters + num_rows + row, 0)
            tl.store(scratch.counters + 2 * num_rows + row, 0)
