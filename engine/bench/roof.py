"""The fewest bytes that a round must move, and the time that takes at the memory's rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.mlp import MoeMlp
from pilotfish.engine.model.trunk import Layer
from pilotfish.kernels.moe import GatedMlp

COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Frame:
    """A round: sequences, drafts each, tokens in each one's caches; `stored`: the share of rounds that store the
    recurrent state."""

    batch: int
    depth: int
    context: int
    stored: float = 1.0

    @property
    def rows(self) -> int:
        return self.batch * (self.depth + 1)


def distinct_experts(num_experts: int, top_k: int, rows: int) -> float:
    """Expected number under uniform routing."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def stored_share(width: int, accepted: float, most_pending: int) -> float:
    """The share of rounds that store the state, where pending rows grow by `accepted` a round while they and a window
    of `width` are no more than most_pending."""
    return 1 / (1 + max(0, most_pending - width) // accepted)


def round_bytes(model: Model, frame: Frame, draft_vocab: int | None = None) -> float:
    """Weights once (of experts the distinct ones, routed uniformly), state read, and written in rounds that store it,
    keys and values read, the head once for the window and once for each draft after the first, lm_head for the window
    and for each draft."""
    trunk, config = model.trunk, model.config
    routed = (config.num_experts, config.num_experts_per_tok)
    total = float(trunk.lm_head.num_bytes)
    total += sum(_layer_bytes(layer, frame.rows, *routed) for layer in trunk.layers)
    state = trunk.state
    per_slot = (state.s.nbytes + state.conv.nbytes) / state.s.shape[1] if state.s.numel() else 0.0
    total += (1 + frame.stored) * per_slot * frame.batch
    per_token = [(cache.k.nbytes + cache.v.nbytes) / (cache.k.shape[0] * cache.k.shape[2]) for cache in trunk.kv]
    total += sum(per_token) * frame.context * frame.batch
    if frame.depth and isinstance(model.head, MtpHead):
        total += _head_bytes(model, model.head, frame, draft_vocab)
    return total


def _head_bytes(model: Model, head: MtpHead, frame: Frame, draft_vocab: int | None) -> float:
    config = model.config
    per_token = sum((c.k.nbytes + c.v.nbytes) / (c.k.shape[0] * c.k.shape[2]) for c in head.caches)
    total = 0.0
    for rows in (frame.rows, *[frame.batch] * (frame.depth - 1)):
        total += _layer_bytes(head.layer, rows, config.num_experts, config.num_experts_per_tok)
        total += head.fc.num_bytes + per_token * frame.context * frame.batch
    share = 1.0 if draft_vocab is None else draft_vocab / config.vocab_size
    return total + frame.depth * model.trunk.lm_head.num_bytes * share


def _layer_bytes(layer: Layer, rows: int, num_experts: int, top_k: int) -> float:
    mixer, mlp = layer.mixer, layer.mlp
    first = mixer.qkvg if isinstance(mixer, GatedAttention) else mixer.in_proj
    total = float(first.num_bytes + mixer.output.num_bytes)
    if isinstance(mlp, GatedMlp):
        return total + mlp.gate_up.num_bytes + mlp.down.num_bytes
    total += mlp.router.num_bytes
    each: float
    shared: float
    if isinstance(mlp, MoeMlp):
        each = mlp.experts[0].gate_up.num_bytes + mlp.experts[0].down.num_bytes
        shared = mlp.shared.gate_up.num_bytes + mlp.shared.down.num_bytes
    else:
        each = shared = mlp.experts.num_bytes / (num_experts + 1)
    return total + each * distinct_experts(num_experts, top_k, rows) + shared


def memory_rate(device: torch.device) -> float:
    """Bytes/s of a large copy, read and written counted; the median of nine."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / sorted(seconds[1:])[4]
