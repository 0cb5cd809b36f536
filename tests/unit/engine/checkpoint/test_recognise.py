"""Whole folders: what is accepted in which form, and that each fault is refused by name before a tensor is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from pilotfish.engine.checkpoint.layouts import PACKED, Layout
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import quantize
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.errors import CheckpointError, ConfigError, HeaderError, LayoutError
from tests.support.packing import refused_layouts
from tests.support.tiny_models import KINDS, NVFP4_IGNORE, ct_parts, fuse_experts, nvfp4_config, split_experts

NUM_TRUNK = {"dense": 56, "hv_gt_hk": 56, "tied": 55, "moe": 160, "vl": 56, "vl_moe": 160}


def packed(checkpoint):
    return any(module.layout in PACKED for module in checkpoint.modules.values())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_kinds(built, kind):
    checkpoint = open_checkpoint(built(kind))
    head = {name for name in checkpoint.modules if name.startswith("mtp.")}
    assert len(checkpoint.modules) - len(head) == NUM_TRUNK[kind]
    assert len(head) == (19 if "moe" in kind else 15)
    assert (checkpoint.has_mtp, checkpoint.config.num_mtp_layers, checkpoint.mtp_problem) == (True, 1, None)
    assert not packed(checkpoint)
    assert ("lm_head" in checkpoint.modules) is (kind != "tied")
    assert not any("visual" in name or "language_model" in name for name in checkpoint.modules)
    assert checkpoint.dropped == ({"vision": (21, checkpoint.dropped["vision"][1])} if "vl" in kind else {})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_kinds(built, kind):
    checkpoint = open_checkpoint(built(kind, True))
    assert packed(checkpoint)
    assert checkpoint.modules["model.layers.0.linear_attn.in_proj_qkv"].layout is Layout.CT_NVFP4
    assert checkpoint.modules["model.layers.0.linear_attn.in_proj_a"].layout is Layout.PLAIN
    assert checkpoint.modules["mtp.fc"].layout is Layout.PLAIN
    assert checkpoint.modules["mtp.layers.0.self_attn.q_proj"].layout is Layout.CT_NVFP4


def test_no_tensor_is_read(draft):
    """All bytes after the headers may be garbage, and the whole folder is still recognised."""
    spoiled = draft("moe", True)
    folder = spoiled.write()
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:begin] + b"\xff" * (len(raw) - begin))
    assert open_checkpoint(folder).has_mtp


def test_census_and_summary(built):
    checkpoint = open_checkpoint(built("vl_moe", True))
    rows = census(checkpoint)
    assert list(rows) == ["compressed-tensors NVFP4 (W4A16)", "plain BF16", "plain F32"]
    assert rows["plain F32"]["modules"] == 6  # A_log and the gated norm of three layers
    assert (
        rows["compressed-tensors NVFP4 (W4A16)"]["tensors"] == 3 * rows["compressed-tensors NVFP4 (W4A16)"]["modules"]
    )
    assert sum(row["bytes"] for row in rows.values()) == checkpoint.num_bytes
    line = checkpoint.summary()
    assert "\n" not in line
    for part in ("MoE of 8 experts", "4 layers (1 full attention)", "with MTP head", "21 vision tensors", "NVFP4"):
        assert part in line


# Nesting.


def test_text_only_config_with_the_wrappers_prefix(draft):
    wrapped = draft("dense")
    wrapped.tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in wrapped.tensors.items()
    }
    assert set(open_checkpoint(wrapped.write()).modules) == set(open_checkpoint(draft("dense").write()).modules)


def test_head_under_model_is_accepted(draft):
    nested = draft("dense")
    nested.tensors |= {f"model.{name}": tensor for name, tensor in nested.take("mtp.").items()}
    assert open_checkpoint(nested.write()).has_mtp


def test_same_weight_under_two_names_is_refused(draft):
    twice = draft("dense")
    twice.tensors["model.language_model.norm.weight"] = twice.tensors["model.norm.weight"].clone()
    with pytest.raises(CheckpointError, match="are the same weight"):
        open_checkpoint(twice.write())


# Experts.


@pytest.mark.parametrize("trunk_fused", [False, True])
@pytest.mark.parametrize("head_fused", [False, True])
def test_expert_form_is_chosen_for_trunk_and_head_alone(draft, trunk_fused, head_fused):
    mixed = draft("moe")
    head = mixed.take("mtp.")
    mixed.tensors = (fuse_experts if trunk_fused else split_experts)(mixed.tensors)
    mixed.tensors |= head if head_fused else split_experts(head)
    modules = open_checkpoint(mixed.write()).modules
    assert ("model.layers.2.mlp.experts.gate_up_proj" in modules) is trunk_fused
    assert ("model.layers.2.mlp.experts.7.up_proj" in modules) is not trunk_fused
    assert sum(name.startswith("mtp.") for name in modules) == (19 if head_fused else 17 + 3 * 8)


def test_experts_in_both_forms_are_refused(draft):
    both = draft("moe")
    both.tensors |= fuse_experts(both.tensors)
    with pytest.raises(CheckpointError, match=r"experts\.\d\.\w+_proj\.weight .*implies no such tensor"):
        open_checkpoint(both.write())


# The head.


def test_head_in_an_unindexed_side_file(draft):
    split = draft("moe")
    head = split.take("mtp.")
    folder = split.write(**{"model_mtp": head})
    write_index(folder, dict.fromkeys(split.tensors, "model.safetensors"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.has_mtp and checkpoint.num_files == 2
    assert checkpoint.modules["mtp.fc"].files == (folder / "model_mtp.safetensors",)


def test_head_in_the_mtp_folder(draft):
    split = draft("dense")
    head = split.take("mtp.")
    folder = split.write()
    (folder / "mtp").mkdir()
    save_file(head, folder / "mtp" / "weights.safetensors")
    assert open_checkpoint(folder).has_mtp


def test_head_declared_but_absent(draft):
    bare = draft("dense")
    bare.take("mtp.")
    checkpoint = open_checkpoint(bare.write())
    assert (checkpoint.has_mtp, checkpoint.config.num_mtp_layers) == (False, 1)
    assert checkpoint.mtp_problem is not None and "declares an MTP head" in checkpoint.mtp_problem
    assert "without MTP head (config.json declares" in checkpoint.summary()


def test_head_neither_declared_nor_there(draft):
    bare = draft("dense")
    bare.take("mtp.")
    del bare.text["mtp_num_hidden_layers"]
    checkpoint = open_checkpoint(bare.write())
    assert (checkpoint.has_mtp, checkpoint.config.num_mtp_layers, checkpoint.mtp_problem) == (False, 0, None)


def test_head_there_but_not_declared_is_used(draft):
    quiet = draft("dense")
    quiet.text["mtp_num_hidden_layers"] = 0
    checkpoint = open_checkpoint(quiet.write())
    assert (checkpoint.has_mtp, checkpoint.config.num_mtp_layers) == (True, 0)


@pytest.mark.parametrize(
    ("kind", "lost", "num_missing"),
    [
        ("dense", "mtp.fc.", "1 of its 15"),
        ("dense", "mtp.layers.0.mlp.", "3 of its 15"),
        ("moe", "mtp.layers.0.self_attn.k_norm.", "1 of its 19"),
        ("moe", "mtp.layers.0.mlp.experts.down_proj", "1 of its 19"),
        ("moe", "mtp.layers.0.mlp.experts.", "24 of its 41"),  # nothing tells that they were fused
    ],
)
def test_incomplete_head_is_left_out_whole(draft, kind, lost, num_missing):
    partial = draft(kind)
    partial.take(lost)
    num_left = sum(name.startswith("mtp.") for name in partial.tensors)
    checkpoint = open_checkpoint(partial.write())
    assert not checkpoint.has_mtp and checkpoint.config.num_mtp_layers
    assert checkpoint.mtp_problem is not None
    assert f"the MTP head is incomplete: {num_missing} weights are missing, first {lost.rstrip('.')}" in (
        checkpoint.mtp_problem
    )
    assert not any(name.startswith("mtp.") for name in checkpoint.modules)
    assert checkpoint.dropped["incomplete head"][0] == num_left


@pytest.mark.parametrize("extra", ["mtp.layers.1.input_layernorm.weight", "mtp.fc.bias"])
def test_unknown_tensors_of_the_head_are_refused(draft, extra):
    more = draft("dense")
    more.tensors[extra] = torch.zeros(64)
    with pytest.raises(CheckpointError, match=f"{extra} .*implies no such tensor"):
        open_checkpoint(more.write())


# Missing, unexpected, misshapen.


def test_missing_trunk_tensor_is_named(draft):
    partial = draft("dense")
    partial.take("model.layers.2.linear_attn.dt_bias")
    with pytest.raises(CheckpointError, match=r"1 weight\(s\) of the trunk are missing, the first is .*2.*dt_bias"):
        open_checkpoint(partial.write())


@pytest.mark.parametrize(
    "extra", ["model.layers.4.input_layernorm.weight", "model.layers.0.mlp.gate_proj.bias", "score.weight"]
)
def test_unexpected_tensor_is_named(draft, extra):
    more = draft("dense")
    more.tensors[extra] = torch.zeros(64)
    with pytest.raises(CheckpointError, match=rf"{extra} \(F32 \[64\], .*\): the config implies no such tensor"):
        open_checkpoint(more.write())


def test_a_missing_output_head_names_the_flag(draft):
    lost = draft("dense")
    lost.take("lm_head")
    with pytest.raises(CheckpointError, match=r"lm_head is missing; want it, or tie_word_embeddings true"):
        open_checkpoint(lost.write())


# Matrices that are stored twice.


@pytest.mark.parametrize(
    ("kind", "copy", "meant"),
    [
        ("tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("dense", "mtp.embed_tokens.weight", "model.embed_tokens.weight"),
        ("dense", "mtp.lm_head.weight", "lm_head.weight"),
        ("tied", "mtp.lm_head.weight", "model.embed_tokens.weight"),
        ("vl", "mtp.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_of_a_shared_matrix_is_left(draft, kind, copy, meant, dtype):
    twice = draft(kind)
    wanted = load_weights(open_checkpoint(twice.write()), progress=False)
    twice.tensors[copy] = twice.tensors[meant].to(dtype, copy=True)
    checkpoint = open_checkpoint(twice.write())
    assert checkpoint.dropped["copied"] == (1, twice.tensors[copy].nbytes)
    loaded = load_weights(checkpoint, progress=False)
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_that_differs_is_refused_and_the_flag_named(draft, dtype):
    twice = draft("tied")
    other = twice.tensors["model.embed_tokens.weight"].to(dtype, copy=True)
    other[-1, -1] += 1
    twice.tensors["lm_head.weight"] = other
    checkpoint = open_checkpoint(twice.write())
    with pytest.raises(CheckpointError, match=r"lm_head.weight: other values than .*tie_word_embeddings true.*; false"):
        load_weights(checkpoint, progress=False)


def test_a_copy_of_another_form_is_refused_by_its_header(draft):
    twice = draft("tied")
    twice.tensors["lm_head.weight"] = torch.zeros(8, 64, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: BF16 \[8, 64\], but .*tie_word_embeddings true"):
        open_checkpoint(twice.write())
    packed = draft("tied", True)
    packed.tensors |= ct_parts("lm_head", quantize(packed.tensors["model.embed_tokens.weight"]))
    with pytest.raises(LayoutError, match=r"lm_head: stored as .*NVFP4.*, but .*tie_word_embeddings true"):
        open_checkpoint(packed.write())


def test_embeddings_of_a_heads_own_are_refused(draft):
    own = draft("dense")
    own.tensors["mtp.embed_tokens.weight"] = torch.zeros_like(own.tensors["model.embed_tokens.weight"])
    checkpoint = open_checkpoint(own.write())
    with pytest.raises(CheckpointError, match=r"mtp.embed_tokens.weight: other values .*mtp_use_dedicated_embeddings"):
        load_weights(checkpoint, progress=False)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "mtp.fc.weight",
        "model.layers.1.linear_attn.A_log",
    ],
)
def test_wrong_shape_is_named(draft, name):
    bent = draft("dense")
    bent.tensors[name] = bent.tensors[name].unsqueeze(0)
    with pytest.raises(CheckpointError, match=rf"{name.removesuffix('.weight')}: want shape \["):
        open_checkpoint(bent.write())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.A_log.weight"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_wrong_suffix_is_named(draft, name, wrong):
    renamed = draft("dense")
    renamed.tensors[wrong] = renamed.tensors.pop(name)
    with pytest.raises(CheckpointError, match=f"{wrong}: want it to be called {name}"):
        open_checkpoint(renamed.write())


def test_extras_that_are_not_used_are_counted(draft):
    more = draft("dense")
    for name in ("self_attn.k_scale", "self_attn.v_proj.v_scale", "self_attn.rotary_emb.inv_freq"):
        more.tensors[f"model.layers.3.{name}"] = torch.ones(1)
    assert open_checkpoint(more.write()).dropped == {"kv scales and rope caches": (3, 12)}


# Several files and the index.


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("model.norm.weight", "model-00002.safetensors", "model.norm.weight should be in 'model-00002.*no such file"),
        ("model.norm.weight", "../other.safetensors", "no such file"),
        ("model.absent.weight", "model.safetensors", "model.absent.weight should be in model.safetensors, and is not"),
    ],
)
def test_index_that_promises_too_much_is_refused(draft, name, file, message):
    folder = draft("dense").write()
    write_index(folder, {name: file})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_malformed_index_is_refused(draft, weight_map):
    folder = draft("dense").write()
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="want weight_map, an object of strings"):
        open_checkpoint(folder)


def test_copies_of_different_shape_or_dtype_are_refused(draft):
    for copy in (torch.zeros(65), torch.zeros(64, dtype=torch.float16)):
        twice = draft("dense")
        folder = twice.write(extra={"model.norm.weight": copy})
        write_index(folder, {"model.norm.weight": "model.safetensors"})
        with pytest.raises(CheckpointError, match=r"model.norm.weight: .*\[6[45]\] in .*extra.safetensors, but"):
            open_checkpoint(folder)


@pytest.mark.parametrize("listed", [None, "model.safetensors", "zzz.safetensors"])
def test_of_equal_copies_the_index_chooses(draft, listed):
    twice = draft("dense")
    folder = twice.write(zzz={"model.norm.weight": twice.tensors["model.norm.weight"]})
    if listed is None:
        with pytest.raises(CheckpointError, match="no index says which to take"):
            open_checkpoint(folder)
        return
    write_index(folder, {"model.norm.weight": listed})
    assert open_checkpoint(folder).modules["model.norm"].files == (folder / listed,)


def shards(tensors):
    names = sorted(tensors)
    half = len(names) // 2
    parts = (names[:half], names[half:])
    return {f"model-0000{i}-of-00002": {name: tensors[name] for name in part} for i, part in enumerate(parts, 1)}


@pytest.mark.parametrize("nvfp4", [False, True])
def test_of_two_sets_the_indexed_one_is_read_and_said(draft, nvfp4):
    """Of the same names, or a plain set beside a packed one."""
    meant, other = draft("dense", nvfp4), draft("dense")
    parts = shards(meant.tensors)
    meant.tensors = {name: tensor + 1 for name, tensor in other.tensors.items()}
    folder = meant.write(**parts)
    write_index(folder, {name: f"{file}.safetensors" for file, part in parts.items() for name in part})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.left_aside == (folder / "model.safetensors",) and checkpoint.num_files == 2
    read = {file.name for module in checkpoint.modules.values() for file in module.files}
    assert read == {f"{part}.safetensors" for part in parts}
    assert "read: the files of model.safetensors.index.json; not read: model.safetensors" in checkpoint.summary()


def test_a_head_that_only_the_other_set_has_is_told(draft):
    meant, other = draft("dense"), draft("dense")
    meant.take("mtp.")
    parts = shards(meant.tensors)
    meant.tensors = other.tensors
    folder = meant.write(**parts)
    write_index(folder, {name: f"{file}.safetensors" for file, part in parts.items() for name in part})
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.has_mtp and checkpoint.left_aside == (folder / "model.safetensors",)
    assert "no file holds any mtp.* tensor" in checkpoint.mtp_problem
    assert f"{folder}/model.safetensors, another set that is not read, has one: --draft-head" in checkpoint.mtp_problem
    assert attach_head(checkpoint, folder / "model.safetensors").has_mtp


def test_a_head_s_file_with_copies_of_the_embedding_is_no_other_set(draft):
    split = draft("dense")
    head = split.take("mtp.")
    copies = {name: split.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    folder = split.write(mtp=head | copies)
    write_index(folder, dict.fromkeys(split.tensors, "model.safetensors"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.has_mtp and checkpoint.left_aside == ()


def test_an_adapter_beside_the_model_is_refused(draft):
    folder = draft("dense").write(adapter_model={"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 64)})
    with pytest.raises(LayoutError, match=r"adapter_model.safetensors: a PEFT adapter; merge it first"):
        open_checkpoint(folder)


def test_folder_without_weights_is_refused(draft, tmp_path):
    empty = draft("dense")
    folder = empty.write()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"want at least one \*.safetensors"):
        open_checkpoint(folder)
    with pytest.raises(ConfigError, match="no such file"):
        open_checkpoint(tmp_path / "absent")


def test_any_damaged_file_in_the_folder_counts(draft):
    folder = draft("dense").write()
    (folder / "other.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(HeaderError, match=r"other.safetensors"):
        open_checkpoint(folder)


# Quantisation: config against headers.


def test_activation_scales_are_left_aside_and_counted(draft):
    w4a4 = draft("dense", True)
    modules = [name.removesuffix("_packed") for name in w4a4.tensors if name.endswith(".weight_packed")]
    for module in modules:
        w4a4.tensors[module.removesuffix("weight") + "input_global_scale"] = torch.ones(1)
    before = open_checkpoint(draft("dense", True).write()).num_bytes
    checkpoint = open_checkpoint(w4a4.write())
    assert checkpoint.dropped == {"activation scales": (len(modules), 4 * len(modules))}
    assert checkpoint.modules["model.layers.0.mlp.up_proj"].layout is Layout.CT_NVFP4_W4A4
    assert checkpoint.num_bytes == before
    assert f"{len(modules)} activation scales tensors" in checkpoint.summary()


def test_packed_without_a_declaration_is_refused(draft):
    silent = draft("dense", True)
    del silent.config["quantization_config"]
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.\S+: stored as .*NVFP4.*, but config.json has no"):
        open_checkpoint(silent.write())


def test_packed_but_ignored_is_refused(draft):
    wrong = draft("vl", True)
    name = "model.language_model.layers.1.mlp.up_proj"
    wrong.config["quantization_config"]["ignore"] = [*NVFP4_IGNORE, name]
    with pytest.raises(LayoutError, match=f"{name}: stored as .*, but config.json leaves it unquantised"):
        open_checkpoint(wrong.write())


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"])
def test_ignore_list_may_spell_names_either_way(draft, name):
    wrong = draft("dense", True)
    wrong.config["quantization_config"]["ignore"] = [*NVFP4_IGNORE, name]
    with pytest.raises(LayoutError, match=r"model.layers.1.mlp.up_proj: stored as"):
        open_checkpoint(wrong.write())


def test_containers_in_the_ignore_list_cover_nothing(draft):
    usual = draft("moe", True)
    usual.config["quantization_config"]["ignore"] = [
        *NVFP4_IGNORE,
        "model.layers.0.linear_attn",
        "model.layers.0.mlp.experts.3",
    ]
    assert packed(open_checkpoint(usual.write()))


def test_plain_but_declared_is_refused(draft):
    wrong = draft("dense", True)
    wrong.config["quantization_config"]["ignore"].remove("re:.*in_proj_[ab]$")
    with pytest.raises(LayoutError, match=r"in_proj_\w: stored plain \(BF16\), but config.json has it quantised"):
        open_checkpoint(wrong.write())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_whether_the_output_head_is_packed_its_tensors_say(draft, packed, ignored):
    either = draft("dense", True)
    if not ignored:
        either.config["quantization_config"]["ignore"].remove("lm_head")
    if packed:
        either.tensors |= ct_parts("lm_head", quantize(either.tensors.pop("lm_head.weight")))
    wanted = Layout.CT_NVFP4 if packed else Layout.PLAIN
    assert open_checkpoint(either.write()).modules["lm_head"].layout is wanted


def test_plain_head_needs_no_entry_in_the_ignore_list(draft):
    """Writers' configs cover the class they loaded, which has no head."""
    packed, plain = draft("moe", True), draft("moe")
    packed.take("mtp.")
    packed.tensors |= plain.take("mtp.")
    packed.config["quantization_config"]["ignore"].remove("mtp.fc")
    checkpoint = open_checkpoint(packed.write())
    assert checkpoint.has_mtp
    assert checkpoint.modules["mtp.layers.0.self_attn.q_proj"].layout is Layout.PLAIN


def test_packed_output_head_and_gates_are_read_where_the_config_says_so(draft):
    """Every Linear packed, in_proj_a/b with their few rows and the router included."""
    all_packed = draft("moe")
    wanted = ("lm_head", "mlp.gate", "mlp.shared_expert_gate", "in_proj_a", "in_proj_b", "mtp.fc", "q_proj", "up_proj")
    head = split_experts(all_packed.take("mtp."))
    all_packed.tensors |= head
    for name in [name for name in all_packed.tensors if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        if all_packed.tensors[name].dim() == 2 and module != "model.embed_tokens":
            all_packed.tensors |= ct_parts(module, quantize(all_packed.tensors.pop(name)))
    all_packed.config["quantization_config"] = nvfp4_config(ignore=[])
    modules = open_checkpoint(all_packed.write()).modules
    for name, module in modules.items():
        if name.endswith(wanted):
            assert module.layout is Layout.CT_NVFP4, name


@pytest.mark.parametrize(
    ("module", "kind"),
    [("model.embed_tokens", "embedding"), ("mtp.layers.0.mlp.experts.gate_up_proj", "fused experts")],
)
def test_packing_of_what_is_no_linear_is_refused(draft, module, kind):
    odd = draft("moe", True)
    odd.take("mtp.layers.0.mlp.experts." if "experts" in module else module)
    odd.tensors |= ct_parts(module, quantize(torch.zeros(320, 64)))
    with pytest.raises(LayoutError, match=f"{module}: .*NVFP4.* of a weight of kind {kind}; want it plain"):
        open_checkpoint(odd.write())


def test_plain_weights_beside_a_modelopt_file_are_refused(draft):
    folder = draft("dense").write()
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(LayoutError, match=r"^\S+: stored plain \(BF16\), but config.json has it quantised"):
        open_checkpoint(folder)


def test_marker_file_that_only_quantises_the_kv_cache_is_accepted(draft):
    folder = draft("dense").write()
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    assert not packed(open_checkpoint(folder))


# Whole checkpoints in layouts that are not read: the module is named, and nothing is read.

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("layout", list(refused_layouts(torch.zeros(16, 64))))
@pytest.mark.parametrize("prefix", ["model.layers.3.self_attn.v_proj", "mtp.layers.0.self_attn.v_proj"])
def test_other_layouts_are_refused_by_name(draft, layout, prefix):
    other = draft("dense")
    stored = refused_layouts(other.tensors.pop(f"{prefix}.weight").float())[layout]
    other.tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in stored.items()}
    with pytest.raises(LayoutError) as caught:
        open_checkpoint(other.write())
    assert str(caught.value).startswith(f"{prefix}: stored as {layout} (")


def undeclared(weight):
    rows, _ = weight.shape
    fp8, packed = weight.to(FP8), quantize(weight)
    factor = torch.tensor(1 / packed.global_scale)
    modelopt = {"weight": packed.packed, "weight_scale": packed.scale, "weight_scale_2": factor}
    return {
        "ModelOpt NVFP4": modelopt,
        "ModelOpt NVFP4 (W4A4)": modelopt | {"input_scale": torch.tensor(1.0)},
        "Qwen/DeepSeek FP8 block (weight_scale_inv)": {"weight": fp8, "weight_scale_inv": torch.ones(2, 1)},
        "compressed-tensors FP8 block": {"weight": fp8, "weight_scale": torch.ones(2, 1)},
        "ModelOpt FP8 block (FP8_PB_WO)": {"weight": fp8, "weight_scale": torch.ones(2, 1, 1, 1)},
        "FP8 per tensor": {"weight": fp8, "weight_scale": torch.ones(()), "input_scale": torch.ones(())},
        "FP8 per output channel": {"weight": fp8, "weight_scale": torch.ones(rows, 1)},
        "Lynn native NVFP4": {
            "weight.packed": packed.packed,
            "weight.scale": packed.scale.half(),
            "weight.global_scale": torch.ones(()),
        },
    }


@pytest.mark.parametrize("layout", list(undeclared(torch.ones(256, 64))))
def test_layouts_that_are_read_must_be_declared(draft, layout):
    other = draft("dense")
    name = "model.layers.3.self_attn.q_proj"
    stored = undeclared(other.tensors.pop(f"{name}.weight").float())[layout]
    other.tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
    with pytest.raises(LayoutError) as caught:
        open_checkpoint(other.write())
    assert str(caught.value) == f"{name}: stored as {layout}, but config.json has no quantization_config"


@pytest.mark.parametrize("method", ["quark", "bitsandbytes", "gptq", "awq", "mxfp4"])
def test_declared_method_that_is_not_read_is_refused(draft, method):
    other = draft("dense")
    other.config["quantization_config"] = {"quant_method": method}
    with pytest.raises(LayoutError, match=f"config.json: quantization_config.quant_method: '{method}' is not read"):
        open_checkpoint(other.write())


def test_mlx_files_are_refused(draft):
    mlx = draft("dense")
    mlx.tensors = {f"language_model.{name}": tensor for name, tensor in mlx.tensors.items()}
    with pytest.raises(LayoutError, match=r"language_model.*: stored in MLX's form"):
        open_checkpoint(mlx.write())


def test_files_that_say_they_are_mlx_are_refused(draft):
    other = draft("dense")
    folder = other.write()
    save_file(other.tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(LayoutError, match="stored in MLX's form"):
        open_checkpoint(folder)
