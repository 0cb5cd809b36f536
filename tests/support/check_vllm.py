"""Lets vLLM's own reader load what `pilotfish quantize` writes, and holds what it then has against our values.

Not part of the test suite: vLLM is no dependency. In an environment with vllm and this project's own dependencies,
`python tests/support/check_vllm.py` quantises tiny models of every kind and a plain copy of the demo model in each
recipe; vLLM makes its engine config, builds trunk and MTP head, and fills both from the folder, as `vllm serve` with
an MTP speculative config does. Every parameter is poisoned first. Then each is decoded by vLLM's own functions and
compared with what our loader gives; a weight of ours that neither of the two took is an error.

No GPU is needed. Without one, vLLM is told that there is a Hopper GPU, so it selects what it would select there (Marlin
for NVFP4), a libcuda of three failing functions lets its libraries be imported, and no kernel runs: the conversion of
weights to a kernel's own order, and the arithmetic, are not checked. Last run with vllm 0.33.0, torch 2.14.0,
compressed-tensors 0.17.0, transformers 5.20.2: all 48 agree. vLLM pins another torch than this project allows, so this
project is not installed there: the check runs from the working tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidia0").exists():
    # Triton's check for a driver is lenient then
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "typings"), str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]

from pilotfish.engine.checkpoint.load import load_weights  # noqa: E402
from pilotfish.engine.checkpoint.recognise import open_checkpoint  # noqa: E402
from pilotfish.engine.convert.quantize import quantize_folder  # noqa: E402
from pilotfish.engine.convert.recipe import Recipe  # noqa: E402
from tests.support.tiny_models import build_tiny, write_tokenizer  # noqa: E402

DEMO = ROOT / "demo" / "model"
RECIPES = {
    "default": Recipe(),
    "head nvfp4": Recipe(head="nvfp4"),
    "plain lm_head and attention": Recipe(attention="bf16", lm_head="bf16"),
    "fp8 attention": Recipe(attention="fp8"),
    "fp8 attention, lm_head and head": Recipe(attention="fp8", lm_head="fp8", head="fp8"),
    "modelopt": Recipe(writer="modelopt"),
    "modelopt, fp8 attention": Recipe(writer="modelopt", attention="fp8"),
    "modelopt, head nvfp4": Recipe(writer="modelopt", head="nvfp4"),
}
KINDS = ("demo", "dense", "moe", "tied", "vl", "vl_moe")
RUNS = [(kind, recipe) for kind in KINDS for recipe in RECIPES]

# Widths that the GPU kernels vLLM selects take
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
WIDE |= {"shared_expert_intermediate_size": 128}

TOGETHER = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

# Without a GPU


def pretend_hopper() -> None:
    """Call before vLLM's modules are imported."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "cuda.c"), Path(folder, "libcuda.so.1")
        names = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))  # no device
        subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 140 << 30)
        device_count = classmethod(lambda cls: 1)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        current_device = staticmethod(lambda: torch.device("cpu"))

    platforms.current_platform = Hopper()
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"


# vLLM's side


def engine_config(folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        limit_mm_per_prompt={"image": 0, "video": 0},
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    return arguments.create_engine_config()


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def poison(model: torch.nn.Module) -> None:
    """So that what the files do not fill is seen."""
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)


def read(config: Any, model_config: Any) -> torch.nn.Module:
    """vLLM's model, filled from the folder by its own loader. Raises what that raises."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = initialize_model(config, model_config=model_config)
    poison(model)
    loader = get_model_loader(config.load_config)
    model.load_weights(loader.get_all_weights(model_config, model))
    return model


def held(model: torch.nn.Module, schemes: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by vLLM's module or parameter name, decoded to fp32 where it is packed."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or isinstance(module, Attention):  # an attention layer's are scales of a KV cache
            continue
        if isinstance(module, RoutedExperts):
            schemes[f"experts {type(module.quant_method).__name__}"] += 1
            gate_up, down = expert_values(module)
            for i in range(len(down)):
                yield f"{name.removesuffix('.routed_experts')}.{i}.gate_up_proj", gate_up[i]
                yield f"{name.removesuffix('.routed_experts')}.{i}.down_proj", down[i]
        elif len(own) > 1 and any(p.dtype in (torch.uint8, torch.float8_e4m3fn) for p in own.values()):
            method = module.quant_method
            schemes[type(getattr(module, "scheme", None) or method).__name__] += 1
            yield name, linear_values(module)
        else:
            schemes["plain"] += "weight" in own
            for parameter, tensor in own.items():
                yield name if parameter == "weight" else f"{name}.{parameter}", tensor.data


def expert_values(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H] and [E, H, I]."""
    if not hasattr(layer, "w13_weight_scale"):
        return layer.w13_weight.data, layer.w2_weight.data
    if layer.w13_weight_scale.dtype == torch.float32:
        return layer.w13_weight.float() * layer.w13_weight_scale, layer.w2_weight.float() * layer.w2_weight_scale
    scales = getattr(layer, "w13_weight_global_scale", None)
    require_one((layer.w13_weight_scale_2 if scales is None else scales).T)
    layer.params_dtype = torch.float32
    return layer.quant_method.dequantize_weight(layer)


def require_one(scales: torch.Tensor) -> None:
    """vLLM keeps one scale, the largest or the first, for the matrices that it computes as one."""
    assert bool((scales == scales[:1]).all()), f"want one global scale, got {scales}"


def linear_values(layer: Any) -> torch.Tensor:
    """[N, K], after vLLM's own step from several scales to one."""
    from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    if isinstance(method, modelopt.ModelOptLinearMethod):
        require_one(getattr(layer, "weight_scale_2", layer.weight_scale))
        method.wkey.process(layer, modelopt.Role.WEIGHT)
        if layer.weight.dtype == torch.float8_e4m3fn:
            return layer.weight.t().float() * layer.weight_scale
    elif layer.weight_scale.dtype == torch.float32:
        return layer.weight.float() * layer.weight_scale
    else:
        require_one(layer.weight_global_scale)
        scheme.kernel = EmulationNvFp4LinearKernel(None)
        scheme.process_weights_after_loading(layer)
    return dequantize_to_dtype(
        layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data, torch.float32, swizzle=False
    )


# Ours


def plain_demo(folder: Path) -> Path:
    """The demo model with every matrix decoded to BF16."""
    folder.mkdir()
    weights = load_weights(open_checkpoint(DEMO), progress=False)
    tensors = {n: w if isinstance(w, torch.Tensor) else w.dequantize().bfloat16() for n, w in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((DEMO / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((DEMO / file).read_bytes())
    return folder


def source(kind: str, folder: Path) -> Path:
    if kind == "demo":
        return plain_demo(folder)
    build_tiny(folder, kind, dtype="bfloat16", **{n: v for n, v in WIDE.items() if "moe" in kind or "expert" not in n})
    write_tokenizer(folder)
    return folder


def our_names(name: str, is_head: bool) -> tuple[str, ...]:
    """The weights of ours that vLLM's module or parameter holds, in the order of their rows."""
    name = name.removeprefix("language_model.")
    if is_head and name.startswith("model.") and not name.endswith("embed_tokens"):
        name = f"mtp.{name.removeprefix('model.')}"
    stem, _, last = name.rpartition(".")
    if last in ("A_log", "dt_bias"):
        return (name,)
    return tuple(f"{stem}.{part}.weight" for part in TOGETHER.get(last, ())) or (f"{name}.weight",)


def check(folder: Path) -> str:
    from vllm.config import DeviceConfig, set_current_vllm_config

    weights = load_weights(open_checkpoint(folder), progress=False)
    config = engine_config(folder)
    config.device_config = DeviceConfig(device="cpu")
    speculative, left, schemes = config.speculative_config, set(weights), Counter[str]()
    with set_current_vllm_config(config), single_rank():
        draft = speculative.apply_draft_overrides(config)
        for its_config, model_config in ((config, config.model_config), (draft, speculative.draft_model_config)):
            model = read(its_config, model_config)
            for name, got in held(model, schemes):
                if name.startswith("visual."):
                    continue
                names = our_names(name, model_config is not config.model_config)
                if names == ("lm_head.weight",) and names[0] not in weights:
                    names = ("model.embed_tokens.weight",)  # tied
                compare(name, got, [weights[other] for other in names])
                left -= set(names)
            del model
    gc.collect()
    assert not left, f"not taken: {sorted(left)[:5]}"
    found = ", ".join(f"{count} {scheme}" for scheme, count in sorted(schemes.items()))
    return f"{len(weights)} weights agree; {found}"


def compare(name: str, got: torch.Tensor, ours: list[Any]) -> None:
    values = [weight if isinstance(weight, torch.Tensor) else weight.dequantize() for weight in ours]
    wanted = torch.cat(values) if len(values) > 1 else values[0]
    # it multiplies the two scales first, which rounds once more; a plain weight takes the model's dtype
    relative = 0 if isinstance(ours[0], torch.Tensor) else 1e-6
    torch.testing.assert_close(got, wanted.to(got.dtype), rtol=relative, atol=0, msg=lambda text: f"{name}: {text}")


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        pretend_hopper()
    calibration = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    failed = 0
    for kind, name in RUNS:
        if arguments and kind not in arguments and name not in arguments:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            recipe, out = RECIPES[name], Path(scratch, "out")
            given = calibration if recipe.needs_inputs else ()
            quantize_folder(source(kind, Path(scratch, "in")), out, recipe, progress=False, calibration=given)
            try:
                found = check(out)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                failed += 1
            print(f"{kind}, {name}: {found}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
