"""The model as its formulas say it: a whole text at once, one token and one head after the other, in float64.

No tiles, no buffers, no pages, no table of operators, no code of the engine: what the round's tables are held to.
T = tokens, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def naive_forward(config: Any, weights: Weights, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Final-norm hidden [T, H] and logits [T, V], fp64, of weights by their names in a checkpoint."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for i, kind in enumerate(config.layer_types):
        x = layer(config, w, f"model.layers.{i}", x, kind == "full_attention")
    hidden = norm(x, w["model.norm.weight"], config.rms_norm_eps)
    lm_head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return hidden, hidden @ lm_head.T


def naive_head(config: Any, weights: Weights, hidden: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
    """The MTP head's hidden [T, H] of the pairs (hidden_i, token i + 1)."""
    w, eps = {name: tensor.double() for name, tensor in weights.items()}, config.rms_norm_eps
    embedded = w["model.embed_tokens.weight"][torch.tensor(next_ids)]
    pair = (
        norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps),
        norm(hidden, w["mtp.pre_fc_norm_hidden.weight"], eps),
    )
    x = layer(config, w, "mtp.layers.0", torch.cat(pair, 1) @ w["mtp.fc.weight"].T, True)
    return norm(x, w["mtp.norm.weight"], eps)


def layer(config: Any, w: Weights, name: str, x: torch.Tensor, full: bool) -> torch.Tensor:
    eps = config.rms_norm_eps
    h = norm(x, w[f"{name}.input_layernorm.weight"], eps)
    x = x + (attention(config, w, f"{name}.self_attn", h) if full else delta_net(config, w, f"{name}.linear_attn", h))
    h = norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
    return x + torch.stack([feed_forward(config, w, f"{name}.mlp", row) for row in h])


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Weights are stored as w, and multiply as 1 + w."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


def attention(config: Any, w: Weights, name: str, h: torch.Tensor) -> torch.Tensor:
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length, half = len(h), config.rotary_dim // 2
    q, gate = (h @ w[f"{name}.q_proj.weight"].T).view(length, heads, 2, dim).unbind(2)
    k, v = ((h @ w[f"{name}.{part}_proj.weight"].T).view(length, kv, dim) for part in "kv")
    q = norm(q, w[f"{name}.q_norm.weight"], config.rms_norm_eps)
    k = norm(k, w[f"{name}.k_norm.weight"], config.rms_norm_eps)
    angles = torch.arange(length)[:, None] * config.rope_theta ** (-torch.arange(half).double() / half)

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    q, k = rotated(q), rotated(k)
    out = torch.zeros(length, heads, dim, dtype=torch.float64)
    for t in range(length):
        for head in range(heads):
            own = head // (heads // kv)
            weights = (k[: t + 1, own] @ q[t, head] * dim**-0.5).softmax(0)
            out[t, head] = (weights @ v[: t + 1, own]) * gate[t, head].sigmoid()
    return out.flatten(1) @ w[f"{name}.o_proj.weight"].T


def delta_net(config: Any, w: Weights, name: str, h: torch.Tensor) -> torch.Tensor:
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    u, z, b, a = (h @ w[f"{name}.in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a"))
    taps = w[f"{name}.conv1d.weight"].squeeze(1)
    past = torch.cat((torch.zeros(taps.shape[1] - 1, u.shape[1], dtype=torch.float64), u))
    state, rows = torch.zeros(heads, dk, dv, dtype=torch.float64), []
    for t in range(len(h)):
        mixed = (past[t : t + taps.shape[1]] * taps.T).sum(0)
        mixed = mixed * mixed.sigmoid()
        q, k, v = mixed.split([key_heads * dk, key_heads * dk, heads * dv])
        q, k = (unit(part.view(key_heads, dk)).repeat_interleave(heads // key_heads, 0) for part in (q, k))
        decay = (-w[f"{name}.A_log"].exp() * softplus(a[t] + w[f"{name}.dt_bias"])).exp()
        beta, v, out = b[t].sigmoid(), v.view(heads, dv), []
        for head in range(heads):
            state[head] *= decay[head]
            error = beta[head] * (v[head] - state[head].T @ k[head])
            state[head] += k[head][:, None] * error
            out.append(state[head].T @ q[head] * dk**-0.5)
        read = torch.stack(out)
        read = read / (read.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[f"{name}.norm.weight"]
        rows.append(read.flatten() * z[t] * z[t].sigmoid())
    return torch.stack(rows) @ w[f"{name}.out_proj.weight"].T


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def feed_forward(config: Any, w: Weights, name: str, row: torch.Tensor) -> torch.Tensor:
    """Of one row [H]."""
    if not config.is_moe:
        return gated(w, name, row)
    chances = (w[f"{name}.gate.weight"] @ row).softmax(0)
    chosen = sorted(range(len(chances)), key=lambda e: (-float(chances[e]), e))[: config.num_experts_per_tok]
    out = sum(chances[e] / chances[chosen].sum() * gated(w, f"{name}.experts.{e}", row) for e in chosen)
    share = (w[f"{name}.shared_expert_gate.weight"] @ row).sigmoid()
    return out + share * gated(w, f"{name}.shared_expert", row)


def gated(w: Weights, name: str, row: torch.Tensor) -> torch.Tensor:
    gate, up = (w[f"{name}.{part}_proj.weight"] @ row for part in ("gate", "up"))
    return w[f"{name}.down_proj.weight"] @ (gate * gate.sigmoid() * up)
