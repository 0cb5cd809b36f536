"""Whether a request can be served: its numbers and ids, what its slot and the page pool hold, rules about tokens that
leave something to choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import Ready, SamplingParams, Submit, ThinkingBudget
from pilotfish.engine.plan import reserved_pages
from pilotfish.engine.requests.loop_guard import LoopGuard, check_loop_rule
from pilotfish.engine.requests.sequence import Sequence
from pilotfish.spec.slots import (
    MAX_BAD_LENGTH,
    MAX_BAD_SEQUENCES,
    MAX_CLOSING,
    MAX_STOP_IDS,
    NEVER,
    banned_sequences,
    banned_tokens,
    stop_ids_of,
)

MAX_COUNT = 1 << 31


def checked_sequence(request: Submit, ready: Ready, num_pages: int) -> Sequence:
    """The sequence of a request that an engine as `ready` says, with `num_pages` KV pages, can serve. Raises
    RequestError, which names the field, for any other."""
    prompt, params, depth = request.prompt_token_ids, request.sampling, ready.num_speculative_tokens
    if not 0 < len(prompt) < ready.max_model_len:
        raise RequestError(f"prompt: want 1..{ready.max_model_len - 1} tokens, got {len(prompt)}")
    stop_ids = stop_ids_of(params)
    _check_ids(request, stop_ids, ready.vocab_size)
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids: want at most {MAX_STOP_IDS} with the model's own, got {len(stop_ids)}")
    check_rules(params, stop_ids)
    check_loop_rule(params.loop_rule)
    _check_numbers(params)
    own_k = depth if request.speculative_k is None else request.speculative_k
    if not 0 <= own_k <= depth:
        raise RequestError(f"speculative_k: want 0..{depth}, got {own_k}")
    limit = min(len(prompt) + params.max_tokens, ready.max_model_len)
    reserved = reserved_pages(limit, depth)
    if reserved > num_pages:
        raise RequestError(f"max_tokens: {limit} tokens need {reserved} KV pages, the pool has {num_pages}")
    if params.grammar is not None and params.min_tokens:
        # a finished grammar allows the end alone: its own min_tokens give way to that
        raise RequestError("min_tokens: want 0 beside a grammar, which has its own")
    guard = None if params.loop_rule is None else LoopGuard(params.loop_rule, params, len(prompt))
    sequence = Sequence(request, limit, own_k, reserved, allowed=allowed_ids(params), loop_guard=guard)
    # log-probabilities of a prompt's own tokens take all its hidden rows
    sequence.uses_cache = params.prompt_logprobs is None
    return sequence


def _check_ids(request: Submit, stop_ids: list[int], vocab_size: int) -> None:
    for name, ids in _ids_by_field(request, stop_ids):
        strange = next((i for i in ids if not 0 <= i < vocab_size), None)
        if strange is not None:
            raise RequestError(f"{name}: want token ids in 0..{vocab_size - 1}, got {strange}")


def _ids_by_field(request: Submit, stop_ids: list[int]) -> Iterator[tuple[str, Iterable[int]]]:
    params = request.sampling
    yield "prompt", request.prompt_token_ids
    yield "stop_token_ids", stop_ids
    yield "logit_bias", params.logit_bias
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield from (("bad_words_token_ids", sequence) for sequence in params.bad_words_token_ids)
    if params.thinking is not None:
        yield "thinking", (params.thinking.end_token_id, *params.thinking.closing)


def _check_numbers(params: SamplingParams) -> None:
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens: want at least 0, got {params.max_tokens}")
    if not -(1 << 63) <= params.seed < 1 << 63:
        raise RequestError(f"seed: want a 64-bit integer, got {params.seed}")
    for name, value in (("top_k", params.top_k), ("min_tokens", params.min_tokens), ("choice", params.choice)):
        if abs(value) > MAX_COUNT:
            raise RequestError(f"{name}: want a number of at most {MAX_COUNT}, got {value}")


def allowed_ids(params: SamplingParams) -> frozenset[int] | None:
    """All that may ever be written, where that is limited."""
    if params.allowed_token_ids is None:
        return None
    return frozenset((*params.allowed_token_ids, *(params.thinking.closing if params.thinking is not None else ())))


def check_rules(params: SamplingParams, stop_ids: list[int]) -> None:
    """Raises RequestError for what the tables cannot hold, or for bans that leave nothing to choose."""
    sequences = banned_sequences(params)
    if any(not sequence or len(sequence) > MAX_BAD_LENGTH for sequence in params.bad_words_token_ids):
        raise RequestError(f"bad_words: want 1..{MAX_BAD_LENGTH} tokens in each")
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise RequestError(
            f"bad_words: want at most {MAX_BAD_SEQUENCES} of several tokens, with and without a space before them, "
            f"got {len(sequences)}"
        )
    if params.allowed_token_ids is not None:
        forbidden = {*banned_tokens(params), *(stop_ids if params.min_tokens else ())}
        if not set(params.allowed_token_ids) - forbidden:
            raise RequestError("allowed_token_ids: want at least one that bad_words and min_tokens do not forbid")
    if params.thinking is not None:
        _check_thinking(params.thinking)


def _check_thinking(rule: ThinkingBudget) -> None:
    if not 0 <= rule.num_tokens < NEVER:
        raise RequestError(f"thinking: want a budget in 0..{NEVER - 1}, got {rule.num_tokens}")
    if not 1 <= len(rule.closing) <= MAX_CLOSING or rule.end_token_id not in rule.closing:
        raise RequestError(f"thinking: want a closing sequence of 1..{MAX_CLOSING} tokens with the end id in it")
