"""A trimmed draft vocabulary on a CPU: size against acceptance and the time of drafting.

    python -m tests.bench.bench_draft_vocab MODEL --text PATH... --prompts FILE [--sizes 512,1024,2048,4096] [--depth 3]

Regime: batch 1, greedy and at temperature 1. The vocabularies are counted from --text, which must not hold the prompts.
Sizes are interleaved prompt by prompt; every size must write the same tokens, checked before any figure is printed. The
limit: drafting costs a pass of the head's layer and one product with the kept rows of lm_head for each draft.
One JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from pilotfish.draft_heads.training.draft_vocab import main as draft_vocab
from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import make_core
from pilotfish.server.text.tokenizer import Tokenizer
from tests.bench.bench_decode import Series, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="lines with a prompt")
    parser.add_argument("--sizes", default="512,1024,2048,4096")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=1)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_folder(args.model)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.num_prompts]
    prompts = [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False) for line in lines]
    cores = {}
    with TemporaryDirectory() as folder:
        for size in (None, *(int(size) for size in args.sizes.split(","))):
            path = Path(folder) / f"{size}.json"
            if size is not None:
                texts = [str(path) for path in args.text]
                command = [str(args.model), "--text", *texts, "--size", str(size), "--out", str(path)]
                assert draft_vocab(command) == 0
            options = EngineOptions(
                model=str(args.model),
                num_speculative_tokens=args.depth,
                max_num_seqs=1,
                max_model_len=2048,
                device="cpu",
                num_threads=args.num_threads,
                draft_vocab=None if size is None else str(path),
            )
            cores[size] = make_core(options)
    print(json.dumps({"machine": platform.processor(), "torch": torch.__version__, "threads": args.num_threads}))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
        series = {size: Series() for size in cores}
        for number, prompt in enumerate(tqdm(prompts, desc=f"temperature {temperature}", disable=None)):
            for size, core in cores.items():
                decode(core, [prompt], params, series[size], number)
        assert all(part.tokens == series[None].tokens for part in series.values()), "sizes wrote different tokens"
        for size, part in series.items():
            line = {
                "size": size,
                "temperature": temperature,
                "acceptance_length": round(part.acceptance_length, 3),
                "draft_ms": round(1e3 * statistics.median(part.phases["draft"]), 3),
                "round_ms": round(1e3 * part.round_seconds, 3),
                "tokens_per_second": round(statistics.median(part.rates), 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
