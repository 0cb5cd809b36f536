"""Heads from files of their own: every form of the same head arrives with the same bits, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint.gguf_file import TYPES, decode, read_gguf
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import GGUF_NAMES, attach_head
from pilotfish.engine.errors import CheckpointError, HeaderError, LayoutError
from pilotfish.server.cli import build_parser, engine_options
from tests.support.gguf_writer import stored, write_gguf
from tests.support.packing import ct_nvfp4, fp8_block, fp8_channel, modelopt_nvfp4
from tests.support.tiny_models import build_tiny, split_experts, write_checkpoint

SIZES = {"dense": {"intermediate_size": 256}, "moe": {"moe_intermediate_size": 256}}
NORMS = "norm"


@dataclasses.dataclass
class Model:
    """A trunk without head, the head's tensors as released, and the weights of both."""

    trunk: object
    head: dict[str, torch.Tensor]
    wanted: dict[str, torch.Tensor]
    raw_config: dict


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Rows of 256: whole blocks of every GGUF type."""
    found = {}
    for kind in ("dense", "moe"):
        folder = build_tiny(tmp_path_factory.mktemp(kind), kind, dtype="bfloat16", hidden_size=256, **SIZES[kind])
        wanted = load_weights(open_checkpoint(folder), progress=False)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
        trunk = open_checkpoint(write_checkpoint(folder / "trunk", config, {"model.safetensors": tensors}))
        assert not trunk.has_mtp
        found[kind] = Model(trunk, head, {n: w for n, w in wanted.items() if n.startswith("mtp.")}, config)
    return found


def write(path, tensors, metadata={"format": "pt"}):  # noqa: B006
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    return path


def head_of(checkpoint):
    weights = load_weights(checkpoint, progress=False)
    return {name: weight for name, weight in weights.items() if name.startswith("mtp.")}


def assert_is(got, wanted):
    """Norms may come in fp32, with the same sum of 1 and w."""
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(got[name].float(), tensor.float()), name
        if NORMS not in name:
            assert got[name].dtype == tensor.dtype, name


kinds = pytest.mark.parametrize("kind", ["dense", "moe"])


@kinds
def test_a_file_beside_a_trunk_without_head(models, tmp_path, kind):
    model = models[kind]
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", model.head))
    assert (checkpoint.has_mtp, checkpoint.mtp_problem) == (True, None)
    assert checkpoint.head is not None and checkpoint.head.container == "safetensors"
    assert len(model.head) == (15 if kind == "dense" else 19)
    assert "with MTP head from" in checkpoint.summary()
    assert_is(head_of(checkpoint), model.wanted)


def test_single_experts_are_the_same_head(models, tmp_path):
    model = models["moe"]
    head = split_experts(model.head)
    assert len(head) == 17 + 3 * 8
    assert_is(head_of(attach_head(model.trunk, write(tmp_path / "x.safetensors", head))), model.wanted)


@pytest.mark.parametrize("place", ["sub/mtp.safetensors", "mtp/weights.safetensors", "a.safetensors"])
def test_a_folder_may_hold_it_and_more(models, tmp_path, place):
    """As a whole checkpoint's folder does: what is not the head's is counted and left."""
    model = models["dense"]
    write(tmp_path / place, model.head)
    folder = tmp_path / "sub" if place.startswith("sub") else tmp_path
    write(folder / "model.safetensors", {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4)})
    checkpoint = attach_head(model.trunk, folder)
    assert checkpoint.dropped["not the head's"] == (2, 32)
    assert_is(head_of(checkpoint), model.wanted)


def test_it_replaces_the_checkpoint_s_own(models, tmp_path):
    model = models["dense"]
    own = {name: tensor + 1 for name, tensor in model.head.items()}
    folder = write_checkpoint(tmp_path / "whole", model.raw_config, {})
    write(folder / "model.safetensors", load_file(model.trunk.path / "model.safetensors") | own)
    checkpoint = attach_head(open_checkpoint(folder), write(tmp_path / "mtp.safetensors", model.head))
    assert checkpoint.dropped["replaced head"][0] == 15
    assert_is(head_of(checkpoint), model.wanted)


@kinds
@pytest.mark.parametrize("form", [fp8_block(), fp8_channel(), modelopt_nvfp4(), ct_nvfp4])
def test_a_packed_head(models, tmp_path, kind, form):
    model = models[kind]
    packed, values = {}, {}
    for name, tensor in split_experts(model.head).items():
        values[name] = tensor
        if tensor.dim() != 2 or name.endswith("gate.weight"):
            packed[name] = tensor
            continue
        parts, values[name] = form(tensor.float())
        packed |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", packed))
    got = head_of(checkpoint)
    for name, tensor in values.items():
        weight = got[name] if isinstance(got[name], torch.Tensor) else got[name].dequantize(torch.float32)
        assert torch.equal(weight, tensor), name


# Containers whose norms hold 1 + w.


def absolute(head):
    return {name: tensor.float() + 1 if NORMS in name else tensor for name, tensor in head.items()}


def bare(head):
    return {name.removeprefix("mtp."): tensor for name, tensor in head.items()}


def nested(head):
    return {f"language_model.{name}": tensor for name, tensor in head.items()}


def mlx_experts(head):
    """Three 3-D tensors, as MLX's converters write them."""
    head = dict(head)
    prefix = "mtp.layers.0.mlp."
    gate, up = head.pop(f"{prefix}experts.gate_up_proj").chunk(2, dim=1)
    parts = {"gate": gate, "up": up, "down": head.pop(f"{prefix}experts.down_proj")}
    return head | {f"{prefix}switch_mlp.{name}_proj.weight": part for name, part in parts.items()}


MLX = [
    (lambda head: head, {"format": "mlx"}),
    (nested, {"format": "mlx"}),
    (bare, {"format": "mlx"}),
    (nested, None),
    (bare, None),
]


@pytest.mark.parametrize(("names", "metadata"), MLX)
def test_mlx_heads_hold_one_plus_w(models, tmp_path, names, metadata):
    model = models["dense"]
    head = names(absolute(model.head))
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", head, metadata))
    assert checkpoint.head.container == "MLX safetensors" and checkpoint.head.absolute_norms
    assert_is(head_of(checkpoint), model.wanted)


@pytest.mark.parametrize("names", [lambda head: head, bare])
def test_mlx_s_experts_are_three_tensors(models, tmp_path, names):
    model = models["moe"]
    head = names(mlx_experts(absolute(model.head)))
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", head, {"format": "mlx"}))
    assert_is(head_of(checkpoint), model.wanted)


@pytest.mark.parametrize(("names", "metadata"), [(bare, {"format": "pt"}), (nested, {"format": "pt"}), (dict, None)])
def test_other_heads_hold_w(models, tmp_path, names, metadata):
    model = models["dense"]
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", names(model.head), metadata))
    assert not checkpoint.head.absolute_norms
    assert_is(head_of(checkpoint), model.wanted)


def test_small_gains_are_not_taken_for_deltas(models, tmp_path):
    """Norms of 0.27 in a file of MLX's stay 0.27: values decide nothing."""
    model = models["dense"]
    head = {name: torch.full_like(tensor, 0.27) if NORMS in name else tensor for name, tensor in model.head.items()}
    checkpoint = attach_head(model.trunk, write(tmp_path / "m.safetensors", head, {"format": "mlx"}))
    norm = head_of(checkpoint)["mtp.norm.weight"]
    assert torch.equal(norm + 1, torch.full_like(head["mtp.norm.weight"], 0.27).float())


def test_two_conventions_in_one_head_are_refused(models, tmp_path):
    model = models["dense"]
    names = list(model.head)
    write(tmp_path / "a.safetensors", {name: model.head[name] for name in names[:7]}, {"format": "mlx"})
    write(tmp_path / "b.safetensors", {name: model.head[name] for name in names[7:]}, {"format": "pt"})
    with pytest.raises(LayoutError, match=r"norms hold w in one file and 1 \+ w in another"):
        attach_head(model.trunk, tmp_path)


def test_flags_reach_the_engine():
    args = build_parser().parse_args(["serve", "m", "--draft-head", "head.gguf", "--head-check", "warn"])
    options = engine_options(args)
    assert (options.draft_head, options.head_check, options.speculative_method) == ("head.gguf", "warn", "mtp")
    assert engine_options(build_parser().parse_args(["serve", "m"])).head_check == "refuse"
    by_json = json.dumps({"method": "mtp", "model": "head", "num_speculative_tokens": 2})
    options = engine_options(build_parser().parse_args(["serve", "m", "--speculative-config", by_json]))
    assert (options.draft_head, options.num_speculative_tokens) == ("head", 2)


# Refusals.


def quantised_by_mlx(head):
    rows, columns = head.pop("mtp.fc.weight").shape
    return head | {
        "mtp.fc.weight": torch.zeros(rows, columns // 8, dtype=torch.uint32),
        "mtp.fc.scales": torch.ones(rows, columns // 64),
        "mtp.fc.biases": torch.ones(rows, columns // 64),
    }


COPIED = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
FAULTS = [
    (lambda head: {"model.norm.weight": torch.ones(4)}, CheckpointError, "holds no draft head"),
    (lambda head: {n: t for n, t in head.items() if "fc" not in n}, CheckpointError, "incomplete: 3 of its 15 weights"),
    (
        lambda head: head | {"mtp.fc.weight": torch.ones(256, 256)},
        CheckpointError,
        r"no head for this model: mtp.fc: want",
    ),
    (lambda head: head | {"mtp.embed_tokens.weight": torch.ones(4, 4)}, CheckpointError, "dedicated_embeddings"),
    (lambda head: head | {"mtp.layers.1.mlp.up_proj.weight": torch.ones(4, 4)}, CheckpointError, "no such tensor"),
    (lambda head: head | {"model.mtp.fc.weight": torch.ones(4, 4)}, CheckpointError, "are the same weight"),
    (quantised_by_mlx, LayoutError, "mtp.fc: stored as MLX affine-quantised integers"),
    (
        lambda head: head | {"mtp.norm.weight": torch.ones(256, dtype=torch.float64)},
        LayoutError,
        "mtp.norm: stored as un",
    ),
]


def test_copies_of_the_trunk_s_matrices_are_left(models, tmp_path):
    """Some exports of a head bring the embedding and lm_head along."""
    model = models["dense"]
    trunk = load_weights(model.trunk, progress=False)
    copied = {f"mtp.{name}.weight": trunk[f"{full}.weight"].clone() for name, full in COPIED.items()}
    checkpoint = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", dict(model.head) | copied))
    assert checkpoint.has_mtp and len(checkpoint.copies) == 2 and "not the head's" in checkpoint.dropped
    loaded = load_weights(checkpoint, progress=False)
    assert {name for name in loaded if name.startswith("mtp.")} == set(model.head)
    copied["mtp.lm_head.weight"][0, 0] += 1
    other = attach_head(model.trunk, write(tmp_path / "mtp.safetensors", dict(model.head) | copied))
    with pytest.raises(CheckpointError, match=r"mtp.lm_head.weight: other values than lm_head.weight"):
        load_weights(other, progress=False)


@pytest.mark.parametrize(("change", "error", "message"), FAULTS)
def test_faulty_heads_are_refused_by_name(models, tmp_path, change, error, message):
    model = models["dense"]
    path = write(tmp_path / "mtp.safetensors", change(dict(model.head)))
    with pytest.raises(error, match=message):
        attach_head(model.trunk, path)


def test_a_head_of_the_other_family_is_refused(models, tmp_path):
    path = write(tmp_path / "mtp.safetensors", models["moe"].head)
    with pytest.raises(CheckpointError, match=r"no head for this model: mtp\.layers\.0\.mlp\..*implies no such tensor"):
        attach_head(models["dense"].trunk, path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "want a folder, a .safetensors or a .gguf"), ("absent.gguf", "want a regular"), ("", "got none")],
)
def test_paths_that_hold_nothing(models, tmp_path, name, message):
    with pytest.raises(CheckpointError, match=message):
        attach_head(models["dense"].trunk, tmp_path / name)


# GGUF.


def gguf_tensors(model, types, fused=False):
    """The head's block; `types`: a pattern in our name -> type, BF16 for the rest."""
    ours = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    head = absolute(model.head)
    if any("experts" in name for name in head) and not fused:
        head = {
            name.replace("switch_mlp", "experts").removesuffix(".weight") if "switch_mlp" in name else name: t
            for name, t in mlx_experts(head).items()
        }
    generator = torch.Generator().manual_seed(0)
    records = {}
    for name, tensor in head.items():
        kind = "F32" if NORMS in name else next((kind for part, kind in types.items() if part in name), "BF16")
        tensor = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
        records[f"blk.4.{ours[name.removeprefix('mtp.')]}"] = stored(tensor, kind, generator)
    return records


def metadata(arch="qwen35", **change):
    values = {
        "general.architecture": arch,
        "general.name": "tiny",
        f"{arch}.block_count": 5,
        f"{arch}.nextn_predict_layers": 1,
        f"{arch}.rope.freq_base": 1e7,
        "tokenizer.ggml.tokens": ["a", "bc", "ü"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "general.flag": True,
    }
    return values | change


OTHERS = {"token_embd.weight": ("F32", (4, 8), bytes(128)), "blk.0.attn_norm.weight": ("F32", (8,), bytes(32))}


@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("kind", ["dense", "moe", "moe fused"])
def test_gguf_blocks(models, tmp_path, kind, alignment):
    model = models[kind.split()[0]]
    arch = "qwen35moe" if "moe" in kind else "qwen35"
    tensors = OTHERS | gguf_tensors(model, {}, "fused" in kind)
    values = metadata(arch) | ({"general.alignment": alignment} if alignment != 32 else {})
    path = write_gguf(tmp_path / "mtp-x.gguf", values, tensors, alignment=alignment)
    for given in (path, tmp_path):
        checkpoint = attach_head(model.trunk, given)
        assert checkpoint.head.container == "GGUF" and checkpoint.dropped["not the head's"] == (2, 160)
        assert {"GGUF BF16", "GGUF F32"} <= set(census(checkpoint))
    got = head_of(checkpoint)
    assert set(got) == set(model.wanted)
    for name, tensor in model.wanted.items():
        assert torch.equal(got[name], tensor.float()), name


def test_gguf_without_a_norm_of_its_own_uses_the_final_one(models, tmp_path):
    model = models["dense"]
    tensors = gguf_tensors(model, {})
    tensors["output_norm.weight"] = tensors.pop("blk.4.nextn.shared_head_norm.weight")
    checkpoint = attach_head(model.trunk, write_gguf(tmp_path / "x.gguf", metadata(), tensors))
    assert torch.equal(head_of(checkpoint)["mtp.norm.weight"], model.wanted["mtp.norm.weight"].float())


def test_gguf_embeddings_of_its_own_are_left(models, tmp_path):
    model = models["dense"]
    extra = {f"blk.4.nextn.{name}.weight": ("F32", (1, 8), bytes(32)) for name in ("embed_tokens", "shared_head_head")}
    checkpoint = attach_head(model.trunk, write_gguf(tmp_path / "x.gguf", metadata(), gguf_tensors(model, {}) | extra))
    assert checkpoint.dropped["not the head's"] == (2, 64)


BLOCK_TYPES = (
    {"q_proj": "Q4_K", "k_proj": "Q5_K", "v_proj": "Q6_K", "fc": "IQ4_XS", "o_proj": "Q8_0", "gate_proj": "F16"},
    {
        "q_proj": "Q2_K",
        "k_proj": "Q3_K",
        "v_proj": "IQ4_NL",
        "fc": "Q4_0",
        "o_proj": "Q4_1",
        "up_proj": "Q5_0",
        "down": "Q5_1",
    },
)


@pytest.mark.parametrize("types", BLOCK_TYPES)
def test_gguf_block_types_are_decoded_by_the_gguf_package(models, tmp_path, types):
    """A matrix of blocks and a row of it give the same."""
    gguf = pytest.importorskip("gguf", reason="gguf is an optional dependency")
    model = models["dense"]
    records = gguf_tensors(model, types)
    got = head_of(attach_head(model.trunk, write_gguf(tmp_path / "x.gguf", metadata(), OTHERS | records)))
    seen = set()
    for name, (kind, shape, raw) in records.items():
        ours = "mtp." + GGUF_NAMES[name.removeprefix("blk.4.")]
        if kind in ("F32", "F16", "BF16"):
            continue
        blocks = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)
        values = gguf.quants.dequantize(blocks[3:4], gguf.GGMLQuantizationType[kind])
        assert np.array_equal(got[ours][3:4].numpy(), values), name
        assert got[ours].isfinite().all() and got[ours].std() > 0
        seen.add(kind)
    assert seen == set(types.values()) - {"F16"}


def test_q8_0_of_known_bytes(tmp_path):
    pytest.importorskip("gguf", reason="gguf is an optional dependency")
    raw = struct.pack("<e32b", 0.5, *range(-16, 16))
    header = read_gguf(write_gguf(tmp_path / "x.gguf", {}, {"t": ("Q8_0", (1, 32), raw)}))
    assert decode(header.tensors["t"]).tolist() == [[i / 2 for i in range(-16, 16)]]


def test_without_the_gguf_package_block_types_are_refused(models, tmp_path, monkeypatch):
    model = models["dense"]
    path = write_gguf(tmp_path / "x.gguf", metadata(), gguf_tensors(model, {"q_proj": "Q4_K"}))
    checkpoint = attach_head(model.trunk, path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        LayoutError, match=r"attn_q.weight: decoding GGUF Q4_K needs .* pip install 'pilotfish\[gguf\]'"
    ):
        load_weights(checkpoint, progress=False)


def test_headers_are_read_as_the_gguf_package_reads_them(models, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is an optional dependency")
    path = write_gguf(tmp_path / "x.gguf", metadata(), OTHERS | gguf_tensors(models["dense"], BLOCK_TYPES[0]))
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.dtype == f"GGUF {tensor.tensor_type.name}"
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.start, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    for _, (name, values, size) in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (values, size)


GGUF_FAULTS = [
    (metadata("llama"), {}, LayoutError, "want general.architecture 'qwen35', got 'llama'"),
    (metadata("qwen35moe"), {}, LayoutError, "want general.architecture 'qwen35', got 'qwen35moe'"),
    (
        metadata(**{"qwen35.nextn_predict_layers": 0}),
        {},
        CheckpointError,
        "nextn_predict_layers 1, got 0: it has no head",
    ),
    (metadata(**{"qwen35.block_count": 9}), {}, CheckpointError, "head is block 8, .* the trunk has 4"),
    (metadata(), {"blk.4.ssm_a": ("F32", (8,), bytes(32))}, CheckpointError, "a head has no such tensor"),
    (metadata(), {"blk.4.nextn.eh_proj.weight": ("IQ1_S", (8,), bytes(32))}, LayoutError, "stored as GGUF type 99"),
    (
        metadata(),
        {"blk.4.nextn.eh_proj.weight": ("F32", (8,), bytes(32))},
        CheckpointError,
        r"eh_proj: want shape \[256, 512\]",
    ),
]


@pytest.mark.parametrize(("values", "change", "error", "message"), GGUF_FAULTS)
def test_other_gguf_files_are_refused(models, tmp_path, values, change, error, message):
    model = models["dense"]
    path = write_gguf(tmp_path / "x.gguf", values, gguf_tensors(model, {}) | change)
    with pytest.raises(error, match=message):
        attach_head(model.trunk, path)


@pytest.mark.parametrize("cut", [0, 3, 7, 20, 60, 200, 400, -1])
def test_truncated_gguf_files_are_refused(models, tmp_path, cut):
    path = write_gguf(tmp_path / "x.gguf", metadata(), gguf_tensors(models["dense"], {}))
    path.write_bytes(path.read_bytes()[: cut if cut >= 0 else -4096])
    with pytest.raises(HeaderError, match=r"x\.gguf"):
        attach_head(models["dense"].trunk, path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "want version 2 or 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "are more than a model has"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "a string of"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "an array of"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 20), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "metadata of unknown type 77"),
        (b"PK\3\4" + bytes(64), "want it to begin with 'GGUF'"),
    ],
)
def test_hostile_gguf_headers_are_refused(tmp_path, raw, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(HeaderError, match=message):
        read_gguf(path)


def test_a_file_of_the_gguf_package_s_writer(models, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is an optional dependency")
    model = models["moe"]
    writer = gguf.GGUFWriter(tmp_path / "mtp-tiny.gguf", "qwen35moe")
    writer.add_block_count(5)
    writer.add_nextn_predict_layers(1)
    writer.add_rope_freq_base(1e7)
    writer.add_token_list(["a", "b"])
    for name, (kind, shape, raw) in gguf_tensors(model, {}).items():
        values = decode_bf16(raw) if kind == "BF16" else np.frombuffer(raw, np.float32)
        data = gguf.quants.quantize(values.reshape(shape), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = head_of(attach_head(model.trunk, tmp_path))
    for name, tensor in model.wanted.items():
        assert torch.equal(got[name], tensor.float()), name


def decode_bf16(raw):
    return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().numpy()
