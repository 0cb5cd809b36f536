"""The MTP head computed from scratch: one row at a time, plain torch in fp32 on the host, from the weights as loaded.

It has no cache, window, batch or kernel in common with the engine's head, so it says what a sound head drafts after a
text and how many of its drafts are accepted. Of the engine it takes the trunk's hidden states of the whole text alone.
H = hidden, T = tokens of the text, h = heads, kv = key/value heads, D = head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.config import ModelConfig

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "mtp.layers.0"
KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [n, kv, D] each."""


@dataclass(frozen=True)
class Written:
    """A text in the head's own terms: pair i is (hidden i, token i + 1)."""

    pairs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class ScratchHead:
    """Keeps the head's weights on the host as they were read; a matrix is made plain when it is needed."""

    def __init__(self, weights: Mapping[str, Weight], config: ModelConfig, inv_freq: torch.Tensor):
        self.config, self.inv_freq = config, inv_freq.float().cpu()
        self._weights = {name: weight.to("cpu") for name, weight in weights.items()}
        # of experts only those that are chosen
        self._plain = lru_cache(maxsize=96)(self._make_plain)

    @staticmethod
    def takes(name: str) -> bool:
        """Whether the weight of this name is wanted."""
        return is_mtp(name) or name in (EMBEDDING, LM_HEAD)

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor) -> Written:
        """tokens int64 [T], hidden [T, H] of the trunk."""
        pairs = self._pair(tokens[1:].cpu(), hidden[:-1].float().cpu())
        return Written(pairs, *self._keys_and_values(pairs, torch.arange(len(pairs))))

    def start(self, text: Written, length: int) -> tuple[torch.Tensor, KeysAndValues]:
        """The head's hidden [H] for draft 1 when `length` tokens are in the caches, and what it has read."""
        rows = text.keys[:length], text.values[:length]
        return self._output(text.pairs[length - 1], rows, length - 1), rows

    def go_on(self, hidden: torch.Tensor, draft: int, rows: KeysAndValues) -> tuple[torch.Tensor, KeysAndValues]:
        """The head's own hidden after one more draft."""
        position = len(rows[0])
        pair = self._pair(torch.tensor([draft]), hidden[None])
        more = self._keys_and_values(pair, torch.tensor([position]))
        rows = torch.cat((rows[0], more[0])), torch.cat((rows[1], more[1]))
        return self._output(pair[0], rows, position), rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [V]."""
        return self._product(EMBEDDING if LM_HEAD not in self._weights else LM_HEAD, hidden)

    # -- one row ------------------------------------------------------------------------------------------------------

    def _pair(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self._norm(self._plain(EMBEDDING)[tokens], "mtp.pre_fc_norm_embedding")
        return self._product("mtp.fc.weight", torch.cat((embedded, self._norm(hidden, "mtp.pre_fc_norm_hidden")), -1))

    def _keys_and_values(self, pairs: torch.Tensor, positions: torch.Tensor) -> KeysAndValues:
        kv, dim = self.config.num_key_value_heads, self.config.head_dim
        normed = self._norm(pairs, f"{LAYER}.input_layernorm")
        keys = self._product(f"{LAYER}.self_attn.k_proj.weight", normed).view(-1, kv, dim)
        values = self._product(f"{LAYER}.self_attn.v_proj.weight", normed).view(-1, kv, dim)
        return self._rotate(self._norm(keys, f"{LAYER}.self_attn.k_norm"), positions), values

    def _output(self, pair: torch.Tensor, rows: KeysAndValues, position: int) -> torch.Tensor:
        x = pair + self._attention(self._norm(pair, f"{LAYER}.input_layernorm"), rows, position)
        normed = self._norm(x, f"{LAYER}.post_attention_layernorm")
        x = x + (self._experts(normed) if self.config.is_moe else self._mlp(f"{LAYER}.mlp", normed))
        return self._norm(x, "mtp.norm")

    def _attention(self, normed: torch.Tensor, rows: KeysAndValues, position: int) -> torch.Tensor:
        heads, kv, dim = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        q, gate = self._product(f"{LAYER}.self_attn.q_proj.weight", normed).view(heads, 2, dim).unbind(1)
        q = self._rotate(self._norm(q, f"{LAYER}.self_attn.q_norm")[None], torch.tensor([position]))[0]
        keys, values = (part.repeat_interleave(heads // kv, 1).transpose(0, 1) for part in rows)
        shares = torch.softmax(keys @ q[:, :, None] * dim**-0.5, 1)
        mixed = (shares * values).sum(1) * torch.sigmoid(gate)
        return self._product(f"{LAYER}.self_attn.o_proj.weight", mixed.flatten())

    def _experts(self, normed: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(self._product(f"{LAYER}.mlp.gate.weight", normed), -1)
        chosen = sorted(range(len(shares)), key=lambda i: (-float(shares[i]), i))[: self.config.num_experts_per_tok]
        whole = sum(float(shares[i]) for i in chosen)
        gate = torch.sigmoid(self._product(f"{LAYER}.mlp.shared_expert_gate.weight", normed))
        total = gate * self._mlp(f"{LAYER}.mlp.shared_expert", normed)
        for i in chosen:
            total = total + float(shares[i]) / whole * self._mlp(f"{LAYER}.mlp.experts.{i}", normed)
        return total

    def _mlp(self, name: str, normed: torch.Tensor) -> torch.Tensor:
        gate, up = (self._product(f"{name}.{part}_proj.weight", normed) for part in ("gate", "up"))
        return self._product(f"{name}.down_proj.weight", F.silu(gate) * up)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pairs (j, j + rotary / 2) of the first dimensions turn; YaRN scales them too."""
        half = len(self.inv_freq)
        turns = torch.polar(torch.ones(()), positions.float()[:, None, None] * self.inv_freq)
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous()) * turns
        factor = self.config.yarn.attention_factor if self.config.yarn else 1.0
        return torch.cat((pairs.real * factor, pairs.imag * factor, x[..., 2 * half :]), -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config.rms_norm_eps) * (1.0 + self._plain(f"{name}.weight"))

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._plain(name).T

    def _make_plain(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
