"""All measurements of one running server, in a fixed order."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pilotfish.deploy.prompts import DomainPrompt, domains, long_text
from pilotfish.deploy.sweep.client import Endpoint, EndpointError, TimedAnswer
from pilotfish.deploy.sweep.records import MAX, Measurement, SweepSettings

SAMPLE_CHARS = 1000
ROOM = 0.97
"""The share of max_model_len for a prompt whose length in tokens is estimated."""
SEED = 1

Progress = Callable[[str, float], None]
"""Told what has just been measured, and its share of the work in tokens."""


def work_of(settings: SweepSettings, max_num_seqs: int | None) -> float:
    """An estimate of how long a cell takes, in the time of one token; only the progress bar sees it."""
    vias = 1 + (settings.relay is not None)
    single = len(settings.domains) * settings.passes * settings.single_tokens * len(settings.paths) * vias
    several = sum(concurrent_work(settings, count, max_num_seqs) for count in settings.concurrency)
    return single + several + sum(long_work(settings, context) for context in settings.contexts)


def concurrent_work(settings: SweepSettings, count: int, max_num_seqs: int | None) -> float:
    return settings.concurrent_tokens * -(-count // (max_num_seqs or count))


def long_work(settings: SweepSettings, context: int | str) -> float:
    return settings.long_tokens + (context / 20 if isinstance(context, int) else 500)


class CellRun:
    """One server's measurements, collected in `done`."""

    def __init__(
        self,
        settings: SweepSettings,
        direct: Endpoint,
        relay: Endpoint | None,
        max_model_len: int | None,
        tell: Progress,
    ) -> None:
        self.settings, self.direct, self.relay, self.max_model_len, self.tell = (
            settings,
            direct,
            relay,
            max_model_len,
            tell,
        )
        self.prompts = {name: prompt for name, prompt in domains().items() if name in settings.domains}
        self.done: list[Measurement] = []
        self.notes: list[str] = []

    async def run(self, max_num_seqs: int | None) -> list[Measurement]:
        for via, endpoint in (("direct", self.direct), ("relay", self.relay)):
            for path in self.settings.paths if endpoint else ():
                for domain, prompt in self.prompts.items():
                    await self._single(endpoint or self.direct, via, path, domain, prompt)
        for count in self.settings.concurrency:
            await self._concurrent(count)
            self.tell(f"{count} at once", concurrent_work(self.settings, count, max_num_seqs))
        await self._long()
        return self.done

    async def _single(self, endpoint: Endpoint, via: str, path: str, domain: str, prompt: DomainPrompt) -> None:
        """Passes one after the other; the first one warms up and is not kept (unless it is the only one)."""
        text = prompt.chat if path == "chat" else prompt.completion
        for number in range(self.settings.passes):
            one = await self._measure(endpoint, via, path, [text], self.settings.single_tokens)
            if number or self.settings.passes == 1:
                self.done.append(msgspec.structs.replace(one, kind="single", domain=domain, number=number))
            self.tell(f"{path} {domain}", self.settings.single_tokens)

    async def _concurrent(self, count: int) -> None:
        path = self.settings.paths[0]
        one = await self._measure(self.direct, "direct", path, self.mixed(count), self.settings.concurrent_tokens)
        self.done.append(msgspec.structs.replace(one, kind="concurrent"))

    def mixed(self, count: int) -> list[str]:
        """Domains in turn. A domain's second text starts later, so that no two are equal."""
        prompts = list(self.prompts.values())
        chosen = [(prompts[i % len(prompts)], 24 * (i // len(prompts))) for i in range(count)]
        texts = [prompt.chat if self.settings.paths[0] == "chat" else prompt.completion for prompt, _ in chosen]
        return [text[skip % (len(text) // 2) :] for text, (_, skip) in zip(texts, chosen, strict=True)]

    async def _long(self) -> None:
        contexts = self.contexts()
        if not contexts:
            return
        path = self.settings.paths[0]
        sample = self.sample()
        counted = await self.direct.complete(path, sample, self._fields(1))
        for context in contexts:
            size = int(context * len(sample) / counted.prompt_tokens)
            text = long_text(size)[:size]
            try:
                one = await self._measure(self.direct, "direct", path, [text], self.settings.long_tokens)
                self.done.append(msgspec.structs.replace(one, kind="long"))
            except EndpointError as error:
                self.notes.append(f"context of {context} tokens: {error}")
            self.tell(f"context {context}", long_work(self.settings, context))

    def sample(self) -> str:
        """A short text with each domain's share, as `long_text` has it: gives characters a token."""
        share = min(SAMPLE_CHARS, (self.max_model_len or SAMPLE_CHARS * 16) // 16)
        return "\n\n".join(prompt.completion[:share] for prompt in domains().values())

    def contexts(self) -> list[int]:
        """Prompt lengths to measure: those that fit, and the longest that does where `max` was asked for."""
        wanted = [context for context in self.settings.contexts if isinstance(context, int)]
        if self.max_model_len is None:
            return wanted
        longest = int(ROOM * (self.max_model_len - self.settings.long_tokens))
        fitting = {context for context in wanted if context <= longest}
        return sorted(fitting | ({longest} if MAX in self.settings.contexts and longest > 0 else set()))

    def _fields(self, max_tokens: int) -> dict[str, Any]:
        fields = {"max_tokens": max_tokens, "temperature": self.settings.temperature, "seed": SEED}
        return fields | ({"ignore_eos": True} if self.settings.ignore_eos else {})

    async def _measure(
        self, endpoint: Endpoint, via: str, path: str, texts: Sequence[str], max_tokens: int
    ) -> Measurement:
        """All texts at once."""
        before = await self.direct.counters()
        began = time.perf_counter()
        answers = await asyncio.gather(*(endpoint.complete(path, text, self._fields(max_tokens)) for text in texts))
        seconds = time.perf_counter() - began
        return summary(answers, seconds, path, via, growth(before, await self.direct.counters()))


def growth(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int | None]:
    """The counters' increase, under the names of a measurement."""
    names = {"drafts": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    if before is None or after is None:
        return dict.fromkeys(names)
    return {name: after[counter] - before[counter] for name, counter in names.items()}


def summary(
    answers: Sequence[TimedAnswer], seconds: float, path: str, via: str, counted: dict[str, int | None]
) -> Measurement:
    """What `answers`, sent together, say; the caller names kind and domain."""
    tokens = sum(answer.completion_tokens for answer in answers)
    return Measurement(
        kind="single",
        path=path,
        via=via,
        domain="mixed",
        concurrency=len(answers),
        context=round(statistics.mean(answer.prompt_tokens for answer in answers)),
        completion_tokens=tokens,
        seconds=seconds,
        tokens_per_second=answers[0].decode_rate if len(answers) == 1 else tokens / seconds,
        first_token_seconds=statistics.median(answer.first_seconds for answer in answers),
        slowest_seconds=max(answer.seconds for answer in answers),
        drafts=counted["drafts"],
        drafted=counted["drafted"],
        accepted=counted["accepted"],
    )
