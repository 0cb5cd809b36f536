"""An engine loop over a tiny model, its drafts right for a drawn number of tokens of what each request gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from pilotfish.engine.link.messages import RequestOutput, SamplingParams, StepReport, Submit
from pilotfish.engine.loop import EngineLoop
from tests.support.rounds import MODES, Transcript, make_engine, transcript


@dataclass
class Request:
    """What was asked, what came, and the logits of its rows by position."""

    submit: Submit
    reference: Transcript | None
    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


class LoopDriver:
    """`agreeing`: how many drafts of a round are right, None to draw it, or "own" to leave the head's drafts.
    `run_ahead`: rounds are read after the next one has been launched, as on a GPU."""

    def __init__(
        self,
        kind: str = "moe",
        dtype: str = "float32",
        *,
        agreeing: int | str | None = None,
        seed: int = 0,
        run_ahead: bool = False,
        **options: Any,
    ):
        self.kind, self.dtype = kind, dtype
        self.chunk, self.kv_dtype = options.get("prefill_chunk", 64), options.get("kv_dtype")
        self.loop = EngineLoop(make_engine(kind, dtype, **options))
        self.loop.executor.run_ahead = run_ahead
        self.agreeing, self.random = agreeing, random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.reports: list[StepReport] = []
        self.loop.executor.observers.append(self._observe)

    def _observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        scheduler = self.loop.scheduler
        owners = {sequence.slot: sequence.request_id for sequence in (*scheduler.running, *scheduler.retired)}
        if name == "logits":
            for row, slot, position in zip(rows, slots, positions, strict=True):
                self.requests[owners[slot]].logits[position] = row.clone()

    def submit(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        reference: Transcript | None = None,
        speculative_k: int | None = None,
    ) -> Request:
        submit = Submit(request_id=name, prompt_token_ids=prompt, sampling=params, speculative_k=speculative_k)
        self.requests.setdefault(name, Request(submit, reference))
        self.loop.submit(submit)
        return self.requests[name]

    def ask(
        self, name: str, length: int, *, seed: int = 0, mode: str = "greedy", k: int | None = None, **fields: Any
    ) -> Request:
        """Submits random_prompt(length, seed) in a mode; `fields` change its parameters, not what is drafted."""
        reference = transcript(
            self.kind,
            self.dtype,
            length,
            seed=seed,
            mode=mode,
            num_tokens=24,
            chunk=self.chunk,
            kv_dtype=self.kv_dtype,
        )
        values = {name: getattr(MODES[mode], name) for name in SamplingParams.__struct_fields__}
        params = SamplingParams(**values | {"max_tokens": 20} | fields)
        return self.submit(name, reference.prompt, params, reference=reference, speculative_k=k)

    def step(self) -> StepReport | None:
        self._force()
        report = self.loop.step()
        self.loop.scheduler.check()
        if report is not None:
            self.reports.append(report)
            for output in report.outputs:
                request = self.requests[output.request_id]
                request.outputs.append(output)
                request.tokens += output.token_ids
        return report

    def run(self, steps: int = 1000) -> None:
        """Steps until nothing is left to do, or so many."""
        for _ in range(steps):
            if not self.loop.has_work():
                return
            self.step()
        assert steps < 1000, "the loop does not end"

    def _force(self) -> None:
        state = self.loop.executor.state
        for sequence in self.loop.scheduler.running:
            request = self.requests[sequence.request_id]
            if not sequence.is_prefilled or request.reference is None or self.agreeing == "own":
                continue
            depth = state.max_depth
            agreeing = self.random.randint(0, depth) if self.agreeing is None else int(self.agreeing)
            num_committed = int(state.length[sequence.slot]) + 1 - len(sequence.prompt)
            drafts = request.reference.drafts(num_committed, depth, agreeing)
            state.drafts[sequence.slot] = torch.tensor(drafts)


def assert_alone(request: Request) -> None:
    """Tokens and logits of a request are those it has alone at k = 0."""
    reference = request.reference
    assert reference is not None
    assert request.tokens == reference.tokens[: len(request.tokens)]
    for position in range(len(reference.prompt), len(reference.prompt) + len(request.tokens) - 1):
        assert torch.equal(request.logits[position], reference.logits[position]), position


def assert_seen_alone(request: Request) -> None:
    """Tokens of a request, and those of its logits that were looked at, are those it has alone at k = 0."""
    reference = request.reference
    assert reference is not None
    assert request.tokens == reference.tokens[: len(request.tokens)]
    for position, row in request.logits.items():
        if position in reference.logits and position < len(reference.prompt) + len(request.tokens) - 1:
            assert torch.equal(row, reference.logits[position]), position
