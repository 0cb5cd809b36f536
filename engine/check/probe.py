"""Requests of our own that are run at the start, before the first client's: which kernels each layer took in them, and
what libraries set up at a first call, so that no client waits for it.

Configuration says what ought to run, and a fallback deep in a library says nothing. So every matrix product, attention
and kernel of ours that torch's dispatcher or Triton's launcher is asked for is written down, beside the layer that
asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish.engine.check import driver
from pilotfish.engine.link.messages import SamplingParams

if TYPE_CHECKING:
    from pilotfish.engine.loop import EngineLoop

HEAVY = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum", "convolution", "_scaled_mm", "_grouped_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
)
"""torch's own operators that count; those of other libraries all do."""
PLAIN_LIBRARIES = ("aten", "prim", "prims")
PARTS = {"logits": "lm_head", "head": "head", "draft": "head", "prefill.logits": "prefill"}
"""What the executor shows after a layer's name, and whose work it closes."""
NUM_PROMPT_TOKENS, NUM_TOKENS = 24, 6
TAILS = (16, 64, 256, 1024)
"""Lengths of prompts, about where libraries go over to other kernels for products and attention."""


class Watch(TorchDispatchMode):
    """Kernel and dtype -> the layers that took it."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, set[str]] = defaultdict(set)
        self._since: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to shield this from torch.compile takes all of it, which is long in coming."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in HEAVY or name.split("::")[0] not in PLAIN_LIBRARIES:
            dtype = next((str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)), "")
            self._since.add(f"{name} {dtype}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Kernels that Triton launches on a GPU count too; they pass no dispatcher."""
        if not torch.cuda.is_available():
            yield
            return
        from triton import knobs

        knobs.runtime.launch_enter_hook.add(self._launched)
        try:
            yield
        finally:
            knobs.runtime.launch_enter_hook.remove(self._launched)

    def _launched(self, metadata: Any) -> None:
        self._since.add(f"triton::{metadata.get()['name']}")

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        """What was asked for since the last observation belongs to the layer that this one closes."""
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else PARTS.get(name)
        if layer is not None:
            for kernel in self._since:
                self.routes[kernel].add(layer)
        self._since.clear()


def warm_up(loop: EngineLoop) -> None:
    """Reads prompts of several lengths, the longest one more than a chunk, each by itself, and writes a few tokens: a
    library loads a kernel, and memory is asked for, when a length first wants it. No kernel that is compiled depends on
    a prompt's length, so the first one has all of them. Sampled with filters, which torch chooses a first token by."""
    ready, grid = loop.ready, loop.scheduler.grid
    room = ready.max_model_len - NUM_TOKENS - 1
    tails = [tail for tail in TAILS if tail <= grid.chunk]
    # the first chunk is a smaller one where the grid has a cut at half of one
    whole = grid.chunk if grid.half is None else 2 * grid.chunk
    wanted = [*tails, whole, whole + min(TAILS[0], grid.chunk)]
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)
    for length in sorted({min(length, room) for length in wanted} - {0}) if room > 0 else ():
        prompt = driver.filler(ready.vocab_size, length)
        name = f"warm-up-{length}"
        driver.submit(loop, {name: prompt}, sampling, cache_salt=name)
        driver.drain(loop)


def routes(loop: EngineLoop) -> dict[str, list[str]]:
    """Kernels of one request alone, and of as many as may run at once, the last one without drafts; {} where the
    context is too short for them. Layers are "layers.0", ..; "lm_head", "head" and "prefill" stand beside them."""
    ready = loop.ready
    room = min(NUM_PROMPT_TOKENS, ready.max_model_len - NUM_TOKENS - 1)
    prompt = driver.filler(ready.vocab_size, room)
    watch = Watch()
    loop.executor.observers.append(watch.observe)
    # what a prompt launches behind a pause would be taken for the next round's
    loop.pauses_after = loop.UNBROKEN
    try:
        for count in sorted({1, ready.max_num_seqs}) if prompt else ():
            for number in range(count):
                k = 0 if number and number == count - 1 else None
                driver.submit(loop, {f"probe-{number}": prompt}, driver.greedy(NUM_TOKENS), k)
            with watch, watch.launches():
                driver.drain(loop)
    finally:
        loop.executor.observers.remove(watch.observe)
        loop.pauses_after = None
    return {kernel: sorted(layers) for kernel, layers in sorted(watch.routes.items())}
