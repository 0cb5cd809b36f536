"""The engine's drafts against a head computed from scratch, and how many of its drafts would be accepted; k = 0 against
one pass over its text.

None of this can be equal bit for bit: a pass over a whole text adds in another order than decoding does, and the
scratch head computes in fp32. Asked is that a draft is the best one but for rounding, at nearly all places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.check.audit import book
from pilotfish.engine.check.audit.scratch import ScratchHead, Written
from pilotfish.engine.check.audit.transcript import Finding, Transcript
from pilotfish.engine.check.teacher_forcing import logits
from pilotfish.engine.ledger import caches_of
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.prompt import SLOT, PromptPass, pages_of
from pilotfish.kernels.attention import PAGE

NUM_PLACES = 64
"""Places of all requests together whose drafts are looked at."""
MAX_ROUNDS = 200
NEAR = {torch.float32: 2e-3, torch.bfloat16: 0.1}
"""How far below the best a draft may be for rounding, as a share of the logits' standard deviation."""
MOST_FAR = {torch.float32: 0.02, torch.bfloat16: 0.2}
"""Share of the places whose draft may be farther: experts that are nearly equal change places, filters cut near by."""
MAX_DISTANCE = {torch.float32: 0.01, torch.bfloat16: 0.2}
"""How far k = 0's logits may be from those of one pass, as a share of what they vary by: the median over all rows that
are looked at."""
MAX_OWN_DISTANCE = {torch.float32: 0.01, torch.bfloat16: 0.8}
"""The same of one request's rows. It is wide in bf16, since all rows are off after a place where nearly equal experts
change places; unrelated logits are 1.4 from each other."""
MIN_SHARE = 0.75
"""The share of a sound head's accepted drafts that the engine's must have."""
MIN_ACCEPTED = 30

Drafts = Mapping[str, Mapping[int, list[int]]]
"""Drafts by request and committed length."""


@dataclass
class HeadReport:
    """How the engine's drafts compare with a sound head's. `looked`, `far`: by number of the draft, how many were
    looked at, and how many of them were farther from the best one than rounding explains. `rounds`: the tokens that
    each round would have committed with a sound head; `num_first` of them would have had their first draft accepted."""

    looked: dict[int, int] = field(default_factory=dict)
    far: dict[int, int] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)
    num_first: int = 0

    @property
    def length(self) -> float:
        return sum(self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def first(self) -> float:
        """Share of rounds whose first draft is accepted."""
        return self.num_first / len(self.rounds) if self.rounds else 0.0

    def too_few(self, run: str, depth: int, own_length: float) -> list[Finding]:
        """Where the engine's drafts are accepted far less than a sound head's."""
        if sum(self.rounds) - len(self.rounds) < MIN_ACCEPTED or own_length - 1 >= MIN_SHARE * (self.length - 1):
            return []
        words = f"acceptance length {own_length:.2f} at k = {depth}, a sound head reaches {self.length:.2f}, and so it"
        return [Finding(run, "all", 0, words)]


class Yardstick:
    """Computes a sound head's drafts over the texts of k = 0; needs the model's slot 1 and first pages, when nobody
    runs."""

    def __init__(self, model: Model, scratch: ScratchHead | None, requests: list[Submit]):
        self.model, self.scratch = model, scratch
        # keys and values in FP8 round what an fp32 model computes, and the scratch head keeps them as they are
        coarse = any(cache.k.dtype.itemsize == 1 for cache in caches_of(model))
        self.rounding = torch.bfloat16 if coarse else model.dtype
        # what a grammar forces stands among its drafts
        self.requests = [request for request in requests if request.sampling.grammar is None]
        self._written: dict[str, Written] = {}
        self._hidden: dict[str, torch.Tensor] = {}

    @property
    def usable(self) -> bool:
        return self.scratch is not None or isinstance(self.model.head, LookupHead)

    def against_one_pass(
        self, run: str, reference: dict[str, Transcript], raw: dict[str, list[np.ndarray]]
    ) -> list[Finding]:
        """k = 0's rows against the trunk's over the whole text at once."""
        found, everything = [], []
        for request in self.requests:
            rows = raw.get(request.request_id)
            if not rows:
                continue
            start = len(request.prompt_token_ids) - 1
            far = self._distances(request, reference, rows)
            everything += far
            if not np.median(far) <= MAX_OWN_DISTANCE[self.rounding]:
                found.append(Finding(run, request.request_id, start, f"logits, from one pass by {np.median(far):.2f},"))
        if not found and everything and not np.median(everything) <= MAX_DISTANCE[self.rounding]:
            found.append(Finding(run, "all", 0, f"logits, from one pass by {np.median(everything):.2f},"))
        return found

    def _distances(self, request: Submit, reference: dict[str, Transcript], rows: list[np.ndarray]) -> list[float]:
        start = len(request.prompt_token_ids) - 1
        hidden = self._trunk(request, reference)[start : start + len(rows)]
        wanted = torch.cat([part.float().cpu() for part in logits(self.model, hidden)]).numpy()
        return [float(np.std(row - other) / np.std(other)) for row, other in zip(rows, wanted, strict=False)]

    def look_at(self, run: str, reference: dict[str, Transcript], drafts: Drafts, report: HeadReport) -> list[Finding]:
        """The engine's drafts at places spread over all requests, each after the drafts before it."""
        places = [(request, length) for request in self.requests for length in sorted(drafts[request.request_id])]
        first: dict[int, tuple[str, int]] = {}
        count = min(NUM_PLACES, len(places))
        for number in np.linspace(0, len(places) - 1, count).round().astype(int).tolist() if count else ():
            request, length = places[number]
            made = drafts[request.request_id][length]
            for depth, (scores, spread) in enumerate(self._drafting(request, reference, length, made), 1):
                is_far = not scores[made[depth - 1]] >= scores.max() - NEAR[self.rounding] * spread
                report.looked[depth] = report.looked.get(depth, 0) + 1
                report.far[depth] = report.far.get(depth, 0) + is_far
                if is_far:
                    first.setdefault(depth, (request.request_id, length))
        most = MOST_FAR[self.rounding]
        return [
            Finding(run, *first[depth], f"draft {depth}, as {far} of {report.looked[depth]} looked at,")
            for depth, far in report.far.items()
            if far > max(1, most * report.looked[depth])
        ]

    def reach(self, reference: dict[str, Transcript], depth: int, report: HeadReport) -> None:
        """Rounds of this depth along the texts of k = 0, with the drafts that a sound head makes."""
        for request in self.requests:
            tokens = reference[request.request_id].tokens
            own_k = depth if request.speculative_k is None else min(depth, request.speculative_k)
            place = 0
            while place < len(tokens) - 1 and len(report.rounds) < MAX_ROUNDS:
                offered = min(own_k, request.sampling.max_tokens - place - 2)
                accepted = self._accepted(request, reference, place, offered) if offered > 0 else 0
                report.rounds.append(min(accepted + 1, len(tokens) - 1 - place))
                report.num_first += accepted > 0
                place += accepted + 1

    def _accepted(self, request: Submit, reference: dict[str, Transcript], place: int, offered: int) -> int:
        coming = reference[request.request_id].tokens[place + 1 : place + 1 + offered]
        drafting = self._drafting(request, reference, len(request.prompt_token_ids) + place, coming)
        accepted = 0
        for (scores, _), token in zip(drafting, coming, strict=False):
            if int(scores.argmax()) != token:
                break
            accepted += 1
        return accepted

    def _drafting(
        self, request: Submit, reference: dict[str, Transcript], length: int, drafts: list[int]
    ) -> Iterator[tuple[np.ndarray, float]]:
        """Scores of draft 1, 2, .., each after the drafts given before it, and what the head's logits vary by."""
        before = reference[request.request_id].tokens[: length + 1 - len(request.prompt_token_ids)]
        if self.scratch is None:
            assert isinstance(self.model.head, LookupHead)
            found = look_up([*request.prompt_token_ids, *before], self.model.head, len(drafts))
            for token in found:
                scores = np.full(self.model.config.vocab_size, -np.inf)
                scores[token] = 0.0
                yield scores, 1.0
            return
        stops = book.stops_of(request.sampling)
        hidden, rows = self.scratch.start(self._read(request, reference), length)
        for step in range(len(drafts)):
            if step:
                hidden, rows = self.scratch.go_on(hidden, drafts[step - 1], rows)
            raw = self.scratch.logits(hidden).numpy()
            given = [*before, *drafts[:step]]
            yield book.score(request.prompt_token_ids, request.sampling, given, raw, stops), float(np.std(raw))

    def _read(self, request: Submit, reference: dict[str, Transcript]) -> Written:
        assert self.scratch is not None
        if request.request_id not in self._written:
            tokens = torch.tensor([*request.prompt_token_ids, *reference[request.request_id].tokens])
            self._written[request.request_id] = self.scratch.read(tokens, self._trunk(request, reference))
        return self._written[request.request_id]

    def _trunk(self, request: Submit, reference: dict[str, Transcript]) -> torch.Tensor:
        if request.request_id not in self._hidden:
            ids = [*request.prompt_token_ids, *reference[request.request_id].tokens]
            tokens = torch.tensor(ids, device=self.model.device)
            self._hidden[request.request_id] = one_pass(self.model, tokens)
        return self._hidden[request.request_id]


def one_pass(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The trunk's hidden [T, H] of a whole text, from nothing."""
    state, table, prompt = model.trunk.state, pages_of(len(tokens)), PromptPass(model)
    for tensor in (state.s, state.conv):
        tensor[:, SLOT].zero_()
    parts = []
    for start in range(0, len(tokens), PAGE):
        part = tokens[start : start + PAGE]
        parts.append(prompt.trunk(part, prompt.span(SLOT, start, len(part), table)))
    return torch.cat(parts)


def look_up(text: list[int], head: LookupHead, count: int) -> list[int]:
    """What the look-up drafts after a text: the longest match, the latest of them, read on in a circle."""
    last = len(text) - 1
    for size in range(head.longest, head.shortest - 1, -1):
        for end in range(last - 1, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[last - size + 1 :]:
                return [text[end + 1 + step % (last - end)] for step in range(count)]
    return []
