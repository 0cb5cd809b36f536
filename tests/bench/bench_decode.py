"""Decoding speed by k: tokens/s, acceptance length, where a round's time goes, and what the HTTP path adds.

    python tests/bench/bench_decode.py MODEL [--prompts FILE] [--depths 0,1,2,3,5] [--http] ...

Regime: batch 1 (or --batch), greedy (or --temperature), prompts of 100-400 tokens. Variants are interleaved prompt by
prompt, so that a change of the machine's load meets all of them; figures are medians over prompts with the quartiles.
The limit: a round at depth k commits at most k + 1 tokens, so k pays where its acceptance length exceeds its
break-even, the time of its round over that of a k = 0 round. Every depth must write the same tokens: checked before
any figure is printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import reserved_pages
from pilotfish.engine.start import make_core
from pilotfish.kernels.attention import PAGE
from pilotfish.server.text.tokenizer import Tokenizer


@dataclass
class Series:
    """One depth's measurements: a rate per prompt, totals over all rounds, seconds of each phase per round."""

    rates: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def round_seconds(self) -> float:
        return sum(statistics.median(seconds) for seconds in self.phases.values())


def decode(core: EngineLoop, prompts: list[list[int]], params: SamplingParams, series: Series, first: int) -> None:
    """Runs prompts together; adds the decode rate of the group (from the last prefill to the end) to the series."""
    ids = {f"p{first + i}": first + i for i in range(len(prompts))}
    for name, prompt in zip(ids, prompts, strict=True):
        core.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=params))
    seconds, counted = 0.0, 0
    texts: dict[int, list[int]] = {number: [] for number in ids.values()}
    while core.has_work():
        report = core.step()
        if report is None:
            continue  # the first round of a run-ahead loop has been launched, and nothing read
        for output in report.outputs:
            assert output.error is None, output.error
            texts[ids[output.request_id]] += output.token_ids
            if output.round:
                counted += len(output.token_ids)
                series.rounds += 1
                series.drafted += output.num_drafted
                series.accepted += output.num_accepted
        # a round that was waited for, or read one behind
        if "verify" in report.stats.phases or "wait" in report.stats.phases:
            seconds += report.stats.step_seconds - report.stats.phases.get("prefill", 0.0)
            for phase, spent in report.stats.phases.items():
                series.phases[phase].append(spent)
    series.rates.append(counted / seconds)
    series.tokens |= texts


def run_engine(args: argparse.Namespace, prompts: list[list[int]], params: SamplingParams) -> dict[int, Series]:
    """Every depth over every group of prompts, interleaved."""
    cores = {k: make_core(options(args, k)) for k in args.depths}
    measured = {k: Series() for k in args.depths}
    for k, core in cores.items():
        decode(core, prompts[:1], params, Series(), 0)  # warm-up
        assert core.ready.num_speculative_tokens == k, f"want k = {k}, the engine serves {core.ready}"
    groups = [(i, prompts[i : i + args.batch]) for i in range(0, len(prompts), args.batch)]
    for first, group in tqdm(groups, desc="prompts", disable=not sys.stderr.isatty()):
        for k in args.depths:
            decode(cores[k], group, params, measured[k], first)
    reference = measured[args.depths[0]].tokens
    for k in args.depths:
        if measured[k].tokens != reference:
            raise SystemExit(f"k = {k} writes other tokens than k = {args.depths[0]}: no figures")
    return measured


def options(args: argparse.Namespace, depth: int) -> EngineOptions:
    return EngineOptions(
        model=args.model,
        num_speculative_tokens=depth,
        max_num_seqs=args.batch,
        max_model_len=args.max_model_len,
        # by default an engine would take what memory the device has, and there are several
        kv_cache_tokens=args.batch * reserved_pages(args.max_model_len, depth) * PAGE,
        num_threads=args.threads,
        device=args.device,
    )


@contextmanager
def server(args: argparse.Namespace, depth: int, port: int):
    """A served model; yields (seconds from the command to ready)."""
    command = [sys.executable, "-m", "pilotfish.server.cli", "serve", args.model, "--port", str(port)]
    command += ["--num-speculative-tokens", str(depth), "--max-num-seqs", str(args.batch)]
    command += ["--max-model-len", str(args.max_model_len)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            time.sleep(0.05)
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1)
                break
            except OSError:
                continue
        yield
    finally:
        process.terminate()
        process.wait(30)


def stream(port: int, body: dict) -> tuple[float, float, int]:
    """Seconds to the first token, seconds from it to the last, completion tokens by usage."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started, first, last, count = time.perf_counter(), None, None, 0
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    assert first is not None and last is not None
    return first - started, last - first, count


def run_http(args: argparse.Namespace, prompts: list[list[int]], depth: int, engine_rate: float) -> dict:
    """The same prompts one by one over HTTP, beside the engine's own rate in this run."""
    port = 18473
    model = Path(args.model).name
    started = time.perf_counter()
    with server(args, depth, port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        body = {"model": model, "max_tokens": args.max_tokens, "temperature": args.temperature, "ignore_eos": True}
        stream(port, body | {"prompt": prompts[0], "max_tokens": 1})
        to_first_token = time.perf_counter() - started
        rates = []
        for prompt in tqdm(prompts, desc="http", disable=not sys.stderr.isatty()):
            _, seconds, count = stream(port, body | {"prompt": prompt})
            rates.append((count - 1) / seconds)
    rate = statistics.median(rates)
    return {
        "http_tokens_per_second": rate,
        "http_over_engine": rate / engine_rate,
        "start_to_first_token_seconds": to_first_token,
    }


def table(measured: dict[int, Series]) -> list[dict]:
    base = measured.get(0)
    rows = []
    for k, series in measured.items():
        quartiles = statistics.quantiles(series.rates, n=4) if len(series.rates) > 1 else series.rates * 3
        row = {
            "k": k,
            "tokens_per_second": statistics.median(series.rates),
            "quartiles": [quartiles[0], quartiles[2]],
            "acceptance_length": series.acceptance_length,
            "accepted_over_drafted": series.accepted / series.drafted if series.drafted else None,
            "round_ms": 1e3 * series.round_seconds,
            "phases_ms": {name: 1e3 * statistics.median(spent) for name, spent in series.phases.items()},
        }
        if base is not None:
            ratios = [a / b for a, b in zip(series.rates, base.rates, strict=True)]
            row["speedup"] = statistics.median(ratios)
            row["break_even"] = series.round_seconds / base.round_seconds
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    print("| k | tokens/s (quartiles) | over k = 0 | acceptance length | break-even | round ms | by phase, ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        phases = ", ".join(f"{name} {spent:.2f}" for name, spent in row["phases_ms"].items())
        print(
            f"| {row['k']} | {row['tokens_per_second']:.1f} ({low:.1f}-{high:.1f}) | {row.get('speedup', 1):.2f} | "
            f"{row['acceptance_length']:.2f} | {row.get('break_even', 1):.2f} | {row['round_ms']:.2f} | {phases} |"
        )


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines with a `prompt` (default: MODEL/../prompts/code.jsonl)"
    )
    parser.add_argument("--depths", type=lambda s: [int(k) for k in s.split(",")], default=[0, 1, 2, 3, 4, 5, 7])
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--no-http", action="store_true", help="leave the HTTP path out")
    args = parser.parse_args()
    file = args.prompts or Path(args.model).parent / "prompts" / "code.jsonl"
    tokenizer = Tokenizer.from_folder(Path(args.model))
    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()][: args.num_prompts]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    print(f"{cpu_name()}, torch {torch.__version__}, commit {commit()}, {args.model}")
    lengths = sorted(map(len, prompts))
    print(
        f"{len(prompts)} prompts of {lengths[0]}-{lengths[-1]} tokens, {args.max_tokens} tokens each, "
        f"batch {args.batch}, temperature {args.temperature:g}, threads {args.threads or 'default'}\n"
    )
    measured = run_engine(args, prompts, params)
    rows = table(measured)
    show(rows)
    result = {"rows": rows, "commit": commit(), "batch": args.batch, "temperature": args.temperature}
    if not args.no_http and args.batch == 1:
        depth = 3 if 3 in measured else args.depths[-1]
        rate = statistics.median(measured[depth].rates)
        http = run_http(args, prompts, depth, rate)
        result |= http
        print(
            f"\nHTTP at k = {depth}: {http['http_tokens_per_second']:.1f} tokens/s, "
            f"{100 * http['http_over_engine']:.0f} % of the engine's own {rate:.1f}; "
            f"first token {http['start_to_first_token_seconds']:.1f} s after the command"
        )
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
