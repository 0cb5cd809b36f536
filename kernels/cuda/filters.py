"""min_p, top_k and top_p over a whole row: where the scores that survive end.

All three keep a prefix of the row in falling order, ties by index. `threshold_kernel` lists what reaches a bound (that
at least top_k scores reach, or the maxima of three quarters of the chunks); if the end lies within 256 of these, the
program that arrives last finds it from all pairs. What goes further (a top_k of hundreds, a flat row under top_p) is
found by a radix sort's way from the highest digit down, a launch a digit, by all programs: `count_kernel` adds up how
many scores have each 8-bit digit, `mass_kernel` the probability of each 5-bit digit, and the next launch looks where
the limit is reached. `tie_kernel` counts equal scores at the end. No launch takes longer for one distribution than
another, and each returns at once for rows that are done: at the first launch most of the time.

Probabilities are summed as integers, exp(l - l_max) in units of 2^-40: no order shows, whoever adds first, and the
result differs from a sum of floats only where that sum lies within its own rounding error of top_p.

R = rows, N = scores of a row. Reads 4 N R bytes a launch from the L2, for rows that are not done.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.scores import key_of, pack, row_of, value_of
from pilotfish.spec import slots

COUNT_STEPS = 4
"""Launches of `count_kernel`, each for 8 bits of a key. A histogram looks at each score once for every 32 digits."""
COUNT_DIGITS = 1 << 8
MASS_STEPS = 7
"""Six of 5 bits, one of 2: launches of `mass_kernel`."""
MASS_DIGITS = 1 << 5
FEW = 256
"""Candidates that `threshold_kernel` may list."""
ENTRIES = 1 + COUNT_STEPS + MASS_STEPS
"""Entries of `ChoiceScratch.cut`, four int64 each. First lowest key, largest key, top_k, top_p's bits; then for each
step the key's digits so far, number or mass of what is above them, and of masses the limit (at the first one what top_k
cuts off)."""
OPEN = tl.constexpr(-1)
"""A row's threshold that is not found yet."""

_MIN_P = tl.constexpr(slots.MIN_P)
_TOP_K = tl.constexpr(slots.TOP_K)
_TOP_P = tl.constexpr(slots.TOP_P)
# noise is -2.9 .. 16.7: a score that far below the row's largest is never drawn; and its mass is 0 units
_REACH = tl.constexpr(28.0)
_COUNT_STEPS = tl.constexpr(COUNT_STEPS)
_COUNT_DIGITS = tl.constexpr(COUNT_DIGITS)
_MASS_STEPS = tl.constexpr(MASS_STEPS)
_MASS_DIGITS = tl.constexpr(MASS_DIGITS)
_FEW = tl.constexpr(FEW)
_ENTRIES = tl.constexpr(ENTRIES)
_TILE = tl.constexpr(256)


@triton.jit
def _mass(x, top):
    """exp(x - top) in units of 2^-40."""
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@triton.jit
def _share(part, mass):
    """What the scores before one must not reach, if that is to be kept; the first always is."""
    return tl.maximum(tl.ceil(part.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def load_scores(scratch, row, cols, num_logits):
    """What `_choose_kernel` left of a row with a filter: its logits after all rules and temperature."""
    return tl.load(scratch.scores + row * num_logits + cols, cols < num_logits, other=float("-inf"))


@triton.jit
def clear_sums(scratch, row, chunk, CHUNKS: tl.constexpr):
    """A chunk's part of the row's sums, to which later launches add."""
    PART: tl.constexpr = (_COUNT_STEPS * _COUNT_DIGITS + CHUNKS - 1) // CHUNKS
    places = tl.arange(0, triton.next_power_of_2(PART))
    own = chunk * PART + places
    inside = (places < PART) & (own < _COUNT_STEPS * _COUNT_DIGITS)
    tl.store(scratch.counts + row * (_COUNT_STEPS * _COUNT_DIGITS) + own, 0, inside)
    if chunk == 0:
        sums = tl.arange(0, triton.next_power_of_2(_MASS_STEPS * _MASS_DIGITS))
        tl.store(scratch.sums + row * (_MASS_STEPS * _MASS_DIGITS) + sums, 0, sums < _MASS_STEPS * _MASS_DIGITS)


@triton.jit
def _load_cut(scratch, row, entry, field: tl.constexpr):
    return tl.load(scratch.cut + (row * _ENTRIES + entry) * 4 + field, cache_modifier=".cg")


@triton.jit
def _store_cut(scratch, row, entry, first, second, third, fourth):
    place = scratch.cut + (row * _ENTRIES + entry) * 4
    tl.store(place, first)
    tl.store(place + 1, second)
    tl.store(place + 2, third)
    tl.store(place + 3, fourth)


# -- the end within a short list ---------------------------------------------------------------------------------------


@triton.jit
def _last_of_few(candidates, packed, mass, num_candidates, max_count, max_mass, share, top, BITS: tl.constexpr):
    """The last candidate before which stand fewer than max_count and less than max_mass, from all pairs. A share below
    1 is one of what max_count leaves, and replaces max_mass."""
    others = tl.arange(0, 32)
    counts = tl.zeros((_FEW,), tl.int32)
    masses = tl.zeros((_FEW,), tl.int64)
    for start in range(0, num_candidates, 32):
        other = tl.load(candidates + start + others, start + others < num_candidates, other=-1, cache_modifier=".cg")
        other_mass = tl.where(other >= 0, _mass(value_of(other >> BITS), top), 0)
        is_before = other[None, :] > packed[:, None]
        counts += tl.sum(is_before.to(tl.int32), 1)
        masses += tl.sum(tl.where(is_before, other_mass[None, :], 0), 1)
    kept = (packed >= 0) & (counts < max_count)
    if share < 1:
        max_mass = _share(share, tl.sum(tl.where(kept, mass, 0), 0))
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


@triton.jit(do_not_specialize=["W", "first", "num_rows"])
def threshold_kernel(
    slots,
    s,
    scratch,
    W,
    first,
    num_rows,
    num_logits,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the least packed score that survives, for rows that use a filter; or what other launches need to find it.
    A row that uses none has no threshold to be found."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, slot, flags, _depth, _position, _temperature, filtered = row_of(slots, s, W, first)
    if filtered:
        chunks = tl.arange(0, BLOCK_CHUNKS)
        maxima = tl.load(scratch.partials + row * CHUNKS + chunks, chunks < CHUNKS, other=-1) >> BITS
        top_key = tl.max(maxima, 0)
        top = value_of(top_key)
        top_k = tl.full((), 1 << 40, tl.int64)
        if flags & _TOP_K:
            top_k = tl.load(s.top_k + slot)
        top_p = tl.full((), 1.0, tl.float32)
        if flags & _TOP_P:
            top_p = tl.load(s.top_p + slot)
        floor = tl.full((), 0, tl.int64)
        if flags & _MIN_P:
            floor = key_of(top + tl.log(tl.load(s.min_p + slot)))
        bound = _ranked(scratch.partials + row * CHUNKS, maxima, top_k, BITS, CHUNKS, BLOCK_CHUNKS)
        bound = tl.maximum(bound, floor)
        cuts_number = top_k < num_logits

        candidates = scratch.candidates + row * _FEW
        # of a chunk without a candidate only the sum may be wanted, where top_p is one of the whole row
        needs_sum = (top_p < 1) & (not cuts_number)
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            own = row * CHUNKS + chunk
            if needs_sum | ((tl.load(scratch.partials + own) >> BITS) >= bound):
                cols = chunk * CHUNK + tl.arange(0, CHUNK)
                x = load_scores(scratch, row, cols, num_logits)
                key = key_of(x)
                valid = (cols < num_logits) & (key >= floor)
                tl.store(scratch.masses + own, tl.sum(tl.where(valid, _mass(x, top), 0), 0))
                listed = valid & (key >= bound)
                count = listed.to(tl.int32)
                start = tl.atomic_add(scratch.counters + 2 * num_rows + row, tl.sum(count, 0))
                place = start + tl.cumsum(count, 0) - 1
                tl.store(candidates + place, pack(key, cols, BITS), listed & (place < _FEW))
        tl.debug_barrier()
        if tl.atomic_add(scratch.counters + num_rows + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            num_candidates = tl.load(scratch.counters + 2 * num_rows + row, volatile=True)
            threshold = floor << BITS
            # no probabilities where the largest is infinite or NaN: it is chosen whatever is cut
            if (tl.abs(top) < float("inf")) & (cuts_number | (top_p < 1)):
                places = tl.arange(0, _FEW)
                packed = tl.load(candidates + places, places < num_candidates, other=-1, cache_modifier=".cg")
                mass = tl.where(packed >= 0, _mass(value_of(packed >> BITS), top), 0)
                share = top_p
                max_mass = tl.full((), 1 << 62, tl.int64)
                is_short = num_candidates < top_k
                if needs_sum:
                    masses = tl.load(
                        scratch.masses + row * CHUNKS + chunks, chunks < CHUNKS, other=0, cache_modifier=".cg"
                    )
                    max_mass = _share(share, tl.sum(masses, 0))
                    share = tl.full((), 1.0, tl.float32)
                    is_short = tl.sum(mass, 0) < max_mass
                if (num_candidates > _FEW) | (is_short & (bound > floor)):
                    threshold = tl.full((), OPEN, tl.int64)
                    lowest = tl.maximum(key_of(top - _REACH), floor)
                    top_p_bits = top_p.to(tl.int32, bitcast=True).to(tl.int64)
                    _store_cut(scratch, row, 0, lowest, top_key, top_k, top_p_bits)
                    _store_cut(scratch, row, 1, 0, 0, 0, 0)
                else:
                    last = _last_of_few(candidates, packed, mass, num_candidates, top_k, max_mass, share, top, BITS)
                    threshold = tl.maximum(threshold, last)
            tl.store(scratch.threshold + row, threshold)
            tl.store(scratch.counters + num_rows + row, 0)
            tl.store(scratch.counters + 2 * num_rows + row, 0)
    elif tl.program_id(1) == 0:
        tl.store(scratch.threshold + row, 0)


# -- the end anywhere, digit by digit ----------------------------------------------------------------------------------


@triton.jit
def _request(scratch, row, num_logits):
    """What a row asks: lowest key that may be kept, largest score, top_k, top_p, and which of both the row has still to
    be cut by: neither if it is done."""
    is_open = tl.load(scratch.threshold + row, cache_modifier=".cg") == OPEN
    top_k = _load_cut(scratch, row, 0, 2)
    top_p = _load_cut(scratch, row, 0, 3).to(tl.int32).to(tl.float32, bitcast=True)
    lowest, top = _load_cut(scratch, row, 0, 0), value_of(_load_cut(scratch, row, 0, 1))
    return lowest, top, top_k, top_p, is_open & (top_k < num_logits), is_open & (top_p < 1)


@triton.jit
def _count_bits(step):
    """Bits below a step's digit, and with that digit."""
    return 24 - 8 * step, 32 - 8 * step


@triton.jit
def _mass_bits(step):
    return tl.maximum(27 - 5 * step, 0), 32 - 5 * step


@triton.jit
def _digits_of(scratch, row, start, prefix, least, end, shift, num_logits, SIZE: tl.constexpr):
    """Scores and their digits, -1 for those that are not from `least` up and below `end`."""
    cols = start + tl.arange(0, SIZE)
    x = load_scores(scratch, row, cols, num_logits)
    key = key_of(x)
    inside = (cols < num_logits) & (key >= least) & (key < end)
    return x, tl.where(inside, (key - prefix) >> shift, -1).to(tl.int32)


@triton.jit
def _reached(digits, sums, prefix, above, limit, shift):
    """The key's digits so far with one more, that at which what is counted from the top reaches the limit (the lowest
    if none does); what is above it, and of it."""
    from_top = above.to(sums.dtype) + tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums
    digit = tl.max(tl.where(from_top >= limit, digits, 0), 0)
    own = tl.sum(tl.where(digits == digit, sums, 0), 0)
    above = tl.sum(tl.where(digits == digit, from_top, 0), 0) - own
    return prefix + (digit.to(tl.int64) << shift), above.to(tl.int64), own.to(tl.int64)


@triton.jit
def _counted(scratch, row, step, top_k):
    """The key's digits after a step of counting, the number of scores above them, and of those that have them."""
    digits = tl.arange(0, _COUNT_DIGITS)
    place = scratch.counts + (row * _COUNT_STEPS + step) * _COUNT_DIGITS + digits
    counts = tl.load(place, cache_modifier=".cg")
    prefix, above = _load_cut(scratch, row, 1 + step, 0), _load_cut(scratch, row, 1 + step, 1)
    shift, _bits = _count_bits(step)
    return _reached(digits, counts, prefix, above, top_k, shift)


@triton.jit
def _weighed(scratch, row, step, top_p):
    """The same after a step of adding masses, and the limit of mass."""
    digits = tl.arange(0, _MASS_DIGITS)
    sums = tl.load(scratch.sums + (row * _MASS_STEPS + step) * _MASS_DIGITS + digits, cache_modifier=".cg")
    entry = 1 + _COUNT_STEPS + step
    prefix, above = _load_cut(scratch, row, entry, 0), _load_cut(scratch, row, entry, 1)
    limit = _load_cut(scratch, row, entry, 2)
    if step == 0:
        limit = _share(top_p, tl.sum(sums, 0) - limit)
    shift, _bits = _mass_bits(step)
    prefix, above, own = _reached(digits, sums, prefix, above, limit, shift)
    return prefix, above, own, limit


@triton.jit(do_not_specialize=["step"])
def count_kernel(scratch, step, num_logits, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Counts, for rows that top_k has still to cut, how many scores have each digit, among those with the digits before
    it at which top_k is reached."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lowest, _top, top_k, _top_p, cuts_number, _cuts_mass = _request(scratch, row, num_logits)
    if cuts_number:
        shift, bits = _count_bits(step)
        prefix = tl.full((), 0, tl.int64)
        if step > 0:
            prefix, above, _own = _counted(scratch, row, step - 1, top_k)
            if tl.program_id(1) == 0:
                _store_cut(scratch, row, 1 + step, prefix, above, 0, 0)
        least = tl.maximum(prefix, lowest)
        end = prefix + (tl.full((), 1, tl.int64) << bits)
        counts = tl.zeros((_COUNT_DIGITS,), tl.int32)
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            _, digit = _digits_of(scratch, row, chunk * CHUNK, prefix, least, end, shift, num_logits, CHUNK)
            counts += tl.histogram(tl.maximum(digit, 0), _COUNT_DIGITS, mask=digit >= 0)
        digits = tl.arange(0, _COUNT_DIGITS)
        place = scratch.counts + (row * _COUNT_STEPS + step) * _COUNT_DIGITS + digits
        tl.atomic_add(place, counts, counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["step"])
def mass_kernel(scratch, step, num_logits, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Sums, for rows that top_p has still to cut, the mass of each digit, among scores with the digits before it at
    which top_p is reached; at first among those that top_k leaves and those that are equal to its last one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lowest, top, top_k, top_p, cuts_number, cuts_mass = _request(scratch, row, num_logits)
    if cuts_mass:
        shift, bits = _mass_bits(step)
        prefix, above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        least = lowest
        # what is equal to top_k's last score and yet cut off
        limit = tl.full((), 0, tl.int64)
        if step > 0:
            prefix, above, _own, limit = _weighed(scratch, row, step - 1, top_p)
            least = tl.maximum(prefix, lowest)
        elif cuts_number:
            last, before, own = _counted(scratch, row, _COUNT_STEPS - 1, top_k)
            limit = tl.maximum(before + own - top_k, 0) * _mass(value_of(last), top)
            least = tl.maximum(last, lowest)
        if tl.program_id(1) == 0:
            _store_cut(scratch, row, 1 + _COUNT_STEPS + step, prefix, above, limit, 0)
        end = prefix + (tl.full((), 1, tl.int64) << bits)
        digits = tl.arange(0, _MASS_DIGITS)
        sums = tl.zeros((_MASS_DIGITS,), tl.int64)
        TILE: tl.constexpr = min(CHUNK, _TILE)
        for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
            _, digit = _digits_of(scratch, row, chunk * CHUNK, prefix, least, end, shift, num_logits, CHUNK)
            # after some digits few chunks have any; what was read here is in the L1 below
            if tl.max(digit, 0) >= 0:
                for start in range(0, CHUNK, TILE):
                    x, part = _digits_of(
                        scratch, row, chunk * CHUNK + start, prefix, least, end, shift, num_logits, TILE
                    )
                    # a digit a lane: each thread adds up alone
                    sums += tl.sum(tl.where(part[:, None] == digits[None, :], _mass(x, top)[:, None], 0), 0)
        place = scratch.sums + (row * _MASS_STEPS + step) * _MASS_DIGITS + digits
        tl.atomic_add(place, sums, sums > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def tie_kernel(
    scratch,
    num_rows,
    num_logits,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The threshold of rows that are still open: the key is known, but not how many of several equal scores are kept,
    the lowest indices first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lowest, top, top_k, top_p, cuts_number, cuts_mass = _request(scratch, row, num_logits)
    if cuts_number | cuts_mass:
        if cuts_mass:
            last, above, own, limit = _weighed(scratch, row, _MASS_STEPS - 1, top_p)
            each = tl.maximum(_mass(value_of(last), top), 1)
        else:
            last, above, own = _counted(scratch, row, _COUNT_STEPS - 1, top_k)
            limit = top_k
            each = tl.full((), 1, tl.int64)
        # (limit - above) / each, rounded up: at least 1, and of no use above the number of scores
        num_kept = tl.full((), 0, tl.int64)
        rest = limit - above
        for i in range(BITS):
            more = num_kept + (tl.full((), 1, tl.int64) << (BITS - 1 - i))
            num_kept = tl.where(more * each < rest, more, num_kept)
        num_kept += 1
        if num_kept * each >= own:
            if tl.program_id(1) == 0:
                tl.store(scratch.threshold + row, tl.maximum(last, lowest) << BITS)
        else:
            for chunk in range(tl.program_id(1), CHUNKS, tl.num_programs(1)):
                cols = chunk * CHUNK + tl.arange(0, CHUNK)
                equal = (cols < num_logits) & (key_of(load_scores(scratch, row, cols, num_logits)) == last)
                tl.store(scratch.masses + row * CHUNKS + chunk, tl.sum(equal.to(tl.int64), 0))
            tl.debug_barrier()
            if tl.atomic_add(scratch.counters + num_rows + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
                chunks = tl.arange(0, BLOCK_CHUNKS)
                counts = tl.load(scratch.masses + row * CHUNKS + chunks, chunks < CHUNKS, other=0, cache_modifier=".cg")
                before = tl.cumsum(counts, 0) - counts
                chunk = tl.max(tl.where((counts > 0) & (before < num_kept), chunks, 0), 0)
                num_kept -= tl.sum(tl.where(chunks == chunk, before, 0), 0)
                cols = chunk * CHUNK + tl.arange(0, CHUNK)
                equal = (cols < num_logits) & (key_of(load_scores(scratch, row, cols, num_logits)) == last)
                kept = equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_kept)
                tl.store(scratch.threshold + row, pack(last, tl.max(tl.where(kept, cols, 0), 0).to(tl.int64), BITS))
                tl.store(scratch.counters + num_rows + row, 0)
