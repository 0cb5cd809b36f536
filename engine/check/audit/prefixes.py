"""Prompts whose beginnings the prefix cache has, and how much of each it must give: what is held against cold runs.

Two texts, cut and joined so that each way to meet a kept prefix comes up once. Which of the kept prefixes are given up
when is the cache's own policy; here they are few, and only the last two boundaries of a text are counted on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import msgspec

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.check.audit.rules import GRAMMARS
from pilotfish.engine.link.messages import SamplingParams, Submit

NUM_BOUNDARIES = 3
NUM_TOKENS = 8
"""Written after each prompt."""
BEYOND = 21
"""Tokens of a prompt past its last boundary, where it does not end there."""
LONGEST_BEYOND = 3 * BEYOND
ANOTHER = "another tenant"
WAYS = {
    "whole": "prompts that end at a boundary",
    "longer": "a token past one",
    "parted": "that part at one, before and after it",
    "again": "A B A",
    "aborted": "an aborted prompt",
    "salt": "another salt",
    "load": "under load",
    "evicted": "given up and read again",
}
"""What is compared, as the verdict names it, by the first word of a name."""


@dataclass(frozen=True)
class Ask:
    """`found`: how many of its tokens the cache must give. `aborted_at`: it is aborted once so many have been read."""

    request: Submit
    found: int
    aborted_at: int | None = None

    @property
    def name(self) -> str:
        return self.request.request_id


class Script:
    """`waves` run one after the other in one engine, requests of a wave at once; `scarce` in one that keeps a single
    prefix. `boundaries` are those of the grid that fit `max_tokens` with what comes after them; without any there is
    nothing to ask."""

    def __init__(self, prompts: list[list[int]], sampling: dict[str, SamplingParams], grid: Grid, max_tokens: int):
        self.boundaries = list(_boundaries(grid, max_tokens - LONGEST_BEYOND - NUM_TOKENS))
        self.sampling = sampling
        length = max(self.boundaries, default=0) + LONGEST_BEYOND
        self._modes = cycle(sampling)
        self._mode_of: dict[tuple[int, ...], str] = {}
        joined = [token for prompt in prompts for token in prompt]
        self._one, self._other = (_repeat(text, length) for text in (joined, joined[::-1]))
        self.waves = list(self._waves()) if self.boundaries else []
        self.scarce = list(self._scarce()) if self.boundaries else []

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(ask.request.prompt_token_ids) for ask in self.asks), default=0)

    @property
    def num_kept(self) -> int:
        """Tokens of all prompts that may be kept at once."""
        return sum(map(len, {tuple(ask.request.prompt_token_ids) for ask in self.asks}))

    @property
    def asks(self) -> list[Ask]:
        return [ask for wave in (*self.waves, *self.scarce) for ask in wave]

    def _waves(self) -> Iterator[list[Ask]]:
        one, other, before = self._one, self._other, 0
        for end in self.boundaries:
            yield [self._ask(f"longer: to {end}", one[:end], before)]
            yield [self._ask(f"whole: {end}", one[:end], end)]
            yield [self._ask(f"longer: {end} and one", one[: end + 1], end)]
            # its last token is another: the chunk that it ends may not be shared
            yield [self._ask(f"parted: before {end}", _changed(one[:end]), before)]
            before = end
        last, first = self.boundaries[-1], self.boundaries[0]
        long = one[: last + BEYOND]
        yield [self._ask("again: A", long, last)]
        yield [self._ask("again: B", other[: first + BEYOND], 0)]
        yield [self._ask("again: A, after B", long, last)]
        yield [self._ask("parted: after the last", [*one[: last + 5], *other[:BEYOND]], last)]
        yield [self._ask("salt: its own", long[: first + BEYOND], 0, cache_salt=ANOTHER)]
        yield [self._ask("salt: B under it", other[: first + BEYOND], 0, cache_salt=ANOTHER)]
        third = [*other[5 : first + BEYOND], *one[:BEYOND]]
        yield [self._ask("aborted: once a chunk was read", [*third, *other[:BEYOND]], 0, aborted_at=first)]
        yield [self._ask("aborted: asked again", third, first)]
        # two that go on from one place, while both write; one that is among them twice
        yield [
            self._ask("load: parts at the last", [*one[:last], *other[:BEYOND]], last),
            self._ask("load: parts there too", [*one[:last], *other[7 : 7 + BEYOND]], last),
            self._ask("load: A", long, last),
            self._ask("load: B", other[: first + BEYOND], first),
            self._ask("load: A, again", long, last),
        ]

    def _scarce(self) -> Iterator[list[Ask]]:
        first = self.boundaries[0]
        one, other = self._one[: first + 1], self._other[: first + BEYOND]
        yield [self._ask("evicted: A", one, 0)]
        yield [self._ask("evicted: B", other, 0)]
        yield [self._ask("evicted: A, read again", one, 0)]
        yield [self._ask("evicted: A, found again", one, first)]

    def _ask(
        self, name: str, prompt: list[int], found: int, cache_salt: str = "", aborted_at: int | None = None
    ) -> Ask:
        """A prompt is written on in one mode wherever it stands, so that one cold run is right for all of them."""
        key = tuple(prompt)
        mode = self._mode_of.setdefault(key, next(self._modes) if key not in self._mode_of else "")
        request = Submit(
            request_id=f"{name}, {mode}", prompt_token_ids=prompt, sampling=self.sampling[mode], cache_salt=cache_salt
        )
        return Ask(request, found, aborted_at)


def modes(requests: list[Submit], end_ids: tuple[int, ...], grammars: bool) -> dict[str, SamplingParams]:
    """The sampling parameters, by name, under which texts are continued: those of each request of the first prompt, and
    a grammar that ends with `end_ids`; all with log-probabilities."""
    found = {
        request.request_id.removeprefix("0-"): msgspec.structs.replace(
            request.sampling, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True
        )
        for request in requests
        if request.request_id.startswith("0-")
    }
    if grammars:
        found["grammar"] = msgspec.structs.replace(found["greedy"], grammar=GRAMMARS["regex"], eos_token_ids=end_ids)
    return found


def _boundaries(grid: Grid, room: int) -> Iterator[int]:
    end = 0
    for _ in range(NUM_BOUNDARIES):
        end = grid.next_boundary(end)
        if end > room:
            return
        yield end


def _repeat(tokens: list[int], count: int) -> list[int]:
    """A text of so many tokens: the given ones over and over, each time from another place on, so that it comes back to
    itself late."""
    found: list[int] = []
    while len(found) < count:
        turn = 7 * (len(found) // len(tokens)) % len(tokens)
        found += tokens[turn:] + tokens[:turn]
    return found[:count]


def _changed(prompt: list[int]) -> list[int]:
    """The prompt with another last token."""
    return [*prompt[:-1], next(token for token in prompt if token != prompt[-1])]
