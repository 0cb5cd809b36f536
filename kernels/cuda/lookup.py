"""Prompt look-up on the device: drafts are what followed the newest tokens where they stood before in the same text.

Meaning as in `draft_heads.lookup.match.look_up` over each slot's history; what was offered stays. Programs take
chunks of a text in turn and leave their best match, its length and place as one integer; the program that arrives last
takes the maximum, whose order does not matter, and writes the drafts. B = sequences, K = largest depth, L = positions.
Reads 4 bytes a token of each text, from memory once; launch-bound up to some 100 k tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.spec.slots import SlotState

CHUNK = 1024
"""Places that a program compares at once."""
PROGRAMS = 32
"""Programs of one sequence, a power of two; texts of more than PROGRAMS chunks take several in turn."""


class LookupScratch(NamedTuple):
    """What one `look_up` at a time works in. Counters are zero between launches."""

    partials: torch.Tensor
    """int64 [B, PROGRAMS]: each program's best match."""
    counters: torch.Tensor
    """int32 [B]: programs arrived."""

    @classmethod
    def empty(cls, batch: int, device: torch.device | str) -> LookupScratch:
        partials = torch.zeros((batch, PROGRAMS), dtype=torch.int64, device=device)
        return cls(partials, torch.zeros(batch, dtype=torch.int32, device=device))


@triton.jit(do_not_specialize=["depth", "max_depth", "text_length"])
def _look_up_kernel(
    slots,
    s,
    scratch,
    depth,
    max_depth,
    text_length,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    # where the newest token stands; matches end before it
    last = tl.load(s.length + slot).to(tl.int32)
    text = s.history + slot * text_length
    best = tl.full((), -1, tl.int64)
    for start in range(tl.program_id(1) * CHUNK, last, PROGRAMS * CHUNK):
        places = start + tl.arange(0, CHUNK)
        running = places < last
        lengths = tl.zeros((CHUNK,), tl.int32)
        for back in range(LONGEST):
            wanted = tl.load(text + last - back, last >= back, other=-2)
            there = tl.load(text + places - back, running & (places >= back), other=-1)
            running = running & (there == wanted)
            lengths += running.to(tl.int32)
        # the longest, and of equally long ones the latest
        match = (lengths.to(tl.int64) << 32) | places.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(places < last, match, -1), 0))
    tl.store(scratch.partials + row * PROGRAMS + tl.program_id(1), best)
    tl.debug_barrier()
    if tl.atomic_add(scratch.counters + row, 1, sem="acq_rel") == PROGRAMS - 1:
        programs = tl.arange(0, PROGRAMS)
        match = tl.max(tl.load(scratch.partials + row * PROGRAMS + programs, cache_modifier=".cg"), 0)
        is_meant = (match >> 32) >= SHORTEST
        end = (match & 0xFFFFFFFF).to(tl.int32)
        steps = tl.arange(0, BLOCK)
        # the tokens behind the match, again from its start once they have been used up
        source = end + 1 + steps % tl.maximum(last - end, 1)
        token = tl.load(text + source, is_meant & (steps < depth), other=0)
        tl.store(s.drafts + slot * max_depth + steps, token.to(tl.int64), steps < depth)
        tl.store(s.num_offered + slot, tl.full((), 0, tl.int64), is_meant == 0)
        tl.store(scratch.counters + row, 0)


def look_up(
    slots_B: torch.Tensor,
    state: SlotState,
    depth: int,
    longest: int,
    shortest: int,
    scratch: LookupScratch,
    pdl: bool = False,
) -> None:
    """Writes `depth` drafts of slots_B (int32 or int64) into `state`, after the commit; where no match of `shortest`
    tokens or more is found they are zeros, and none is offered.

    longest: newest tokens that are compared, at most. scratch: for B or more sequences. Several may be the null slot.
    """
    max_depth = state.drafts.shape[1]
    assert state.history is not None and state.history.is_contiguous()
    assert 1 <= depth <= max_depth and 1 <= shortest <= longest and len(scratch.counters) >= len(slots_B)
    programs = scratch.partials.shape[1]
    _look_up_kernel[(len(slots_B), programs)](
        slots_B,
        state,
        scratch,
        depth,
        max_depth,
        state.history.shape[1],
        LONGEST=longest,
        SHORTEST=shortest,
        PROGRAMS=programs,
        CHUNK=CHUNK,
        BLOCK=triton.next_power_of_2(max(16, max_depth)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
