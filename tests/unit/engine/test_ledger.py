"""The ledger adds up, counts each storage once, and the limits are what their formulas say."""

import torch

from pilotfish.engine import ledger
from tests.support.loops import LoopDriver


def ready(**options):
    return LoopDriver(**{"depth": 3, "max_num_seqs": 2, **options}).loop.ready


def test_the_parts_are_the_total():
    account = ready().ledger
    assert sum(account[f"{name}_bytes"] for name in ledger.PARTS) == account["total_bytes"]
    assert all(account[f"{name}_bytes"] > 0 for name in ("weights", "kv_cache", "recurrent_state", "pending", "free"))


def test_a_token_and_a_sequence_times_their_number_are_the_caches():
    facts = ready()
    pages = facts.kv_pages_total + 1  # the null page
    assert facts.kv_bytes_per_token * facts.page_size * pages == facts.ledger["kv_cache_bytes"]
    slots = facts.max_num_seqs + 1
    held = sum(facts.ledger[f"{name}_bytes"] for name in ("recurrent_state", "pending", "buffers"))
    assert facts.bytes_per_sequence == held // slots


def test_fp8_takes_half_the_bytes_of_bf16():
    exact, narrow = ready(dtype="bfloat16"), ready(dtype="bfloat16", kv_dtype=torch.float8_e4m3fn)
    assert narrow.kv_bytes_per_token * 2 == exact.kv_bytes_per_token
    assert narrow.ledger["kv_cache_bytes"] * 2 == exact.ledger["kv_cache_bytes"]
    assert (exact.execution.kv_dtype, narrow.execution.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert "of KV cache in float8_e4m3fn, which holds" in "\n".join(ledger.show(narrow))


def test_each_storage_counts_once_and_packed_matrices_count():
    weight = torch.zeros(16, 32)
    assert ledger.tensor_bytes([weight, weight, weight[3:], {"a": weight.T}]) == 16 * 32 * 4
    # in float32, which every CPU packs
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 32), 8)
    assert ledger.tensor_bytes((packed, packed)) == 16 * 32 * 4


def test_every_limit_has_its_number():
    limits = ready().limits
    assert limits["fast-path rows"] == 4 and limits["wide-path rows"] == 64
    assert limits["configured"] == limits["state slots"] == 2
    assert limits["KV pages"] >= 1


def test_the_log_names_the_limit_that_binds():
    text = "\n".join(ledger.show(ready()))
    assert "configured            2   <- sets the cap" in text
    assert "= total" in text and "of KV cache in float32, which holds" in text
