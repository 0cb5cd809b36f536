"""One log line every ten seconds of work: what a person watching the terminal wants to see."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from pilotfish.engine.link.messages import StepReport, StepStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
IDLE_SECONDS = 1.0
"""A longer pause without requests is in no rate; between one client's requests there are shorter ones."""


class ThroughputLog:
    """Adds reports up and logs when one arrives after the interval; an idle engine logs nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._restart(clock())
        self._reported, self._is_idle = -math.inf, True

    def _restart(self, now: float) -> None:
        self._began = now
        self._num_tokens = self._num_prompt_tokens = 0
        self._num_drafts = self._num_accepted = 0

    def on_report(self, report: StepReport) -> None:
        now = self._clock()
        if self._is_idle and now - self._reported > IDLE_SECONDS:
            self._restart(now)
        self._reported, self._is_idle = now, not (report.stats.num_running or report.stats.num_waiting)
        self._num_prompt_tokens += report.stats.num_prefill_tokens
        for output in report.outputs:
            self._num_tokens += len(output.token_ids)
            if output.num_drafted:
                self._num_drafts += 1
                self._num_accepted += output.num_accepted
        if now - self._began >= INTERVAL_SECONDS:
            logger.info(self._line(report.stats, now - self._began))
            self._restart(now)

    def _line(self, stats: StepStats, seconds: float) -> str:
        text = f"{self._num_tokens / seconds:.1f} tokens/s, {self._num_prompt_tokens / seconds:.1f} prompt tokens/s, "
        text += f"{stats.num_running} running, {stats.num_waiting} waiting"
        if self._num_drafts:
            text += f", acceptance length {1 + self._num_accepted / self._num_drafts:.2f}"
        return text
