"""`--audit-rate`: a share of finished requests is decoded again while the engine is idle, at k = 0 and from the first
token of the prompt, and compared.

The same promise that `pilotfish audit` checks before traffic is checked here on the traffic itself. No torch.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import msgspec

from pilotfish.engine.link.messages import Submit

logger = logging.getLogger(__name__)

MAX_PENDING = 8
PREFIX = "audit:"


@dataclass
class Check:
    """A request to decode again, the tokens it gave, and how many of them have been given again."""

    request: Submit
    tokens: list[int]
    num_seen: int = 0


class SelfAudit:
    """Which requests to watch, which wait to be checked, and what came of it (counts since the last `take_counts`)."""

    def __init__(self, rate: float):
        if not 0 <= rate <= 1:
            raise ValueError(f"audit_rate: want a share in 0..1, got {rate}")
        self.rate = rate
        self.running: Check | None = None
        self._watched: dict[str, list[int]] = {}
        self._pending: deque[Check] = deque(maxlen=MAX_PENDING)
        self._credit = 0.0
        self._num_tokens = self._num_mismatched = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self.running)

    def on_submit(self, request: Submit) -> None:
        """Takes every 1/rate-th request into view."""
        self._credit += self.rate
        if self._credit >= 1:
            self._credit -= 1
            self._watched[request.request_id] = []

    def on_tokens(self, request_id: str, tokens: list[int]) -> None:
        if request_id in self._watched:
            self._watched[request_id] += tokens

    def on_end(self, request: Submit, failed: bool) -> None:
        """A watched request that gave tokens waits to be checked; when too many wait, the oldest is forgotten."""
        tokens = self._watched.pop(request.request_id, None)
        if tokens and not failed:
            sampling = msgspec.structs.replace(
                request.sampling, max_tokens=len(tokens), logprobs=None, prompt_logprobs=None
            )
            again = msgspec.structs.replace(
                request, request_id=PREFIX + request.request_id, sampling=sampling, speculative_k=0
            )
            self._pending.append(Check(again, tokens))

    def start(self) -> Submit | None:
        """The next request to decode again."""
        if self.running is None and self._pending:
            self.running = self._pending.popleft()
            self.running.num_seen = 0
        return self.running.request if self.running else None

    def interrupt(self) -> None:
        """Real work has come: the check starts anew when the engine is idle again."""
        if self.running is not None:
            self._pending.appendleft(self.running)
            self.running = None

    def give_up(self) -> None:
        """The running check cannot be made: a library failed in it."""
        self.running = None

    def on_check_tokens(self, tokens: list[int], ended: bool) -> bool:
        """Compares what the running check gave; True if it is over."""
        check = self.running
        assert check is not None
        wanted = check.tokens[check.num_seen : check.num_seen + len(tokens)]
        check.num_seen += len(tokens)
        matches = tokens == wanted and not (ended and check.num_seen != len(check.tokens))
        if not matches:
            self._num_mismatched += 1
            name = check.request.request_id.removeprefix(PREFIX)
            logger.error("EXACTNESS: request %s differs from its own k = 0 within %d tokens", name, check.num_seen)
        if matches and not ended:
            return False
        self._num_tokens += check.num_seen
        self.running = None
        return True

    def take_counts(self) -> tuple[int, int]:
        """Tokens checked and requests that differed since the last call."""
        counts = self._num_tokens, self._num_mismatched
        self._num_tokens = self._num_mismatched = 0
        return counts
