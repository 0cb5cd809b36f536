"""An engine core that needs no model: each prompt carries, as JSON between `@` signs, what will be generated.
`«` and `»` do as well, for clients that take `@` for the name of a file.

`"text @{"reply": "Hello", "runs": [1, 3], "drafted": 3}@ more"` generates the tokens of "Hello", first one token, then
rounds of 1, 3, 1, 3, ... tokens, each drafting 3. Keys: reply (text, one token a byte), ids (token ids instead),
times (how often the reply is repeated), runs, drafted, forced (tokens of each round that a grammar had forced), delay
(seconds a step) with go (a file: a token waits no longer than until it has a byte for each token before it), fault
("raise", "exit", "hang" or "refuse") with at (generated tokens before it). A prompt without a script gets "Hello,
world!".

Obeys the engine's contract: never past max_tokens, ends at stop ids, aborts within a step, bounded queue.
`options.model` is a folder with tokenizer.json; `transcript.jsonl` there gets one line a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from loaded import ready

from pilotfish.engine.errors import BusyError, CheckpointError, OptionError
from pilotfish.engine.link.messages import RequestOutput, StepReport, StepStats, Submit, TokenLogprob

DEFAULT_REPLY = "Hello, world!"


def byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


@dataclass
class Sequence:
    request: Submit
    script: dict
    todo: list[int]
    done: int = 0
    rounds: int = 0
    prefilled: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)


class ScriptedCore:
    def __init__(self, options) -> None:
        folder = Path(options.model)
        tokenizer = json.loads(folder.joinpath("tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        letters = byte_letters()
        self._bytes = {id_: bytes(letters[c] for c in token if c in letters) for token, id_ in vocabulary.items()}
        self._bytes |= {entry["id"]: entry["content"].encode() for entry in tokenizer["added_tokens"]}
        self._byte_ids = {raw[0]: id_ for id_, raw in self._bytes.items() if len(raw) == 1}
        self._transcript = folder.joinpath("transcript.jsonl").open("a")
        self._k = 3 if options.num_speculative_tokens is None else options.num_speculative_tokens
        self._running: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._refused: list[RequestOutput] = []
        self._max_num_seqs = options.max_num_seqs or 4
        self._max_waiting = options.max_waiting
        self.ready = ready(
            max_model_len=options.max_model_len or 4096,
            max_num_seqs=self._max_num_seqs,
            num_speculative_tokens=self._k,
            speculation_disabled_reason=None if self._k else "no head in a scripted core",
            max_waiting=options.max_waiting,
        )

    def submit(self, request: Submit) -> None:
        sequence = self._read_script(request)
        if sequence.script.get("fault") == "refuse":
            self._refuse(request.request_id, "a refused request")
        elif len(self._waiting) >= self._max_waiting + self._max_num_seqs - len(self._running):
            self._refuse(request.request_id, "the queue is full")
        else:
            self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        kept = [sequence for sequence in self._waiting if sequence.request.request_id != request_id]
        known = self._running.pop(request_id, None) is not None or len(kept) < len(self._waiting)
        self._waiting = kept
        if known:
            self._refused.append(RequestOutput(request_id=request_id, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._refused)

    def step(self) -> StepReport | None:
        if not self.has_work():
            return None
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.pop(0)
            self._running[sequence.request.request_id] = sequence
        outputs, self._refused = self._refused, []
        sequences = list(self._running.values())
        self._wait(sequences)
        outputs += [self._advance(sequence) for sequence in sequences]
        for output in outputs:
            if output.finish_reason is not None:
                self._running.pop(output.request_id, None)
        report = StepReport(outputs=outputs, stats=self._stats())
        self._transcript.write(msgspec.json.encode(report).decode() + "\n")
        self._transcript.flush()
        return report

    def _wait(self, sequences: list[Sequence]) -> None:
        """As long as the slowest of them says, or until those have been told to go on."""
        end = time.monotonic() + max((one.script.get("delay", 0.0) for one in sequences), default=0.0)
        while (left := end - time.monotonic()) > 0 and not all(map(_may_go, sequences)):
            time.sleep(min(left, 0.01))

    def _refuse(self, request_id: str, message: str) -> None:
        code = "queue_full" if "queue" in message else "invalid"
        self._refused.append(
            RequestOutput(request_id=request_id, finish_reason="error", error=message, error_code=code)
        )

    def _read_script(self, request: Submit) -> Sequence:
        prompt = b"".join(self._bytes.get(token, b"") for token in request.prompt_token_ids).decode("utf-8", "replace")
        found = re.findall(r"[@«](\{.*?\})[@»]", prompt, re.DOTALL)
        try:
            script = json.loads(found[-1]) if found else {}
        except ValueError:
            script = {}
        reply = script.get("reply", DEFAULT_REPLY).encode()
        todo = script.get("ids") or [self._byte_ids[byte] for byte in reply]
        return Sequence(request, script, list(todo) * script.get("times", 1))

    def _advance(self, sequence: Sequence) -> RequestOutput:
        self._maybe_fault(sequence)
        sampling, script = sequence.request.sampling, sequence.script
        size = min(1, sampling.max_tokens)
        own_k = self._k if sequence.request.speculative_k is None else sequence.request.speculative_k
        if sequence.prefilled:
            runs = script.get("runs", [1])
            size = min(runs[sequence.rounds % len(runs)], len(sequence.todo), sampling.max_tokens - sequence.done)
            if own_k < self._k:
                size = min(size, own_k + 1)
            sequence.rounds += 1
        tokens, stop = self._cut(sequence, sequence.todo[:size])
        sequence.todo = sequence.todo[len(tokens) :]
        sequence.done += len(tokens)
        ended = "stop" if stop is not None or not sequence.todo else None
        if ended is None and sequence.done >= sampling.max_tokens:
            ended = "length"
        drafted = min(script.get("drafted", self._k), own_k) if sequence.prefilled else 0
        output = RequestOutput(
            request_id=sequence.request.request_id,
            token_ids=tokens,
            logprobs=self._logprobs(tokens, sampling.logprobs),
            finish_reason=ended,
            stop_token_id=stop,
            num_drafted=drafted,
            num_accepted=min(max(len(tokens) - 1, 0), drafted),
            num_forced=min(len(tokens), script.get("forced", 0)) if sequence.prefilled else 0,
            round=sequence.prefilled,
        )
        sequence.prefilled = True
        return output

    def _cut(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], int | None]:
        sampling = sequence.request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        for index, token in enumerate(tokens):
            if token in ends and sequence.done + index >= sampling.min_tokens:
                return tokens[: index + 1], token
        return tokens, None

    def _logprobs(self, tokens: list[int], wanted: int | None) -> list[TokenLogprob] | None:
        if wanted is None:
            return None
        return [TokenLogprob(token, -0.25, [((token + i) % 256, -0.25 - i) for i in range(wanted)]) for token in tokens]

    def _maybe_fault(self, sequence: Sequence) -> None:
        fault = sequence.script.get("fault")
        if fault is None or sequence.done < sequence.script.get("at", 0):
            return
        if fault == "raise":
            raise RuntimeError("a scripted fault")
        if fault == "exit":
            os._exit(7)
        if fault == "hang":
            time.sleep(3600)

    def _stats(self) -> StepStats:
        return StepStats(
            phases={"verify": 0.001, "draft": 0.002},
            step_seconds=0.003,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_pages_used=len(self._running),
            kv_pages_total=100,
            state_slots_used=len(self._running),
            state_slots_total=self._max_num_seqs,
        )


def _may_go(sequence: Sequence) -> bool:
    file = sequence.script.get("go")
    if file is None:
        return not sequence.script.get("delay")
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(file) >= sequence.done
    return False


def make_core(options) -> ScriptedCore:
    return ScriptedCore(options)


def make_core_with_room(options) -> ScriptedCore:
    """For agents, whose first prompt has a hundred thousand bytes."""
    core = ScriptedCore(options)
    core.ready = msgspec.structs.replace(core.ready, kv_pages_total=core.ready.max_model_len // 256 + 1)
    return core


def make_core_that_fails(options) -> ScriptedCore:
    raise ValueError("no such checkpoint")


def make_core_that_names_a_file(options):
    raise CheckpointError("a\udcff.safetensors: damaged")


def make_core_that_refuses(options):
    raise OptionError("max_model_len: want 2..8, got 9")


def make_core_of_a_damaged_checkpoint(options):
    raise CheckpointError("model.safetensors: the head is dead")


def make_core_without_room(options):
    raise BusyError("memory: other processes hold it")


def make_core_that_serves_once(options) -> ScriptedCore:
    """Only the first time in its folder; the checkpoint is damaged then."""
    began = Path(options.model, "began")
    if began.exists():
        return make_core_of_a_damaged_checkpoint(options)
    began.touch()
    return ScriptedCore(options)


def make_core_when_told(options) -> ScriptedCore:
    """Loads until its folder has a file `go`."""
    while not Path(options.model, "go").exists():
        time.sleep(0.01)
    return ScriptedCore(options)


def make_core_that_loads_forever(options) -> ScriptedCore:
    time.sleep(3600)
    raise AssertionError
