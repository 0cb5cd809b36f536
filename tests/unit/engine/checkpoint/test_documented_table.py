"""The table of docs/checkpoints.md says, layout by layout, what really happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import PilotfishError
from tests.support.packing import RECIPES, pack_checkpoint, refused_layouts
from tests.support.tiny_models import (
    NVFP4_IGNORE,
    build_tiny,
    fuse_experts,
    nvfp4_config,
    pack_tensors,
    split_experts,
    write_checkpoint,
)

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "checkpoints.md"
FAMILIES = {"Qwen3-Next": "qwen3_next", "Qwen3.8-Flash-Next": "qwen4_exp", "another model_type": "llama"}
MODULE = "model.layers.3.self_attn.v_proj"


def documented(heading: str) -> dict[str, str]:
    """First and last cell of each row under a heading."""
    section = DOCUMENT.read_text().split(f"\n{heading}\n")[1].split("\n##")[0]
    rows = [line.strip("| \n").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): cells[-1].strip() for cells in rows[1:]}


def outcome(folder: Path) -> str:
    try:
        load_weights(open_checkpoint(folder), progress=False)
    except PilotfishError as error:
        assert "\n" not in str(error)
        return "refused"
    return "loaded"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = build_tiny(tmp_path_factory.mktemp("source"), "dense")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_the_table_is_what_happens(source, tmp_path):
    config, tensors = source
    found = {}
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        plain = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        folder = write_checkpoint(tmp_path / f"plain{number}", config, {"model.safetensors": plain})
        found[f"plain {('BF16', 'F16', 'F32')[number]}"] = outcome(folder)
    for number, recipe in enumerate(RECIPES):
        folder, _ = pack_checkpoint(tmp_path / f"packed{number}", config, split_experts(tensors), recipe)
        found[recipe.name] = outcome(folder)
    for number, (name, parts) in enumerate(refused_layouts(tensors[f"{MODULE}.weight"]).items()):
        rest = {other: tensor for other, tensor in tensors.items() if not other.startswith(MODULE)}
        rest |= {f"{MODULE}.{suffix}": tensor for suffix, tensor in parts.items()}
        found[name] = outcome(write_checkpoint(tmp_path / f"other{number}", config, {"model.safetensors": rest}))
    for name, model_type in FAMILIES.items():
        folder = write_checkpoint(
            tmp_path / model_type, config | {"model_type": model_type}, {"m.safetensors": tensors}
        )
        found[name] = outcome(folder)
    assert found == documented("## Layouts")


def declared(config, **change):
    """A packed checkpoint's config.json with another quantization_config."""
    quantization = nvfp4_config(**change)
    return config | {"quantization_config": quantization}


def group(**weights):
    one = nvfp4_config()["config_groups"]["group_0"]
    return {"config_groups": {"group_0": one | {"weights": one["weights"] | weights}}}


def test_the_table_of_refused_declarations_is_what_happens(source, tmp_path):
    config, tensors = source
    packed = pack_tensors(tensors)
    lynn = next(recipe for recipe in RECIPES if recipe.name == "lynn-engine native")
    folded, _ = pack_checkpoint(tmp_path / "folded", config, split_experts(tensors), lynn)
    manifest = json.loads((folded / "lynn_quant_manifest.json").read_text())
    manifest["runtime_contract"] = {"fallback_path_allowed": False, "inference_path_required": "w4a8"}
    (folded / "lynn_quant_manifest.json").write_text(json.dumps(manifest))
    configs = {
        "a module packed that the config leaves out": declared(config, ignore=[*NVFP4_IGNORE, MODULE]),
        "no declaration": config,
        "another layout declared": config | {"quantization_config": {"quant_method": "fp8"}},
        "another `quant_method` (bitsandbytes, quark, gptq, awq, mxfp4)": config
        | {"quantization_config": {"quant_method": "bitsandbytes"}},
        "groups of other sizes than 16": declared(config, **group(group_size=32)),
        "asymmetric": declared(config, **group(symmetric=False)),
        "sparse (`sparsity_config`)": declared(config, sparsity_config={"format": "sparse-24-bitmask"}),
        "transformed (`transform_config`)": declared(config, transform_config={"config_groups": {"u": {}}}),
        "frozen, not compressed (`quantization_status`)": declared(config, quantization_status="frozen"),
    }
    found = {"folded for lynn-engine's w4a8 path": outcome(folded)}
    for number, (name, changed) in enumerate(configs.items()):
        found[name] = outcome(write_checkpoint(tmp_path / f"{number}", changed, {"m.safetensors": packed}))
    plain = declared(config)
    found["a module plain that the config has packed"] = outcome(
        write_checkpoint(tmp_path / "plain", plain, {"m.safetensors": tensors})
    )
    assert outcome(write_checkpoint(tmp_path / "sound", plain, {"m.safetensors": packed})) == "loaded"
    assert found == documented("### Refused by what is declared")


def test_the_table_of_names_and_files_is_what_happens(tmp_path):
    found = {}

    def look(name, config, **files):
        folder = tmp_path / str(len(found))
        named = {
            f"{file.replace('__', '/')}.safetensors": {name: tensor.clone() for name, tensor in part.items()}
            for file, part in files.items()
        }
        found[name] = outcome(write_checkpoint(folder, config, named))
        return folder

    def read(kind):
        folder = build_tiny(tmp_path / kind, kind)
        return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    config, tensors = read("moe")
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    trunk = {name: tensor for name, tensor in tensors.items() if name not in head}
    look("text-only names", config, m=tensors)
    vl_config, vl = read("vl_moe")
    look("names of the vision-language wrapper", vl_config, m=vl)
    look("experts fused, in trunk and head", config, m=fuse_experts(tensors))
    look("experts one by one, in trunk and head", config, m=split_experts(tensors))
    look("experts fused in the trunk, one by one in the head", config, m=fuse_experts(trunk) | split_experts(head))
    look("experts one by one in the trunk, fused in the head", config, m=split_experts(trunk) | fuse_experts(head))
    names = sorted(trunk)
    first, second = ({name: trunk[name] for name in part} for part in (names[::2], names[1::2]))
    folder = look("shards with an index, the head in a file that it does not know", config, a=first, b=second, mtp=head)
    weight_map = {name: "a.safetensors" if name in first else "b.safetensors" for name in trunk}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert outcome(folder) == "loaded" and open_checkpoint(folder).has_mtp
    look("the head in `mtp/`", config, m=trunk, mtp__head=head)
    assert open_checkpoint(
        look("the head under `model.mtp.`", config, m=trunk | {f"model.{n}": t for n, t in head.items()})
    ).has_mtp
    bare = look("a head declared and not there, or a part of one: served without it", config, m=trunk)
    assert not open_checkpoint(bare).has_mtp
    twice = trunk | {
        f"model.language_model.{n.removeprefix('model.')}": t for n, t in trunk.items() if "model.norm" in n
    }
    look("one weight under two names", config, m=twice | head)
    look("experts in both forms", config, m=tensors | split_experts(tensors))
    look("a trunk's tensor missing", config, m={n: t for n, t in tensors.items() if n != "model.norm.weight"})
    look("a trunk's tensor of another shape", config, m=tensors | {"model.norm.weight": torch.ones(65)})
    look("a tensor that no part of the model takes", config, m=tensors | {"model.layers.0.extra.weight": torch.ones(4)})
    folder = look("an index that points outside of the folder", config, m=tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../m.safetensors"}}))
    found["an index that points outside of the folder"] = outcome(folder)
    folder = look("a file cut short", config, m=tensors)
    with (folder / "m.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    found["a file cut short"] = outcome(folder)
    folder = look("weights in pickle files alone", config, m=tensors)
    (folder / "m.safetensors").rename(folder / "pytorch_model.bin")
    found["weights in pickle files alone"] = outcome(folder)
    look("files of an MLX converter", config, m={f"language_model.{name}": tensor for name, tensor in tensors.items()})
    assert found == documented("### Names and files")
