"""An engine core on a clock: every period each running request gets RUN tokens, whatever the host makes of it.

The time of a round is not that of the work done for it: rounds fall due on a fixed grid, and one that is late is
followed at once by the next. The period is what `pace.json` in the model's folder says when the first of some requests
comes, else a millisecond. Each request's first round is written to `started.jsonl` in the model's folder, so that a
client can tell when each token was due (monotonic clocks are one for all processes of a machine).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from loaded import ready

from pilotfish.engine.link.messages import RequestOutput, StepReport, StepStats, Submit

RUN = 3
TEXT = b"the quick brown fox jumps over the lazy dog. "


def write_pace(folder: Path, period: float) -> None:
    """For the requests that come next to an engine that has none."""
    folder.joinpath("pace.json").write_text(json.dumps(period))


class PacedCore:
    def __init__(self, options) -> None:
        self._pace, self._period = Path(options.model, "pace.json"), 1e-3
        self._log = Path(options.model).joinpath("started.jsonl").open("a")
        self._done: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._aborted: list[RequestOutput] = []
        self._due = 0.0
        self.ready = ready(max_model_len=options.max_model_len or 1 << 20, max_num_seqs=options.max_num_seqs or 64)

    def submit(self, request: Submit) -> None:
        if not self._done and self._pace.exists():
            self._period = json.loads(self._pace.read_text())
        self._done[request.request_id] = 0
        self._wanted[request.request_id] = request.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        if self._done.pop(request_id, None) is not None:
            self._aborted.append(RequestOutput(request_id=request_id, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self._done or self._aborted)

    def step(self) -> StepReport | None:
        aborted, self._aborted = self._aborted, []
        if not self._done:
            return StepReport(outputs=aborted, stats=StepStats()) if aborted else None
        now = time.monotonic()
        if now > self._due + 1:
            self._due = now
        self._due += self._period
        time.sleep(max(0.0, self._due - time.monotonic()))
        outputs = aborted + [self._advance(name) for name in list(self._done)]
        stats = StepStats(phases={"verify": self._period}, step_seconds=self._period, num_running=len(self._done))
        return StepReport(outputs=outputs, stats=stats)

    def _advance(self, name: str) -> RequestOutput:
        done = self._done[name]
        if not done:
            self._log.write(json.dumps({"due": self._due}) + "\n")
            self._log.flush()
        count = min(RUN, self._wanted[name] - done)
        tokens = [TEXT[(done + i) % len(TEXT)] for i in range(count)]
        self._done[name] += count
        finished = self._done[name] == self._wanted[name]
        if finished:
            del self._done[name]
        reason = "length" if finished else None
        return RequestOutput(request_id=name, token_ids=tokens, finish_reason=reason, num_drafted=3, num_accepted=2)


def make_core(options) -> PacedCore:
    return PacedCore(options)
