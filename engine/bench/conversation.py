"""A conversation that grows turn by turn: what each turn reads of its prompt, and how long its first token takes.

A turn's prompt is the one before, what the model wrote, and as much more as it grows by. Its beginning up to the last
boundary in the prompt before was read then; what must be read is the rest, to the token, a function of the lengths and
of engine/cache/grid.py alone. Cold turns are the same prompts under salts of their own, after all warm ones: they must
write the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pilotfish.engine.bench.measure import random_prompts
from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.check import driver
from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.loop import EngineLoop

WARM = "warm"
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Conversation:
    """`turns` prompts of `system` tokens and `growth` more each turn, of which `answer` at most are what the model
    wrote. Every `cold_every`-th turn, the first and the last are read cold too; 0: none is."""

    turns: int
    system: int
    growth: int
    answer: int = ANSWER_TOKENS
    cold_every: int = 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each turn's prompt."""
        return [self.system + self.growth * turn for turn in range(1, self.turns + 1)]

    def is_cold(self, turn: int) -> bool:
        return bool(self.cold_every) and (turn % self.cold_every == 0 or turn == self.turns - 1)


@dataclass
class Read:
    """One prompt through the engine, alone. `num_read` tokens of it were read, `num_cached` were not; `num_compiled`
    kernels had to be compiled meanwhile."""

    num_read: int = 0
    num_cached: int = 0
    first_token_seconds: float = 0.0
    num_compiled: int = 0
    text: list[int] = field(default_factory=list)


def required_reads(lengths: Sequence[int], grid: Grid) -> list[int]:
    """What the boundaries leave to be read of prompts that each begin with the one before."""
    cached = [0, *(grid.last_boundary(length) for length in lengths[:-1])]
    return [length - known for length, known in zip(lengths, cached, strict=True)]


def measure_conversation(loop: EngineLoop, conversation: Conversation, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each turn. Raises PilotfishError where a cold turn writes another text than the warm one."""
    (tokens,) = random_prompts(1, conversation.lengths[-1], loop.ready.vocab_size)
    required = required_reads(conversation.lengths, loop.scheduler.grid)
    # for what libraries set up at their first call, and at the first hit; nothing of it is shared with the turns
    for length in conversation.lengths[:2]:
        read(loop, tokens[:length], conversation, seed, "warm-up")
    prompts: list[list[int]] = []
    warm: list[Read] = []
    for length in conversation.lengths:
        known = [*prompts[-1], *warm[-1].text] if prompts else []
        prompts.append([*known, *tokens[len(known) : length]])
        warm.append(read(loop, prompts[-1], conversation, seed, WARM))
    for turn, (prompt, found) in enumerate(zip(prompts, warm, strict=True)):
        row: dict[str, Any] = {
            "turn": turn + 1,
            "prompt": len(prompt),
            "cached": found.num_cached,
            "read": found.num_read,
            "required": required[turn],
            "first_token_ms": 1e3 * found.first_token_seconds,
            "num_compiled": found.num_compiled,
        }
        if conversation.is_cold(turn):
            cold = read(loop, prompt, conversation, seed, f"cold {turn}")
            if cold.text != found.text:
                raise PilotfishError(f"turn {turn + 1}: other text than the same prompt read cold")
            row |= {"cold_read": cold.num_read, "cold_first_token_ms": 1e3 * cold.first_token_seconds}
        yield row


def read(loop: EngineLoop, prompt: list[int], conversation: Conversation, seed: int, salt: str) -> Read:
    """The prompt and its answer, alone in the engine."""
    found = Read()
    began = perf_counter()
    sampling = driver.greedy(min(conversation.answer, conversation.growth), seed)
    driver.submit(loop, {"turn": prompt}, sampling, cache_salt=salt, system_tokens=conversation.system)
    for report in driver.reports(loop):
        found.num_read += report.stats.num_prefill_tokens
        found.num_compiled += report.stats.num_compiled
        for output in report.outputs:
            found.num_cached += output.num_cached_tokens or 0
            if output.token_ids and not found.text:
                found.first_token_seconds = perf_counter() - began
            found.text += output.token_ids
    return found
