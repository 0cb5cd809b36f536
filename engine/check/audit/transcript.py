"""What a request did in a run, row by row, as digests; where two runs differ; one digest over all that was compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from pilotfish.engine.link.messages import Submit, TokenLogprob
from pilotfish.engine.loop import EngineLoop

DRAFT, PROMPT = "draft", "prefill.logits"
TEXT = "text"
"""Stands among the tensors for all tokens of a request."""
BOOK = "token by the book"
"""Stands in a finding for a token that does not follow from its row's logits and the request's rules."""


@dataclass(frozen=True)
class Finding:
    """Where a run first left the reference."""

    run: str
    request: str
    position: int
    tensor: str

    def __str__(self) -> str:
        return f"{self.run}: request {self.request}, position {self.position}: {self.tensor} differs"


@dataclass
class Transcript:
    """One request's run: its tokens from the first generated one; for each position, a digest of each tensor's row.

    `drafts`: by the committed length that they were made at, those offered. `logits`: by position, the first rows as
    they were, where they are kept. `logprobs` of the tokens, where it asked for them. `rounds`: drafted and accepted
    tokens of each. `num_found`: prompt tokens that the prefix cache gave. `error`: why it did not end as it should.
    """

    tokens: list[int] = field(default_factory=list)
    rows: dict[int, dict[str, bytes]] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    num_found: int = 0
    error: str | None = None


class Recorder:
    """An observer that files digests by request and keeps only rows whose input was committed. Without `rows` it looks
    at tokens alone. `keep`: rows of logits a request that are kept as they are. `most_at_once`: sequences a round."""

    def __init__(self, loop: EngineLoop, requests: Iterable[Submit], rows: bool = True, keep: int = 0):
        self.loop, self.rows, self.keep = loop, rows, keep
        self.prompts = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self.transcripts = {request: Transcript() for request in self.prompts}
        # rounds of sequences, drafted and accepted tokens, first drafts and accepted ones
        self.totals = [0] * 5
        self.num_steps, self.most_at_once = 0, 0
        self._seen: list[tuple[str, int, str, bytes]] = []
        if rows:
            loop.executor.observers.append(self.observe)

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        if not slots:
            # all sequences sat this round out
            return
        scheduler = self.loop.scheduler
        owners = {sequence.slot: sequence.request_id for sequence in (*scheduler.running, *scheduler.retired)}
        table = rows.detach().to("cpu").contiguous()
        flat = table.reshape(len(slots), -1).view(torch.uint8).numpy()
        for row, slot, position in zip(flat, slots, positions, strict=True):
            self._seen.append((owners[slot], position, name, _digest(row.tobytes())))
        if name in ("logits", PROMPT):
            for row, slot, position in zip(table, slots, positions, strict=True):
                kept = self.transcripts[owners[slot]].logits
                if len(kept) < self.keep:
                    # a copy: the row may stand in memory that the next round overwrites
                    kept[position] = row.float().numpy().copy()

    def step(self) -> None:
        """One engine step; one in which nothing could be done is not counted."""
        report = self.loop.step()
        self.num_steps += report is not None
        ended = set()
        outputs = report.outputs if report is not None else []
        self.most_at_once = max(self.most_at_once, sum(output.round > 0 for output in outputs))
        for output in outputs:
            transcript = self.transcripts[output.request_id]
            transcript.error = output.error
            drafted, accepted = output.num_drafted, output.num_accepted
            more = (output.round, drafted, accepted, drafted > 0, accepted > 0)
            self.totals = [total + count for total, count in zip(self.totals, more, strict=True)]
            if output.finish_reason is not None:
                ended.add(output.request_id)
            transcript.tokens += output.token_ids
            transcript.logprobs += output.logprobs or []
            transcript.num_found += output.num_cached_tokens or 0
            if output.round:
                transcript.rounds.append((drafted, accepted))
        for request, position, name, digest in self._seen:
            transcript = self.transcripts[request]
            # the last token is committed but not yet an input: its own row has not been run
            is_committed = name == PROMPT or position < self.prompts[request] + len(transcript.tokens) - 1
            # what is drafted after the end is never looked at
            if request not in ended if name == DRAFT else is_committed:
                transcript.rows.setdefault(position, {})[name] = digest
        self._seen.clear()
        if self.rows:
            self._note_drafts()

    def _note_drafts(self) -> None:
        state = self.loop.executor.state
        for sequence in self.loop.scheduler.running:
            if sequence.is_prefilled:
                count, length = int(state.num_offered[sequence.slot]), int(state.length[sequence.slot])
                # a sequence that stood still may have been given others meanwhile
                made = self.transcripts[sequence.request_id].drafts
                made.setdefault(length, state.drafts[sequence.slot, :count].tolist())


def compare(
    run: str, wanted: Mapping[str, Transcript], got: Mapping[str, Transcript], prompt_lengths: Mapping[str, int]
) -> list[Finding]:
    """The first difference of each request, in order of position, then of computation; what did not end well first."""
    findings = []
    for request, reference in wanted.items():
        place = _first_difference(reference, got[request], prompt_lengths[request])
        if place is not None:
            findings.append(Finding(run, request, *place))
    return findings


def _first_difference(reference: Transcript, other: Transcript, prompt_length: int) -> tuple[int, str] | None:
    """A token's position is that of the row that chose it; at one position the tensors come before the token."""
    if other.error != reference.error or other.error is not None:
        return prompt_length - 1 + len(other.tokens), f"its end ({other.error or 'sound'})"
    wrong = [i for i, (a, b) in enumerate(zip(reference.tokens, other.tokens, strict=False)) if a != b]
    if not wrong and len(reference.tokens) != len(other.tokens):
        wrong = [min(len(reference.tokens), len(other.tokens))]
    token_place = (prompt_length - 1 + wrong[0], "tokens") if wrong else None
    for position in sorted(other.rows):
        if token_place is not None and position > token_place[0]:
            break
        wanted = reference.rows.get(position, {})
        for name, digest in other.rows[position].items():
            if wanted.get(name, digest) != digest:
                return position, name
    return token_place


def unseen(run: str, wanted: Mapping[str, Transcript], got: Mapping[str, Transcript]) -> list[Finding]:
    """The first row of each request that the reference has and the run does not show, drafts apart: those stand only
    where a round began. A run that shows less than it should proves less."""
    findings = []
    for request, reference in wanted.items():
        rows = got[request].rows
        for position, names in sorted(reference.rows.items()):
            missing = [name for name in names if name != DRAFT and name not in rows.get(position, {})]
            if missing:
                findings.append(Finding(run, request, position, f"{missing[0]} was not shown, and so it"))
                break
    return findings


def compared_rows(reference: Transcript, other: Transcript) -> Iterable[tuple[int, str, bytes]]:
    """(position, tensor, digest) of the rows of a run that the reference has too: those that were compared."""
    for position, names in other.rows.items():
        wanted = reference.rows.get(position, {})
        yield from ((position, name, digest) for name, digest in names.items() if name in wanted)


class Compared:
    """Every distinct row and text that was compared, whichever runs they came from, and one digest of them all.

    Each stands there once, so the digest does not depend on the order of runs, nor on how often a row was met: two
    engines that compute the same bits have the same digest, after the same flags on the same device.
    """

    def __init__(self) -> None:
        self._met: set[tuple[str, str, int, bytes]] = set()

    def add(self, reference: Mapping[str, Transcript], got: Mapping[str, Transcript]) -> int:
        """Takes a run in; returns the number of its rows that were compared."""
        count = 0
        for request, wanted in reference.items():
            tokens = ",".join(map(str, got[request].tokens)).encode()
            self._met.add((TEXT, request, 0, _digest(tokens)))
            for position, name, digest in compared_rows(wanted, got[request]):
                self._met.add((re.sub(r"\.\d+\.", ".", name), f"{request}/{name}", position, digest))
                count += 1
        return count

    def digest(self, kind: str | None = None) -> str:
        """A digest of all rows, or of one kind of tensor, in hex."""
        whole = blake2b(digest_size=16)
        for entry in sorted(self._met):
            if kind in (None, entry[0]):
                whole.update(repr(entry).encode())
        return whole.hexdigest()

    def digests(self) -> dict[str, str]:
        """Digests by kind of tensor, layers taken together: where two engines differ, these say in what."""
        return {kind: self.digest(kind) for kind in sorted({entry[0] for entry in self._met})}


def _digest(row: bytes) -> bytes:
    return blake2b(row, digest_size=8).digest()
