"""Runs requests at every depth and batch, and holds each against what the request gives alone at k = 0."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import msgspec
import numpy as np
import torch
from tqdm import tqdm

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.assemble import assemble
from pilotfish.engine.check.audit import book
from pilotfish.engine.check.audit.hits import Hits, depths_of
from pilotfish.engine.check.audit.matchers import Matchers
from pilotfish.engine.check.audit.result import RunResult
from pilotfish.engine.check.audit.rules import Decode, Rules, lures
from pilotfish.engine.check.audit.scratch import ScratchHead
from pilotfish.engine.check.audit.transcript import (
    BOOK,
    PROMPT,
    Compared,
    Finding,
    Recorder,
    Transcript,
    compare,
    unseen,
)
from pilotfish.engine.check.audit.yardstick import HeadReport, Yardstick
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model
from pilotfish.engine.plan import Plan
from pilotfish.engine.requests.sequence import Sequence

MAX_BOOK_ROWS = 64
"""Rows of logits of a request that are kept for the book."""
MAX_RAW = 8
"""Requests whose rows are held against one pass over their text."""
SPARE_STEPS = 64
PAUSES_EVERY, PAUSING_STEPS = 32, 8
"""Of so many steps of the engine prompts pause in the first few."""
MAX_MASK_SECONDS = 60.0


class Auditor:
    """Runs requests over one loaded model at any depth and batch size; `compared` is what has been compared so far.

    `make_rules` adds requests to those given, once it can decode. `matchers` reads grammars, None where no request has
    one. `scratch` is the head again, computed from scratch. `hits`: what may be held against cold runs.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        requests: list[Submit],
        make_rules: Callable[[Decode], Rules] | None = None,
        matchers: Matchers | None = None,
        scratch: ScratchHead | None = None,
        hits: Hits | None = None,
    ):
        self.model, self.plan, self.requests = model, plan, list(requests)
        self.make_rules, self.matchers, self.scratch, self.hits = make_rules, matchers, scratch, hits
        self.head_report = HeadReport()
        # drafts by request and committed length, the most that any run made
        self.drafts: dict[str, dict[int, list[int]]] = {}
        self._raw: dict[str, list[np.ndarray]] = {}
        self._own: dict[int, RunResult] = {}
        self.rules = Rules()
        self.reference: dict[str, Transcript] = {}
        self.compared = Compared()
        self.num_by_book = 0
        # what follows a text that ended at a stop: drafts that are right beyond its end
        self._beyond: dict[str, list[int]] = {}
        # the newest engine of captured rounds, with its depth and batch
        self._captured: tuple[int, int, EngineLoop] | None = None

    @property
    def prompt_lengths(self) -> dict[str, int]:
        return {request.request_id: len(request.prompt_token_ids) for request in self.requests}

    def run_reference(self) -> RunResult:
        """Every request alone at k = 0: with the head off, and by the book; then with a head that repairs one row a
        round and drafts."""
        if self.make_rules is not None:
            self.rules = self.make_rules(self._decode)
            self.requests += self.rules.requests
            self.make_rules = None
        plain: dict[str, Transcript] = {}
        findings: list[Finding] = []
        name = "k = 0, batch 1, head off"
        for request in self.requests:
            transcript = plain[request.request_id] = self._alone(request)
            findings += self._by_book(name, request, transcript)
            if self.model.head is not None:
                self.reference |= self.decode(1, 1, [_at_most(request, 0)]).transcripts
            self._beyond[request.request_id] = self._continue(request, transcript)
        self.reference = self.reference or plain
        findings += compare(name, self.reference, plain, self.prompt_lengths)
        findings += [finding for finding in map(self._too_few_rows, self.requests) if finding is not None]
        self.drafts = {request.request_id: {} for request in self.requests}
        num_rows = self.compared.add(self.reference, plain)
        return RunResult(name, findings, sum(len(t.tokens) for t in plain.values()), num_rows)

    def _too_few_rows(self, request: Submit) -> Finding | None:
        """A reference without the logits of every token's row proves nothing."""
        transcript = self.reference[request.request_id]
        start = len(request.prompt_token_ids) - 1
        for place in range(len(transcript.tokens)):
            name = PROMPT if place == 0 else "logits"
            if name not in transcript.rows.get(start + place, {}):
                return Finding("k = 0", request.request_id, start + place, f"{name} was not shown, and so it")
        return None

    def _alone(self, request: Submit) -> Transcript:
        return self.decode(0, 1, [request], keep=MAX_BOOK_ROWS).transcripts[request.request_id]

    def _decode(self, request: Submit) -> list[int]:
        """What it writes alone at k = 0; nobody looks at the rows."""
        return self.decode(0, 1, [request], rows=False).transcripts[request.request_id].tokens

    def _by_book(self, run: str, request: Submit, transcript: Transcript) -> list[Finding]:
        params, matcher = request.sampling, None
        if params.grammar is not None:
            assert self.matchers is not None
            matcher = self.matchers.matcher(params.grammar, params.eos_token_ids)
        rows = [transcript.logits.pop(position) for position in sorted(transcript.logits)]
        self.num_by_book += min(len(rows), len(transcript.tokens))
        if len(self._raw) < MAX_RAW:
            self._raw[request.request_id] = rows
        wrong = book.first_wrong(request.prompt_token_ids, params, transcript.tokens, rows, matcher)
        if wrong is None:
            return []
        return [Finding(run, request.request_id, len(request.prompt_token_ids) - 1 + wrong, BOOK)]

    def _continue(self, request: Submit, transcript: Transcript) -> list[int]:
        """Tokens that would have come if the text had not ended before its limit."""
        if len(transcript.tokens) == request.sampling.max_tokens:
            return []
        sampling = msgspec.structs.replace(
            request.sampling, stop_token_ids=(), ignore_eos=True, min_tokens=0, max_tokens=self.plan.depth, grammar=None
        )
        prompt = [*request.prompt_token_ids, *transcript.tokens]
        return self._decode(Submit(request_id="beyond", prompt_token_ids=prompt, sampling=sampling))

    def run(self, depth: int, batch: int, forced: bool, captured: bool = False) -> RunResult:
        """All requests at depth k, at most `batch` at once, compared with the reference. `captured`: tokens alone, of
        rounds that are replayed; those whose rows are in view are launched one operator after the other."""
        name = f"k = {depth}, batch {batch}, {'forced' if forced else 'own'} drafts{', captured' if captured else ''}"
        recorder = self.decode(depth, batch, self.requests, forced, captured, rows=not captured)
        got = recorder.transcripts
        findings = compare(name, self.reference, got, self.prompt_lengths)
        if not captured:
            findings += unseen(name, self.reference, got) + self._compare_drafts(name, depth, got)
        num_rows = self.compared.add(self.reference, got)
        num_tokens = sum(len(transcript.tokens) for transcript in got.values())
        result = RunResult(name, findings, num_tokens, num_rows, *recorder.totals, most_at_once=recorder.most_at_once)
        if not forced:
            self._own[depth] = result
        return result

    def _compare_drafts(self, run: str, depth: int, got: dict[str, Transcript]) -> list[Finding]:
        """Drafts are a function of the text before them: those of all runs agree as far as they go, and a head that
        does not look things up offers as many as may be accepted."""
        found: dict[str, Finding] = {}
        for request in self.requests:
            name = request.request_id
            for length, drafts in sorted(got[name].drafts.items()):
                known = self.drafts[name].get(length, [])
                wrong = [i for i, (a, b) in enumerate(zip(known, drafts, strict=False), 1) if a != b]
                offered = self._num_offered(request, depth, length)
                if not wrong and offered is not None and len(drafts) != offered:
                    wrong = [min(len(drafts), offered) + 1]
                if wrong:
                    found.setdefault(name, Finding(run, name, length, f"draft {wrong[0]}"))
                if len(drafts) > len(known):
                    self.drafts[name][length] = drafts
        return list(found.values())

    def _num_offered(self, request: Submit, depth: int, length: int) -> int | None:
        """Drafts that must be offered when so many tokens are in the caches, None where it is not known."""
        if request.sampling.grammar is not None or isinstance(self.model.head, LookupHead) or self.model.head is None:
            return None
        own_k = depth if request.speculative_k is None else min(depth, request.speculative_k)
        return max(0, min(own_k, len(request.prompt_token_ids) + request.sampling.max_tokens - length - 2))

    def check_head(self) -> RunResult:
        """Compares, after all runs: their drafts, and how many were accepted, against a head computed from scratch; and
        k = 0 against one pass over its text."""
        name = "from scratch"
        yardstick = Yardstick(self.model, self.scratch, self.requests)
        findings = yardstick.against_one_pass(name, self.reference, self._raw)
        depth = max(self._own, default=0)
        if depth and yardstick.usable:
            findings += yardstick.look_at(name, self.reference, self.drafts, self.head_report)
            yardstick.reach(self.reference, depth, self.head_report)
            findings += self.head_report.too_few(name, depth, self._own[depth].acceptance_length)
        return RunResult(name, findings, 0, 0)

    def decode(
        self,
        depth: int,
        batch: int,
        requests: list[Submit],
        forced: bool = False,
        captured: bool = False,
        rows: bool = True,
        keep: int = 0,
        plan: Plan | None = None,
    ) -> Recorder:
        """Runs requests at depth k, at most `batch` at once. `captured`: in rounds that are replayed; else `plan` may
        stand in place of the auditor's own."""
        loop = self._captured_loop(depth, batch) if captured else self.make_loop(depth, batch, len(requests), plan=plan)
        recorder = Recorder(loop, requests, rows, keep)
        self.run_to_end(recorder, requests, Forcer(self, loop, depth, requests) if forced else None)
        return recorder

    def _captured_loop(self, depth: int, batch: int) -> EngineLoop:
        """One engine for own and forced drafts: capturing takes longer than a run."""
        if self._captured is None or self._captured[:2] != (depth, batch):
            # the memory of the one before is free first
            self._captured = None
            self._captured = depth, batch, self.make_loop(depth, batch, len(self.requests), captured=True)
        return self._captured[2]

    def make_loop(
        self, depth: int, batch: int, num_requests: int, captured: bool = False, plan: Plan | None = None
    ) -> EngineLoop:
        """An engine over the model."""
        plan = dataclasses.replace(plan or self.plan, depth=depth, max_num_seqs=batch, captured=captured)
        engine = assemble(self.model, plan, num_requests, 0, 0.0)
        if self.matchers is not None:
            engine = dataclasses.replace(engine, grammars=cast(GrammarLibrary, self.matchers))
            engine.executor.grammars.steps = self.matchers.steps
        return EngineLoop(engine)

    def run_to_end(
        self,
        recorder: Recorder,
        requests: list[Submit],
        forcer: Forcer | None = None,
        aborted_at: Mapping[str, int] | None = None,
    ) -> None:
        """Submits requests and steps until all have ended; of those in `aborted_at`, once so many tokens of the prompt
        have been read."""
        loop, begun = recorder.loop, recorder.num_steps
        for request in requests:
            loop.submit(_at_most(request, loop.depth))
        # a chunk and a round in turn, and a first cut before a whole chunk
        pauses = 2 * len(loop.executor.prompt.groups)
        chunks = sum(len(request.prompt_token_ids) // self.plan.prefill_chunk + 2 for request in requests)
        tokens = sum(request.sampling.max_tokens for request in requests)
        most = begun + SPARE_STEPS + 2 * tokens + pauses * chunks
        while loop.has_work() and recorder.num_steps < most:
            # prompts that pause wherever they can, beside others, are held to those that were read at once; but while
            # one pauses so often those beside it come to their ends, and batches would never fill up
            loop.pauses_after = 1 if recorder.num_steps % PAUSES_EVERY < PAUSING_STEPS else loop.UNBROKEN
            recorder.step()
            if forcer is not None:
                forcer.force()
            for sequence in loop.scheduler.running if aborted_at else ():
                if sequence.num_prefilled >= (aborted_at or {}).get(sequence.request_id, len(sequence.prompt) + 1):
                    loop.abort(sequence.request_id)
                    break
        if loop.has_work():
            for request in requests:
                transcript = recorder.transcripts[request.request_id]
                transcript.error = transcript.error or f"not ended after {most - begun} steps of the engine"

    def right(self, sequence: Sequence, position: int, count: int) -> list[int]:
        """Tokens that follow those in the caches and the last one: the reference's, and what would come after it."""
        known = self.reference[sequence.request_id].tokens + self._beyond[sequence.request_id]
        known = known[position + 1 - len(sequence.prompt) :][:count]
        return known + [0] * (count - len(known))


class Forcer:
    """Puts drafts in place of the head's, for each request by itself.

    Of a window depth, 0, depth - 1, 1, .. in turn agree with the reference. A draft that means something to the
    request's rules follows, and after it what is right or means something too, in turn.
    """

    def __init__(self, auditor: Auditor, loop: EngineLoop, depth: int, requests: list[Submit]):
        self.auditor, self.loop, self.depth = auditor, loop, depth
        # rules fire early: those requests begin with a whole window that agrees, the others anywhere
        with_rules = {request.request_id for request in auditor.rules.requests}
        self._turns = {r.request_id: 0 if r.request_id in with_rules else n for n, r in enumerate(requests)}
        self._forced: dict[str, int] = {}

    def force(self) -> None:
        """Every sequence that has moved on since the last call."""
        for sequence in self.loop.scheduler.running:
            position = int(self.loop.executor.state.length[sequence.slot])
            if not sequence.is_prefilled or self._in_flight(sequence):
                continue
            if self._forced.get(sequence.request_id) != position:
                self._forced[sequence.request_id] = position
                self._force(sequence, position)
                self._turns[sequence.request_id] += 1

    def _in_flight(self, sequence: Sequence) -> bool:
        """Whether a round has been launched with its masks: until it is read, its grammar does not know the text."""
        return sequence.constraint is not None and not self.loop.executor.grammars.steps.waits(sequence.slot)

    def _force(self, sequence: Sequence, position: int) -> None:
        state, slot, depth = self.loop.executor.state, sequence.slot, self.depth
        drafts = self._drafts(sequence, self.auditor.right(sequence, position, depth))
        state.drafts[slot, :depth] = torch.tensor(drafts, device=state.device)
        left = int(state.limit[slot]) - position - 2
        state.num_offered[slot] = max(0, min(depth, sequence.own_k, left))
        if sequence.constraint is not None:
            # its masks were begun after the head's drafts
            steps = self.loop.executor.grammars.steps
            steps.wait(slot, MAX_MASK_SECONDS)
            steps.begin(slot, sequence.constraint, [], state.drafts[slot].tolist())

    def _drafts(self, sequence: Sequence, right: list[int]) -> list[int]:
        turns = self._turns[sequence.request_id]
        step, turn = turns % (self.depth + 1), turns // (self.depth + 1)
        # depth, 0, depth - 1, 1, ..
        agreeing = step // 2 if step % 2 else self.depth - step // 2
        tempting, vocab = lures(sequence.request.sampling), self.auditor.model.config.vocab_size

        def wrong(place: int) -> int:
            lure = tempting[(turn + place) % len(tempting)] if tempting else right[place]
            return lure if lure != right[place] else (lure + 1) % vocab

        return [
            token if place < agreeing or (place > agreeing and turn % 2) else wrong(place)
            for place, token in enumerate(right)
        ]


def _at_most(request: Submit, k: int) -> Submit:
    """The request with a depth of its own that an engine of depth k takes."""
    own = k if request.speculative_k is None else min(k, request.speculative_k)
    return msgspec.structs.replace(request, speculative_k=own)


def audit(auditor: Auditor, depths: list[int], batches: list[int], hits: Hits | None = None) -> Iterator[RunResult]:
    """Runs every configuration, the reference first. `hits`: what is held against cold runs."""
    if auditor.plan.fused:
        for depth in depths:
            # in parallel; where a round meets a kernel that is not there, one is compiled after the other
            auditor.make_loop(depth, max(batches), len(auditor.requests)).executor.compile()
    yield auditor.run_reference()
    own = [False] if auditor.model.head is not None else []
    # what a head drafts by itself is one text's matter: forced drafts alone are run in every batch
    ends = {min(batches), max(batches)}
    runs = [(k, b, forced) for k in depths for b in batches for forced in (*own, True) if forced or b in ends]
    for depth, batch, forced in tqdm(runs, desc="audit", unit="run", disable=not sys.stderr.isatty()):
        yield auditor.run(depth, batch, forced)
        if auditor.plan.fused:
            yield auditor.run(depth, batch, forced, captured=True)
    if hits is not None:
        for depth in depths_of(depths, auditor.plan.depth, auditor.model.device):
            yield hits.run(auditor, depth, max(batches))
            if auditor.plan.fused:
                yield hits.run(auditor, depth, max(batches), captured=True)
    yield auditor.check_head()
