"""Which rules about tokens a request may ask for: what slots hold, and bans that leave something to choose."""

from __future__ import annotations

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import SamplingParams, ThinkingBudget
from pilotfish.spec.slots import (
    MAX_BAD_LENGTH,
    MAX_BAD_SEQUENCES,
    MAX_CLOSING,
    NEVER,
    banned_sequences,
    banned_tokens,
)


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
