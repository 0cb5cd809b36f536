"""Loading: every weight arrives under its name with its bits, from any form of the same checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint import load
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import CheckpointError
from tests.support.tiny_models import KINDS, build_tiny, fuse_experts, split_experts


def text_tensors(folder):
    """What the files hold, normalised, experts one by one."""
    tensors = split_experts(load_file(folder / "model.safetensors"))
    return {name.replace("language_model.", ""): tensor for name, tensor in tensors.items() if "visual" not in name}


def read(folder):
    return load_weights(open_checkpoint(folder), progress=False)


def assert_equal(got, wanted):
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_plain_weights_arrive_unchanged(built, kind):
    assert_equal(read(built(kind)), text_tensors(built(kind)))


def test_released_dtypes_are_kept(built):
    weights = read(built("dense"))
    assert weights["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert weights["model.layers.0.linear_attn.norm.weight"].dtype == torch.float32
    assert weights["model.layers.0.linear_attn.dt_bias"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_equal_a_plain_checkpoint_of_their_values(built, draft, kind):
    """Exact in fp32: the packed model is the plain model that holds the dequantised values."""
    packed = read(built(kind, True))
    stored = load_file(built(kind, True) / "model.safetensors")
    plain = draft(kind, True)
    del plain.config["quantization_config"]
    for name in [name for name in plain.tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        scale, divisor = plain.tensors.pop(f"{module}.weight_scale"), plain.tensors.pop(f"{module}.weight_global_scale")
        plain.tensors[f"{module}.weight"] = by_hand(plain.tensors.pop(name), scale, divisor)
    wanted = read(plain.write())
    assert sum(isinstance(weight, NvFp4Weight) for weight in packed.values()) == sum(
        name.endswith(".weight_packed") for name in stored
    )
    values = {
        name: weight.dequantize(torch.float32) if isinstance(weight, NvFp4Weight) else weight
        for name, weight in packed.items()
    }
    assert_equal(values, wanted)


def by_hand(packed, scale, divisor):
    """Dequantisation written out a second time: one code at a time, in fp64 and then rounded to fp32."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    rows, half = packed.shape
    values = torch.empty(rows, 2 * half, dtype=torch.float64)
    values[:, 0::2] = table[(packed % 16).long()]
    values[:, 1::2] = table[(packed // 16).long()]
    for column in range(2 * half):
        values[:, column] *= scale[:, column // 16].double()
    return (values / divisor.double()).float()


@pytest.mark.parametrize("trunk_fused", [False, True])
@pytest.mark.parametrize("head_fused", [False, True])
def test_fused_and_single_experts_are_the_same_weights(built, draft, trunk_fused, head_fused):
    mixed = draft("moe")
    head = split_experts(mixed.take("mtp."))
    mixed.tensors = fuse_experts(mixed.tensors) if trunk_fused else mixed.tensors
    mixed.tensors |= fuse_experts(head) if head_fused else head
    assert_equal(read(mixed.write()), text_tensors(built("moe")))


def test_split_experts_share_one_allocation(draft):
    fused = draft("moe")
    fused.tensors = fuse_experts(fused.tensors)
    weights = read(fused.write())
    pointers = {
        weights[f"model.layers.0.mlp.experts.{i}.{projection}.weight"].untyped_storage().data_ptr()
        for i in range(8)
        for projection in ("gate_proj", "up_proj")
    }
    assert len(pointers) == 1


def test_parts_of_a_module_may_lie_in_different_files(draft, built):
    scattered = draft("dense", True)
    names = sorted(scattered.tensors)
    shards = {f"model-0000{i}": {name: scattered.tensors[name] for name in names[i::3]} for i in range(3)}
    scattered.tensors = shards.pop("model-00000")
    folder = scattered.write(**shards)
    whole, parts = read(built("dense", True)), read(folder)
    assert sorted(whole) == sorted(parts)
    for name, weight in whole.items():
        other = parts[name]
        if isinstance(weight, NvFp4Weight):
            assert torch.equal(weight.packed, other.packed) and weight.global_scale == other.global_scale
            assert torch.equal(weight.scale.view(torch.uint8), other.scale.view(torch.uint8))
        else:
            assert torch.equal(weight, other)


def test_head_that_is_incomplete_is_not_loaded(draft):
    partial = draft("dense")
    partial.take("mtp.norm")
    assert not any(name.startswith("mtp.") for name in read(partial.write()))


def test_head_in_a_side_file_is_loaded(draft, built):
    split = draft("moe")
    head = split.take("mtp.")
    assert_equal(read(split.write(mtp=head)), text_tensors(built("moe")))


def test_weights_do_not_share_memory_with_the_file(draft):
    folder = draft("dense").write()
    weights = read(folder)
    before = weights["model.norm.weight"].clone()
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(weights["model.norm.weight"], before)


def test_progress_counts_every_byte(built, monkeypatch):
    seen = []

    class Bar(load.tqdm):
        def update(self, n=1):
            seen.append(n)
            return super().update(n)

    monkeypatch.setattr(load, "tqdm", Bar)
    checkpoint = open_checkpoint(built("moe", True))
    load_weights(checkpoint, progress=False)
    assert sum(seen) == checkpoint.num_bytes


def test_no_bar_is_drawn_into_a_log(built, capsys):
    checkpoint = open_checkpoint(built("dense"))
    capsys.readouterr()  # what making it said
    load_weights(checkpoint)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("change", ["shape", "dtype", "gone", "garbage", "deleted"])
def test_file_that_changed_after_opening_is_refused(draft, change):
    changed = draft("dense")
    folder = changed.write()
    path = folder / "model.safetensors"
    checkpoint = open_checkpoint(folder)
    norm = changed.tensors.pop("model.norm.weight")
    replaced = {"shape": norm[:32], "dtype": norm.float(), "gone": None}
    if change == "garbage":
        path.write_bytes(b"\xff" * 100)
    elif change == "deleted":
        path.unlink()
    else:
        extra = {} if replaced[change] is None else {"model.norm.weight": replaced[change].clone()}
        save_file(changed.tensors | extra, path)
    with pytest.raises(CheckpointError, match="since it was opened"):
        load_weights(checkpoint, progress=False)


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan")])
def test_global_scale_must_be_a_divisor(draft, divisor):
    bad = draft("dense", True)
    bad.tensors["model.layers.0.mlp.up_proj.weight_global_scale"].fill_(divisor)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj.weight_global_scale: want a finite divisor"):
        read(bad.write())


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF], ids=["nan", "minus zero", "minus nan"])
def test_block_scales_must_be_numbers_of_one_sign(draft, byte):
    bad = draft("dense", True)
    bad.tensors["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 1] = byte
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj.weight_scale: want scales"):
        read(bad.write())


def test_a_folder_from_transformers_save_pretrained_loads(tmp_path, built):
    """Sharded and indexed by the library itself, head left out as it always leaves it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(built("vl_moe"), dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.num_files > 1 and json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert not checkpoint.has_mtp and checkpoint.mtp_problem is not None
    weights = load_weights(checkpoint, progress=False)
    state = model.state_dict()
    assert torch.equal(weights["lm_head.weight"], state["lm_head.weight"])
    fused = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(weights["model.layers.1.mlp.experts.5.gate_proj.weight"], fused[5, :32])
    assert torch.equal(weights["model.layers.1.mlp.experts.5.up_proj.weight"], fused[5, 32:])


MEASURE = """
import sys
from pathlib import Path
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

checkpoint = open_checkpoint(sys.argv[1])
load_weights(open_checkpoint(sys.argv[2]), sys.argv[3], progress=False)  # what a first load takes once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = kilobytes("VmRSS:")
weights = load_weights(checkpoint, sys.argv[3], progress=False)
print((kilobytes("VmHWM:") - before) * 1024)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Five shards, and the size of the largest and of all."""
    folder = build_tiny(tmp_path_factory.mktemp("sharded"), "dense", dtype="bfloat16", intermediate_size=32768)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = [{n: tensors.pop(n) for n in [*tensors] if n.startswith(f"model.layers.{i}.mlp.")} for i in range(4)]
    for number, shard in enumerate((*shards, tensors)):
        save_file(shard, folder / f"{number}.safetensors", metadata={"format": "pt"})
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return folder, max(sizes), sum(sizes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_beyond_the_result_at_most_one_shard_is_in_memory(built, sharded, device):
    """A device with memory of its own ("meta" stands for it) takes buffers of one shard's size; a CPU only the weights,
    and up to 2 MB a large one for whole huge pages."""
    folder, largest, total = sharded
    command = [sys.executable, "-c", MEASURE, str(folder), str(built("dense")), device]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    low, high = (0.5 * largest, 1.2 * largest) if device == "meta" else (0.95 * total, total + 0.6 * largest)
    # nothing less, or the measurement is broken
    assert low < peak < high, (peak, largest, total)
