"""Prompts that share a beginning, through an engine that keeps what it reads: all that a request shows, to compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pilotfish.engine.link.messages import RequestOutput, SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.kernels.attention import PAGE
from tests.support.fixed_shapes import PaddedPrompts, fixed_engine
from tests.support.rounds import make_engine

LOGPROBS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)


@dataclass
class Shown:
    """`rows`: what observers saw, by name and position. `caches`: keys and values of trunk and head from the first
    token on, and the recurrent state, when the first token had been chosen."""

    outputs: list[RequestOutput] = field(default_factory=list)
    rows: list[tuple[str, int, torch.Tensor]] = field(default_factory=list)
    caches: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_cached(self) -> int | None:
        told = [output.num_cached_tokens for output in self.outputs if output.num_cached_tokens is not None]
        assert len(told) <= 1
        return told[0] if told else None

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def said(self) -> list[Any]:
        """All that a client is told, but for what depends on what was kept and on the clock."""
        return [
            (o.token_ids, o.logprobs, o.finish_reason, o.error, o.num_drafted, o.num_accepted, o.round)
            for o in self.outputs
        ]


class Prefixes:
    """An engine loop over a tiny model. `ask` runs one request alone. `fixed`: rounds of fixed shapes and padded
    prompts, as kernels have."""

    def __init__(
        self, kind: str = "moe", dtype: str = "float32", run_ahead: bool = False, fixed: bool = False, **options: Any
    ):
        options = {"depth": 3, "prefill_chunk": PAGE, "num_pages": 24, "num_snapshots": 12} | options
        if fixed:
            options |= {"operators": PaddedPrompts(), "captured": False}
        self.loop = EngineLoop((fixed_engine if fixed else make_engine)(kind, dtype=dtype, **options))
        self.loop.executor.run_ahead = run_ahead
        self.loop.executor.observers.append(self._observe)
        self.shown: dict[str, Shown] = {}
        self.num_asked = self.num_read = self.num_evictions = 0

    def submit(self, prompt: list[int], params: SamplingParams = LOGPROBS, **fields: Any) -> str:
        self.num_asked += 1
        name = f"r{self.num_asked}"
        self.shown[name] = Shown()
        self.loop.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=params, **fields))
        return name

    def step(self) -> None:
        report = self.loop.step()
        self.loop.scheduler.check()
        if report is None:
            return
        self.num_read += report.stats.num_prefill_tokens
        if report.stats.prefix_cache is not None:
            self.num_evictions += report.stats.prefix_cache.num_evictions
        for output in report.outputs:
            self.shown[output.request_id].outputs.append(output)
            if output.token_ids and not output.round:
                self._look_at_caches(output.request_id)

    def run(self) -> None:
        while self.loop.has_work():
            self.step()

    def ask(self, prompt: list[int], params: SamplingParams = LOGPROBS, **fields: Any) -> Shown:
        name = self.submit(prompt, params, **fields)
        self.run()
        return self.shown[name]

    def cold(self, prompt: list[int], params: SamplingParams = LOGPROBS, **fields: Any) -> Shown:
        """The same with nothing kept that it could find."""
        found = self.ask(prompt, params, cache_salt=f"cold {self.num_asked}", **fields)
        assert not found.num_cached
        return found

    def _observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        scheduler = self.loop.scheduler
        owners = {s.slot: s for s in (*scheduler.running, *scheduler.retired)}
        for row, slot, position in zip(rows, slots, positions, strict=True):
            sequence = owners[slot]
            self.shown[sequence.request_id].rows.append((name, position, row.clone()))

    def _look_at_caches(self, name: str) -> None:
        sequence = next((s for s in self.loop.scheduler.running if s.request_id == name), None)
        if sequence is None:
            return
        model = self.loop.executor.model
        caches = [*model.trunk.kv, *(model.head.caches if model.head else ())]
        held = [torch.cat([t[page] for page in sequence.pages], 1) for cache in caches for t in (cache.k, cache.v)]
        state, slot = model.trunk.state, sequence.slot
        # the head's first place is of no pair
        found = [t[:, 1 : len(sequence.prompt)] for t in held] + [state.s[:, slot], state.conv[:, slot]]
        self.shown[name].caches = [t.clone() for t in found]


def same(one: Shown, other: Shown) -> bool:
    """Whether two runs showed the same bits: tokens, log-probabilities, acceptance, rows, drafts, caches."""
    return (
        one.said == other.said
        and len(one.rows) == len(other.rows)
        and all(
            a[:2] == b[:2] and torch.equal(a[2], b[2])
            for a, b in zip(sorted_rows(one), sorted_rows(other), strict=True)
        )
        and len(one.caches) == len(other.caches)
        and all(torch.equal(a, b) for a, b in zip(one.caches, other.caches, strict=True))
    )


def sorted_rows(shown: Shown) -> list[tuple[str, int, torch.Tensor]]:
    """By position and name; rows of one kind at one place stay in order."""
    return sorted(shown.rows, key=lambda row: (row[1], row[0]))
