"""What a request did in a run, row by row, as digests; where two runs differ; one digest over all that was compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from pilotfish.engine.loop import EngineLoop

ALWAYS_KEPT = ("prefill.logits", "draft")
TEXT = "text"
"""Stands among the tensors for all tokens of a request."""


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
    """One request's run: its tokens from the first generated one; for each position, a digest of each tensor's row."""

    tokens: list[int] = field(default_factory=list)
    rows: dict[int, dict[str, bytes]] = field(default_factory=dict)


class Recorder:
    """An observer that files digests by request and keeps only rows whose input was committed. Without `rows` it looks
    at tokens alone."""

    def __init__(self, loop: EngineLoop, rows: bool = True):
        self.loop = loop
        self.transcripts: dict[str, Transcript] = {}
        self._seen: list[tuple[str, int, str, bytes]] = []
        if rows:
            loop.runner.observers.append(self.observe)

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        scheduler = self.loop.scheduler
        owners = {sequence.slot: sequence.request_id for sequence in (*scheduler.running, *scheduler.retired)}
        table = rows.detach().to("cpu").contiguous()
        flat = table.reshape(len(slots), -1).view(torch.uint8).numpy()
        for row, slot, position in zip(flat, slots, positions, strict=True):
            self._seen.append((owners[slot], position, name, _digest(row.tobytes())))

    def step(self) -> list[int]:
        """One engine step. Of it: rounds of sequences, drafted and accepted tokens, first drafts and accepted ones."""
        prompts = {s.request_id: len(s.prompt) for s in (*self.loop.scheduler.running, *self.loop.scheduler.waiting)}
        report = self.loop.step()
        totals = [0] * 5
        for output in report.outputs if report is not None else ():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            transcript = self.transcripts.setdefault(output.request_id, Transcript())
            transcript.tokens += output.token_ids
            totals[0] += output.round
            totals[1] += output.num_drafted
            totals[2] += output.num_accepted
            totals[3] += output.num_drafted > 0
            totals[4] += output.num_accepted > 0
        for request, position, name, digest in self._seen:
            transcript = self.transcripts.setdefault(request, Transcript())
            # the last token is committed but not yet an input: its own row has not been run
            if name in ALWAYS_KEPT or position < prompts[request] + len(transcript.tokens) - 1:
                transcript.rows.setdefault(position, {})[name] = digest
        self._seen.clear()
        return totals


def compare(
    run: str, wanted: Mapping[str, Transcript], got: Mapping[str, Transcript], prompt_lengths: Mapping[str, int]
) -> list[Finding]:
    """The first difference of each request, in order of position, then of computation."""
    findings = []
    for request, reference in wanted.items():
        place = _first_difference(reference, got[request], prompt_lengths[request])
        if place is not None:
            findings.append(Finding(run, request, *place))
    return findings


def _first_difference(reference: Transcript, other: Transcript, prompt_length: int) -> tuple[int, str] | None:
    """A token's position is that of the row that chose it; at one position the tensors come before the token."""
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
        """Of all, or of one kind of tensor, in hex."""
        whole = blake2b(digest_size=16)
        for entry in sorted(self._met):
            if kind in (None, entry[0]):
                whole.update(repr(entry).encode())
        return whole.hexdigest()

    def digests(self) -> dict[str, str]:
        """By kind of tensor, layers taken together: where two engines differ, these say in what."""
        return {kind: self.digest(kind) for kind in sorted({entry[0] for entry in self._met})}


def _digest(row: bytes) -> bytes:
    return blake2b(row, digest_size=8).digest()
