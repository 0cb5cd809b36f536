"""Makes modules of a checkpoint's weights: fuses projections, applies the norm convention, checks nothing twice.

Norm weights are stored as w; every norm but the gated one of GatedDeltaNet multiplies by 1 + w. Weights leave the
dictionary as they are used, so that the two forms never stand in memory together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pilotfish.draft_heads.head import DraftHead
from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.draft_heads.vocabulary import DraftVocabulary
from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.config import FULL, ModelConfig
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import MoeMlp, PackedMoeMlp
from pilotfish.engine.model.trunk import Embedding, Layer, Norm, Trunk
from pilotfish.kernels.linear import MAX_SEGMENTS, AnyLinear, make_linear, segments
from pilotfish.kernels.moe import GatedMlp
from pilotfish.kernels.rope import inverse_frequencies

if TYPE_CHECKING:
    from pilotfish.kernels.cuda.scratch import BulkScratch


@dataclass(frozen=True)
class Model:
    """A trunk, its draft head if there is one, and the tables both use. `draft_vocabulary`: what drafts are chosen
    from, None for all ids. `scratch`, of packed weights alone: what they are expanded into for prompts."""

    config: ModelConfig
    trunk: Trunk
    head: DraftHead | None
    inv_freq: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    draft_vocabulary: DraftVocabulary | None = None
    scratch: BulkScratch | None = None

    @property
    def is_packed(self) -> bool:
        """Whether weights stand in the order of the kernels in kernels.cuda."""
        return self.scratch is not None


@dataclass(frozen=True)
class CacheSizes:
    """Pages and slots to allocate (one null page and slot included), and the rows of the largest window.

    `kv_dtype`: of keys and values, None for the model's. `kv_scales`: (k_scale, v_scale) by attention module where
    FP8 ones are divided by more than 1.
    """

    num_pages: int
    num_slots: int
    max_window: int
    kv_dtype: torch.dtype | None = None
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def build_model(
    weights: dict[str, Weight],
    config: ModelConfig,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool = False,
    draft_ids: Sequence[int] | None = None,
) -> Model:
    """Consumes `weights`. The head is built when its tensors are there. `fused`: weights in the order of the kernels
    in kernels.cuda. `draft_ids`: a vocabulary for drafts."""
    if fused:
        from pilotfish.engine.model.build_fused import FusedBuilder  # imports Triton

        return FusedBuilder(weights, config, sizes, dtype, device).model(draft_ids)
    return Builder(weights, config, sizes, dtype, device).model(draft_ids)


def with_head(model: Model, weights: dict[str, Weight], num_pages: int) -> Model:
    """The same trunk with the MTP head of these weights (`mtp.*`), which are consumed; `num_pages` as in CacheSizes."""
    builder = Builder(weights, model.config, CacheSizes(num_pages, 1, 1), model.dtype, model.device)
    head = builder.mtp_head()
    assert not weights, f"weights that the head did not take: {sorted(weights)[:3]}"
    return dataclasses.replace(model, head=head)


class Builder:
    """Weights as plain torch multiplies them."""

    def __init__(
        self,
        weights: dict[str, Weight],
        config: ModelConfig,
        sizes: CacheSizes,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.weights, self.config, self.sizes, self.dtype, self.device = weights, config, sizes, dtype, device

    def model(self, draft_ids: Sequence[int] | None = None) -> Model:
        config = self.config
        embedding = self.plain("model.embed_tokens.weight").to(self.device, self.dtype)
        draft_vocabulary = None
        if draft_ids is not None:
            whole = embedding if config.tie_word_embeddings else self.weights["lm_head.weight"]
            draft_vocabulary = self.draft_vocabulary(whole, draft_ids)
        embedded: Embedding = embedding
        if config.tie_word_embeddings:
            embedded, lm_head = self.tied(embedding)
        else:
            lm_head = self.vocabulary(self.take("lm_head.weight"))
        del embedding  # its rows may be held as lm_head alone
        layers = [self.layer(f"model.layers.{i}", kind == FULL) for i, kind in enumerate(config.layer_types)]
        kv = [self.kv_cache(f"model.layers.{i}.self_attn") for i in config.full_layers]
        state = RecurrentState.empty(config, self.sizes.num_slots, self.sizes.max_window, self.dtype, self.device)
        trunk = Trunk(embedded, layers, self.norm("model.norm"), lm_head, kv, state)
        head = self.mtp_head() if "mtp.fc.weight" in self.weights else None
        assert not self.weights, f"weights that no module took: {sorted(self.weights)[:3]}"
        ramp = config.yarn.ramp if config.yarn else None
        inv_freq = inverse_frequencies(config.rotary_dim, config.rope_theta, self.device, ramp)
        return Model(config, trunk, head, inv_freq, self.dtype, self.device, draft_vocabulary)

    def tied(self, embedding: torch.Tensor) -> tuple[Embedding, AnyLinear]:
        """An embedding that is lm_head too, as both."""
        return embedding, self.vocabulary(embedding)

    def draft_vocabulary(self, lm_head: Weight, draft_ids: Sequence[int]) -> DraftVocabulary:
        """Rows of their own beside the whole matrix: a product reads them in one piece."""
        rows = torch.tensor(draft_ids, device=lm_head.device)
        taken = lm_head[rows] if isinstance(lm_head, torch.Tensor) else lm_head.take_rows(rows)
        return DraftVocabulary(rows.int().to(self.device), self.vocabulary(taken))

    def mtp_head(self) -> MtpHead:
        return MtpHead(
            self.linear("mtp.fc"),
            self.norm("mtp.pre_fc_norm_embedding"),
            self.norm("mtp.pre_fc_norm_hidden"),
            self.layer("mtp.layers.0", True),
            self.norm("mtp.norm"),
            self.kv_cache("mtp.layers.0.self_attn", lag=1),
        )

    def layer(self, name: str, full: bool) -> Layer:
        mixer = self.attention(f"{name}.self_attn") if full else self.delta_net(f"{name}.linear_attn")
        mlp = self.moe(f"{name}.mlp") if self.config.is_moe else self.dense_mlp(f"{name}.mlp")
        return Layer(self.norm(f"{name}.input_layernorm"), mixer, self.norm(f"{name}.post_attention_layernorm"), mlp)

    def attention(self, name: str) -> GatedAttention:
        config = self.config
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # q_proj holds [q | gate] per head: split by rows, which a packed matrix can be too
        q, gate = _split_heads(self.take(f"{name}.q_proj.weight"), heads, dim)
        qkvg = [q, self.take(f"{name}.k_proj.weight"), self.take(f"{name}.v_proj.weight"), gate]
        q_norm, k_norm = (self.scale(f"{name}.{part}_norm.weight") for part in "qk")
        if config.yarn:
            # what YaRN multiplies cosine and sine by: a rotation is linear, and every path reads these norms
            for norm in (q_norm, k_norm):
                norm[: config.rotary_dim] *= config.yarn.attention_factor
        return GatedAttention(
            self.product(qkvg),
            self.row_parallel(f"{name}.o_proj", heads),
            torch.cat((q_norm.expand(heads, dim), k_norm.expand(kv, dim))),
            heads,
            kv,
            dim,
            config.rms_norm_eps,
            self.dtype,
        )

    def delta_net(self, name: str) -> GatedDeltaNet:
        config = self.config
        return GatedDeltaNet(
            self.linear(*(f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
            self.row_parallel(f"{name}.out_proj", config.linear_num_value_heads),
            self.float32(f"{name}.conv1d.weight").squeeze(1).T.contiguous(),
            -self.float32(f"{name}.A_log").exp(),
            self.float32(f"{name}.dt_bias"),
            self.float32(f"{name}.norm.weight"),
            torch.tensor([config.linear_key_head_dim**-0.5, 1.0], device=self.device)[:, None, None],
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.rms_norm_eps,
            self.dtype,
        )

    def moe(self, name: str) -> MoeMlp | PackedMoeMlp:
        config = self.config
        router = self.router(name)
        # from the router, not the config: some packs have dropped experts, layer by layer
        experts = [self.expert_mlp(f"{name}.experts.{i}") for i in range(len(router[0]))]
        shared = self.expert_mlp(f"{name}.shared_expert")
        return MoeMlp(self.product(list(router)), experts, shared, config.num_experts_per_tok)

    def router(self, name: str) -> list[torch.Tensor]:
        return [self.plain(f"{name}.{part}.weight").to(self.device) for part in ("gate", "shared_expert_gate")]

    def expert_mlp(self, name: str) -> GatedMlp:
        return GatedMlp(self.linear(f"{name}.gate_proj", f"{name}.up_proj"), self.linear(f"{name}.down_proj"))

    def dense_mlp(self, name: str) -> GatedMlp:
        return GatedMlp(self.linear(f"{name}.gate_proj", f"{name}.up_proj"), self.row_parallel(f"{name}.down_proj"))

    def linear(self, *names: str) -> AnyLinear:
        return self.product([self.take(f"{name}.weight") for name in names])

    def row_parallel(self, name: str, num_heads: int = MAX_SEGMENTS) -> AnyLinear:
        """A product that devices may share by K, whole heads each."""
        weight = self.take(f"{name}.weight")
        return self.product([weight], segments(weight.shape[1], num_heads))

    def product(self, parts: Sequence[Weight], num_segments: int = 0) -> AnyLinear:
        """`num_segments`: of a row-parallel product, 0 for another."""
        return make_linear(parts, self.dtype, self.device, max(1, num_segments))

    def vocabulary(self, lm_head: Weight) -> AnyLinear:
        """All rows of lm_head, or some: a product of few rows of x, of prompts too."""
        return self.product([lm_head])

    def norm(self, name: str) -> Norm:
        return Norm(self.scale(f"{name}.weight"), self.config.rms_norm_eps, self.dtype)

    def scale(self, name: str) -> torch.Tensor:
        return 1.0 + self.float32(name)

    def float32(self, name: str) -> torch.Tensor:
        return self.plain(name).to(self.device, torch.float32)

    def plain(self, name: str) -> torch.Tensor:
        weight = self.take(name)
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize(self.dtype)

    def take(self, name: str) -> Weight:
        return self.weights.pop(name)

    def kv_cache(self, attention: str, lag: int = 0) -> KvCache:
        sizes = self.sizes
        scales = sizes.kv_scales.get(attention, (1.0, 1.0))
        kv_dtype = sizes.kv_dtype or self.dtype
        return KvCache.empty(self.config, sizes.num_pages, kv_dtype, self.device, *scales, lag)


def _split_heads(weight: Weight, heads: int, dim: int) -> tuple[Weight, Weight]:
    """q rows and gate rows of a q_proj [heads * 2 * dim, H], heads in order."""
    if isinstance(weight, torch.Tensor):
        pairs = weight.view(heads, 2, dim, -1)
        return pairs[:, 0].reshape(heads * dim, -1), pairs[:, 1].reshape(heads * dim, -1)
    rows = torch.arange(heads * 2 * dim, device=weight.device).view(heads, 2, dim)
    q, gate = (rows[:, part].reshape(-1) for part in range(2))
    return weight.take_rows(q), weight.take_rows(gate)
