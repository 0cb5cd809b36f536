"""The rules by the book: which token must follow from a row's raw logits, written out for one row at a time.

It shares no code with the engine's sampling, so a fault that changes every k alike is seen too. numpy in float64; a
token that is within rounding of the best one passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pilotfish.engine.check.audit.matchers import Matcher
from pilotfish.engine.link.messages import SamplingParams

SLACK = 2e-3
"""The slack of scores: fp32 logits divided by a temperature, with noise."""
EDGE = 1e-4
"""The slack of probabilities: a token this close to where a filter cuts may stand on either side."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
GREEDY_BELOW = 1e-5


def first_wrong(
    prompt: Sequence[int],
    params: SamplingParams,
    tokens: Sequence[int],
    logits: Sequence[np.ndarray],
    matcher: Matcher | None,
) -> int | None:
    """The first of the tokens that the book does not allow, None if all are right; `logits`: a row for each token.

    Past the rows that there are, only where the text ends is looked at.
    """
    stops = stops_of(params)
    if not tokens:
        return 0
    for place, token in enumerate(tokens):
        is_last = place == len(tokens) - 1
        must_end = token in stops or place + 1 == params.max_tokens
        if is_last != must_end:
            return place
        if place < len(logits) and not _is_right(prompt, params, tokens, place, logits[place], stops, matcher):
            return place
        if matcher is not None:
            matcher.take(token)
    return None


def stops_of(params: SamplingParams) -> set[int]:
    """Ids that end the text."""
    eos = () if params.ignore_eos and params.grammar is None else params.eos_token_ids
    return {*params.stop_token_ids, *eos}


def _is_right(
    prompt: Sequence[int], params: SamplingParams, tokens: Sequence[int], place: int, logits: np.ndarray,
    stops: set[int], matcher: Matcher | None,
) -> bool:  # fmt: skip
    scores = score(prompt, params, tokens[:place], logits, stops, matcher)
    best = scores.max()
    return bool(scores[tokens[place]] >= best - SLACK * max(1.0, abs(best)))


def score(
    prompt: Sequence[int], params: SamplingParams, before: Sequence[int], logits: np.ndarray,
    stops: set[int], matcher: Matcher | None = None,
) -> np.ndarray:  # fmt: skip
    """float64 [V] of what may follow `before`: the token with the highest one comes."""
    scores = logits.astype(np.float64)
    forced = _forced(params, before)
    if forced is not None:
        scores[:] = -np.inf
        scores[forced] = 0.0
        return scores
    for ids, value in params.logit_bias.items():
        scores[ids] += value
    if params.allowed_token_ids is not None:
        scores[np.setdiff1d(np.arange(len(scores)), params.allowed_token_ids)] = -np.inf
    banned = [word[-1] for word in params.bad_words_token_ids if _ends_with(before, word[:-1])]
    banned += list(stops) if len(before) < params.min_tokens else []
    scores[banned] = -np.inf
    if matcher is not None:
        scores[~_allowed(params, len(before), matcher, len(scores))] = -np.inf
    scores = _penalised(scores, prompt, before, params)
    if params.temperature < GREEDY_BELOW:
        return scores
    drawn = noise(params.seed, params.choice, len(prompt) + len(before), np.arange(len(scores)))
    return _filtered(scores / params.temperature, params) + drawn


def _allowed(params: SamplingParams, num_tokens: int, matcher: Matcher, vocab: int) -> np.ndarray:
    """What the grammar allows; before min_tokens no end, unless nothing else may come."""
    allowed = matcher.allowed(vocab)
    assert params.grammar is not None
    if num_tokens >= params.grammar.min_tokens:
        return allowed
    others = allowed.copy()
    others[list(params.grammar.ends)] = False
    return others if others.any() else allowed


def _ends_with(before: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(wanted) <= len(before) and list(before[len(before) - len(wanted) :]) == list(wanted)


def _forced(params: SamplingParams, before: Sequence[int]) -> int | None:
    """What a thinking budget puts at the next place."""
    rule = params.thinking
    if rule is None:
        return None
    if rule.start_token_id is None:
        opened = 0
    elif rule.start_token_id in before:
        opened = list(before).index(rule.start_token_id) + 1
    else:
        return None
    deadline = opened + rule.num_tokens
    step = len(before) - deadline
    if rule.end_token_id in before[:deadline] or not 0 <= step < len(rule.closing):
        return None
    return rule.closing[step]


def _penalised(scores: np.ndarray, prompt: Sequence[int], before: Sequence[int], params: SamplingParams) -> np.ndarray:
    for token in {*prompt, *before}:
        score = scores[token]
        scores[token] = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    for token in set(before):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(before).count(token)
    return scores


def _filtered(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """min_p, top_k, top_p in turn, each of what the ones before left."""
    if params.min_p > 0:
        scores = np.where(scores < scores.max() + np.log(params.min_p) - EDGE, -np.inf, scores)
    order = np.argsort(-scores, kind="stable")
    if 0 < params.top_k < len(scores):
        scores = np.where(scores < scores[order[params.top_k - 1]] - EDGE, -np.inf, scores)
    if params.top_p < 1:
        weights = np.exp(scores[order] - scores[order[0]])
        share = weights / weights.sum()
        before = np.cumsum(share) - share
        dropped = (before >= params.top_p + EDGE) & (np.arange(len(order)) > 0)
        scores = scores.copy()
        scores[order[dropped]] = -np.inf
    return scores


def noise(seed: int, choice: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Gumbel noise of token ids, SplitMix64 as a counter."""
    with np.errstate(over="ignore"):
        key: Any = np.uint64(seed & (1 << 64) - 1) + GOLDEN
        for number in (choice, position):
            key = _mix(key) + np.uint64(number) * GOLDEN
        bits = _mix(_mix(key) + (ids.astype(np.uint64) + np.uint64(1)) * GOLDEN) >> np.uint64(41)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-23
    result: np.ndarray = -np.log(-np.log(uniform))
    return result


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
