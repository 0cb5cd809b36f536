"""What goes into a round and what comes out of it, as the loop sees both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pilotfish.engine.link.messages import TokenLogprob


@dataclass(frozen=True)
class Batch:
    """Sequences of one round. `logprobs` holds what each asked for (None: nothing)."""

    slots: list[int]
    tables: list[list[int]]
    depth: int
    logprobs: list[int | None]


@dataclass(frozen=True)
class SequenceReport:
    """What a round added to one sequence. Drafts that were accepted but lie past a stop are not counted.

    `has_nan`: a committed token was chosen from logits with a NaN, so it means nothing. `looped`: the host ends the
    text here, because it repeats itself.
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

    def cut(self, count: int) -> SequenceReport:
        """The first `count` tokens, with which the text has begun to loop."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        accepted = min(self.num_accepted, count)
        return replace(
            self, token_ids=self.token_ids[:count], num_accepted=accepted, logprobs=logprobs, done=True, stopped=False,
            looped=True,
        )  # fmt: skip


def token_logprobs(logits: torch.Tensor, tokens: list[int], wanted: int) -> list[TokenLogprob]:
    """Of the raw logits, as vLLM's default is: before penalties and temperature."""
    table = logits.log_softmax(-1)
    top = table.sort(dim=-1, descending=True, stable=True)
    return [
        TokenLogprob(
            token,
            float(table[row, token]),
            list(zip(top.indices[row, :wanted].tolist(), top.values[row, :wanted].tolist(), strict=True)),
        )
        for row, token in enumerate(tokens)
    ]
