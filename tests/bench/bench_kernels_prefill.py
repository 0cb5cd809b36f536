"""Experts over a prompt: from their packed weights (moe_prompt.py) against expanding them first (`bulk` in moe.py).

    python tests/bench/bench_kernels_prefill.py [--rows 24,256,1024,2048,4096,8192] [--only-packed]

Regime: the experts of one layer of the 35B-A3B (256, top 8, and the shared one, 2048 x 512, NVFP4), rows routed
uniformly. A time is that of one call as prefill makes it, launches by the host included where it is what limits
(`us`), and of the device alone, replayed in a graph (`us_graph`). The limits: 455 MB of packed weights at 4.37 TB/s,
104 us, and 6.3 MFLOP a row and expert at 900 TFLOP/s of bf16, 0.57 us for 9 of them and 9 rows. Values are compared
first. One JSON line a row, and one for each launch of ours; for up to 256 rows by a round's kernels too, and beyond 24
rows an expert with 64 in place of 96 rows at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable

import torch

from pilotfish.engine.bench.sizes import released_config
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.kernels.cuda import moe_prompt
from pilotfish.kernels.cuda.linear import MAX_ROWS
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from tests.support.routed import choosing

PARTS = ("gate", "up", "down")
CALLS = 10
REPLAYS = 9


def layer() -> GroupedExperts:
    config = released_config("35B-A3B")
    assert config is not None
    config = dataclasses.replace(config, num_hidden_layers=1, layer_types=config.layer_types[:1], vocab_size=128)
    weights = dummy_weights(config, "nvfp4", torch.device("cuda"), with_head=False)

    def expert(name: str) -> ExpertWeights:
        return ExpertWeights(*(weights.pop(f"model.layers.0.mlp.{name}.{part}_proj.weight") for part in PARTS))

    routed = [expert(f"experts.{number}") for number in range(config.num_experts)]
    return GroupedExperts(routed, expert("shared_expert"), config.num_experts_per_tok)


def seconds(call: Callable[[], object]) -> float:
    """Of a call, by events around several; the median."""
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return sorted(found)[REPLAYS // 2]


def in_graph(call: Callable[[], object]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay)


def launches(packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Each launch of ours but the sum; all of them with fewer rows at a time; a round's, where it has so many rows."""
    (group,) = packed.groups
    lists, arranged = moe_prompt.prepare(packed, x, ids)
    gate_up = (packed, group.gate_up, arranged, lists, group.width)
    inner = moe_prompt.products(*gate_up, down=False)
    down = (packed, group.down, inner, lists, packed.hidden)
    whole = moe_prompt.parts(packed, x, ids)

    def with_64_rows() -> torch.Tensor:
        before, moe_prompt.ROWS = moe_prompt.ROWS, 64
        try:
            return moe_prompt.parts(packed, x, ids)
        finally:
            moe_prompt.ROWS = before

    assert torch.equal(with_64_rows(), whole)
    found: dict[str, Callable[[], object]] = {
        "as packed, without the sum": lambda: moe_prompt.parts(packed, x, ids),
        "prepare": lambda: moe_prompt.prepare(packed, x, ids),
        "gate_up": lambda: moe_prompt.products(*gate_up, down=False),
        "down": lambda: moe_prompt.products(*down, down=True),
    }
    if len(ids) <= MAX_ROWS:
        routed = choosing(ids, packed.num_experts)
        found["a round's, without the sum"] = lambda: moe_prompt.parts_of_few(packed, x, *routed)
    if len(ids) * packed.top_k > 24 * packed.num_experts:
        found["64 rows at a time, without the sum"] = with_64_rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="24,256,1024,2048,4096,8192")
    parser.add_argument(
        "--only-packed", action="store_true", help="not the expanded one, which needs 1 GiB and is slow"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    packed = layer()
    scratch = torch.empty(packed.scratch_size, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for rows in map(int, args.rows.split(",")):
        x = torch.randn((rows, packed.hidden), generator=generator, device="cuda").bfloat16()
        logits = torch.randn((rows, packed.num_experts), generator=generator, device="cuda")
        values, ids = logits.topk(packed.top_k, -1)
        operands = (x, values.softmax(-1), ids.int())
        gate = torch.rand(rows, generator=generator, device="cuda")
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "as packed": lambda: moe_prompt.experts(packed, *operands, gate),  # noqa: B023
            "expanded": lambda: packed.bulk(*operands, gate, scratch),  # noqa: B023
        }
        got, want = (call() for call in calls.values())
        # products and SwiGLU are rounded to bf16 once more where weights are expanded
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * want.abs().max().item())
        if args.only_packed:
            del calls["expanded"]
        for name, call in (calls | launches(packed, operands[0], operands[2])).items():
            line = {"name": name, "rows": rows, "us": seconds(call) * 1e6, "us_graph": in_graph(call) * 1e6}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
