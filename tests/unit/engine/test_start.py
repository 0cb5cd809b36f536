"""What options leave open is decided from the checkpoint and the machine, and impossible wishes are refused by name."""

import dataclasses
import re
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch

from pilotfish.engine import plan as planning
from pilotfish.engine import start
from pilotfish.engine.check import driver
from pilotfish.engine.checkpoint.dummy import stored_bytes
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import OptionError
from pilotfish.engine.ledger import tensor_bytes
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import make_plan
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda import warm
from pilotfish.kernels.cuda.delta_net import pending_width
from tests.support.rounds import make_engine
from tests.support.tiny_models import VOCAB_SIZE, build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("start") / "dense", "dense")


@pytest.mark.parametrize("name", ["model", "draft_head", "draft_vocab"])
def test_a_path_that_is_no_text_is_refused_before_an_engine_is_started(name):
    with pytest.raises(OptionError, match=rf"{name}: want a path in UTF-8, got a\\udcff"):
        EngineOptions(**({"model": "m"} | {name: "a\udcff"}))


def plan(folder, **options):
    return make_plan(EngineOptions(model=str(folder), device="cpu", **options), open_checkpoint(folder))


def test_defaults_draft_three_and_keep_a_round_on_the_fast_path(folder):
    decided = plan(folder)
    assert (decided.depth, decided.max_num_seqs, decided.binding_limit) == (3, 4, "fast-path rows")
    assert decided.disabled_reason is None
    assert decided.max_model_len == 2048
    # four sequences of the longest kind fit
    assert decided.num_pages == 4 * -(-(2048 + 4) // PAGE)


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
    ],
)
def test_the_key_value_cache_follows_the_model_unless_told_otherwise(folder, wanted, dtype):
    decided = plan(folder, kv_cache_dtype=wanted)
    assert (decided.kv_dtype, decided.dtype) == (dtype, torch.float32)
    assert decided.cache_sizes.kv_dtype == dtype


@pytest.mark.parametrize("vocab", (VOCAB_SIZE, 248320))
def test_room_is_left_for_every_slot(vocab):
    """Against what an engine allocates: not less, and not much more."""
    depth, slots = 3, 5
    engine = make_engine("moe", "bfloat16", depth=depth, max_num_seqs=slots - 1)
    state, config = engine.executor.model.trunk.state, engine.executor.model.config
    tables = BatchState(slots, depth, vocab, torch.device("cpu"))
    held = (
        slots * len(config.linear_layers) * (depth + 1) * pending_width(config.conv_dim, config.linear_num_value_heads)
    )
    rows = 16 * vocab * (4 + 8 + 4)  # logits, candidates, drafts' logits
    experts = 2 * 3 * (config.num_experts + 1) * config.moe_intermediate_size * config.hidden_size
    allocated = state.s.nbytes + state.conv.nbytes + 2 * held + tensor_bytes(tables) + rows
    reserved = planning.buffer_bytes(dataclasses.replace(config, vocab_size=vocab), depth, slots - 1)
    assert allocated <= reserved <= 1.2 * allocated + experts + slots * planning.SLOT_TABLE_BYTES


def test_the_same_memory_holds_twice_the_tokens_in_fp8(tmp_path, monkeypatch):
    folder = build_tiny(tmp_path / "bf16", "dense", dtype="bfloat16")
    monkeypatch.setattr(planning, "cpu_multiplies_bf16", lambda: True)
    # two full layers' keys and values of a page, the head's too, ten times
    config = open_checkpoint(folder).config
    layers = len(config.full_layers) + 1
    page_bytes = 2 * layers * config.num_key_value_heads * config.head_dim * PAGE * 2
    monkeypatch.setattr(planning, "CPU_KV_BYTES", 10 * page_bytes)
    pages = [plan(folder, kv_cache_dtype=name).num_pages for name in ("auto", "bfloat16", "fp8")]
    assert pages == [10, 10, 20]


def test_fused_kernels_read_fp8_where_the_device_does(monkeypatch):
    cuda = torch.device("cuda")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if refused:
            with pytest.raises(OptionError, match=r"kv_cache_dtype: .* read fp8 from compute capability 8\.9"):
                planning.choose_kv_dtype("fp8", torch.bfloat16, cuda, True)
        else:
            assert planning.choose_kv_dtype("fp8", torch.bfloat16, cuda, True) == torch.float8_e4m3fn
        # torch's operators convert by themselves
        assert planning.choose_kv_dtype("fp8", torch.bfloat16, cuda, False) == torch.float8_e4m3fn
        assert planning.choose_kv_dtype("auto", torch.bfloat16, cuda, True) == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "wanted"),
    [
        ("cuda", torch.bfloat16, (9, 0), None),
        ("cuda", torch.bfloat16, (8, 0), None),
        ("cuda", torch.bfloat16, (7, 5), "compute capability 8.0 (bf16 products), got 7.5"),
        ("cuda", torch.float32, (9, 0), "bfloat16, got torch.float32"),
        ("cpu", torch.bfloat16, None, "a CUDA device, got cpu"),
    ],
)
def test_fused_kernels_run_wherever_they_can(device, dtype, capability, wanted, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(warm, "prepare", lambda: None)
    place = torch.device(device)
    assert planning.choose_fused("auto", place, dtype) == (wanted is None)
    # on a CPU torch's operators are what there is
    assert [wanted in message for message in caplog.messages] == [True] * (device == "cuda" and wanted is not None)
    assert planning.choose_fused("torch", place, dtype) is False
    if wanted is None:
        assert planning.choose_fused("fused", place, dtype) is True
    else:
        with pytest.raises(OptionError, match=f"kernels: fused ones want {re.escape(wanted)}"):
            planning.choose_fused("fused", place, dtype)


@pytest.mark.parametrize("wanted", ["auto", "fused"])
def test_a_gpu_without_what_triton_needs_is_no_reason_to_be_slow(wanted, monkeypatch):
    def prepare():
        raise RuntimeError("Triton cannot launch kernels here: Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(warm, "prepare", prepare)
    place = torch.device("cuda")
    with pytest.raises(OptionError, match=r"kernels: .* find C compiler; it wants .*, or --kernels torch"):
        planning.choose_fused(wanted, place, torch.bfloat16)
    assert planning.choose_fused("torch", place, torch.bfloat16) is False


def test_a_checkpoint_without_head_is_served_without_speculation_and_says_so(tmp_path, caplog):
    headless = build_tiny(tmp_path / "dense", "dense", mtp=False)
    decided = plan(headless, num_speculative_tokens=3)
    assert decided.depth == 0
    assert decided.disabled_reason
    assert "SPECULATION IS OFF" in caplog.text


def test_bf16_checkpoints_run_in_fp32_where_the_cpu_has_no_bf16_products(folder, monkeypatch, caplog, tmp_path):
    bf16 = build_tiny(tmp_path / "bf16", "dense", dtype="bfloat16")
    monkeypatch.setattr(planning, "cpu_multiplies_bf16", lambda: False)
    assert plan(bf16).dtype == torch.float32
    assert "float32" in caplog.text
    monkeypatch.setattr(planning, "cpu_multiplies_bf16", lambda: True)
    assert plan(bf16).dtype == torch.bfloat16
    assert plan(folder).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens: want 0..8, got 9"),
        ({"max_model_len": 4096}, "max_model_len: want 2..2048"),
        ({"max_num_seqs": 0}, "max_num_seqs: want 1..64"),
        ({"max_num_seqs": 65}, "max_num_seqs: want 1..64"),
        ({"kv_cache_tokens": 512}, "kv cache: 2 pages of 256 tokens, want at least 9"),
        ({"num_threads": 0}, r"num_threads: want 1\.\.1024, got 0"),
    ],
)
def test_impossible_wishes_are_refused_by_name(folder, options, named):
    with pytest.raises(OptionError, match=named):
        if "num_threads" in options:
            start.start_engine(EngineOptions(model=str(folder), **options))
        plan(folder, **options)


def test_random_weights_of_a_config_serve_without_a_file_of_weights(folder, tmp_path):
    """What stands where a checkpoint would: only config.json is read, and the text is the same each time."""
    shutil.copy(folder / "config.json", tmp_path)
    options = EngineOptions(
        model=str(tmp_path), load_format="dummy", num_threads=1, device="cpu", max_model_len=256, dtype="float32"
    )
    texts = []
    for _ in range(2):
        loop = start.make_core(options)
        driver.submit(loop, {"one": [1, 2, 3]}, driver.greedy(12))
        texts.append([token for report in driver.reports(loop) for out in report.outputs for token in out.token_ids])
    assert len(texts[0]) == 12 and texts[0] == texts[1]
    assert loop.ready.num_speculative_tokens == 3 and loop.ready.head_check is loop.ready.trunk_check is None
    assert loop.ready.draft_head == "MTP head of random weights"
    assert loop.ready.ledger["checkpoint_bytes"] == stored_bytes(ModelConfig.load(tmp_path), "nvfp4") > 0
    with pytest.raises(OptionError, match="load_format dummy"):
        start.start_engine(msgspec.structs.replace(options, draft_head=str(folder)))


def test_random_weights_accept_what_was_decreed_and_say_so(folder, tmp_path, caplog):
    shutil.copy(folder / "config.json", tmp_path)
    options = EngineOptions(
        model=str(tmp_path), load_format="dummy", num_threads=1, device="cpu", max_model_len=512, dtype="float32",
        synthetic_acceptance_length=2.6, max_num_seqs=3,
    )  # fmt: skip
    loop = start.make_core(options)
    assert "synthetic: 2.6 tokens a round" in caplog.text and "synthetic: 2.6 tokens" in loop.ready.draft_head
    driver.submit(loop, {str(number): [1, 2, number] for number in range(3)}, driver.greedy(200))
    outputs = [out for report in driver.reports(loop) for out in report.outputs if out.num_drafted == 3]
    assert len(outputs) > 150
    assert sum(len(out.token_ids) for out in outputs) / len(outputs) == pytest.approx(2.6, rel=0.02)
    assert {out.num_accepted for out in outputs} == {0, 1, 2, 3}
    driver.submit(loop, {"plain": [5, 6]}, driver.greedy(10), speculative_k=0)
    assert sum(len(out.token_ids) for report in driver.reports(loop) for out in report.outputs) == 10
    for wrong, words in (
        ({"load_format": "auto", "model": str(folder)}, "load_format dummy alone"),
        ({"audit_rate": 0.5}, "audit_rate 0"),
        ({"synthetic_acceptance_length": 4.5}, "got 4.5, k = 3"),
        ({"num_speculative_tokens": 0}, "k = 0"),
    ):
        with pytest.raises(OptionError, match=words):
            start.start_engine(msgspec.structs.replace(options, **wrong))


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch for GPUs imports it with its masks")
def test_torch_compile_is_not_imported(folder):
    """It takes half as long as all the rest of a start. A prompt's second part is read as well."""
    code = "import sys; from pilotfish.engine import start; from pilotfish.engine.check import driver"
    code += "; from pilotfish.engine.options import EngineOptions"
    code += (
        "; loop = start.make_core(EngineOptions(model=sys.argv[1], max_model_len=1024, dtype='float32', num_threads=1))"
    )
    code += "; driver.submit(loop, {'one': list(range(1, 600))}, driver.greedy(2)); driver.drain(loop)"
    code += "; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
