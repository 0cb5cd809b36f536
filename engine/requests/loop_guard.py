"""What becomes of a text that repeats itself for ever: a function of its tokens alone, and so the same for every k.

A text loops at a token if its last d tokens have come `repeats` times in a row and these copies cover at least `tokens`
tokens, for some period d. An answer ends there. A thinking block is closed CLOSING_LAG tokens later: rounds that were
launched before the loop was seen are not past that place, whatever their k. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import LoopRule, SamplingParams

CLOSING_LAG = 64
MAX_PERIOD = 1024


@dataclass(frozen=True)
class LoopVerdict:
    """`kept`: how many of the tokens read the answer has, None where it goes on. `close_at`: the position from which an
    open thinking block is to be closed."""

    kept: int | None = None
    close_at: int | None = None


GOES_ON = LoopVerdict()


def check_loop_rule(rule: LoopRule | None) -> None:
    """Raises RequestError."""
    if rule is None:
        return
    if not (rule.repeats >= 2 and rule.tokens >= 0 and 1 <= rule.min_period <= rule.max_period <= MAX_PERIOD):
        raise RequestError(f"loop_guard: want 2 repeats or more, of 1..{MAX_PERIOD} tokens, got {rule}")


class LoopGuard:
    """Reads one sequence's tokens as they are committed, in runs of any length."""

    def __init__(self, rule: LoopRule, params: SamplingParams, num_prompt: int):
        self._loops, self._thinking, self._min_tokens = LoopDetector(rule), params.thinking, params.min_tokens
        self._is_open = self._thinking is not None and self._thinking.start_token_id is None
        self._is_closing = False
        self._num_prompt, self._num_read = num_prompt, 0

    def read(self, token_ids: Sequence[int]) -> LoopVerdict:
        close_at = None
        for number, token in enumerate(token_ids, 1):
            self._num_read += 1
            self._follow_block(token)
            if self._is_closing or not self._loops.read(token) or self._num_read < self._min_tokens:
                continue
            if not self._is_open:
                return LoopVerdict(number, close_at)
            close_at = self._num_prompt + self._num_read + CLOSING_LAG
            self._is_closing = True
        return LoopVerdict(None, close_at) if close_at is not None else GOES_ON

    def _follow_block(self, token: int) -> None:
        """Whether the thinking block is open, and what is said after it is another text."""
        thinking = self._thinking
        if thinking is None:
            return
        if token == thinking.start_token_id:
            self._is_open = True
        elif token == thinking.end_token_id and self._is_open:
            # a block is opened and closed once
            self._is_open, self._is_closing, self._thinking = False, False, None
            self._loops.restart()


class LoopDetector:
    """Says of each token whether a loop is complete with it."""

    def __init__(self, rule: LoopRule):
        periods = np.arange(rule.min_period, rule.max_period + 1)
        # equal tokens in a row, each to the one a period before, that make `repeats` copies over `tokens` tokens
        self._wanted = np.maximum((rule.repeats - 1) * periods, rule.tokens - periods)
        self._lowest, self._longest = rule.min_period, rule.max_period
        self.restart()

    def restart(self) -> None:
        """Forgets all tokens so far: a loop must be made of later ones."""
        self._equal = np.zeros(len(self._wanted), dtype=np.int64)
        # the newest tokens, newest first; nothing equals -1
        self._recent = np.full(self._longest, -1, dtype=np.int64)

    def read(self, token: int) -> bool:
        # of period d: the token d places back
        self._equal = np.where(self._recent[self._lowest - 1 :] == token, self._equal + 1, 0)
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[0] = token
        return bool((self._equal >= self._wanted).any())
