"""The engine: a model, its scheduler and its buffers behind the `EngineCore` face."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from time import perf_counter

import msgspec
import torch

from pilotfish.engine import ledger
from pilotfish.engine.assemble import Engine
from pilotfish.engine.check.self_audit import SelfAudit
from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar.library import GrammarLibrary, Ticket
from pilotfish.engine.guard import Guarded, tell
from pilotfish.engine.link.messages import (
    ErrorCode,
    Ready,
    RequestOutput,
    StepReport,
    StepStats,
    Submit,
)
from pilotfish.engine.requests.checks import checked_sequence
from pilotfish.engine.requests.loop_guard import LoopGuard
from pilotfish.engine.requests.outputs import output_of
from pilotfish.engine.requests.round_times import RoundTimes
from pilotfish.engine.requests.scheduler import PrefillStep, QueueFull, RoundStep, Scheduler
from pilotfish.engine.requests.sequence import Sequence
from pilotfish.engine.round.executor import LaunchedRound, RoundExecutor
from pilotfish.engine.round.reading import FirstToken, Reading
from pilotfish.engine.round.reports import Batch, SequenceReport

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.005
"""Where every request waits for its grammar, new ones are looked for this often."""


@dataclass(frozen=True)
class InFlight:
    """A launched round that has not been read yet, and its sequences, some of which may have ended meanwhile."""

    sequences: list[Sequence]
    round: LaunchedRound


class EngineLoop:
    """See EngineCore. A request that fails its checks is answered in the next report.

    Where rounds are `asynchronous`, a round is launched before the one before it is read, or the first token of the
    prompt before it, so that the device never waits for the host. A sequence that ended in what is being read commits
    nothing in the round already launched, and keeps its pages and slot until that one has been read too.

    `pauses_after`: steps of a chunk after which it pauses for the others, UNBROKEN for never, in place of what follows
    from times; no bit depends on it, which audits and tests show.
    """

    UNBROKEN = 1 << 30

    def __init__(self, engine: Engine):
        self.executor: RoundExecutor = engine.executor
        self.scheduler: Scheduler = engine.scheduler
        self.ready: Ready = engine.ready
        self.snapshots = engine.snapshots
        self.grammars: GrammarLibrary | None = engine.grammars
        self.depth = engine.ready.num_speculative_tokens
        self.self_audit = SelfAudit(engine.audit_rate)
        self._sequences: dict[str, Sequence] = {}
        self._coming: dict[str, tuple[Sequence, Ticket]] = {}
        # aborted while their grammars were being compiled, which goes on
        self._leaving: dict[str, Ticket] = {}
        self._ended: list[RequestOutput] = []
        self._in_flight: InFlight | None = None
        self._first: tuple[Sequence, FirstToken] | None = None
        self.pauses_after: int | None = None
        self._reading: tuple[PrefillStep, Reading] | None = None
        # of timed steps since the last round, for which others have waited
        self._read_seconds = 0.0
        self._round_times = RoundTimes()
        self._mask_seconds = 0.0
        self._num_sat_out = 0
        self._read_graph = False

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        """See EngineCore."""
        try:
            sequence = self._sequence_of(request)
            ticket = self._ask_grammar(request)
            if ticket is None:
                self.scheduler.add(sequence, self._num_coming)
        except RequestError as error:
            self._refuse(request.request_id, str(error), "invalid")
        except QueueFull as error:
            self._refuse(request.request_id, str(error), "queue_full")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._refuse(request.request_id, tell(error, request.request_id), None)
        else:
            self._interrupt_self_audit()
            if ticket is not None:
                self._coming[request.request_id] = sequence, ticket
                return
            self._sequences[request.request_id] = sequence
            self.self_audit.on_submit(request)

    def abort(self, request_id: str) -> None:
        """See EngineCore; an unknown id, one that has just ended, is no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._finish(sequence)
            self.self_audit.on_end(sequence.request, failed=False)
            self._ended.append(RequestOutput(request_id=request_id, finish_reason="abort", round=False))
        elif (coming := self._coming.pop(request_id, None)) is not None:
            assert self.grammars is not None
            if self.grammars.drop(coming[1]):
                self._ended.append(RequestOutput(request_id=request_id, finish_reason="abort", round=False))
            else:
                self._leaving[request_id] = coming[1]

    def has_work(self) -> bool:
        """See EngineCore."""
        return bool(
            self._sequences
            or self._coming
            or self._leaving
            or self._ended
            or self._in_flight
            or self._first
            or self.self_audit.has_work
        )

    def _finish(self, sequence: Sequence) -> None:
        if sequence in self.scheduler.running:
            self.executor.grammars.release(sequence.slot)
        self.scheduler.finish(sequence, self._is_launched(sequence))

    def _is_launched(self, sequence: Sequence) -> bool:
        """Whether something launched has yet to be read of it."""
        is_first = self._first is not None and self._first[0] is sequence
        return is_first or (self._in_flight is not None and sequence in self._in_flight.sequences)

    def _refuse(self, request_id: str, error: str, code: ErrorCode | None) -> None:
        self._ended.append(
            RequestOutput(request_id=request_id, finish_reason="error", error=error, error_code=code, round=False)
        )

    def _sequence_of(self, request: Submit) -> Sequence:
        """Raises RequestError for what cannot be served."""
        if request.request_id in self._sequences or request.request_id in self._coming:
            raise RequestError(f"request_id: {request.request_id} is in use")
        return checked_sequence(request, self.ready, self.scheduler.pages.capacity)

    @property
    def _num_coming(self) -> int:
        """How many requests wait outside the queue, or have left but still cost something."""
        return len(self._coming) + len(self._leaving)

    # -- grammars ---------------------------------------------------------------------------------------------------

    def _ask_grammar(self, request: Submit) -> Ticket | None:
        """What a request's grammar will come by, if it has one; it waits outside the queue, but counts there. Raises
        QueueFull."""
        params = request.sampling
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise RequestError("grammar: this engine has no tokenizer to read grammars with")
        self.scheduler.check_room(self._num_coming)
        return self.grammars.ask(params.grammar, params.eos_token_ids, request.key)

    def _take_grammars(self) -> list[RequestOutput]:
        """Queues the requests whose grammars have come, and refuses those whose grammars are refused."""
        for request_id, (sequence, ticket) in list(self._coming.items()):
            if not ticket.done:
                continue
            del self._coming[request_id]
            check = self.self_audit.running
            is_check = check is not None and check.request.request_id == request_id
            if ticket.constraint is not None:
                sequence.constraint = Guarded(ticket.constraint, request_id)
                self.scheduler.add(sequence, self._num_coming)
                if not is_check:
                    self._sequences[request_id] = sequence
                    self.self_audit.on_submit(sequence.request)
            elif is_check:
                self.self_audit.give_up()
            elif ticket.fault is not None:
                self._refuse(request_id, tell(ticket.fault, request_id), None)
            else:
                self._refuse(request_id, ticket.error or "grammar: it cannot be read", "invalid")
        for request_id, ticket in list(self._leaving.items()):
            if ticket.done:
                del self._leaving[request_id]
                self._ended.append(RequestOutput(request_id=request_id, finish_reason="abort", round=False))
        outputs, self._ended = self._ended, []
        return outputs

    def _with_masks(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[RequestOutput]]:
        """The sequences that the next round can take, so that no slow grammar holds it up, and what ends those whose
        grammars are broken."""
        outputs, began = [], perf_counter()
        ready = set(
            self.executor.grammars.settle([sequence.slot for sequence in sequences], self._round_times.patience)
        )
        self._mask_seconds += perf_counter() - began
        for sequence in sequences:
            if sequence.constraint is not None and sequence.constraint.error is not None:
                outputs += self._fail_grammar(sequence, sequence.constraint)
        going = [sequence for sequence in sequences if sequence in self.scheduler.running]
        if going and not ready and not outputs:
            self.executor.grammars.steps.wait(going[0].slot, IDLE_SECONDS)
        taken = [sequence for sequence in going if sequence.slot in ready]
        if taken:
            self._num_sat_out += len(going) - len(taken)
        return taken, outputs

    def _hold_prompts(self) -> tuple[list[Sequence], list[RequestOutput]]:
        """The sequences whose grammars have yet to say how a text may begin: their prompts are not read, for the first
        token would be waited for. And what ends those whose grammars took too long."""
        unread = [s for s in self.scheduler.running if s.constraint is not None and not s.is_prefilled]
        if not unread:
            return [], []
        outputs = []
        unready = self.executor.grammars.unready([sequence.slot for sequence in unread], self._round_times.patience)
        for sequence in unread:
            if sequence.constraint is not None and sequence.constraint.overrun is not None:
                outputs += self._fail_grammar(sequence, sequence.constraint)
        return [sequence for sequence in unread if sequence.slot in unready], outputs

    def _fail_grammar(self, sequence: Sequence, constraint: Guarded) -> list[RequestOutput]:
        outputs = self._fail(sequence, constraint.error or "")
        if constraint.fault is not None:
            return outputs
        return [msgspec.structs.replace(output, error_code="invalid") for output in outputs]

    # -- steps ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """See EngineCore."""
        started = perf_counter()
        outputs = self._take_grammars()
        if not self._sequences and not self._coming:
            self._start_self_audit()
        for sequence in self.scheduler.admit():
            sequence.admitted()
            outputs += self._admit(sequence)
        held, failed = self._hold_prompts()
        outputs += failed
        step = self.scheduler.next_step(held)
        phases: dict[str, float] = {}
        num_prefilled = 0
        if isinstance(step, PrefillStep):
            # on its way before the round that was launched before it is waited for
            began = perf_counter()
            reading = self._read_on(step, started)
            launched = perf_counter()
            outputs += self._read_first(phases) + self._read(self._in_flight, phases)
            finishing = perf_counter()
            if reading is not None:
                outputs += self._finish_reading(step, reading)
                num_prefilled = step.end - step.start
            phases["prefill"] = phases.get("prefill", 0.0) + launched - began + perf_counter() - finishing
        elif isinstance(step, RoundStep):
            self._read_seconds = 0.0
            outputs += self._round(step.sequences, phases)
        else:
            outputs += self._read_first(phases) + self._read(self._in_flight, phases)
        # a wait for masks is a share of a round's time, which must not grow with it
        waited, self._mask_seconds = self._mask_seconds + phases.get("mask", 0.0), 0.0
        self._round_times.note(bool(phases) and isinstance(step, RoundStep), perf_counter() - started - waited)
        if not (phases or outputs):
            if held and step is None:
                self.executor.grammars.steps.wait(held[0].slot, IDLE_SECONDS)
            elif (self._coming or self._leaving) and step is None:
                assert self.grammars is not None
                self.grammars.wait(IDLE_SECONDS)
            return None
        if not self._sequences:
            self.scheduler.check()
        return StepReport(outputs=outputs, stats=self._stats(phases, perf_counter() - started, num_prefilled))

    def _admit(self, sequence: Sequence) -> list[RequestOutput]:
        params = sequence.request.sampling
        try:
            self.executor.admit(
                sequence.slot, sequence.prompt, params, sequence.limit, sequence.own_k, sequence.constraint
            )
        except (KeyboardInterrupt, torch.AcceleratorError):
            # after an error of its own the device does nothing more
            raise
        except BaseException as error:
            return self._fail(sequence, tell(error, sequence.request_id))
        return []

    def _read_on(self, step: PrefillStep, started: float) -> Reading | None:
        """Launches a chunk, or what is left of it after a pause; None where it pauses for a round of the others, who
        have waited since this step was `started`. Where they have waited for a short time only, and the chunk is not
        its prompt's last, no round follows it."""
        if self._reading is None or self._reading[0] is not step:
            self._reading = step, self._begin(step)
        _, reading = self._reading
        num_steps, until = self.pauses_after if self.scheduler.has_others else None, math.inf
        round_seconds, timed = self._round_times.round_seconds, None
        if self.scheduler.has_others and num_steps is None and round_seconds is not None:
            num_steps = timed = self.executor.steps_at_a_time(reading.num_rows, round_seconds, self._read_seconds)
            until = started + self.executor.seconds_at_a_time(round_seconds)
        if not reading.advance(num_steps, until):
            self.scheduler.pause(step)
            return None
        self._reading = None
        if timed is not None and reading.num_advanced < timed and step.end < len(step.sequence.prompt):
            self._read_seconds += reading.advanced_seconds
            self.scheduler.go_on()
        return reading

    def _begin(self, step: PrefillStep) -> Reading:
        sequence, params = step.sequence, step.sequence.request.sampling
        if sequence.restore is not None:
            assert self.snapshots is not None
            self.snapshots.load(sequence.restore, sequence.slot)
        return self.executor.prefill(
            sequence.slot,
            sequence.pages,
            sequence.prompt,
            step.start,
            step.end,
            self.depth,
            params.logprobs,
            params.prompt_logprobs,
            params.max_tokens > 0,
            step.middle,
        )

    def _finish_reading(self, step: PrefillStep, reading: Reading) -> list[RequestOutput]:
        sequence, ended = step.sequence, reading.end()
        sequence.restore = None
        for end in step.ends:
            sequence.num_prefilled = end
            if (snapshot := self.scheduler.prefix.publish(sequence)) is not None:
                assert self.snapshots is not None
                self.snapshots.save(snapshot, self.executor.state_at(sequence.slot, is_middle=end == step.middle))
        if not isinstance(ended, FirstToken):
            return [] if ended is None else self._outputs(sequence, ended, after_round=False)
        self._first = sequence, ended
        # what a grammar allows depends on it
        return [] if self.executor.asynchronous and sequence.constraint is None else self._read_first({})

    def _read_first(self, phases: dict[str, float]) -> list[RequestOutput]:
        """What a prompt's first token, launched before, gave to its sequence, unless that has ended; waits for it."""
        if self._first is None:
            return []
        (sequence, first), self._first = self._first, None
        began = perf_counter()
        report = first.collect()
        phases["prefill"] = phases.get("prefill", 0.0) + perf_counter() - began
        if sequence not in self.scheduler.retired:
            return self._outputs(sequence, report, after_round=False)
        if not self._is_launched(sequence):
            self.scheduler.release(sequence)
        return []

    def _round(self, sequences: list[Sequence], phases: dict[str, float]) -> list[RequestOutput]:
        """Launches a round and reads the one before it, or, where rounds are waited for, this one."""
        before, outputs = self._in_flight, []
        if before is not None and any(sequence.constraint is not None for sequence in sequences):
            # what a grammar allows depends on the tokens not read yet
            outputs = self._read(before, phases)
            before = None
            sequences = [sequence for sequence in sequences if sequence in self.scheduler.running]
        if not self.executor.asynchronous:
            outputs += self._read_first(phases)
            sequences = [sequence for sequence in sequences if sequence in self.scheduler.running]
        if any(sequence.constraint is not None for sequence in sequences):
            sequences, failed = self._with_masks(sequences)
            outputs = outputs + failed
        if not sequences:
            return outputs + self._read_first(phases) + self._read(before, phases)
        launched = InFlight(sequences, self._launch(sequences))
        if not self.executor.asynchronous:
            return outputs + self._read(launched, phases)
        self._in_flight = launched
        return outputs + self._read_first(phases) + self._read(before, phases)

    def _launch(self, sequences: list[Sequence]) -> LaunchedRound:
        batch = Batch(
            slots=[sequence.slot for sequence in sequences],
            tables=[sequence.pages for sequence in sequences],
            depth=max(sequence.own_k for sequence in sequences),
            logprobs=[sequence.request.sampling.logprobs for sequence in sequences],
            patience=self._round_times.patience,
        )
        return self.executor.launch(batch, self.depth)

    def _read(self, flight: InFlight | None, phases: dict[str, float]) -> list[RequestOutput]:
        """What a round gave to those of its sequences that had not ended before; waits for it."""
        if flight is None:
            return []
        if flight is self._in_flight:
            self._in_flight = None
        reports, seconds = flight.round.collect()
        self._read_graph = flight.round.graph
        self._num_sat_out += len(flight.round.missed)
        phases |= seconds
        outputs = [
            output
            for sequence, report in zip(flight.sequences, reports, strict=True)
            if report is not None and sequence not in self.scheduler.retired
            for output in self._outputs(sequence, report, after_round=True)
        ]
        for sequence in flight.sequences:
            if sequence in self.scheduler.retired and not self._is_launched(sequence):
                self.scheduler.release(sequence)
        return outputs

    def _outputs(self, sequence: Sequence, report: SequenceReport, after_round: bool) -> list[RequestOutput]:
        """What a client is told of a sequence's tokens: nothing, if they are a check's, or chosen past a fault."""
        self.scheduler.wrote(sequence, len(report.token_ids))
        if sequence.constraint is not None and sequence.constraint.error is not None:
            return self._fail_grammar(sequence, sequence.constraint)
        if sequence.loop_guard is not None:
            report = self._stop_loops(sequence, sequence.loop_guard, report)
        if sequence.request_id not in self._sequences:
            if self.self_audit.on_check_tokens(report.token_ids, report.done):
                self._finish(sequence)
            return []
        self.self_audit.on_tokens(sequence.request_id, report.token_ids)
        return [self._output(sequence, report, after_round)]

    def _stop_loops(self, sequence: Sequence, guard: LoopGuard, report: SequenceReport) -> SequenceReport:
        verdict = guard.read(report.token_ids)
        if verdict.close_at is not None:
            self.executor.state.close_thinking(sequence.slot, verdict.close_at)
        if verdict.kept is None or (report.stopped and verdict.kept == len(report.token_ids)):
            return report
        return report.cut(verdict.kept)

    def _output(self, sequence: Sequence, report: SequenceReport, after_round: bool) -> RequestOutput:
        output = output_of(sequence, report, after_round)
        if output.finish_reason is not None:
            self._finish(sequence)
            self.self_audit.on_end(sequence.request, failed=output.error is not None)
            del self._sequences[sequence.request_id]
        return output

    def _fail(self, sequence: Sequence, error: str) -> list[RequestOutput]:
        """Ends a request by a fault of ours. A check that meets one is given up: it has shown nothing."""
        self._finish(sequence)
        if sequence.request_id not in self._sequences:
            self.self_audit.give_up()
            return []
        del self._sequences[sequence.request_id]
        self.self_audit.on_end(sequence.request, failed=True)
        return [RequestOutput(request_id=sequence.request_id, finish_reason="error", error=error, round=False)]

    def _start_self_audit(self) -> None:
        """The engine is idle: one finished request is decoded again."""
        if self.self_audit.running is None and (request := self.self_audit.start()) is not None:
            try:
                sequence = self._sequence_of(request)
                # what was found may be what is wrong
                sequence.uses_cache = False
                ticket = self._ask_grammar(request)
                if ticket is not None:
                    self._coming[request.request_id] = sequence, ticket
                else:
                    self.scheduler.add(sequence)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                tell(error, request.request_id)
                self.self_audit.give_up()

    def _interrupt_self_audit(self) -> None:
        if self.self_audit.running is not None:
            checked = self.self_audit.running.request.request_id
            if (coming := self._coming.pop(checked, None)) is not None:
                assert self.grammars is not None
                self.grammars.drop(coming[1])
            else:
                others = (*self.scheduler.running, *self.scheduler.waiting)
                self._finish(next(sequence for sequence in others if sequence.request_id == checked))
            self.self_audit.interrupt()

    def _stats(self, phases: dict[str, float], seconds: float, num_prefilled: int) -> StepStats:
        scheduler = self.scheduler
        audited, mismatches = self.self_audit.take_counts()
        sat_out, self._num_sat_out = self._num_sat_out, 0
        return StepStats(
            phases=phases,
            step_seconds=seconds,
            num_prefill_tokens=num_prefilled,
            graph=self._read_graph,
            num_compiled=self.executor.take_compiled(),
            num_sat_out=sat_out,
            num_audited_tokens=audited,
            num_audit_mismatches=mismatches,
            memory_bytes=0 if self._sequences else ledger.used(self.executor.model.device),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._num_coming,
            kv_pages_used=scheduler.num_reserved,
            kv_pages_total=scheduler.pages.capacity,
            state_slots_used=scheduler.slots.num_used,
            state_slots_total=scheduler.slots.capacity,
            prefix_cache=scheduler.prefix.take_stats(),
        )
