"""The MTP head as a torch module that gradients pass through: the serving head's arithmetic over whole rows of text.

Unrolled as drafting does it: depth 1 reads the trunk's hidden states, each deeper one the head's own output. Of depth 1
a position attends to the pairs up to its own; of a deeper one to the same pairs and to the entries of its own chain.
B = rows, T = pairs of a row, H = hidden, h / kv = query / key heads, D = head width, E = experts, k = depths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from pilotfish.engine.config import ModelConfig
from pilotfish.kernels.moe import route
from pilotfish.kernels.rope import apply_rope, inverse_frequencies, rope_angles

INITIAL_STD = 0.02
Chain = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, T, kv, D] of the depths so far."""


class TrainableNorm(nn.Module):
    """x / rms(x) * (1 + w), fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, self.eps)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, width), _linear(hidden, width)
        self.down_proj = _linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Moe(nn.Module):
    """`balance` is Switch's loss of the last call (Fedus et al. 2021, arXiv:2101.03961): 1 where the load is even."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, self.top_k = config.hidden_size, config.num_experts_per_tok
        self.gate, self.shared_expert_gate = _linear(hidden, config.num_experts), _linear(hidden, 1)
        self.experts = nn.ModuleList(Mlp(hidden, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.shared_expert = Mlp(hidden, config.shared_expert_intermediate_size)
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        logits = self.gate(flat).float()
        weights, ids = route(logits, self.top_k)
        load = F.one_hot(ids, len(self.experts)).float().mean((0, 1))
        self.balance = len(self.experts) * (load * logits.softmax(-1).mean(0)).sum()
        out = self.shared_expert(flat).float() * torch.sigmoid(self.shared_expert_gate(flat).float())
        for number in ids.unique().tolist():
            rows, ranks = torch.where(ids == number)
            part = self.experts[number](flat[rows]).float() * weights[rows, ranks, None]
            out = out.index_add(0, rows, part)
        return out.view_as(x)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden = config.hidden_size
        self.q_proj = _linear(hidden, 2 * self.heads * self.dim)
        self.k_proj, self.v_proj = _linear(hidden, self.kv * self.dim), _linear(hidden, self.kv * self.dim)
        self.o_proj = _linear(self.heads * self.dim, hidden)
        self.q_norm, self.k_norm = (
            TrainableNorm(self.dim, config.rms_norm_eps),
            TrainableNorm(self.dim, config.rms_norm_eps),
        )

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], chain: Chain) -> torch.Tensor:
        """[B, T, H]; appends this depth's keys and values to `chain`."""
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, self.heads, 2, self.dim).unbind(3)
        k, v = (proj(x).view(batch, length, self.kv, self.dim) for proj in (self.k_proj, self.v_proj))
        q, k = apply_rope(self.q_norm(q), *angles), apply_rope(self.k_norm(k), *angles)
        chain.append((k, v.float()))
        mixed = _attend(q * self.dim**-0.5, chain)
        gated = mixed.flatten(2) * torch.sigmoid(gate.flatten(2).float())
        out: torch.Tensor = self.o_proj(gated)
        return out


def _attend(q: torch.Tensor, chain: Chain) -> torch.Tensor:
    """[B, T, h, D]: causal over the first depth's entries, and each position's own entry of every later depth."""
    batch, length, heads, dim = q.shape
    kv = chain[0][0].shape[2]
    q = q.view(batch, length, kv, heads // kv, dim).permute(0, 2, 3, 1, 4)
    k, v = (entries.transpose(1, 2)[:, :, None] for entries in chain[0])
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ k.mT).masked_fill(hidden, float("-inf"))]
    own = [tuple(entries.transpose(1, 2)[:, :, None] for entries in depth) for depth in chain[1:]]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat(scores, -1).softmax(-1)
    out = weights[..., :length] @ v
    for number, (_, v) in enumerate(own):
        out = out + weights[..., length + number, None] * v
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


class TrainableLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = TrainableNorm(width, eps), TrainableNorm(width, eps)
        self.self_attn = Attention(config)
        self.mlp = Moe(config) if config.is_moe else Mlp(width, config.intermediate_size)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], chain: Chain) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, chain)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainableHead(nn.Module):
    """Parameters fp32, named as a checkpoint names them below `mtp.`, experts one by one."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = _linear(2 * width, width)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = TrainableNorm(width, eps), TrainableNorm(width, eps)
        self.layers = nn.ModuleList([TrainableLayer(config)])
        self.norm = TrainableNorm(width, eps)
        ramp = config.yarn.ramp if config.yarn else None
        inv_freq = inverse_frequencies(config.rotary_dim, config.rope_theta, ramp=ramp)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_factor = config.yarn.attention_factor if config.yarn else 1.0

    def step(self, embedding: torch.Tensor, hidden: torch.Tensor, depth: int, chain: Chain) -> torch.Tensor:
        """Depth 1, 2, .. for all positions at once: fp32 [B, T, H], from embeddings and hidden states of that shape."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1)).float()
        assert isinstance(self.inv_freq, torch.Tensor)
        cos, sin = rope_angles(torch.arange(x.shape[1], device=x.device) + depth - 1, self.inv_freq)
        angles = cos * self.attention_factor, sin * self.attention_factor
        return self.norm(self.layers[0](x, angles, chain))

    def unroll(
        self, hidden: torch.Tensor, depths: int, embed_next: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Outputs of depths 1 .. k. embed_next(d, what depth d reads as hidden): the embeddings that depth d reads."""
        chain: Chain = []
        outputs: list[torch.Tensor] = []
        for depth in range(1, depths + 1):
            hidden = self.step(embed_next(depth, hidden), hidden, depth, chain)
            outputs.append(hidden)
        return outputs

    def balance(self) -> torch.Tensor:
        """The balancing loss of the last step; 0 for a dense head."""
        mlp = self.layers[0].mlp
        return mlp.balance if isinstance(mlp, Moe) else self.fc.weight.new_zeros(())


def _linear(columns: int, rows: int) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(linear.weight, std=INITIAL_STD)
    return linear
