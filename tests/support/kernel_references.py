"""The launchers of kernels/cuda in plain torch, over the definitions in kernels/*.py and with the launchers' arguments:
what the kernels are held to. tests/unit/kernels/cuda holds those of whole layers to the torch table."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pilotfish.kernels.activation import sigmoid, silu, softplus
from pilotfish.kernels.attention import PAGE, pages_for, row_tiles, window_attention, write_kv
from pilotfish.kernels.conv import causal_conv
from pilotfish.kernels.cuda import attention, packing
from pilotfish.kernels.cuda.attention import AttentionScratch, RowPlan
from pilotfish.kernels.cuda.delta_net import DeltaScratch
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts
from pilotfish.kernels.cuda.packing import TILE, Packed, PackedRows
from pilotfish.kernels.delta_net import delta_read, delta_step
from pilotfish.kernels.norm import l2_norm, rms_norm
from pilotfish.kernels.rope import apply_rope, rope_angles


def plan_rows_reference(
    slots: torch.Tensor,
    length: torch.Tensor,
    inv_freq: torch.Tensor,
    width: int,
    step: int,
    num_heads: int,
    num_kv_heads: int,
    plan: RowPlan,
) -> None:
    """`plan_rows` in plain torch, without a wait for the device."""
    batch, num_rows = len(slots), len(slots) * width
    starts = length[slots.long()].int() + step
    plan.positions[:num_rows] = (starts[:, None] + torch.arange(width, device=starts.device)).flatten()
    row_cos, row_sin = rope_angles(plan.positions[:num_rows], inv_freq)
    plan.cos[:num_rows], plan.sin[:num_rows] = row_cos[:, 0], row_sin[:, 0]
    each = num_kv_heads * attention.num_tiles(width, num_heads // num_kv_heads)
    units, in_chunk = _ceil(starts + width + attention.MAX_LAG, attention.UNIT), attention.CHUNK // attention.UNIT
    size = _item_units(units, each, in_chunk)
    plan.items[0] = size * attention.UNIT
    plan.items[[1, batch + 2]] = 0
    plan.items[2 : batch + 2] = (_ceil(units, size) * each).cumsum(0)
    plan.items[batch + 3 : 2 * batch + 3] = (_ceil(units, in_chunk) * each).cumsum(0)


def _item_units(units: torch.Tensor, each: int, in_chunk: int) -> torch.Tensor:
    """The size that ends first where PROGRAMS programs take turns; of several the first."""
    programs, k = attention.PROGRAMS, torch.arange(32, device=units.device)
    least = _ceil(units.sum() * each, programs).clamp(min=1)
    sizes = torch.where(k < 28, least + k * _ceil(least, 16), in_chunk << (k - 28).clamp(min=0))
    if attention.ITEM_UNITS:
        sizes = torch.where(k < 28, attention.ITEM_UNITS, -(-attention.ITEM_UNITS // in_chunk) * in_chunk)
    items = _ceil(units[:, None], sizes).sum(0) * each
    turns = _ceil(items, programs) * (sizes.clamp(max=units.max()) + 2)
    turns = torch.where((sizes % in_chunk > 0) & (items > programs), 1 << 24, turns)
    return sizes[(turns * 32 + k).argmin()]


def _ceil(numbers: torch.Tensor, divisor: torch.Tensor | int) -> torch.Tensor:
    return (numbers + divisor - 1).div(divisor, rounding_mode="floor")


def attention_window_reference(
    projected: torch.Tensor,
    slots: torch.Tensor,
    plan: RowPlan,
    tables: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qk_norm: torch.Tensor,
    eps: float,
    width: int,
    scratch: AttentionScratch,
    out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
) -> None:
    """`attention_window` in plain torch, from the CPU path's operators; reads positions and tables on the host."""
    num_rows, kv, dim = len(slots) * width, k_cache.shape[1], k_cache.shape[3]
    heads = len(qk_norm) - kv
    slots, positions = slots.long(), plan.positions[:num_rows].long()
    qk, v, gate = projected[:num_rows].split([(heads + kv) * dim, kv * dim, heads * dim], dim=-1)
    qk = rms_norm(qk.reshape(num_rows, heads + kv, dim), qk_norm, eps, torch.float32)
    q, k = apply_rope(qk, plan.cos[:num_rows, None], plan.sin[:num_rows, None]).split([heads, kv], dim=1)
    places = positions + lag
    pages = tables[slots.repeat_interleave(width), places // PAGE].long()
    values = v.reshape(num_rows, kv, dim).float().nan_to_num(0.0, 0.0, 0.0)
    write_kv(k_cache, v_cache, pages, places % PAGE, k, values, k_scale, v_scale)
    starts = positions[::width].tolist()
    used = [tables[slot, : pages_for(start + width + lag)].tolist() for slot, start in zip(slots, starts, strict=True)]
    tiles = row_tiles(starts, used, width, q.device, lag)
    mixed = window_attention(q.contiguous(), k_cache, v_cache, tiles, k_scale, v_scale)
    out[:num_rows] = (mixed.flatten(1) * sigmoid(gate.float())).to(out.dtype)


def gdn_window_reference(
    projected: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    history: torch.Tensor,
    pending: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_norm: torch.Tensor,
    eps: float,
    width: int,
    scratch: DeltaScratch | None,
    out: torch.Tensor,
    most_pending: int = 0,
) -> None:
    """`gdn_window` in plain torch, without a wait for the device; `scratch` is left alone."""
    slots = slots.long()
    batch, num_rows = len(slots), len(slots) * width
    heads, dk, dv = state.shape[1:]
    channels, most = history.shape[2], pending.shape[1]
    u, z, gates = projected[:num_rows].split([channels, heads * dv, 2 * heads], dim=-1)
    rows = torch.cat((u, gates), dim=-1).view(batch, width, -1)
    count = counts[slots].long().clamp(0, most)
    # time t of a sequence: its accepted rows, then the window's; past those the last one again, unused
    time = torch.arange(most + width, device=state.device)
    index = torch.where(time < count[:, None], time, most + (time - count[:, None]).clamp(max=width - 1))
    joined = torch.cat((pending[slots], rows), dim=1)
    taken = joined.gather(1, index[..., None].expand(-1, -1, joined.shape[2]))
    inputs = torch.cat((history[slots], taken[..., :channels]), dim=1)
    b, a = taken[..., channels:].float().chunk(2, dim=-1)
    beta, decay = sigmoid(b), (decay_rate * softplus(a + dt_bias)).exp()
    q, k, v = _heads(causal_conv(inputs, conv_weight), heads, dk, dv)

    after, committed, reads = state[slots], state[slots], []
    for t in range(most + width):
        committed = torch.where((count == t)[:, None, None, None], after, committed)
        after = delta_step(
            after, k[:, t, :, :, None], v[:, t, :, None], *(g[:, t, :, None, None] for g in (beta, decay))
        )
        reads.append(delta_read(after, q[:, t, :, :, None]))
    own = count[:, None] + torch.arange(width, device=state.device)
    window = torch.stack(reads, dim=1).gather(1, own[..., None, None].expand(-1, -1, heads, dv))
    normed = rms_norm(window.flatten(0, 1), gate_norm, eps, torch.float32)
    out[:num_rows] = (normed.flatten(1) * silu(z.float())).to(out.dtype)

    left = torch.where(count + width <= most_pending, count, 0)
    newest = torch.where(left > 0, 0, count)[:, None] + torch.arange(history.shape[1], device=state.device)
    history[slots] = inputs.gather(1, newest[..., None].expand(-1, -1, channels))
    state[slots] = torch.where((left > 0)[:, None, None, None], state[slots], committed)
    pending[slots[:, None], left[:, None] + torch.arange(width, device=state.device)] = rows


def _heads(mixed: torch.Tensor, heads: int, dk: int, dv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (normed and scaled), k (normed), v of the convolved channels, fp32 [B, T, Hv, width] each."""
    qk, v = mixed.split([mixed.shape[-1] - heads * dv, heads * dv], dim=-1)
    factor = torch.tensor([dk**-0.5, 1.0], device=qk.device)[:, None, None]
    qk = l2_norm(qk.unflatten(-1, (2, -1, dk)), factor)
    q, k = qk.repeat_interleave(heads // qk.shape[-2], dim=-2).unbind(-3)
    return q, k, v.unflatten(-1, (heads, dv))


def embed_rows_reference(
    embedding_VH: torch.Tensor | PackedRows,
    scale_H: torch.Tensor,
    eps: float,
    slots_B: torch.Tensor,
    last_token_S: torch.Tensor,
    drafts_SK: torch.Tensor,
    length_S: torch.Tensor,
    width: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    x: torch.Tensor,
    h: torch.Tensor,
) -> None:
    """`embed_rows` in plain torch."""
    slots, num_rows = slots_B.long(), len(slots_B) * width
    for out in (tokens, positions, x, h):
        out[num_rows:] = 0
    tokens[:num_rows] = torch.cat((last_token_S[slots][:, None], drafts_SK[slots, : width - 1]), dim=1).flatten()
    positions[:num_rows] = (length_S[slots][:, None] + torch.arange(width, device=slots.device)).flatten()
    x[:num_rows] = embedding_VH[tokens[:num_rows]].float()
    h[:num_rows] = rms_norm(x[:num_rows], scale_H, eps, h.dtype)


def add_norm_reference(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    scale_H: torch.Tensor,
    eps: float,
    h: torch.Tensor,
    rows: torch.Tensor | None = None,
    store: bool = True,
) -> None:
    """`add_norm` in plain torch."""
    source = slice(len(h)) if rows is None else rows.long()
    value = x[source].float() if delta is None else x[source].float() + delta[source].float()
    if store and delta is not None and rows is None:
        x[: len(h)] = value
    h.copy_(rms_norm(value, scale_H, eps, h.dtype))


def pair_norm_reference(
    tokens_R: torch.Tensor,
    embedding_VH: torch.Tensor | PackedRows,
    hidden_RH: torch.Tensor,
    embedding_scale_H: torch.Tensor,
    hidden_scale_H: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    num_rows: int,
) -> None:
    """`pair_norm` in plain torch."""
    embedded = rms_norm(embedding_VH[tokens_R[:num_rows].long()], embedding_scale_H, eps, out.dtype)
    out[:num_rows] = torch.cat((embedded, rms_norm(hidden_RH[:num_rows], hidden_scale_H, eps, out.dtype)), dim=1)


def combine_reference(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared_gate: torch.Tensor,
    x: torch.Tensor,
    norm_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> None:
    """`combine` in plain torch."""
    rows, top_k = weights.shape
    total = parts[:, 0].float() * weights[:, :1]
    for rank in range(1, top_k):
        total = torch.addcmul(total, parts[:, rank].float(), weights[:, rank : rank + 1])
    total = torch.addcmul(total, parts[:, top_k].float(), shared_gate[:, None])
    x[:rows] += total
    if norm_scale is not None and out is not None:
        out[:rows] = F.rms_norm(x[:rows], (x.shape[1],), norm_scale, eps).to(out.dtype)


def expert_rows_reference(
    packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor, scratch: ExpertScratch
) -> torch.Tensor:
    """`GroupedExperts.rows` in plain torch, in fp32; rounded where the kernels round."""
    num_rows = len(ids)
    for row in range(num_rows):
        for rank, expert in enumerate([*ids[row].tolist(), packed.num_experts]):
            gate_up, down = dequantized_expert(packed, expert)
            gate, up = (x[row].float() @ gate_up.T).chunk(2)
            inner = (F.silu(gate) * up).to(x.dtype)
            scratch.inner[row, rank, : len(inner)] = inner
            scratch.out[row, rank] = inner.float() @ down.T
    return scratch.out[:num_rows]


def dequantized_expert(packed: GroupedExperts, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [2 I, H], gate then up, and [H, I] of an expert; the shared one is number E."""
    group = packed.groups[0] if expert < packed.groups[0].num_experts else packed.groups[-1]
    index = expert if group is packed.groups[0] else 0
    gate_up, down = (_take(part, index, group.num_experts) for part in (group.gate_up, group.down))
    values = packing.unpack(gate_up, packed.hidden).view(-1, 2, TILE, packed.hidden).transpose(0, 1)
    gate_up_values = values.reshape(2, -1, packed.hidden)[:, : group.width].reshape(-1, packed.hidden)
    return gate_up_values, packing.unpack(down, group.width)[: packed.hidden]


def _take(part: Packed, index: int, count: int) -> Packed:
    """The tiles of one of `count` experts."""
    height = part.num_tiles // count
    rows = slice(index * height, (index + 1) * height)
    scale = None if part.block_scale is None else part.block_scale[rows]
    return Packed(part.format, part.data[rows], part.place[rows], part.number[rows], part.divides, scale)


def dequantized(product: PackedLinear) -> torch.Tensor:
    """fp32 [N, K] ([2 N, K], gate then up, with `swiglu`): exactly what the parts' own `dequantize` give."""
    height = product.out_features * (2 if product.swiglu else 1)
    out = torch.empty((height, product.in_features), dtype=torch.float32, device=product.ranges[0].data.device)
    for part in product.ranges:
        values = packing.unpack(part, product.in_features).view(part.num_tiles, TILE, -1)
        for tile, (first, count) in enumerate(part.place.tolist()):
            if product.swiglu:
                first += (tile % 2) * product.out_features
            out[first : first + count] = values[tile, :count]
    return out
