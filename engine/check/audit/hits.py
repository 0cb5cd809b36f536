"""Cold beside hit: requests whose prompts the prefix cache has, held against the same requests read from nothing.

A hit must give a cold run's tokens, log-probabilities, rows of tensors and drafts, bit for bit, and so its acceptance;
and it must be one: what the cache gives of each prompt is known beforehand. Every engine here begins with keys, values
and states that are NaN, so that nothing is right because an earlier one left it there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.check.audit.prefixes import WAYS, Ask, Script
from pilotfish.engine.check.audit.result import RunResult
from pilotfish.engine.check.audit.transcript import Finding, Recorder, Transcript, compare, unseen
from pilotfish.engine.ledger import caches_of
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.model.build import Model
from pilotfish.engine.plan import Plan

if TYPE_CHECKING:
    from pilotfish.engine.check.audit.run import Auditor

NUM_SNAPSHOTS = 16
GPU_DEPTHS = (1, 3)
"""The k that a GPU compares, beside the largest."""


class Hits:
    """Runs a script at one k after the other, in engines of `plan`, whose prompts are longer than those of other runs.
    `num_found`: tokens that the cache gave in all of them."""

    def __init__(self, script: Script, plan: Plan):
        self.script, self.plan = script, plan
        self.num_found = self.num_prompts = 0
        self.depths: list[int] = []
        self._known: dict[int, dict[tuple[object, ...], Transcript]] = {}

    def run(self, auditor: Auditor, depth: int, batch: int, captured: bool = False) -> RunResult:
        """All of the script at depth k, at most `batch` sequences at once. `captured`: of rounds and prompts that are
        replayed, whose rows are not in view."""
        name = f"k = {depth}, batch {batch}, cold beside hit{', captured' if captured else ''}"
        if depth not in self._known:
            self._known[depth] = self._cold(auditor, depth)
        cold = self._known[depth]
        ample = self._warm(auditor, depth, batch, self.script.waves, NUM_SNAPSHOTS, captured)
        scarce = self._warm(auditor, depth, batch, self.script.scarce, 1, captured)
        got = ample.transcripts | scarce.transcripts
        asks = [ask for ask in self.script.asks if ask.aborted_at is None]
        wanted = {ask.name: cold[_key(ask.request)] for ask in asks}
        lengths = {ask.name: len(ask.request.prompt_token_ids) for ask in asks}
        findings = [finding for ask in asks for finding in _not_found(name, ask, got[ask.name])]
        findings += compare(name, wanted, got, lengths) + ([] if captured else unseen(name, wanted, got))
        findings += [finding for ask in asks for finding in _unlike(name, ask, wanted[ask.name], got[ask.name])]
        num_rows = auditor.compared.add(wanted, got)
        self.num_prompts += len(asks)
        self.num_found += sum(got[ask.name].num_found for ask in asks)
        self.depths += [] if depth in self.depths else [depth]
        totals = [one + other for one, other in zip(ample.totals, scarce.totals, strict=True)]
        return RunResult(name, findings, sum(len(got[ask.name].tokens) for ask in asks), num_rows, *totals)

    def _cold(self, auditor: Auditor, depth: int) -> dict[tuple[object, ...], Transcript]:
        """Each prompt once, alone, in an engine that keeps nothing."""
        distinct = {_key(ask.request): ask.request for ask in self.script.asks if ask.aborted_at is None}
        poison(auditor.model)
        plan = dataclasses.replace(self.plan, num_snapshots=0)
        recorder = auditor.decode(depth, 1, list(distinct.values()), plan=plan)
        return {key: recorder.transcripts[request.request_id] for key, request in distinct.items()}

    def _warm(
        self, auditor: Auditor, depth: int, batch: int, waves: list[list[Ask]], num_snapshots: int, captured: bool
    ) -> Recorder:
        poison(auditor.model)
        num_requests = sum(map(len, waves))
        plan = dataclasses.replace(self.plan, num_snapshots=num_snapshots)
        loop = auditor.make_loop(depth, batch, num_requests, captured, plan)
        recorder = Recorder(loop, [ask.request for wave in waves for ask in wave], rows=not captured)
        for wave in waves:
            aborted_at = {ask.name: ask.aborted_at for ask in wave if ask.aborted_at is not None}
            auditor.run_to_end(recorder, [ask.request for ask in wave], aborted_at=aborted_at)
        loop.scheduler.check()
        return recorder

    def described(self) -> list[str]:
        """What was compared, for the verdict."""
        ways = ", ".join(WAYS.values())
        ends = ", ".join(map(str, self.script.boundaries))
        counts = f"{self.num_prompts} prompts beside cold runs, {self.num_found} of their tokens found"
        return [
            f"{counts}, boundaries {ends}, k = {', '.join(map(str, self.depths))}:",
            f"{ways}; {', '.join(self.script.sampling)}",
        ]

    def counts(self) -> dict[str, object]:
        """What `described` says, for a program."""
        return {
            "k": self.depths,
            "boundaries": self.script.boundaries,
            "prompts": self.num_prompts,
            "tokens_found": self.num_found,
            "ways": list(WAYS),
            "modes": list(self.script.sampling),
        }


def depths_of(depths: list[int], most: int, device: torch.device) -> list[int]:
    """The k that are compared, of those that are asked for: all on a CPU; few on a GPU, where prompts are longer, with
    the largest of all, `most`, among them, or one at least."""
    return [k for k in depths if device.type == "cpu" or k in (*GPU_DEPTHS, most)] or depths[-1:]


def poison(model: Model) -> None:
    """Leaves nothing in the caches and states that an engine could find right."""
    for cache in caches_of(model):
        for tensor in (cache.k, cache.v):
            tensor.fill_(float("nan"))
    state = model.trunk.state
    for tensor in (state.s, state.conv, state.last_hidden):
        tensor.fill_(float("nan"))


def _key(request: Submit) -> tuple[object, ...]:
    return tuple(request.prompt_token_ids), id(request.sampling)


def _not_found(run: str, ask: Ask, got: Transcript) -> list[Finding]:
    if got.num_found == ask.found:
        return []
    return [Finding(run, ask.name, got.num_found, f"what was found ({got.num_found} tokens, not {ask.found})")]


def _unlike(run: str, ask: Ask, wanted: Transcript, got: Transcript) -> list[Finding]:
    """What is no row: drafts by the length that they were made at, log-probabilities, tokens of each round."""
    found = []
    for length, drafts in sorted(got.drafts.items()):
        if drafts != wanted.drafts.get(length):
            found.append(Finding(run, ask.name, length, "drafts"))
            break
    start = len(ask.request.prompt_token_ids) - 1
    if got.logprobs != wanted.logprobs:
        found.append(Finding(run, ask.name, start, "log-probabilities"))
    if got.rounds != wanted.rounds:
        found.append(Finding(run, ask.name, start, "acceptance"))
    return found
