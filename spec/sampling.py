"""Sampling by agreement: the token at a position is a function of its logits, parameters, seed and position.

Greedy is argmax; sampled is argmax(filtered logits / T + keyed Gumbel noise), which draws from the filtered softmax.
Ties go to the lower id. The order of the processors is vLLM's: logit bias and bans, penalties, temperature, min_p,
top_k, top_p. Every processor leaves a row with neutral parameters bit for bit as it was, so who else is in the batch is
invisible.

This is the definition. On a CUDA device kernels.cuda.sample carries it out (scores.py the processors and the noise of
spec.gumbel, filters.py the filters); tests/support/small_operators.py holds it to `choose`, token for token.
R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pilotfish.spec import rules
from pilotfish.spec.gumbel import gumbel_noise
from pilotfish.spec.rules import Rows
from pilotfish.spec.slots import (
    BAD_SEQUENCES,
    BIASED,
    MIN_P,
    MIN_TOKENS,
    PENALISED,
    SAMPLED,
    THINKING,
    TOP_K,
    TOP_P,
)

See = Callable[[str, torch.Tensor], None]


def choose(
    logits_RV: torch.Tensor,
    rows: Rows,
    flags: int,
    forbidden_RV: torch.Tensor | None = None,
    see: See | None = None,
) -> torch.Tensor:
    """Token ids int64 [R] for the rows. logits fp32, not changed.

    flags: the bits of spec.slots that any of the rows' requests has; what no bit stands for is not run. forbidden: bool
    [R, V], tokens that a row must not choose (grammars). `see` is shown the penalties' "history", where there is one.
    """
    chosen = _choose_freely(logits_RV, rows, flags, forbidden_RV, see)
    if not flags & THINKING:
        return chosen
    forced = rules.forced(rows)
    return torch.where(forced >= 0, forced, chosen)


def _choose_freely(
    logits: torch.Tensor, rows: Rows, flags: int, forbidden: torch.Tensor | None, see: See | None
) -> torch.Tensor:
    state = rows.state
    logits = bias(logits, rows.each(state.bias) if flags & BIASED else None, banned_rows(rows, flags, forbidden))
    if flags & PENALISED:
        counts, seen = rules.history(rows)
        if see is not None:
            see("history", counts)
        factors = (rows.each(factor) for factor in (state.repetition, state.presence, state.frequency))
        logits = penalise(logits, counts, seen, *factors)
    if not flags & SAMPLED:
        return logits.argmax(-1)
    temperature = rows.each(state.temperature)
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel_noise(rows.each(state.seed), rows.each(state.choice), rows.positions.flatten(), logits.shape[-1])
    if flags & MIN_P:
        scaled = keep_probable(scaled, rows.each(state.min_p))
    if flags & (TOP_K | TOP_P):
        scaled = keep_first(scaled, rows.each(state.top_k), rows.each(state.top_p))
    return torch.where(greedy, logits.argmax(-1), (scaled + noise).argmax(-1))


def bias(logits: torch.Tensor, bias_RV: torch.Tensor | None, banned_RV: torch.Tensor | None) -> torch.Tensor:
    """The bias added, then -inf for what is banned; None: neither."""
    if bias_RV is not None:
        logits = logits + bias_RV
    return logits if banned_RV is None else logits.masked_fill(banned_RV, float("-inf"))


def banned_rows(rows: Rows, flags: int, forbidden_RV: torch.Tensor | None = None) -> torch.Tensor | None:
    """All that each row must not choose, bool [R, V]; None where nothing is banned."""
    banned = forbidden_RV
    for bit, rule in ((MIN_TOKENS, rules.early_stops), (BAD_SEQUENCES, rules.banned_words)):
        if flags & bit:
            more = rule(rows)
            banned = more if banned is None else banned | more
    return banned


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    repetition_R: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
) -> torch.Tensor:
    """vLLM's penalties: repetition over prompt and output (`seen`), the other two over output (`counts`)."""
    repetition = repetition_R[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - frequency_R[:, None] * counts
    return logits - presence_R[:, None] * (counts > 0)


def keep_probable(scaled: torch.Tensor, min_p_R: torch.Tensor) -> torch.Tensor:
    """Scores of tokens at least min_p times as likely as the likeliest; -inf for the others."""
    floor = scaled.amax(-1) + min_p_R.log()
    return scaled.masked_fill(scaled < floor[:, None], float("-inf"))


def keep_first(scaled: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Scores of the top_k likeliest tokens (V: all), and of these the fewest that have top_p of the mass (1: all)."""
    # the null slot, which takes the place of sequences that sit a round out, has a top_k of 0; a GPU is not waited for
    most = max(1, int(top_k_R.max())) if scaled.device.type == "cpu" else scaled.shape[-1]
    ordered, ids = _first_in_order(scaled, most)
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(ranks >= top_k_R[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # the most likely token stays whatever top_p is
    dropped = (before >= top_p_R[:, None]) & (ranks > 0)
    ordered = ordered.masked_fill(dropped & (top_p_R < 1)[:, None], float("-inf"))
    return torch.full_like(ordered, float("-inf")).scatter_(-1, ids, ordered[:, : ids.shape[1]])


def _in_order(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest first, of equals the one that stands first."""
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    return ordered, places


def _first_in_order(scaled: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [R, V], the likeliest first, of equals the lower id, and the ids of those that may be kept: all, or the
    first `most`, with -inf from there on. That spares a sort of the whole vocabulary, which on a CPU takes more than
    everything else about a choice."""
    if 2 * most >= scaled.shape[-1]:
        return _in_order(scaled)
    ids = scaled.topk(2 * most).indices.sort(dim=-1).values
    first, places = _in_order(scaled.gather(-1, ids))
    # if the last kept one has equals that were left out, others may be the lower ids; not so with NaN, nor where it is
    # -inf, for then the order does not matter
    last_kept, last = first[:, most - 1], first[:, -1]
    if not bool(((last < last_kept) | (last_kept == float("-inf"))).all()):
        return _in_order(scaled)
    ordered = torch.full_like(scaled, float("-inf"))
    ordered[:, :most] = first[:, :most]
    return ordered, ids.gather(-1, places[:, :most])
