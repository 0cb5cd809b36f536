"""GET /v1/capacity: what a person may add up."""

import json
import urllib.request

import pytest
from serving import serving_in_thread

CORE = "pilotfish.engine.start:make_core"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from byte_model import write_model
    from tiny_models import build_tiny

    return build_tiny(write_model(tmp_path_factory.mktemp("tiny")), "dense")


def test_the_cap_its_reason_and_memory_that_adds_up(tiny):
    engine = {"num_speculative_tokens": 3, "max_model_len": 256, "num_threads": 1}
    with serving_in_thread(tiny, core=CORE, engine=engine) as server:
        with urllib.request.urlopen(server.v1 + "/capacity") as response:
            capacity = json.load(response)
        with urllib.request.urlopen(server.url + "/metrics") as response:
            metrics = response.read().decode()
    assert capacity["max_num_seqs"] == 4 == capacity["limits"][capacity["binding_limit"]]
    assert capacity["binding_limit"] == "fast-path rows" and capacity["rows_per_round"] == 16
    memory = capacity["memory"]
    parts = memory.keys() - {"total_bytes", "checkpoint_bytes"}
    assert sum(memory[part] for part in parts) == memory["total_bytes"]
    for part in parts:
        name = part.removesuffix("_bytes")
        line = next(
            line for line in metrics.splitlines() if line.startswith(f'pilotfish_memory_bytes{{part="{name}"}}')
        )
        assert float(line.split()[-1]) == memory[part]
    assert capacity["kv_cache"]["tokens"] == capacity["kv_cache"]["pages"] * capacity["kv_cache"]["page_size"]
    assert capacity["execution"]["kv_dtype"] == "float32"
    prefix = capacity["prefix_cache"]
    assert prefix["enabled"] and prefix["snapshots"] > 0
    assert prefix["snapshots"] * prefix["snapshot_bytes"] == memory["snapshots_bytes"]


@pytest.mark.parametrize(("name", "dtype", "size"), (("bfloat16", "bfloat16", 2), ("fp8", "float8_e4m3fn", 1)))
def test_the_key_value_cache_s_dtype_and_what_a_token_takes_of_it(tiny, name, dtype, size):
    engine = {"num_speculative_tokens": 3, "max_model_len": 256, "num_threads": 1, "kv_cache_dtype": name}
    engine["enable_prefix_caching"] = False
    with serving_in_thread(tiny, core=CORE, engine=engine) as server:
        with urllib.request.urlopen(server.v1 + "/capacity") as response:
            capacity = json.load(response)
        with urllib.request.urlopen(server.url + "/metrics") as response:
            metrics = response.read().decode()
    config = json.loads((tiny / "config.json").read_text())
    # keys and values of the full-attention layer and the head's
    numbers = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert capacity["kv_cache"]["bytes_per_token"] == numbers * size
    assert capacity["memory"]["kv_cache_bytes"] == numbers * size * 256 * (capacity["kv_cache"]["pages"] + 1)
    assert capacity["execution"]["kv_dtype"] == dtype
    (info,) = (line for line in metrics.splitlines() if line.startswith("pilotfish_build_info"))
    assert f'kv_dtype="{dtype}"' in info
    assert capacity["prefix_cache"] == {"enabled": False, "snapshots": 0, "snapshot_bytes": 0}
