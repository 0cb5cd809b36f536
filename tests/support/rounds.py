"""Small engines over tiny random models, and rounds whose drafts agree for a chosen number of tokens.

`Driver` runs an executor without scheduler or loop. `transcript` is what a request gives alone at k = 0: its tokens,
and for every position the logits, the recurrent state, the keys and values, the head's too, and the head's first draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pilotfish.engine.assemble import Engine, assemble
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.model.build import build_model
from pilotfish.engine.plan import Plan
from pilotfish.engine.round.executor import RoundExecutor
from pilotfish.engine.round.reports import Batch, SequenceReport
from pilotfish.kernels.attention import PAGE
from tests.support.tiny_models import VOCAB_SIZE, build_tiny

CPU = torch.device("cpu")
MAX_DEPTH = 8
GREEDY = SamplingParams(temperature=0)
MODES = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, seed=7),
    "every feature": SamplingParams(
        temperature=1.1,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 2.0, 17: -5.0},
        min_tokens=5,
        stop_token_ids=(319,),
        seed=-11,
        choice=2,
    ),
}
MODELS = [(kind, dtype) for kind in ("hv_gt_hk", "moe") for dtype in ("float32", "bfloat16")]
"""Dense and MoE, both with more value heads than key heads."""


@cache
def checkpoint_of(kind: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    # kept for tests that write into them, whoever asks first
    with TemporaryDirectory() as folder, torch.inference_mode(mode=False):
        checkpoint = open_checkpoint(build_tiny(folder, kind, dtype=dtype))
        return checkpoint.config, load_weights(checkpoint, progress=False)


def make_engine(
    kind: str = "moe",
    dtype: str = "float32",
    *,
    depth: int = MAX_DEPTH,
    max_num_seqs: int = 4,
    max_model_len: int = 2048,
    num_pages: int = 12,
    prefill_chunk: int = 64,
    max_waiting: int = 8,
    draft_ids: Sequence[int] | None = None,
    kv_dtype: torch.dtype | None = None,
    num_snapshots: int = 0,
) -> Engine:
    """An engine with caches of its own, full of NaN. depth 0: no head."""
    config, weights = checkpoint_of(kind, dtype)
    kept = {name: weight for name, weight in weights.items() if depth or not name.startswith("mtp.")}
    plan = Plan(
        CPU,
        getattr(torch, dtype),
        depth,
        None,
        max_model_len,
        max_num_seqs,
        "configured",
        num_pages,
        prefill_chunk,
        kv_dtype=kv_dtype,
        num_snapshots=num_snapshots,
    )
    model = build_model(kept, config, plan.cache_sizes, plan.dtype, CPU, draft_ids=draft_ids)
    return assemble(model, plan, max_waiting, 0, 0.0)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Driver:
    """Runs sequences by slot; keeps each one's tokens and, by position of the row, its logits."""

    def __init__(self, engine: Engine):
        self.executor: RoundExecutor = engine.executor
        self.state = engine.executor.state
        self.trunk = engine.executor.model.trunk
        self.grid = engine.scheduler.grid
        self.tables: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, dict[int, torch.Tensor]] = {}
        self.executor.observers.append(self._observe)

    def _observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        if name == "logits":
            for row, slot, position in zip(rows, slots, positions, strict=True):
                self.logits[slot][position] = row.clone()

    @torch.inference_mode()
    def start(
        self,
        slot: int,
        prompt: list[int],
        table: list[int],
        params: SamplingParams = GREEDY,
        *,
        max_tokens: int = 64,
        own_k: int = MAX_DEPTH,
        depth: int = 1,
        logprobs: int | None = None,
    ) -> SequenceReport:
        """Admits and prefills. depth >= 1 fills the head's cache up to the prompt's end, if there is a head."""
        self.prompts[slot], self.tables[slot] = prompt, table
        self.tokens[slot], self.logits[slot] = [], {}
        self.executor.admit(slot, prompt, params, len(prompt) + max_tokens, own_k)
        report, end = None, 0
        while end < len(prompt):
            start, end = end, self.grid.next_cut(end, len(prompt))
            report = self.executor.prefill(slot, table, prompt, start, end, depth, logprobs).finish()
        assert report is not None
        self.tokens[slot] += report.token_ids
        return report

    def force(self, slot: int, drafts: Sequence[int]) -> None:
        """What the next round verifies, all of it offered."""
        self.state.drafts[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        self.state.num_offered[slot] = len(drafts)

    @torch.inference_mode()
    def round(
        self, slots: list[int], depth: int = 0, next_depth: int = 0, logprobs: int | None = None
    ) -> list[SequenceReport]:
        tables = [self.tables[slot] for slot in slots]
        batch = Batch(slots, tables, depth, [logprobs] * len(slots))
        reports, _ = self.executor.launch(batch, next_depth).collect()
        for report in reports:
            self.tokens[report.slot] += report.token_ids
        return reports

    def length(self, slot: int) -> int:
        return int(self.state.length[slot])

    def entries(self, cache: Any, slot: int, end: int) -> torch.Tensor:
        """Keys and values of positions 0..end-1, [2, kv, end, D]; FP8 ones as bytes, which torch can compare."""
        places = slice(cache.lag, end + cache.lag)
        pages = self.tables[slot][: -(-places.stop // PAGE)]
        stored = [t.view(torch.uint8) if t.element_size() == 1 else t for t in (cache.k, cache.v)]
        return torch.stack([t[pages].transpose(0, 1).flatten(1, 2)[:, places].clone() for t in stored])

    def memory(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every buffer that rounds change, and a copy of it; `restore` takes it back."""
        caches = [*self.trunk.kv, *([self.executor.model.head.cache] if self.executor.model.head else [])]
        state, pending = self.trunk.state, self.trunk.state.pending
        buffers = [buffer for buffer in self.state.fields if buffer is not None]
        buffers += [state.s, state.conv, state.last_hidden, *vars(pending).values()]
        buffers += [t for c in caches for t in (c.k, c.v)]
        self._kept_tokens = {slot: list(tokens) for slot, tokens in self.tokens.items()}
        return [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self, memory: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for buffer, kept in memory:
            buffer.copy_(kept)
        self.tokens = {slot: list(tokens) for slot, tokens in self._kept_tokens.items()}


@dataclass(frozen=True)
class Transcript:
    """One request alone, one row a round. `logits[p]` and the entries are those of the row at position p; `states[n]`
    is (S, convolution inputs) after n tokens, `first_drafts[n]` the head's first draft when n are in the caches."""

    prompt: list[int]
    tokens: list[int]
    logits: dict[int, torch.Tensor]
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    kv: torch.Tensor | None = None
    head_kv: torch.Tensor | None = None
    first_drafts: dict[int, int] = field(default_factory=dict)

    def drafts(self, num_tokens: int, depth: int, agreeing: int) -> list[int]:
        """Drafts after the first num_tokens tokens: right but for the one at `agreeing`."""
        right = self.tokens[num_tokens : num_tokens + depth]
        right += [0] * (depth - len(right))
        return [(token + 1) % VOCAB_SIZE if i == agreeing else token for i, token in enumerate(right)]


@cache
def transcript(
    kind: str,
    dtype: str,
    length: int,
    *,
    seed: int = 0,
    mode: str = "greedy",
    num_tokens: int = 40,
    chunk: int = 64,
    kv_dtype: torch.dtype | None = None,
) -> Transcript:
    """random_prompt(length, seed) decoded alone at k = 0, with a head that repairs one row a round."""
    driver = Driver(make_engine(kind, dtype, num_pages=6, max_num_seqs=1, prefill_chunk=chunk, kv_dtype=kv_dtype))
    prompt = random_prompt(length, seed)
    driver.start(1, prompt, [1, 2, 3, 4, 5, 6], MODES[mode], max_tokens=num_tokens)
    states, first_drafts = {}, {}
    while not bool(driver.state.done[1]):
        start = driver.length(1)
        driver.round([1], next_depth=1)
        first_drafts[driver.length(1)] = int(driver.state.drafts[1, 0])
        states[start] = (driver.trunk.state.s[:, 1].clone(), driver.trunk.state.conv[:, 1].clone())
    end = driver.length(1)
    (full,) = driver.trunk.kv
    head_kv = driver.entries(driver.executor.model.head.cache, 1, end)
    kv = driver.entries(full, 1, end)
    return Transcript(prompt, driver.tokens[1], driver.logits[1], states, kv, head_kv, first_drafts)
