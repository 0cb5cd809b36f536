"""The slots' state on a device: the buffers of spec.slots, and what the host writes into them.

They are the truth; the host writes a slot when a request is admitted, after that only rounds do, on the device.
S = slots, B = sequences of a round, K = largest k, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Protocol

import torch

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.round import parcel
from pilotfish.engine.round.synthetic import SyntheticAcceptance
from pilotfish.spec import accept
from pilotfish.spec.slots import (
    ANY,
    BAD_SEQUENCES,
    BIASED,
    FIELDS,
    MAX_BAD_LENGTH,
    NO_TOKEN,
    NUMBERS,
    PENALISED,
    ROWS,
    Admission,
    Field,
    SlotState,
    banned_sequences,
    banned_tokens,
    flags_of,
    value_of,
)

WHOLE_NUMBERS = [name for name, field in NUMBERS.items() if field.dtype == torch.int64]
FACTORS = [name for name, field in NUMBERS.items() if field.dtype == torch.float32]


class DraftSource(Protocol):
    """Where drafts come from in place of a head."""

    def admit(self, slot: int, prompt: list[int]) -> None:
        """A new sequence has got this slot."""
        ...

    def replace(self, drafts_SK: torch.Tensor, slots: torch.Tensor, length_S: torch.Tensor, depth: int) -> None:
        """Overwrites the next `depth` drafts of `slots`."""
        ...


class BatchState:
    """See the module's docstring. `fields` is the tuple that operators take; each of its tensors is an attribute too.

    `history_length` > 0 keeps every slot's tokens by position, for heads that read them.
    """

    def __init__(self, num_slots: int, max_depth: int, vocab_size: int, device: torch.device, history_length: int = 0):
        self.num_slots, self.max_depth, self.vocab_size, self.device = num_slots, max_depth, vocab_size, device
        # of one table each, so that one copy writes a slot
        self._ints = parcel.columns(len(WHOLE_NUMBERS), num_slots, torch.int64, device)
        self._floats = parcel.columns(len(FACTORS), num_slots, torch.float32, device)
        columns = dict(zip((*WHOLE_NUMBERS, *FACTORS), (*self._ints, *self._floats), strict=True))
        sizes = {"depth": max_depth, "vocabulary": vocab_size, "positions": history_length}
        buffers: dict[str, torch.Tensor | None] = {}
        for name, field in FIELDS.items():
            buffer = columns[name] if name in columns else _buffer(field, num_slots, sizes, device)
            buffers[name] = buffer.fill_(field.fill)
        if not history_length:
            buffers["history"] = None
        self.fields = SlotState(**buffers)  # type: ignore[arg-type]
        # what each slot uses, without a wait for the device
        self.host_flags = [0] * num_slots
        # for measurements: replaces what a head drafts
        self.oracle: DraftSource | None = None
        # for servers of random weights: decides what is accepted
        self.synthetic: SyntheticAcceptance | None = None

    def __getattr__(self, name: str) -> torch.Tensor:
        """A field of spec.slots."""
        if name in FIELDS:
            field: torch.Tensor = getattr(self.fields, name)
            return field
        raise AttributeError(name)

    def flags_of(self, slots: Iterable[int]) -> int:
        """The bits that any of the slots has."""
        return reduce(or_, (self.host_flags[slot] for slot in slots), 0)

    def admit(self, slot: int, prompt: list[int], params: SamplingParams, limit: int, own_k: int) -> None:
        """Writes a slot for a new request whose tokens may number `limit` in all: one copy to the device, and no wait
        for it. Raises ValueError for more stop ids than a slot has places.

        What the request does not use stays as it was, unless the slot's last request has left there what would count.
        """
        admission = Admission(prompt, params, limit, own_k, self.vocab_size)
        state, flags = self.fields, flags_of(admission)
        left = flags | self.host_flags[slot]
        rows = {name: _row(name, field, admission) for name, field in ROWS.items() if flags & field.only == field.only}
        biases = _biases(params) if flags & BIASED else {}
        banned = [token for row in _banned_rows(params) for token in row] if flags & BAD_SEQUENCES else []
        text = prompt if flags & PENALISED or state.history is not None else []
        (values, *sent_rows, bias_ids, sent_banned, sent_prompt), (factors, sent_biases) = parcel.send(
            ([_values(WHOLE_NUMBERS, admission), *rows.values(), list(biases), banned, text], torch.int64),
            ([_values(FACTORS, admission), list(biases.values())], torch.float32),
            device=self.device,
        )
        self.host_flags[slot] = flags
        state.flags[slot].fill_(flags)
        state.done[slot].fill_(0)
        self._ints[:, slot] = values
        self._floats[:, slot] = factors
        for name, row in zip(rows, sent_rows, strict=True):
            getattr(state, name)[slot] = row
        if flags & PENALISED:
            state.counts[slot].zero_()
            state.seen[slot].zero_().index_fill_(0, sent_prompt, 1)
        if state.history is not None:
            state.history[slot, : len(prompt)] = sent_prompt
        if left & BIASED:
            state.bias[slot].fill_(0.0 if params.allowed_token_ids is None else float("-inf"))
        if biases:
            state.bias[slot].index_copy_(0, bias_ids, sent_biases)
        if left & BAD_SEQUENCES:
            state.bad_lasts[slot].fill_(NO_TOKEN)
        if flags & BAD_SEQUENCES:
            table = sent_banned.view(-1, MAX_BAD_LENGTH)
            state.bad_prefixes[slot, : len(table)] = table[:, :-1]
            state.bad_lasts[slot, : len(table)] = table[:, -1]
            state.recent[slot].fill_(NO_TOKEN)
        if self.oracle is not None:
            self.oracle.admit(slot, prompt)
        if self.synthetic is not None:
            self.synthetic.places.restart(slot)

    def set_drafts(self, slots: torch.Tensor, drafts_BK: torch.Tensor, counts_B: torch.Tensor | None = None) -> None:
        """Stores drafts for the next round, of which counts are offered (None: all) within the requests' limits."""
        depth = drafts_BK.shape[1]
        self.fields.drafts[slots, :depth] = drafts_BK
        if self.oracle is not None:
            self.oracle.replace(self.fields.drafts, slots, self.fields.length, depth)
        accept.offer(self.fields, slots, depth, counts_B)

    def close_thinking(self, slot: int, position: int) -> None:
        """An open thinking block is closed from `position` on, as if its budget were spent there. No launched round may
        be that far."""
        budget = self.fields.think_budget
        budget[slot] = torch.minimum(budget[slot], position - 1 - self.fields.think_opened[slot])

    def force_drafts(self, slot: int, tokens: list[int]) -> None:
        """Puts tokens that are sure to come in place of the first drafts; what was drafted after others is dropped."""
        tokens = tokens[: self.max_depth]
        if not tokens:
            return
        forced = torch.tensor(tokens, device=self.device)
        drafts, count = self.drafts[slot].clone(), len(tokens)
        agreed = (drafts[:count] == forced).all() & (self.num_offered[slot] > count)
        drafts[:count] = forced
        offered = torch.where(agreed, self.num_offered[slot], count)
        self.set_drafts(torch.tensor([slot], device=self.device), drafts[None], offered[None])


def _buffer(field: Field, num_slots: int, sizes: dict[str, int], device: torch.device) -> torch.Tensor:
    shape = (sizes[axis] if isinstance(axis, str) else axis for axis in field.shape)
    return torch.empty((num_slots, *shape), dtype=field.dtype, device=device)


def _values(names: list[str], admission: Admission) -> list[float]:
    return [value_of(FIELDS[name], admission) for name in names]


def _row(name: str, field: Field, admission: Admission) -> list[int]:
    """What an admission writes into a field of one axis, filled up."""
    assert field.row is not None and field.dtype == torch.int64
    (places,) = field.shape
    values = list(field.row(admission))
    if len(values) > int(places):
        raise ValueError(f"{name}: want at most {places}, with the model's own, got {len(values)}")
    return values + [field.fill] * (int(places) - len(values))


def _banned_rows(params: SamplingParams) -> list[list[int]]:
    """Banned sequences, of MAX_BAD_LENGTH each: padded on the left, the last token last."""
    return [[ANY] * (MAX_BAD_LENGTH - len(sequence)) + list(sequence) for sequence in banned_sequences(params)]


def _biases(params: SamplingParams) -> dict[int, float]:
    """What is added to the logits of ids; where ids are allowed, all others have -inf. Bans that hold at every position
    are a bias too."""
    banned = float("-inf")
    biases = dict.fromkeys(params.allowed_token_ids or (), 0.0)
    for token, value in params.logit_bias.items():
        if params.allowed_token_ids is None or token in biases:
            biases[token] = value
    biases |= dict.fromkeys(banned_tokens(params), banned)
    return biases
