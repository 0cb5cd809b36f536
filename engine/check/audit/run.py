"""Runs requests at every depth and batch, and holds each against what the request gives alone at k = 0."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from tqdm import tqdm

from pilotfish.engine.assemble import assemble
from pilotfish.engine.check.audit.transcript import Compared, Finding, Recorder, Transcript, compare
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model
from pilotfish.engine.plan import Plan
from pilotfish.engine.sequence import Sequence


@dataclass(frozen=True)
class RunResult:
    """Outcome of one (k, batch, drafts) run. `num_rows`: rows of tensors that the reference has too."""

    name: str
    findings: list[Finding]
    num_tokens: int
    num_rows: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_first_drafted: int
    num_first_accepted: int

    @property
    def first_draft_acceptance(self) -> float:
        """Share of rounds with a draft whose first draft was accepted."""
        return self.num_first_accepted / self.num_first_drafted if self.num_first_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens a sequence and round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0


class Auditor:
    """Runs requests over one loaded model at any depth and batch size; `compared` is what has been compared so far."""

    def __init__(self, model: Model, plan: Plan, requests: list[Submit]):
        self.model, self.plan, self.requests = model, plan, requests
        self.prompt_lengths = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self.reference: dict[str, Transcript] = {}
        self.compared = Compared()

    def run_reference(self) -> None:
        """Every request alone at k = 0: with the head off, then with a head that repairs one row a round and drafts."""
        plain: dict[str, Transcript] = {}
        for request in self.requests:
            plain |= self._transcripts(0, 1, [request])[0].transcripts
            if self.model.head is None:
                continue
            alone = Submit(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                speculative_k=0,
            )
            self.reference |= self._transcripts(1, 1, [alone])[0].transcripts
        self.reference = self.reference or plain
        findings = compare("k = 0, head off", self.reference, plain, self.prompt_lengths)
        if findings:
            raise RuntimeError(f"the head's presence changes plain decoding: {findings[0]}")

    def run(self, depth: int, batch: int, forced: bool, captured: bool = False) -> RunResult:
        """All requests at depth k, at most `batch` at once, compared with the reference. `captured`: tokens alone, of
        rounds that are replayed; those whose rows are in view are launched one operator after the other."""
        name = f"k = {depth}, batch {batch}, {'forced' if forced else 'own'} drafts{', captured' if captured else ''}"
        recorder, totals = self._transcripts(depth, batch, self.requests, forced, captured)
        got = recorder.transcripts
        findings = compare(name, self.reference, got, self.prompt_lengths)
        num_rows = self.compared.add(self.reference, got)
        return RunResult(name, findings, sum(len(t.tokens) for t in got.values()), num_rows, *totals)

    def _transcripts(
        self, depth: int, batch: int, requests: list[Submit], forced: bool = False, captured: bool = False
    ) -> tuple[Recorder, list[int]]:
        plan = dataclasses.replace(self.plan, depth=depth, max_num_seqs=batch, captured=captured)
        loop = EngineLoop(assemble(self.model, plan, len(requests), 0, 0.0))
        recorder = Recorder(loop, rows=not captured)
        for request in requests:
            loop.submit(request)
        totals = [0] * 5
        agreeing = 0
        while loop.has_work():
            totals = [total + more for total, more in zip(totals, recorder.step(), strict=True)]
            for sequence in loop.scheduler.running if forced else ():
                if sequence.is_prefilled:
                    self._force(loop, sequence, depth, agreeing % (depth + 1))
                    agreeing += 1
        return recorder, totals

    def _force(self, loop: EngineLoop, sequence: Sequence, depth: int, agreeing: int) -> None:
        """Drafts that agree with the reference for `agreeing` tokens, then differ."""
        state, slot = loop.runner.state, sequence.slot
        position = int(state.length[slot])
        known = self.reference[sequence.request_id].tokens[position + 1 - len(sequence.prompt) :][:depth]
        drafts = known + [0] * (depth - len(known))
        vocab = self.model.config.vocab_size
        drafts = [token if i < agreeing else (token + 1) % vocab for i, token in enumerate(drafts)]
        state.drafts[slot, :depth] = torch.tensor(drafts, device=state.device)
        left = int(state.limit[slot]) - position - 2
        state.num_offered[slot] = max(0, min(depth, left))

    def first_draft_acceptance(self) -> float:
        """Share of positions where the reference's head drafts the token that came: what depth 1 must accept."""
        hits = total = 0
        for request, transcript in self.reference.items():
            start = self.prompt_lengths[request]
            for position, names in transcript.rows.items():
                index = position + 1 - start
                if "draft" in names and index < len(transcript.tokens):
                    token = torch.tensor([transcript.tokens[index]]).view(torch.uint8).numpy().tobytes()
                    hits += names["draft"] == blake2b(token, digest_size=8).digest()
                    total += 1
        return hits / total if total else 0.0


def audit(auditor: Auditor, depths: list[int], batches: list[int]) -> Iterator[RunResult]:
    """Runs every configuration, the reference first."""
    auditor.run_reference()
    own = [False] if auditor.model.head is not None else []
    runs = [(k, b, forced) for k in depths for b in batches for forced in (*own, True)]
    for depth, batch, forced in tqdm(runs, desc="audit", unit="run", disable=not sys.stderr.isatty()):
        yield auditor.run(depth, batch, forced)
        if auditor.plan.fused:
            yield auditor.run(depth, batch, forced, captured=True)
