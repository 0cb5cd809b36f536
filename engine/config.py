"""The model's shape, read from config.json alone; every check that needs no tensor is made here.

Accepts flat text-only configs and vision-language wrappers (the text part under `text_config`) of the
Qwen3.5 / 3.6 / 3.8 hybrid family, dense and mixture-of-experts. What the engine does not compute is refused
by field name rather than ignored. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.engine.checkpoint.foreign import broken_link, look_at, what_folder
from pilotfish.engine.errors import ConfigError

LINEAR = "linear_attention"
FULL = "full_attention"

DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
KNOWN_BUT_NOT_SERVED = {
    "qwen3_next": "Qwen3-Next, whose fused input projections are not read",
    "qwen4_exp": "Qwen3.8-Flash-Next, another architecture despite its name",
}

MAX_CONFIG_BYTES = 16 << 20
# Far above any released model: a corrupt number is refused before something is allocated by it.
MAX_LAYERS = 1024
MAX_SIZE = 1 << 24
MAX_EXPERTS = 1 << 18
"""Of all layers together: the largest released model has 30 720."""


@dataclass(frozen=True)
class Yarn:
    """Rotary frequencies for contexts beyond those of training, the same for every length: Peng et al. 2023, YaRN,
    arXiv:2309.00071, as transformers computes it.

    Pairs before `low` keep their frequency, those from `high` on are slowed by `factor`, between them the share grows
    evenly. What is rotated is multiplied by `attention_factor`, in queries and in keys.
    """

    factor: float
    low: float
    high: float
    attention_factor: float

    @property
    def ramp(self) -> tuple[float, float, float]:
        """What kernels.rope.inverse_frequencies takes."""
        return self.factor, self.low, self.high


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of one model. Counts are in elements; a dense model has num_experts 0, an MoE intermediate_size 0.

    `layer_types` holds "linear_attention" or "full_attention" for each layer. `num_mtp_layers` is what the config
    declares, 0 or 1: whether the head is there only the checkpoint's headers can tell. `dtype` is "bfloat16",
    "float16" or "float32". `yarn` is None for plain rotary positions; with it max_position_embeddings is at least what
    it stretches them to. `eos_token_ids` are those of config.json, of the wrapper and of its text part.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_mtp_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    yarn: Yarn | None = None

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_dim(self) -> int:
        """Width of all linear-attention key heads together; the queries' too."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all linear-attention value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the GatedDeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """The config of a parsed config.json, which is not changed.

        Raises ConfigError naming the field, what was wanted and what came.
        """
        if not isinstance(raw, dict):
            raise ConfigError(f"config: want a JSON object, got {type(raw).__name__}")
        model_type = _model_type(raw)
        outer, text = _Fields(raw, ""), _text_fields(raw, model_type)
        is_moe = model_type in MOE_TYPES
        _refuse_what_is_not_honoured(text)
        num_layers = text.size("num_hidden_layers", MAX_LAYERS)
        head_dim = text.size("head_dim")
        _refuse_scaling_outside(raw, text)
        yarn, most_positions = _positions(text, head_dim)
        config = cls(
            model_type=model_type,
            hidden_size=text.size("hidden_size"),
            num_hidden_layers=num_layers,
            layer_types=_layer_types(text, num_layers),
            num_attention_heads=text.size("num_attention_heads"),
            num_key_value_heads=text.size("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=_rotary_dim(text, head_dim),
            rope_theta=_rope(text).real("rope_theta"),
            rms_norm_eps=text.real("rms_norm_eps", default=1e-6, high=1.0),
            vocab_size=text.size("vocab_size"),
            tie_word_embeddings=_tied(outer, text),
            max_position_embeddings=most_positions,
            intermediate_size=0 if is_moe else text.size("intermediate_size"),
            num_experts=text.size("num_experts", MAX_EXPERTS) if is_moe else 0,
            num_experts_per_tok=text.size("num_experts_per_tok", MAX_EXPERTS) if is_moe else 0,
            moe_intermediate_size=text.size("moe_intermediate_size") if is_moe else 0,
            shared_expert_intermediate_size=text.size("shared_expert_intermediate_size") if is_moe else 0,
            linear_num_key_heads=text.size("linear_num_key_heads"),
            linear_num_value_heads=text.size("linear_num_value_heads"),
            linear_key_head_dim=text.size("linear_key_head_dim"),
            linear_value_head_dim=text.size("linear_value_head_dim"),
            linear_conv_kernel_dim=text.integer("linear_conv_kernel_dim", 2, 16, default=4),
            num_mtp_layers=text.integer("mtp_num_hidden_layers", 0, 1, default=0),
            eos_token_ids=_eos_token_ids(outer, text),
            dtype=_dtype(outer, text),
            yarn=yarn,
        )
        _check_divisibility(config)
        return config

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """The config of `folder`/config.json. Raises ConfigError if it is missing, unreadable or not served."""
        path = Path(folder) / "config.json"
        try:
            raw = read_json_object(path)
            if "model_type" not in raw and isinstance(raw.get("error"), str):
                raise ConfigError(f"an error message in place of the file, fetch it again: {raw['error']!r:.120}")
            return cls.from_dict(raw)
        except ConfigError as error:
            raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold one object; at most MAX_CONFIG_BYTES. Raises ConfigError naming the file."""
    if not path.is_file():
        if (link := broken_link(path)) is not None:
            raise ConfigError(f"{path}: {link}")
        what = what_folder(path.parent)
        raise ConfigError(f"{path}: no such file" + (f": {path.parent} is {what}" if what else ""))
    if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: {size} bytes, want at most {MAX_CONFIG_BYTES}")
    try:
        raw = json.loads(path.read_bytes())
        # half a character, which JSON can spell, is in no text that is shown, logged or read by a tokenizer
        json.dumps(raw, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {look_at(path) or f'not readable as JSON: {error}'}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: want a JSON object, got {type(raw).__name__}")
    return raw


_REQUIRED: Any = object()


class _Fields:
    """Typed look-ups in one JSON object. A null counts as absent, as transformers writes unset fields."""

    def __init__(self, raw: Mapping[str, Any], prefix: str) -> None:
        self.raw = raw
        self.prefix = prefix

    def get(self, name: str) -> Any:
        return self.raw.get(name)

    def fail(self, name: str, wanted: str, got: Any) -> ConfigError:
        shown = repr(got)
        return ConfigError(
            f"{self.prefix}{name}: want {wanted}, got {shown if len(shown) <= 80 else shown[:77] + '...'}"
        )

    def _value(self, name: str, wanted: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None and default is _REQUIRED:
            raise self.fail(name, wanted, None)
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> int:
        wanted = f"an integer in [{low}, {high}]"
        value = self._value(name, wanted, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, wanted, value)
        return value

    def size(self, name: str, high: int = MAX_SIZE) -> int:
        return self.integer(name, 1, high)

    def real(self, name: str, default: Any = _REQUIRED, high: float = 1e30) -> float:
        wanted = f"a number above 0 and at most {high:g}"
        value = self._value(name, wanted, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise self.fail(name, wanted, value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, "true or false", default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def one_of(self, name: str, choices: Collection[str], default: Any = _REQUIRED) -> str:
        wanted = " or ".join(repr(choice) for choice in choices)
        value = self._value(name, wanted, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(name, wanted, value)
        return value


def _model_type(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    served = (*DENSE_TYPES, *MOE_TYPES)
    if isinstance(model_type, str) and model_type in served:
        return model_type
    known = KNOWN_BUT_NOT_SERVED.get(model_type) if isinstance(model_type, str) else None
    note = f" ({known})" if known else ""
    raise ConfigError(f"model_type: want one of {', '.join(served)}, got {model_type!r}{note}")


def _text_fields(raw: Mapping[str, Any], model_type: str) -> _Fields:
    """The part that describes the text model: `text_config` in a wrapper, else the whole."""
    if "text_config" not in raw:
        return _Fields(raw, "")
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise ConfigError(f"text_config: want an object, got {type(text).__name__}")
    family = MOE_TYPES if model_type in MOE_TYPES else DENSE_TYPES
    fields = _Fields(text, "text_config.")
    fields.one_of("model_type", family, default=model_type)
    return fields


def _refuse_what_is_not_honoured(text: _Fields) -> None:
    """Fields that would change the arithmetic and of which one value is computed."""
    text.one_of("hidden_act", ("silu",), default="silu")
    text.one_of("output_gate_type", ("silu", "swish"), default="silu")
    text.one_of("mamba_ssm_dtype", ("float32",), default="float32")
    for name, wanted in (
        ("attention_bias", False),
        ("mtp_use_dedicated_embeddings", False),
        ("use_sliding_window", False),
        ("attn_output_gate", True),
        ("norm_topk_prob", True),
    ):
        if text.flag(name, wanted) is not wanted:
            raise text.fail(name, str(wanted).lower(), not wanted)
    text.integer("decoder_sparse_step", 1, 1, default=1)
    if text.get("mlp_only_layers"):
        raise text.fail("mlp_only_layers", "none", text.get("mlp_only_layers"))


def _rope(text: _Fields) -> _Fields:
    """The rope fields: `rope_parameters`, or older files' `rope_scaling`, over those of the top level.

    Raises for a type that is not computed, and where both say different things about scaling.
    """
    said = [name for name in ("rope_parameters", "rope_scaling") if text.get(name) is not None]
    found = [_rope_object(text, name) for name in said]
    if len(found) == 2 and _scaling(found[0]) != _scaling(found[1]):
        raise text.fail("rope_scaling", "it in rope_parameters, which says otherwise", text.get("rope_scaling"))
    older = {key: text.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    given = {key: value for fields in reversed(found) for key, value in fields.raw.items() if value is not None}
    return _Fields(older | given, found[0].prefix if found else text.prefix)


def _rope_object(text: _Fields, name: str) -> _Fields:
    raw = text.get(name)
    if not isinstance(raw, dict):
        raise text.fail(name, "an object", raw)
    rope = _Fields(raw, f"{text.prefix}{name}.")
    for key in ("rope_type", "type"):
        rope.one_of(key, ("default", "yarn"), default="default")
    if _scaling(rope) == ("default", None, None) and rope.real("factor", default=1.0) != 1.0:
        raise rope.fail("rope_type", "'yarn' with a factor", rope.get("rope_type"))
    return rope


def _scaling(rope: _Fields) -> tuple[Any, Any, Any]:
    """How positions are scaled: the type, and for YaRN by what and from where."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    yarn = kind == "yarn"
    return kind, rope.get("factor") if yarn else None, rope.get("original_max_position_embeddings") if yarn else None


def _refuse_scaling_outside(raw: Mapping[str, Any], text: _Fields) -> None:
    """A wrapper's own rope fields are read by nobody."""
    for name in ("rope_parameters", "rope_scaling"):
        outside = raw.get(name)
        if "text_config" not in raw or not isinstance(outside, dict):
            continue
        if _scaling(_Fields(outside, "")) not in (("default", None, None), _scaling(_rope(text))):
            raise _Fields(raw, "").fail(name, "it in text_config, where it counts", outside)


def _positions(text: _Fields, head_dim: int) -> tuple[Yarn | None, int]:
    """YaRN if it is asked for, and the most positions."""
    most = text.size("max_position_embeddings", 1 << 31)
    rope = _rope(text)
    if _scaling(rope)[0] != "yarn":
        return None, most
    original = rope.integer("original_max_position_embeddings", 1, 1 << 31, default=most)
    told = rope.get("original_max_position_embeddings") is not None
    factor = rope.real("factor", default=max(1.0, most / original) if told else _REQUIRED, high=1e6)
    theta = rope.real("rope_theta")
    if factor < 1 or theta <= 1:
        name, got = ("factor", factor) if factor < 1 else ("rope_theta", theta)
        raise rope.fail(name, "at least 1 for YaRN", got)
    # vLLM's names for what changes the arithmetic and is not computed
    for name, wanted in (("extrapolation_factor", 1), ("attn_factor", 1), ("apply_yarn_scaling", True)):
        if rope.get(name) not in (None, wanted):
            raise rope.fail(name, str(wanted).lower(), rope.get(name))
    yarn = Yarn(factor, *_correction_range(rope, _rotary_dim(text, head_dim), theta, original), _mscale(rope, factor))
    return yarn, max(most, int(original * factor))


def _correction_range(rope: _Fields, rotary_dim: int, theta: float, original: int) -> tuple[float, float]:
    """The pairs that turn beta_fast and beta_slow times over the original context."""
    fast, slow = rope.real("beta_fast", default=32.0), rope.real("beta_slow", default=1.0)

    def pair(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return (low, high) if low != high else (low, high + 0.001)


def _mscale(rope: _Fields, factor: float) -> float:
    def scale(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.real("attention_factor")
    share, of_all = (rope.get(name) for name in ("mscale", "mscale_all_dim"))
    if share and of_all:
        return scale(rope.real("mscale")) / scale(rope.real("mscale_all_dim"))
    return scale(1.0)


def _rotary_dim(text: _Fields, head_dim: int) -> int:
    rope = _rope(text)
    factor = rope.real("partial_rotary_factor", default=0.25, high=1.0)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise rope.fail("partial_rotary_factor", f"an even, positive share of head_dim {head_dim}", factor)
    return rotary_dim


def _layer_types(text: _Fields, num_layers: int) -> tuple[str, ...]:
    kinds = text.get("layer_types")
    if kinds is None:
        interval = text.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise text.fail("layer_types", f"a list of {num_layers} names", kinds)
    for i, kind in enumerate(kinds):
        if kind not in (LINEAR, FULL):
            raise text.fail(f"layer_types[{i}]", f"{LINEAR!r} or {FULL!r}", kind)
    return tuple(kinds)


def _tied(outer: _Fields, text: _Fields) -> bool:
    """Whether the matrices are shared. In a wrapper the outer flag governs; the inner one counts only where the outer
    is absent."""
    return outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))


def _eos_token_ids(outer: _Fields, text: _Fields) -> tuple[int, ...]:
    vocab_size = text.size("vocab_size")
    found: list[int] = []
    for fields in (outer, text):
        value = fields.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise fields.fail("eos_token_id", f"token ids in [0, {vocab_size})", value)
            if token not in found:
                found.append(token)
    return tuple(found)


def _dtype(outer: _Fields, text: _Fields) -> str:
    for fields in (text, outer):
        for name in ("dtype", "torch_dtype"):
            if fields.get(name) is not None:
                return fields.one_of(name, ("bfloat16", "float16", "float32"))
    return "bfloat16"


def _check_divisibility(config: ModelConfig) -> None:
    """Grouped heads must divide; the router cannot choose more experts than there are, and all can be listed."""
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, many) % getattr(config, few):
            raise ConfigError(f"{many}: want a multiple of {few} {getattr(config, few)}, got {getattr(config, many)}")
    if config.num_experts * config.num_hidden_layers > MAX_EXPERTS:
        raise ConfigError(
            f"num_experts: want at most {MAX_EXPERTS} in all layers together, got {config.num_experts} in each of"
            f" {config.num_hidden_layers}"
        )
    if config.is_moe and config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"num_experts_per_tok: want at most num_experts {config.num_experts}, got {config.num_experts_per_tok}"
        )
