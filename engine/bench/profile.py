"""What a trace of the GPU says of rounds: how many launches one has, and how long nothing runs between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from pilotfish.engine.bench.measure import Case, random_prompts
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.messages import SamplingParams, Submit

ROUNDS = 20
SETTLE = 4
LONGEST = 12


def profile(loop: EngineLoop, case: Case) -> dict[str, Any]:
    """Of a batch's rounds as they are served: launches, the share of the time in which no kernel runs, and the kernels
    that take most of it, in microseconds a round."""
    if loop.runner.model.device.type != "cuda":
        return {}
    length = min(case.context, 256)
    tokens = min((ROUNDS + SETTLE + 8) * (case.depth + 1), loop.ready.max_model_len - length)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number, prompt in enumerate(random_prompts(case.batch, length, loop.ready.vocab_size)):
        loop.submit(Submit(request_id=f"p{number}", prompt_token_ids=prompt, sampling=sampling))
    while len([s for s in loop.scheduler.running if s.is_prefilled]) < case.batch:
        loop.step()
    for _ in range(SETTLE):
        loop.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(ROUNDS):
            loop.step()
        torch.cuda.synchronize()
    while loop.has_work():
        loop.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return {"profile": "the profiler saw no kernel"}
    by_name: Counter[str] = Counter()
    for begin, end, name in spans:
        by_name[name] += end - begin
    busy, reached = 0.0, spans[0][0]
    for begin, end, _ in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return {
        "launches_a_round": len(spans) / ROUNDS,
        "gpu_idle_share": 1 - busy / whole,
        "kernels_us": {name: total / ROUNDS for name, total in by_name.most_common(LONGEST)},
    }
