"""What goes into a round and what comes out of it, as the loop sees both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pilotfish.engine.link.messages import TokenLogprob


@dataclass(frozen=True)
class Batch:
    """Sequences of one round. `logprobs` holds what each asked for (None: nothing). `patience`: seconds after the trunk
    that the round waits for grammars' masks; then it goes on without the sequences whose masks have not come."""

    slots: list[int]
    tables: list[list[int]]
    depth: int
    logprobs: list[int | None]
    patience: float = math.inf


@dataclass(frozen=True)
class SequenceReport:
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
        return replace(
            self, token_ids=self.token_ids[:count], num_accepted=accepted, num_forced=forced, logprobs=logprobs,
            done=True, stopped=False, looped=True,
        )  # fmt: skip


def num_forced(tokens: list[int], forced: list[int]) -> int:
    """How many of the first tokens are those that had to come."""
    same = [token == other for token, other in zip(tokens, forced, strict=False)]
    return same.index(False) if False in same else len(same)


def prompt_logprobs(logits: torch.Tensor, tokens: list[int], wanted: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens that stand in a prompt, from the raw logits [n, V] of the rows before them."""
    table = logits.log_softmax(-1)
    own = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = table.gather(1, own)
    ranks = (table > chosen).sum(1) + 1
    top = table.topk(wanted) if wanted else None
    return [
        TokenLogprob(
            token,
            float(chosen[row, 0]),
            [] if top is None else list(zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)),
            int(ranks[row]),
        )
        for row, token in enumerate(tokens)
    ]


class RowLogprobs:
    """Log-probabilities of a window's rows by the raw logits, as vLLM's default is: before penalties and temperature.

    Computed at once, and on their way to the host before another round is launched: nobody waits for that one.
    """

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, wanted: int):
        """Of raw logits fp32 [W, V]: the tokens chosen, int64 [W], and the `wanted` likeliest ones."""
        table = logits.log_softmax(-1)
        # the first of those that are equal
        top = table.sort(dim=-1, descending=True, stable=True)
        parts = table.gather(1, chosen[:, None]), top.values[:, :wanted], top.indices[:, :wanted]
        self._chosen, self._values, self._ids = (part.to("cpu", non_blocking=True) for part in parts)

    def read(self, tokens: list[int]) -> list[TokenLogprob]:
        """Of the rows that these tokens were committed from. To be called once the device is past them."""
        rows = zip(tokens, self._chosen.tolist(), self._ids.tolist(), self._values.tolist(), strict=False)
        return [TokenLogprob(token, own[0], list(zip(ids, values, strict=True))) for token, own, ids, values in rows]
