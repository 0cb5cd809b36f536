"""The small operators on a GPU: embedding, norms, router, commit, and choosing over a full and a trimmed vocabulary.

    python -m tests.bench.bench_kernels_small [--rows 1,4,8,16] [--only choose]

Regime: decoding, 1 .. 16 rows, launch-bound but for `choose`, whose limit is the logits' bytes over the memory's rate
(4.37 TB/s of an H200; "cold": as many logits in turn as pass the L2; "warm": just written, as in a round). A time is
that of one launch among 40 in a CUDA graph, the median of replays, with and without programmatic dependent launch.
Tokens are compared with the reference first. One JSON line a row on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.kernels.cuda import commit, norm, router, sample
from pilotfish.kernels.cuda.warm import compile_all
from tests.bench.bench_kernels_linear import PAST_L2, RATE, in_graph
from tests.support.device_reference import Reference

VOCAB, TRIMMED = 248320, 32768
MAX_WIDTH = 4
EPS = 1e-6
Launch = Callable[[int, bool], None]
"""(number of the launch, programmatic dependent launch)."""
Case = tuple[str, int, Launch]
"""Name, bytes that must be moved, launch."""
REQUESTS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, seed=1),
    "top_k 20, top_p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
    "top_p 0.98 of a flat row": SamplingParams(temperature=4.0, top_p=0.98, seed=1),
    "top_k 1000": SamplingParams(temperature=1.0, top_k=1000, seed=1),
    "top_k 1000, top_p 0.95 of a flat row": SamplingParams(temperature=4.0, top_k=1000, top_p=0.95, seed=1),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=1),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=1.0, repetition_penalty=1.1, seed=1),
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def small_cases(rows: int) -> Iterator[Case]:
    state = Reference(BatchState(17, 8, 1024, torch.device("cuda"))).slots
    width = MAX_WIDTH if rows % MAX_WIDTH == 0 else 1
    slots = torch.arange(rows // width, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
    for hidden in (2048, 5120):
        x, h, delta, pair = torch.zeros(rows, hidden, device="cuda"), bf16(rows, hidden), bf16(rows, hidden), None
        embedding, scale, pair = bf16(1024, hidden), torch.ones(hidden, device="cuda"), bf16(rows, 2 * hidden)

        def embed(
            number: int, pdl: bool, embedding: Any = embedding, scale: Any = scale, x: Any = x, h: Any = h
        ) -> None:
            norm.embed_rows(
                embedding, scale, EPS, slots, state.last_token, state.drafts, state.length, width, tokens, positions,
                x, h, pdl,
            )  # fmt: skip

        def add(number: int, pdl: bool, x: Any = x, delta: Any = delta, scale: Any = scale, h: Any = h) -> None:
            norm.add_norm(x, delta, scale, EPS, h, pdl=pdl)

        def both(number: int, pdl: bool, parts: Any = (embedding, h, scale, scale), pair: Any = pair) -> None:
            norm.pair_norm(tokens, *parts, EPS, pair, rows, pdl)

        yield f"embed_rows {hidden}", rows * hidden * 8 + 4 * hidden, embed
        yield f"add_norm {hidden}", rows * hidden * 12 + 4 * hidden, add
        yield f"pair_norm {hidden}", rows * hidden * 8 + 8 * hidden, both
    for experts, top_k in ((256, 8), (512, 10)):
        logits = torch.randn(rows, experts + 1, device="cuda")
        ids = torch.zeros(rows, top_k, dtype=torch.int32, device="cuda")
        outputs = (torch.zeros(rows, top_k, device="cuda"), ids, torch.zeros(rows, device="cuda"))

        def route(number: int, pdl: bool, logits: Any = logits, experts: int = experts, out: Any = outputs) -> None:
            router.route(logits, experts, *out, pdl)

        yield f"route {experts} top {top_k}", logits.nbytes, route
    verdicts = commit.Verdicts.empty(len(slots), "cuda")
    yield (
        "accept_commit",
        len(slots) * 1200,
        lambda number, pdl: commit.accept_commit(tokens, slots, state, verdicts, width, 3, pdl=pdl),
    )


def choose_cases(rows: int) -> Iterator[Case]:
    state = BatchState(17, 8, VOCAB, torch.device("cuda"))
    width = MAX_WIDTH if rows % MAX_WIDTH == 0 else 1
    slots = torch.arange(1, rows // width + 1, dtype=torch.int32, device="cuda")
    out, has_nan = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
    for trimmed in (False, True):
        size = TRIMMED if trimmed else VOCAB
        scratch = sample.ChoiceScratch.empty(rows, size, "cuda")
        kept = torch.arange(0, 7 * TRIMMED, 7, dtype=torch.int32, device="cuda") if trimmed else None
        copies = [2 * torch.randn(rows, size, device="cuda") for _ in range(max(1, int(PAST_L2 / rows / size / 4)))]
        for logits in copies:
            # a head of likely tokens over a long tail
            logits += 6 * torch.randn_like(logits).clamp_(min=2.0)
        for name, params in REQUESTS.items():
            for slot in range(1, 17):
                state.admit(slot, [1, 2, 3], params, 100, 8)
            filters = "_p" in name or "top_k" in name
            reference = Reference(state)

            def launch(
                number: int, pdl: bool, copies: Any = copies, scratch: Any = scratch, kept: Any = kept,
                filters: bool = filters, table: Any = reference.slots,
            ) -> None:  # fmt: skip
                logits = copies[number % len(copies)]
                sample.choose(
                    logits, slots, table, width, out, scratch, has_nan, kept=kept, filters=filters, pdl=pdl
                )  # fmt: skip

            def warm(number: int, pdl: bool, launch: Any = launch) -> None:
                launch(0, pdl)

            compile_all(lambda: [launch(0, pdl) for pdl in (False, True)])
            launch(0, False)
            got = out.tolist()
            reference.choose(copies[0], slots, None, width, out, kept=kept)
            differing = sum(mine != theirs for mine, theirs in zip(got, out.tolist(), strict=True))
            # top_p alone may end at another token where a sum of floats is near it
            assert differing <= ("top_p" in name), f"{name}: {differing} tokens of {rows} are not the reference's"
            title = f"choose {size} {name}"
            yield f"{title}, cold", rows * size * 4, launch
            yield f"{title}, warm", rows * size * 4, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    frame = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps(frame), flush=True)
    for rows in (int(count) for count in args.rows.split(",")):
        for cases in (small_cases, choose_cases):
            for name, num_bytes, launch in cases(rows):
                if args.only not in name:
                    continue
                compile_all(lambda: [launch(0, pdl) for pdl in (False, True)])  # noqa: B023
                plain, pdl = (in_graph(lambda number, pdl=pdl: launch(number, pdl)) for pdl in (False, True))  # noqa: B023
                floor = num_bytes / RATE
                line = {
                    "name": name,
                    "rows": rows,
                    "us": round(plain * 1e6, 2),
                    "us_pdl": round(pdl * 1e6, 2),
                    "floor_us": round(floor * 1e6, 2),
                    "tb_s": round(num_bytes / min(plain, pdl) / 1e12, 3),
                    "times_floor": round(min(plain, pdl) / floor, 2),
                }
                print(json.dumps(line), flush=True)
                print(
                    f"{name:48} {rows:3} rows {plain * 1e6:8.2f} us {pdl * 1e6:8.2f} with PDL,"
                    f" floor {floor * 1e6:6.2f}",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
