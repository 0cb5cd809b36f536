"""Sampling by agreement: the token at a position is a function of its logits, parameters, seed and position.

Greedy is argmax; sampled is argmax(filtered logits / T + keyed Gumbel noise), which draws from the filtered softmax.
Ties go to the lower id. The order of the processors is vLLM's: logit bias and bans, penalties, temperature, min_p,
top_k, top_p. Every processor leaves a row with neutral parameters bit for bit as it was, so who else is in the batch is
invisible. R = rows, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.gumbel import gumbel_noise


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of R rows; a feature that no row of the batch uses is None and costs nothing.

    temperature fp32 [R] (0: greedy), seed and choice int64 [R]; top_k int64 [R] (V: off), top_p, min_p fp32 [R];
    penalties: repetition, presence, frequency fp32 [R] with the history of the row as
    `seen` bool [R, V] (prompt or output) and `counts` int32 [R, V] (output only);
    `bias` fp32 [R, V] is added; `banned` bool [R, V] becomes -inf. `forced` int64 [R]: the token itself, whatever the
    rest says, where it is not negative.
    """

    temperature: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    choice: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    banned: torch.Tensor | None = None
    forced: torch.Tensor | None = None


def choose(logits_RV: torch.Tensor, rows: SamplingRows, positions_R: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [R], for the absolute positions that the tokens will take. logits fp32, not changed."""
    chosen = _choose_freely(logits_RV, rows, positions_R)
    return chosen if rows.forced is None else torch.where(rows.forced >= 0, rows.forced, chosen)


def _choose_freely(logits_RV: torch.Tensor, rows: SamplingRows, positions_R: torch.Tensor) -> torch.Tensor:
    logits = _penalise(_bias(logits_RV, rows), rows)
    if rows.temperature is None:
        return logits.argmax(-1)
    assert rows.seed is not None and rows.choice is not None
    greedy = rows.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    noise = gumbel_noise(rows.seed, rows.choice, positions_R, logits.shape[-1])
    sampled = (_filter(scaled, rows) + noise).argmax(-1)
    return torch.where(greedy, logits.argmax(-1), sampled)


def _bias(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if rows.bias is not None:
        logits = logits + rows.bias
    if rows.banned is not None:
        logits = logits.masked_fill(rows.banned, float("-inf"))
    return logits


def _penalise(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if rows.seen is None:
        return logits
    assert rows.counts is not None and rows.repetition is not None
    assert rows.presence is not None and rows.frequency is not None
    repetition = rows.repetition[:, None]
    logits = torch.where(rows.seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - rows.frequency[:, None] * rows.counts
    return logits - rows.presence[:, None] * (rows.counts > 0)


def _filter(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    if rows.min_p is not None:
        floor = scaled.amax(-1) + rows.min_p.log()
        scaled = scaled.masked_fill(scaled < floor[:, None], float("-inf"))
    if rows.top_k is None:
        return scaled
    assert rows.top_p is not None
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(ranks >= rows.top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # the most likely token stays whatever top_p is
    dropped = (before >= rows.top_p[:, None]) & (ranks > 0)
    ordered = ordered.masked_fill(dropped & (rows.top_p < 1)[:, None], float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, ids, ordered)
