"""How long a round takes lately, and so how long grammars may hold one up."""

from __future__ import annotations

from collections import deque
from statistics import median

ROUNDS_KEPT = 8
"""The newest rounds, whose median says how long one takes."""
PATIENCE_SHARE = 8
"""A round is held up by grammars for at most this part of what one takes, before it is launched and after its trunk."""
FIRST_ROUND_SECONDS = 0.03
"""What one takes, until it is known."""
LEAST_PATIENCE = 0.001
"""Seconds that it may be held up however short rounds are."""


class RoundTimes:
    """Of the rounds that followed another: the first one after something else waits for that, too."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=ROUNDS_KEPT)
        self._last_was_round = False

    def note(self, is_round: bool, seconds: float) -> None:
        """A step took so long, and was a round or was not."""
        if is_round and self._last_was_round:
            self._seconds.append(seconds)
        self._last_was_round = is_round

    @property
    def round_seconds(self) -> float | None:
        """What a round takes; None until it is known."""
        return median(self._seconds) if self._seconds else None

    @property
    def patience(self) -> float:
        """Seconds that a round may be held up."""
        return max(LEAST_PATIENCE, (self.round_seconds or FIRST_ROUND_SECONDS) / PATIENCE_SHARE)
