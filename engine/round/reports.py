"""What goes into a round and what comes out of it, as the loop sees both."""

from __future__ import annotations

import math

import msgspec
import torch

from pilotfish.engine.link.messages import TokenLogprob


class Batch(msgspec.Struct, frozen=True):
    """Sequences of one round. `logprobs` holds what each asked for (None: nothing). `patience`: seconds after the trunk
    that the round waits for grammars' masks; then it goes on without the sequences whose masks have not come."""

    slots: list[int]
    tables: list[list[int]]
    depth: int
    logprobs: list[int | None]
    patience: float = math.inf


class SequenceReport(msgspec.Struct, frozen=True):
    """What a round added to one sequence. Drafts that were accepted but lie past a stop are not counted.

    `has_nan`: a committed token was chosen from logits with a NaN, so it means nothing. `looped`: the host ends the
    text here, because it repeats itself. `num_forced`: so many of the first tokens were known, before the round, to be
    all that the grammar allows.
    """

    slot: int
    token_ids: list[int]
    num_drafted: int
    num_accepted: int
    stopped: bool
    done: bool
    has_nan: bool
    logprobs: list[TokenLogprob] | None
    looped: bool = False
    prompt_logprobs: list[TokenLogprob] | None = None
    num_forced: int = 0

    @classmethod
    def of_prompt(cls, slot: int, logprobs: list[TokenLogprob] | None, done: bool) -> SequenceReport:
        """A chunk was read, and no token chosen."""
        return cls(slot, [], 0, 0, False, done, False, None, prompt_logprobs=logprobs)

    def cut(self, count: int) -> SequenceReport:
        """The first `count` tokens, with which the text has begun to loop."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        accepted, forced = min(self.num_accepted, count), min(self.num_forced, count)
        return msgspec.structs.replace(
            self, token_ids=self.token_ids[:count], num_accepted=accepted, num_forced=forced, logprobs=logprobs,
            done=True, stopped=False, looped=True,
        )  # fmt: skip


def num_forced(tokens: list[int], forced: list[int]) -> int:
    """How many of the first tokens are those that had to come."""
    if not forced:
        return 0
    same = [token == other for token, other in zip(tokens, forced, strict=False)]
    return same.index(False) if False in same else len(same)


def prompt_logprobs(logits: torch.Tensor, tokens: list[int], wanted: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens that stand in a prompt, from the raw logits [n, V] of the rows before them."""
    table = logits.log_softmax(-1)
    own = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = table.gather(1, own)
    ids = likeliest(table, wanted)
    ranks = (table > chosen).sum(1) + 1
    parts = zip(ids.tolist(), table.gather(1, ids).tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(*top, strict=True)), rank)
        for token, value, top, rank in zip(tokens, chosen[:, 0].tolist(), parts, ranks.tolist(), strict=True)
    ]


class RowLogprobs:
    """Log-probabilities of rows by the raw logits, as vLLM's default is: before penalties and temperature.

    Computed at once, and on their way to the host before another round is launched: nobody waits for that one.
    """

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, wanted: int):
        """Of raw logits fp32 [R, V]: the tokens chosen, int64 [R], and the `wanted` likeliest ones."""
        table = logits.log_softmax(-1)
        ids = likeliest(table, wanted)
        parts = table.gather(1, chosen[:, None]), table.gather(1, ids), ids
        self._chosen, self._values, self._ids = (part.to("cpu", non_blocking=True) for part in parts)

    def read(self, tokens: list[int], first: int = 0, wanted: int | None = None) -> list[TokenLogprob]:
        """Of the rows from `first` on that these tokens were committed from, with as many of the likeliest, all if not
        given. To be called once the device is past them."""
        rows, most = slice(first, first + len(tokens)), slice(wanted)
        tops = zip(self._ids[rows, most].tolist(), self._values[rows, most].tolist(), strict=True)
        own = self._chosen[rows, 0].tolist()
        return [
            TokenLogprob(token, value, list(zip(*top, strict=True)))
            for token, value, top in zip(tokens, own, tops, strict=True)
        ]


def likeliest(table: torch.Tensor, wanted: int) -> torch.Tensor:
    """int64 [R, wanted]: the ids of the largest of log-probabilities fp32 [R, V], the first of those that are equal.

    `topk` leaves open which of equals it takes, and sorting takes 15 times as long. So it takes the smallest of keys of
    which none are equal: how far below zero, then the id.
    """
    if not wanted:
        return torch.empty((len(table), 0), dtype=torch.int64, device=table.device)
    keys = (table.view(torch.int32) & 0x7FFFFFFF).long()
    keys <<= 32
    keys |= torch.arange(table.shape[1], device=table.device)
    return keys.topk(wanted, largest=False).values & 0xFFFFFFFF
