"""What a quantised checkpoint's config.json says about it, in the words of compressed-tensors or of ModelOpt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pilotfish.engine.checkpoint.layouts import GROUP
from pilotfish.engine.checkpoint.quantization import NVFP4_FORMAT
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.convert.recipe import Action, ConversionPlan, Form, Job, Recipe

MIXED_FORMAT, FP8_FORMAT = "mixed-precision", "float-quantized"
TRUNK, HEAD, LM_HEAD = r"re:(?!mtp\.).*", r"re:mtp\..*", "re:.*lm_head$"
ATTENTION = r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))$"
FEED_FORWARD = r"\.mlp\..*(gate|up|down)_proj$"
FP8_ALGORITHM, NVFP4_ALGORITHM, MIXED_ALGORITHM = "FP8", "W4A16_NVFP4", "MIXED_PRECISION"


def quantised_config(
    raw: Mapping[str, Any], plan: ConversionPlan, checkpoint: Checkpoint, recipe: Recipe
) -> dict[str, Any]:
    """The source's config.json with a quantization_config that names what stays plain, name by name."""
    config = {name: value for name, value in raw.items() if name != "quantization_config"}
    text = dict(config.get("text_config") or config)
    text.pop("quantization_config", None)
    if checkpoint.head is not None:
        text["mtp_num_hidden_layers"] = 1
    config = config | {"text_config": text} if "text_config" in config else text
    ignored = _ignored(plan, checkpoint)
    if recipe.writer == "modelopt":
        declared = {"quant_method": "modelopt", "ignore": ignored, "kv_cache_scheme": None} | _modelopt_layers(plan)
    else:
        declared = _compressed_tensors(plan, recipe, ignored)
    return config | {"quantization_config": declared}


def modelopt_file(plan: ConversionPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """hf_quant_config.json, ModelOpt's second home."""
    quantization = {"kv_cache_quant_algo": None, "exclude_modules": _ignored(plan, checkpoint)} | _modelopt_layers(plan)
    return {"producer": {"name": "pilotfish"}, "quantization": quantization}


def _modelopt_layers(plan: ConversionPlan) -> dict[str, Any]:
    """Every packed module by name, the experts of a layer as one."""
    layers: dict[str, Any] = {}
    for matrix, form in _packed(plan):
        stem, experts, _ = matrix.partition(".experts.")
        name = f"{stem}.experts" if experts else matrix
        fp8 = form == "fp8"
        layers[name] = {"quant_algo": FP8_ALGORITHM} if fp8 else {"quant_algo": NVFP4_ALGORITHM, "group_size": GROUP}
    return {"quant_algo": MIXED_ALGORITHM, "quantized_layers": dict(sorted(layers.items()))}


def _compressed_tensors(plan: ConversionPlan, recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    packed = dict(_packed(plan))
    if set(packed.values()) == {"nvfp4"}:
        # vLLM's output head is no "Linear"
        groups, outer = [_group(["Linear", *([LM_HEAD] if "lm_head" in packed else [])], "nvfp4")], NVFP4_FORMAT
    else:
        # not "Linear" for the rest: vLLM holds its fused modules against classes before it looks at their parts
        groups = [_group(targets, form) for form in ("fp8", "nvfp4") if (targets := _targets(recipe, form))]
        outer = MIXED_FORMAT
    return {
        "quant_method": "compressed-tensors",
        "format": outer,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(recipe: Recipe, form: Form) -> list[str]:
    """Expressions for what a recipe packs in this form."""
    found = [
        (TRUNK + ATTENTION, recipe.attention),
        (TRUNK + FEED_FORWARD, "nvfp4"),
        (LM_HEAD, recipe.lm_head),
        (HEAD + ATTENTION, recipe.head),
        (HEAD + FEED_FORWARD, recipe.head),
    ]
    return [target for target, its_form in found if its_form == form]


def _group(targets: list[str], form: Form) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    if form == "nvfp4":
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": GROUP}
        weights |= {"scale_dtype": "torch.float8_e4m3fn"}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if form == "fp8" else None,
        "output_activations": None,
        "format": FP8_FORMAT if form == "fp8" else NVFP4_FORMAT,
    }


def _packed(plan: ConversionPlan) -> Iterator[tuple[str, Form]]:
    """Names as the output spells them, and what they became."""
    for jobs in plan.values():
        for job in jobs:
            if job.action is Action.PACK:
                yield from ((matrix.raw_name, job.form) for matrix in job.matrices)


def _ignored(plan: ConversionPlan, checkpoint: Checkpoint) -> list[str]:
    names = {name for jobs in plan.values() for job in jobs if job.action is not Action.PACK for name in _linears(job)}
    return sorted(names | ({"lm_head"} if checkpoint.config.tie_word_embeddings else set()))


def _linears(job: Job) -> Iterable[str]:
    """Names, as the output spells them, of what a model class may hold as a Linear."""
    if job.module is None:
        is_matrix = job.main.name.endswith(".weight") and len(job.main.shape) > 1
        return [job.main.name.removesuffix(".weight")] if is_matrix else []
    if len(job.module.shape) < 2 or job.module.name.endswith("embed_tokens"):
        return []
    return [matrix.raw_name for matrix in job.matrices]
