"""Every weight that a config implies, with its exact shape: [out, in] for matrices, y = W x.

Names are module names, normalised (see names.py); the tensor of a plain module is `<name>.weight`, except for
bare parameters (A_log, dt_bias, fused experts), whose name is the tensor's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pilotfish.engine.config import FULL, ModelConfig


class ExpertForm(Enum):
    """How a layer's routed experts are stored: one matrix each, gate and up as one 3-D tensor, or three 3-D tensors."""

    SINGLE = "single"
    FUSED = "fused"
    STACKED = "stacked"


@dataclass(frozen=True)
class Experts:
    """A layer's routed experts; packs that dropped some have fewer in some layers than the config says."""

    form: ExpertForm
    count: int


ExpertsOf = Callable[[str], Experts]
"""Prefix, up to and with `mlp.` -> the experts there."""


class Kind(Enum):
    """What a weight is: only a LINEAR or ROUTER matrix may be stored packed."""

    LINEAR = "linear"
    ROUTER = "router"
    EMBEDDING = "embedding"
    NORM = "norm"
    CONV = "convolution"
    BARE = "parameter"
    FUSED_EXPERTS = "fused experts"


BARE_KINDS = frozenset({Kind.BARE, Kind.FUSED_EXPERTS})
PACKABLE_KINDS = frozenset({Kind.LINEAR, Kind.ROUTER})


@dataclass(frozen=True)
class Expected:
    kind: Kind
    shape: tuple[int, ...]

    @property
    def suffix(self) -> str:
        """What the tensor's name has after the module's when it is plain."""
        return "" if self.kind in BARE_KINDS else ".weight"


Inventory = dict[str, Expected]


def trunk(config: ModelConfig, experts_of: ExpertsOf) -> Inventory:
    """All weights of the trunk."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found: Inventory = {
        "model.embed_tokens": Expected(Kind.EMBEDDING, (vocab, hidden)),
        "model.norm": Expected(Kind.NORM, (hidden,)),
    }
    if not config.tie_word_embeddings:
        found["lm_head"] = Expected(Kind.LINEAR, (vocab, hidden))
    for i, kind in enumerate(config.layer_types):
        found |= _layer(config, f"model.layers.{i}.", kind == FULL, experts_of)
    return found


def mtp(config: ModelConfig, experts_of: ExpertsOf) -> Inventory:
    """All weights of the one-layer multi-token-prediction head; embedding and output head are the trunk's."""
    hidden = config.hidden_size
    found: Inventory = {"mtp.fc": Expected(Kind.LINEAR, (hidden, 2 * hidden))}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}"] = Expected(Kind.NORM, (hidden,))
    return found | _layer(config, "mtp.layers.0.", True, experts_of)


def _layer(config: ModelConfig, prefix: str, is_full: bool, experts_of: ExpertsOf) -> Inventory:
    norm = Expected(Kind.NORM, (config.hidden_size,))
    found = {f"{prefix}input_layernorm": norm, f"{prefix}post_attention_layernorm": norm}
    found |= _full_attention(config, f"{prefix}self_attn.") if is_full else _delta_net(config, f"{prefix}linear_attn.")
    mlp = f"{prefix}mlp."
    return found | (
        _moe(config, mlp, experts_of(mlp)) if config.is_moe else _glu(config, mlp, config.intermediate_size)
    )


def _full_attention(config: ModelConfig, prefix: str) -> Inventory:
    """q_proj holds each head's query rows followed by its gate rows."""
    hidden, dim = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        f"{prefix}q_proj": Expected(Kind.LINEAR, (2 * query, hidden)),
        f"{prefix}k_proj": Expected(Kind.LINEAR, (key, hidden)),
        f"{prefix}v_proj": Expected(Kind.LINEAR, (key, hidden)),
        f"{prefix}o_proj": Expected(Kind.LINEAR, (hidden, query)),
        f"{prefix}q_norm": Expected(Kind.NORM, (dim,)),
        f"{prefix}k_norm": Expected(Kind.NORM, (dim,)),
    }


def _delta_net(config: ModelConfig, prefix: str) -> Inventory:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        f"{prefix}in_proj_qkv": Expected(Kind.LINEAR, (config.conv_dim, hidden)),
        f"{prefix}in_proj_z": Expected(Kind.LINEAR, (config.value_dim, hidden)),
        f"{prefix}in_proj_b": Expected(Kind.LINEAR, (heads, hidden)),
        f"{prefix}in_proj_a": Expected(Kind.LINEAR, (heads, hidden)),
        f"{prefix}conv1d": Expected(Kind.CONV, (config.conv_dim, 1, config.linear_conv_kernel_dim)),
        f"{prefix}A_log": Expected(Kind.BARE, (heads,)),
        f"{prefix}dt_bias": Expected(Kind.BARE, (heads,)),
        f"{prefix}norm": Expected(Kind.NORM, (config.linear_value_head_dim,)),
        f"{prefix}out_proj": Expected(Kind.LINEAR, (hidden, config.value_dim)),
    }


def _glu(config: ModelConfig, prefix: str, width: int) -> Inventory:
    hidden = config.hidden_size
    return {
        f"{prefix}gate_proj": Expected(Kind.LINEAR, (width, hidden)),
        f"{prefix}up_proj": Expected(Kind.LINEAR, (width, hidden)),
        f"{prefix}down_proj": Expected(Kind.LINEAR, (hidden, width)),
    }


def _moe(config: ModelConfig, prefix: str, routed: Experts) -> Inventory:
    hidden, experts, width, form = config.hidden_size, routed.count, config.moe_intermediate_size, routed.form
    found = {
        f"{prefix}gate": Expected(Kind.ROUTER, (experts, hidden)),
        f"{prefix}shared_expert_gate": Expected(Kind.LINEAR, (1, hidden)),
    }
    found |= _glu(config, f"{prefix}shared_expert.", config.shared_expert_intermediate_size)
    down = {f"{prefix}experts.down_proj": Expected(Kind.FUSED_EXPERTS, (experts, hidden, width))}
    if form is ExpertForm.FUSED:
        return (
            found | down | {f"{prefix}experts.gate_up_proj": Expected(Kind.FUSED_EXPERTS, (experts, 2 * width, hidden))}
        )
    if form is ExpertForm.STACKED:
        inner = Expected(Kind.FUSED_EXPERTS, (experts, width, hidden))
        return found | down | {f"{prefix}experts.gate_proj": inner, f"{prefix}experts.up_proj": inner}
    for i in range(experts):
        found |= _glu(config, f"{prefix}experts.{i}.", width)
    return found
