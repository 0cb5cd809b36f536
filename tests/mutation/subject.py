"""What mutants are judged on: a tiny model and requests of every kind; what changes a text, and what the audit names.

`changes_text` knows nothing of the audit: it decodes every request alone at k = 0, before and with the fault, and at
k > 0 beside others, with the head's drafts and with right ones, and compares the tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from pilotfish.engine.assemble import assemble
from pilotfish.engine.check.audit.command import make_auditor, parse
from pilotfish.engine.check.audit.run import Auditor, RunResult
from pilotfish.engine.check.audit.transcript import Finding, Transcript
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.loop import EngineLoop
from tests.mutation.mutants import files
from tests.support.tiny_models import TWO_LAYERS, build_tiny

RUNS = ((3, 4, True), (5, 3, True), (2, 4, False), (1, 4, True))
"""Depth, batch and whether drafts are forced: of the audit, and of the comparison without it."""
LEFT_OUT = ("0-greedy", "stop-2", "bad-words-2", "choice-1", "short-2", "json-schema")
"""Second requests of a kind: a mutant is judged in a second or two."""


class Named(Exception):
    """The audit has found something: the rest of it can be left."""


class Impatient(Auditor):
    """Ends at the first token that is not by the book."""

    def _by_book(self, *args: Any) -> list[Finding]:
        if found := super()._by_book(*args):
            raise Named(str(found[0]))
        return []

    def _continue(self, request: Submit, transcript: Transcript) -> list[int]:
        """As the sound engine went on: they are drafts, right or wrong."""
        return self._beyond[request.request_id]


class Subject:
    """Its requests are derived once, from the sound engine."""

    def __init__(self, folder: Path):
        flags = ["--max-depth", "8", "--max-batch", "4", "--num-prompts", "1", "--max-tokens", "9"]
        made = make_auditor(parse([str(build_tiny(folder, "hv_gt_hk", **TWO_LAYERS)), *flags]))
        made.run_reference()
        self.model, self.plan, self.rules = made.model, made.plan, made.rules
        self.requests = [request for request in made.requests if request.request_id not in LEFT_OUT]
        self.matchers, self.scratch = made.matchers, made.scratch
        assert self.rules.silent == []
        self.beyond = made._beyond
        self.texts = self.decode(0, 1)

    def auditor(self) -> Auditor:
        self.spoil()
        auditor = Impatient(self.model, self.plan, self.requests, None, self.matchers, self.scratch)
        auditor.rules, auditor._beyond = self.rules, dict(self.beyond)
        return auditor

    def audit(self) -> Iterator[RunResult]:
        """What the audit says, run by run; of a fault in the engine that is an exception, that."""
        auditor = self.auditor()
        yield auditor.run_reference()
        for depth, batch, forced in RUNS:
            yield auditor.run(depth, batch, forced)
        yield auditor.check_head()

    def named(self) -> str | None:
        """The audit's first words about the engine as it is now."""
        try:
            for result in self.audit():
                if result.findings:
                    return str(result.findings[0])
        except Named as found:
            return str(found)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def changes_text(self) -> str | None:
        """How the engine as it is now writes other tokens, by comparison alone."""
        try:
            alone = self.decode(0, 1)
            if alone != self.texts:
                return f"k = 0 writes another {_first(self.texts, alone)}"
            for depth, batch, forced in RUNS:
                came = self.decode(depth, batch, forced)
                if came != alone:
                    return f"k = {depth} writes another {_first(alone, came)}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def decode(self, depth: int, batch: int, right_drafts: bool = False) -> dict[str, list[int]]:
        """Tokens of every request. `right_drafts`: of each window some are what comes at k = 0, then others."""
        self.spoil()
        plan = dataclasses.replace(self.plan, depth=depth, max_num_seqs=batch)
        engine = assemble(self.model, plan, len(self.requests), 0, 0.0)
        engine.executor.grammars.steps = self.matchers.steps
        loop = EngineLoop(dataclasses.replace(engine, grammars=cast(GrammarLibrary, self.matchers)))
        for request in self.requests:
            own = depth if request.speculative_k is None else min(depth, request.speculative_k)
            loop.submit(msgspec.structs.replace(request, speculative_k=own))
        texts: dict[str, list[int]] = {request.request_id: [] for request in self.requests}
        drafted: dict[str, int] = {}
        for step in range(2000):
            if not loop.has_work():
                return texts
            report = loop.step()
            for output in report.outputs if report is not None else ():
                texts[output.request_id] += output.token_ids
                if output.error is not None:
                    texts[output.request_id].append(-1)
            for sequence in loop.scheduler.running if right_drafts else ():
                length = int(loop.executor.state.length[sequence.slot])
                if sequence.is_prefilled and drafted.get(sequence.request_id) != length:
                    drafted[sequence.request_id] = length
                    self._draft(loop, sequence, length, depth, step)
        raise RuntimeError("it does not end")

    def _draft(self, loop: EngineLoop, sequence: Any, length: int, depth: int, step: int) -> None:
        state, request = loop.executor.state, sequence.request_id
        known = [*self.texts[request], *self.beyond[request]][length + 1 - len(sequence.prompt) :][:depth]
        drafts = known + [1] * (depth - len(known))
        wrong = (step * 5 + length) % (depth + 2)
        if wrong < depth:
            drafts[wrong] = (drafts[wrong] + 7) % self.model.config.vocab_size
        state.drafts[sequence.slot, :depth] = torch.tensor(drafts)
        left = int(state.limit[sequence.slot]) - length - 2
        state.num_offered[sequence.slot] = max(0, min(depth, sequence.own_k, left))
        if sequence.constraint is not None:
            loop.executor.grammars.steps.wait(sequence.slot, 10.0)
            loop.executor.grammars.steps.begin(
                sequence.slot, sequence.constraint, [], state.drafts[sequence.slot].tolist()
            )

    def spoil(self) -> None:
        """What nobody has written is NaN, as in a fresh engine."""
        owners = [*self.model.trunk.kv, *self.model.head.caches, self.model.trunk.state, self.model.trunk.state.pending]
        for tensor in (value for owner in owners for value in vars(owner).values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(float("nan"))

    def lines(self) -> dict[str, set[int]]:
        """Of the files that mutants are made of, the lines that an audit runs."""
        ran: dict[str, set[int]] = {file: set() for file in files()}
        resolved = {str(Path(file).resolve()): file for file in ran}
        names: dict[str, str | None] = {}

        def trace(frame: Any, event: str, _: object) -> Any:
            name = frame.f_code.co_filename
            if name not in names:
                names[name] = resolved.get(str(Path(name).resolve()))
            file = names[name]
            if file is None:
                return None
            ran[file].add(frame.f_lineno)
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            assert self.named() is None
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        return ran


def _first(wanted: dict[str, list[int]], came: dict[str, list[int]]) -> str:
    return next(request for request in wanted if wanted[request] != came[request])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Faults make the engine speak; nobody needs to read it."""
    logging.disable(logging.CRITICAL)
    try:
        with torch.inference_mode():
            yield
    finally:
        logging.disable(logging.NOTSET)
