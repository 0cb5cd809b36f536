"""What the kernels that choose share: scores as integers, keyed noise, the rules of a request.

A score and its index are packed into one integer, ordered as the scores are with the lower index first among equals
and a NaN above everything, so ties and NaNs need no care. The noise has the bits of `spec.gumbel` on the same device
(CPU and GPU logarithms may differ in the last bit), whatever the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pilotfish.spec import slots

_BIASED = tl.constexpr(slots.BIASED)
_PENALISED = tl.constexpr(slots.PENALISED)
_MIN_TOKENS = tl.constexpr(slots.MIN_TOKENS)
_BAD_SEQUENCES = tl.constexpr(slots.BAD_SEQUENCES)
_MASKED = tl.constexpr(slots.MASKED)
_FILTERED = tl.constexpr(slots.FILTERED)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def key_of(x):
    """0 .. 2^32 - 1 in the order of the floats; equal zeros, and every NaN above infinity."""
    raw = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    raw = raw ^ ((raw >> 31) & 0x7FFFFFFF)
    raw = tl.where(x == x, raw, 0x7FFFFFFF)
    return raw.to(tl.int64) + 0x80000000


@triton.jit
def value_of(key):
    """The float of a key."""
    raw = (key - 0x80000000).to(tl.int32)
    return (raw ^ ((raw >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, index, BITS: tl.constexpr):
    return (key << BITS) | ((1 << BITS) - 1 - index)


@triton.jit
def index_of(packed, BITS: tl.constexpr):
    return (1 << BITS) - 1 - (packed & ((1 << BITS) - 1))


# -- noise -------------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def noise_key(s, slot, position):
    golden = tl.full((), _GOLDEN, tl.uint64)
    key = _mix(tl.load(s.seed + slot).to(tl.uint64, bitcast=True) + golden)
    key = _mix(key + tl.load(s.choice + slot).to(tl.uint64, bitcast=True) * golden)
    return _mix(key + position.to(tl.uint64, bitcast=True) * golden)


@triton.jit
def noise(key, ids):
    """Standard Gumbel, fp32; as `spec.gumbel.gumbel_noise`."""
    drawn = _mix(key + (ids.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * tl.full((), _GOLDEN, tl.uint64)) >> 41
    uniform = (drawn.to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


# -- rules -------------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(slots, s, W, first):
    """What the program's row is: slot, flags, number of drafts before it, position of its token, temperature,
    filtered."""
    row = tl.program_id(0)
    slot = tl.load(slots + row // W).to(tl.int64)
    depth = first + row % W
    temperature = tl.load(s.temperature + slot)
    flags = tl.load(s.flags + slot)
    filtered = (temperature > 0) & ((flags & _FILTERED) != 0)
    return row.to(tl.int64), slot, flags, depth, tl.load(s.length + slot) + 1 + depth, temperature, filtered


@triton.jit
def _ban_early_stops(x, ids, low, high, s, slot, NUM_STOPS: tl.constexpr):
    number = 0
    banned = tl.load(s.stop_ids + slot * NUM_STOPS)
    while banned >= 0:
        if (banned >= low) & (banned <= high):
            x = tl.where(ids == banned, float("-inf"), x)
        number += 1
        banned = tl.load(s.stop_ids + slot * NUM_STOPS + number, number < NUM_STOPS, other=-1)
    return x


@triton.jit
def _ban_sequences(x, ids, low, high, s, slot, depth, max_depth, NUM_BAD: tl.constexpr, BEFORE: tl.constexpr):
    """Only the program that owns a ban's last token looks at the tokens before it."""
    place = tl.arange(0, triton.next_power_of_2(BEFORE))
    inside = place < BEFORE
    source = place + depth
    before = tl.load(s.recent + slot * BEFORE + source, inside & (source < BEFORE), other=-3)
    drafted = tl.load(s.drafts + slot * max_depth + source - BEFORE, inside & (source >= BEFORE), other=-3)
    before = tl.where(source < BEFORE, before, drafted)
    number = 0
    banned = tl.load(s.bad_lasts + slot * NUM_BAD)
    while banned >= 0:
        if (banned >= low) & (banned <= high):
            wanted = tl.load(s.bad_prefixes + (slot * NUM_BAD + number) * BEFORE + place, inside, other=-1)
            hit = tl.min(((wanted == -1) | (wanted == before)).to(tl.int32), 0) != 0
            x = tl.where((ids == banned) & hit, float("-inf"), x)
        number += 1
        banned = tl.load(s.bad_lasts + slot * NUM_BAD + number, number < NUM_BAD, other=-1)
    return x


@triton.jit
def _penalise(x, ids, valid, s, slot, depth, max_depth, V: tl.constexpr):
    count = tl.load(s.counts + slot * V + ids, valid, other=0)
    for d in range(depth):
        count += (ids == tl.load(s.drafts + slot * max_depth + d)).to(tl.int32)
    seen = (tl.load(s.seen + slot * V + ids, valid, other=0) != 0) | (count > 0)
    repetition = tl.load(s.repetition + slot)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - tl.load(s.frequency + slot) * count.to(tl.float32)
    return x - tl.load(s.presence + slot) * (count > 0).to(tl.float32)


@triton.jit
def chunk_ids(kept, chunk, num_logits, CHUNK: tl.constexpr):
    """Columns of a chunk, which of them exist, and their vocabulary ids."""
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = cols < num_logits
    ids = cols
    if kept is not None:
        ids = tl.load(kept + cols, valid, other=0)
    return cols, valid, ids


@triton.jit
def scaled(
    logits,
    allowed,
    cols,
    valid,
    ids,
    s,
    row,
    slot,
    flags,
    depth,
    position,
    temperature,
    stride,
    max_depth,
    V: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_BAD: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """Logits after bias, bans, penalties and temperature."""
    x = tl.load(logits + row * stride + cols, valid, other=float("-inf")).to(tl.float32)
    if flags & (_BIASED | _PENALISED | _MIN_TOKENS | _BAD_SEQUENCES | _MASKED):
        low = tl.min(tl.where(valid, ids, V), 0)
        high = tl.max(tl.where(valid, ids, -1), 0)
        if flags & _BIASED:
            x += tl.load(s.bias + slot * V + ids, valid, other=0.0)
        if allowed is not None:  # noqa: SIM102 - known when compiled, the other is not
            if flags & _MASKED:
                words = tl.load(allowed + row * ((V + 31) // 32) + ids // 32, valid, other=0)
                x = tl.where(((words >> (ids % 32)) & 1) != 0, x, float("-inf"))
        if ((flags & _MIN_TOKENS) != 0) & (position < tl.load(s.min_until + slot)):
            x = _ban_early_stops(x, ids, low, high, s, slot, NUM_STOPS)
        if flags & _BAD_SEQUENCES:
            x = _ban_sequences(x, ids, low, high, s, slot, depth, max_depth, NUM_BAD, BEFORE)
        if flags & _PENALISED:
            x = _penalise(x, ids, valid, s, slot, depth, max_depth, V)
    if temperature > 0:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def forced(s, slot, depth, position, max_depth, MAX_CLOSING: tl.constexpr):
    """The token that a spent thinking budget forces, negative where any may be chosen."""
    opened = tl.load(s.think_opened + slot)
    closed = tl.load(s.think_closed + slot)
    start = tl.load(s.think_start + slot)
    end = tl.load(s.think_end + slot)
    for d in range(depth):
        draft = tl.load(s.drafts + slot * max_depth + d)
        place = position - depth + d
        opened = tl.where(draft == start, tl.minimum(opened, place), opened)
        closed = tl.where(draft == end, tl.minimum(closed, place), closed)
    deadline = opened + 1 + tl.load(s.think_budget + slot)
    step = position - deadline
    in_force = (step >= 0) & (step < tl.load(s.num_closing + slot)) & (closed >= deadline)
    step = tl.minimum(tl.maximum(step, 0), MAX_CLOSING - 1)
    return tl.where(in_force, tl.load(s.closing + slot * MAX_CLOSING + step), -1)
