"""How many drafts a head gets accepted: greedy decoding from places of a text, by the engine's own rounds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish.engine.assemble import assemble
from pilotfish.engine.check import driver
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model
from pilotfish.engine.plan import Plan

PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Acceptance:
    """What `num_rounds` rounds that drafted in full had accepted: the shares of them in which draft 1, 2, .. was
    accepted."""

    num_rounds: int
    shares: tuple[float, ...]

    @property
    def length(self) -> float:
        """Committed tokens a round, the trunk's own included."""
        return 1 + sum(self.shares)

    def line(self) -> str:
        drafts = ", ".join(f"{share:.1%}" for share in self.shares)
        return f"{self.length:.3f} tokens a round (drafts accepted: {drafts}; {self.num_rounds} rounds)"


@torch.inference_mode()
def measure_acceptance(model: Model, plan: Plan, prompts: Sequence[list[int]], max_tokens: int) -> Acceptance:
    """Acceptance over every prompt's greedy continuation of `max_tokens`, at the plan's depth. The model has a head and
    caches."""
    engine = assemble(model, dataclasses.replace(plan, lookup=None, num_snapshots=0), len(prompts), 0, 0.0)
    loop = EngineLoop(engine)
    driver.submit(loop, {str(number): prompt for number, prompt in enumerate(prompts)}, driver.greedy(max_tokens))
    accepted: Counter[int] = Counter()
    for report in driver.reports(loop):
        for output in report.outputs:
            # near its limit a request is offered fewer drafts
            if output.round and output.num_drafted == plan.depth:
                accepted[output.num_accepted] += 1
    rounds = accepted.total()
    shares = [sum(accepted[n] for n in range(d, plan.depth + 1)) / max(1, rounds) for d in range(1, plan.depth + 1)]
    return Acceptance(rounds, tuple(shares))


def cut_prompts(ids: Sequence[int], count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Cuts at most `count` pieces of at most `length` tokens from a text, evenly spread."""
    length = min(length, len(ids))
    count = min(count, len(ids) // length)
    step = len(ids) // count
    return [list(ids[i * step : i * step + length]) for i in range(count)]
