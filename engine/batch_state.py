"""Static device buffers of every slot: where each sequence stands, its limits, its drafts, its sampling parameters.

They are the truth; the host writes a slot when a request is admitted, after that only `commit` and `set_drafts` do,
on the device. S = slots, B = sequences of a round, W = window rows, K = largest k, V = vocabulary, R = rows.
A sequence of length n has n tokens in the caches; its last committed token stands at position n and is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pilotfish.engine import parcel
from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.rules import BadSequences, ThinkingBudgets, bad_sequences, bad_singles
from pilotfish.kernels.cuda import slots as kernel_slots
from pilotfish.spec.accept import Verdict
from pilotfish.spec.sampling import SamplingRows

MAX_STOP_IDS = 64
MIN_TEMPERATURE = 1e-5
"""Below it a request is greedy, as in vLLM: logits divided by less may overflow."""


@dataclass(frozen=True)
class Features:
    """Which parts of sampling a request uses; a batch runs the parts that any of its requests does."""

    sampled: bool = False
    filtered: bool = False
    min_p: bool = False
    penalised: bool = False
    biased: bool = False
    min_tokens: bool = False
    bad_sequences: bool = False
    thinking: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> Features:
        sampled = params.temperature >= MIN_TEMPERATURE
        return cls(
            sampled=sampled,
            filtered=sampled and (params.top_k > 0 or params.top_p < 1),
            min_p=sampled and params.min_p > 0,
            penalised=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1),
            biased=bool(params.logit_bias or params.allowed_token_ids is not None or bad_singles(params)),
            min_tokens=params.min_tokens > 0,
            bad_sequences=bool(bad_sequences(params)),
            thinking=params.thinking is not None,
        )

    def __or__(self, other: Features) -> Features:
        return Features(*(getattr(self, name) or getattr(other, name) for name in self.__dataclass_fields__))


def flags_of(params: SamplingParams) -> int:
    """The bits of kernels.cuda.slots that a request's parts of sampling have."""
    features = Features.of(params)
    bits = {
        kernel_slots.BIASED: features.biased,
        kernel_slots.PENALISED: features.penalised,
        kernel_slots.MIN_TOKENS: features.min_tokens,
        kernel_slots.BAD_SEQUENCES: features.bad_sequences,
        kernel_slots.THINKING: features.thinking,
        kernel_slots.MIN_P: features.min_p,
        kernel_slots.TOP_K: features.sampled and params.top_k > 0,
        kernel_slots.TOP_P: features.sampled and params.top_p < 1,
        kernel_slots.MASKED: params.grammar is not None,
    }
    return sum(bit for bit, used in bits.items() if used)


def stop_ids_of(params: SamplingParams) -> list[int]:
    """Ids that end the request: its own, and the model's unless ignore_eos. A grammar's text ends with the model's."""
    eos = () if params.ignore_eos and params.grammar is None else params.eos_token_ids
    return sorted({*params.stop_token_ids, *eos})


class DraftSource(Protocol):
    """Where drafts come from in place of a head."""

    def admit(self, slot: int, prompt: list[int]) -> None:
        """A new sequence has got this slot."""
        ...

    def replace(self, drafts_SK: torch.Tensor, slots: torch.Tensor, length_S: torch.Tensor, depth: int) -> None:
        """Overwrites the next `depth` drafts of `slots`."""
        ...


class BatchState:
    """See the module's docstring. `limit` counts all tokens a sequence may have, prompt included.

    `history_length` > 0 keeps every slot's tokens by position, for heads that read them: int32 [S, history_length].
    `complete` allocates at once what else waits for the first request that needs it: captured graphs read it.
    """

    def __init__(
        self,
        num_slots: int,
        max_depth: int,
        vocab_size: int,
        device: torch.device,
        history_length: int = 0,
        complete: bool = False,
    ):
        self.num_slots, self.max_depth, self.vocab_size, self.device = num_slots, max_depth, vocab_size, device

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        # of one table each, so that one copy writes a slot
        self._ints = parcel.columns(9, num_slots, torch.int64, device)
        self.length, self.limit, self.pending_count, self.own_k, self.num_offered = self._ints[:5]
        self.min_until, self.seed, self.choice, self.top_k = self._ints[5:]
        self._floats = parcel.columns(6, num_slots, torch.float32, device)
        self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = self._floats
        self.last_token = buffer()
        self.drafts = buffer(max_depth)
        self.done = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.stop_ids = buffer(MAX_STOP_IDS)
        self.history = buffer(history_length, dtype=torch.int32) if history_length else None
        self.features = [Features()] * num_slots
        self.flags = buffer(dtype=torch.int32)
        # [S, V] each; allocated when the first request needs them
        self.counts: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        # allocated likewise
        self.bad_sequences: BadSequences | None = None
        self.thinking: ThinkingBudgets | None = None
        # for measurements: replaces what a head drafts
        self.oracle: DraftSource | None = None
        if complete:
            self._make_history()
            self._make_bias()
            self.bad_sequences = BadSequences(num_slots, vocab_size, device)
            self.thinking = ThinkingBudgets(num_slots, device)

    def admit(self, slot: int, prompt: list[int], params: SamplingParams, limit: int, own_k: int) -> None:
        """Writes a slot for a new request whose tokens may number `limit` in all: one copy to the device, and no wait
        for it. Raises ValueError for more stop ids than a slot has places."""
        features = Features.of(params)
        arrays = {
            "stop_ids": _padded(stop_ids_of(params)),
            "numbers": self._numbers(params, len(prompt), limit, own_k),
            "factors": _factors(params, features),
        }
        self.features[slot] = features
        self._make_tables(features)
        if self.seen is not None or self.history is not None:
            arrays["prompt"] = torch.tensor(prompt, dtype=torch.int32)
        if features.biased:
            arrays["bias_ids"], arrays["biases"] = _biases(params)
        if self.bad_sequences is not None:
            arrays["bad_sequences"] = self.bad_sequences.rows(bad_sequences(params))
        if self.thinking is not None:
            arrays["thinking"] = self.thinking.row(len(prompt), params.thinking)
        sent = dict(zip(arrays, parcel.send(list(arrays.values()), self.device), strict=True))
        self.flags[slot].fill_(flags_of(params))
        self.done[slot].fill_(False)
        self._ints[:, slot] = sent["numbers"]
        self._floats[:, slot] = sent["factors"]
        self.stop_ids[slot] = sent["stop_ids"]
        if self.counts is not None and self.seen is not None:
            self.counts[slot].zero_()
            self.seen[slot].zero_().index_fill_(0, sent["prompt"].long(), True)
        if self.history is not None:
            self.history[slot, : len(prompt)] = sent["prompt"]
        if self.bias is not None:
            self.bias[slot].fill_(0.0 if params.allowed_token_ids is None else float("-inf"))
            if features.biased:
                self.bias[slot].index_copy_(0, sent["bias_ids"], sent["biases"])
        if self.bad_sequences is not None:
            self.bad_sequences.admit(slot, sent["bad_sequences"])
        if self.thinking is not None:
            self.thinking.admit(slot, sent["thinking"])
        if self.oracle is not None:
            self.oracle.admit(slot, prompt)

    def _numbers(self, params: SamplingParams, num_prompt: int, limit: int, own_k: int) -> torch.Tensor:
        """Of a new sequence, int64, in the order of `_ints`."""
        top_k = params.top_k if params.top_k > 0 else self.vocab_size
        min_until = num_prompt + params.min_tokens
        return torch.tensor([0, limit, 0, own_k, 0, min_until, params.seed, params.choice, top_k])

    def _make_tables(self, features: Features) -> None:
        """What the first request that needs it allocates."""
        if features.penalised and self.counts is None:
            self._make_history()
        if features.biased and self.bias is None:
            self._make_bias()
        if features.bad_sequences and self.bad_sequences is None:
            self.bad_sequences = BadSequences(self.num_slots, self.vocab_size, self.device)
        if features.thinking and self.thinking is None:
            self.thinking = ThinkingBudgets(self.num_slots, self.device)

    def _make_history(self) -> None:
        shape = (self.num_slots, self.vocab_size)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)

    def _make_bias(self) -> None:
        self.bias = torch.zeros((self.num_slots, self.vocab_size), dtype=torch.float32, device=self.device)

    def remaining(self, slots: torch.Tensor) -> torch.Tensor:
        """Tokens that each sequence may still commit, int64 [B]; its last token, not yet in the caches, is counted."""
        return self.limit[slots] - self.length[slots] - 1

    def batch_features(self, slots: list[int]) -> Features:
        features = Features()
        for slot in slots:
            features = features | self.features[slot]
        return features

    def sampling_rows(
        self,
        slots: torch.Tensor,
        features: Features,
        positions_BW: torch.Tensor,
        drafts_Bn: torch.Tensor,
        forbidden_RV: torch.Tensor | None = None,
    ) -> SamplingRows:
        """Parameters of B x W rows, the last W of the n + 1 that follow each sequence's committed tokens.

        Row j's history is the sequence's own and drafts 0 .. n - W + j. positions: of the tokens to choose. forbidden:
        tokens that a row must not choose (grammars), beside those that min_tokens bans.
        """
        width = positions_BW.shape[1]

        def rows(parameter: torch.Tensor, used: bool) -> torch.Tensor | None:
            return parameter[slots].repeat_interleave(width, 0) if used else None

        counts, seen = self._history(slots, width, drafts_Bn) if features.penalised else (None, None)
        banned = _either(self._banned(slots, positions_BW) if features.min_tokens else None, forbidden_RV)
        if features.bad_sequences and self.bad_sequences is not None:
            banned = _either(banned, self.bad_sequences.banned(slots, drafts_Bn, width))
        forced = None
        if features.thinking and self.thinking is not None:
            forced = self.thinking.forced(slots, positions_BW, drafts_Bn)
        return SamplingRows(
            temperature=rows(self.temperature, features.sampled),
            seed=rows(self.seed, features.sampled),
            choice=rows(self.choice, features.sampled),
            top_k=rows(self.top_k, features.filtered),
            top_p=rows(self.top_p, features.filtered),
            min_p=rows(self.min_p, features.min_p),
            repetition=rows(self.repetition, features.penalised),
            presence=rows(self.presence, features.penalised),
            frequency=rows(self.frequency, features.penalised),
            seen=seen,
            counts=counts,
            bias=rows(self.bias, features.biased) if self.bias is not None else None,
            banned=banned,
            forced=forced,
        )

    def _history(self, slots: torch.Tensor, width: int, drafts_Bn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.counts is not None and self.seen is not None
        counts = self.counts[slots][:, None].repeat(1, width, 1)
        shared = drafts_Bn.shape[1] + 1 - width
        for i in range(drafts_Bn.shape[1]):
            first = max(0, i + 1 - shared)
            draft = drafts_Bn[:, i, None, None].expand(-1, width - first, 1)
            counts[:, first:].scatter_add_(2, draft, torch.ones_like(draft, dtype=torch.int32))
        seen = self.seen[slots][:, None] | (counts > 0)
        return counts.flatten(0, 1), seen.flatten(0, 1)

    def _banned(self, slots: torch.Tensor, positions_BW: torch.Tensor) -> torch.Tensor:
        """Stop ids of rows whose token would come before min_tokens, bool [R, V]."""
        early = positions_BW < self.min_until[slots][:, None]
        ids = self.stop_ids[slots]
        # the padding id goes to a column of its own, cut off below
        mask = torch.zeros((len(ids), self.vocab_size + 1), dtype=torch.bool, device=self.device)
        mask.scatter_(1, torch.where(ids < 0, self.vocab_size, ids), True)
        return (mask[:, None, : self.vocab_size] & early[..., None]).flatten(0, 1)

    def commit(self, slots: torch.Tensor, chosen_BW: torch.Tensor, verdict: Verdict, pending: bool = True) -> None:
        """Appends each sequence's committed tokens; its drafts are used up.

        `pending`: the tokens' rows wait for replay (not so after prefill).
        """
        count = verdict.num_committed
        last = chosen_BW.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.last_token[slots] = torch.where(count > 0, last, self.last_token[slots])
        self.done[slots] = verdict.done
        self.num_offered[slots] = 0
        first = self.length[slots] + int(pending)
        if self.bad_sequences is not None:
            self.bad_sequences.commit(slots, chosen_BW, count)
        if self.thinking is not None:
            self.thinking.commit(slots, chosen_BW, count, first)
        if self.history is not None:
            # rows past the committed ones are noise beyond the length, overwritten before they are read
            places = first[:, None] + torch.arange(chosen_BW.shape[1], device=self.device)
            self.history[slots[:, None], places] = chosen_BW.int()
        if pending:
            self.length[slots] += count
            self.pending_count[slots] = count
        if self.counts is not None and self.seen is not None:
            taken = torch.arange(chosen_BW.shape[1], device=self.device) < count[:, None]
            rows = self.counts[slots].scatter_add_(1, chosen_BW, taken.int())
            self.counts[slots] = rows
            self.seen[slots] |= rows > 0

    def set_drafts(self, slots: torch.Tensor, drafts_BK: torch.Tensor, counts_B: torch.Tensor | None = None) -> None:
        """Stores drafts for the next round, of which counts are offered (None: all), and never those that could not be
        committed any more."""
        depth = drafts_BK.shape[1]
        self.drafts[slots, :depth] = drafts_BK
        if self.oracle is not None:
            self.oracle.replace(self.drafts, slots, self.length, depth)
        offered = torch.minimum(self.own_k[slots].clamp(max=depth), self.remaining(slots) - 1)
        if counts_B is not None:
            offered = torch.minimum(offered, counts_B)
        self.num_offered[slots] = torch.where(self.done[slots], 0, offered.clamp_(min=0))

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


def _factors(params: SamplingParams, features: Features) -> torch.Tensor:
    """float32, in the order of BatchState._floats."""
    temperature = params.temperature if features.sampled else 0.0
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return torch.tensor([temperature, params.top_p, params.min_p, *penalties], dtype=torch.float32)


def _padded(stop_ids: list[int]) -> torch.Tensor:
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids: want at most {MAX_STOP_IDS} with the model's own, got {len(stop_ids)}")
    return torch.tensor(stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids)))


def _biases(params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and what is added to their logits, float32; where ids are allowed, all others have -inf. Bans that hold
    at every position are a bias too."""
    banned = float("-inf")
    biases = dict.fromkeys(params.allowed_token_ids or (), 0.0)
    for token, value in params.logit_bias.items():
        if params.allowed_token_ids is None or token in biases:
            biases[token] = value
    biases |= dict.fromkeys(bad_singles(params), banned)
    return torch.tensor(list(biases), dtype=torch.int64), torch.tensor(list(biases.values()), dtype=torch.float32)


def _either(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a | b
