"""What to run on a GPU, leg by leg: `make gpu-test`, `make gpu-bench`, `make gpu-tools`.

    python -m tests.gpu.legs test|bench|tools [LEG ...] [--out FOLDER] [--jobs N] [--within SECONDS] [--again]
        [--rehearse] [--list]

Each leg is a process of its own with a time limit. One line says how it went; of one that failed the end of what it
printed follows, the whole stands in FOLDER/test-LEG.log (bench-, tools-). The .json beside it holds its outcome,
the .jsonl the rows that a measurement printed. A leg that has passed is not run again (--again: it is), so an
interrupted run goes on where it was. --within: no leg is begun whose limit is more than what is left of this time, so
that a call that is cut off cuts off no leg. --list says what each may take, and took. --rehearse needs no GPU: tests
are collected, and measurements read their arguments.

Measurements and tools run alone, one after the other: a second run is refused while one goes on, and a leg waits for
memory of the device that another process holds, or fails and names the process.

Needs no installation but the packages: PYTHONPATH is set here. Exits with 1 if a leg failed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter, sleep
from typing import Any

ROOT = Path(__file__).parents[2]
PATHS = ("typings", ".", "tests/bench")
SHOWN_LINES = 30
TEST_JOBS = 4
NO_GPU = ("needs a CUDA device", "want a CUDA device")
"""What a measurement says when its arguments were fine and the machine was not."""
FIRST_TESTS = ("small_operators", "linear", "moe", "delta_net", "attention")
"""Files of tests/gpu in the order in which one builds on another; the rest follow by name."""
AUDITED = ("auto", "fp8")
"""Parameters of tests/gpu/test_audit.py."""
AUDITED_DEPTHS = ("1,7", "3,6", "2,8", "4,5")
"""The k of each of the demo model's audits, which take about as long: rounds are fewer at a larger k, and each list has
one k at which hits of the prefix cache are compared."""
LOCK = Path(gettempdir()) / "pilotfish-gpu-legs.lock"
TOOL_SECONDS = 300
"""Of a tool's leg: two CPU cores took 148 s at most, an H200 175 beside tests."""
FREED_SECONDS = 30.0
"""A process that was killed holds the device's memory for a while."""
running: set[subprocess.Popen[bytes]] = set()
DUMMY = "--load-format dummy --kernels fused --device cuda"
WIDE = "1,4,8,16,32,64 --tokens 320"
"""Batches of up to 64. A round follows each of their prompts, so the first sequence writes some 64 x 3.2 tokens before
the last one's first: with no more than that no round has all of them."""
WIDE_DENSE = "1,4,8,16,32,64 --tokens 384 --context 256"
"""The same of the 27B, whose prompts of 1 024 tokens let several rounds run between their pieces: with 64 of them the
first sequence would end before the last prompt has been read."""


@dataclass(frozen=True)
class Leg:
    """`command` comes after the interpreter's name. `what`: test, bench or tools; names are one of each alone.
    It is ended after `limit_seconds`."""

    what: str
    name: str
    command: tuple[str, ...]
    limit_seconds: int = 480

    @property
    def shares(self) -> bool:
        """Whether others may run beside it: tests of small models. The rest measure, or take all memory."""
        return self.what == "test"

    @property
    def is_pytest(self) -> bool:
        return self.command[:2] == ("-m", "pytest")

    def file(self, folder: Path, suffix: str) -> Path:
        """Where its log, outcome or rows stand."""
        return folder / f"{self.what}-{self.name}.{suffix}"


def test_legs() -> list[Leg]:
    files = {file.stem.removeprefix("test_"): file for file in sorted((ROOT / "tests/gpu").glob("test_*.py"))}
    names = [*FIRST_TESTS, *(name for name in files if name not in FIRST_TESTS)]
    # a warning of torch or of a driver that we have never seen is shown, and fails nothing
    options = ("-m", "gpu", "-q", "--maxfail=8", "--tb=short", "-rfE", "-p", "no:cacheprovider", "-W", "default")
    tests = []
    for name in names:
        command = ("-m", "pytest", *options, str(files[name].relative_to(ROOT)))
        # the audit's engines are made for each dtype of the cache: a leg each
        parts = {f"{name}-{part}": ("-k", part) for part in AUDITED} if name == "audit" else {name: ()}
        tests += [Leg("test", part, (*command, *chosen)) for part, chosen in parts.items()]
    on_demo = "demo/model --device cuda --kernels fused"
    audit = f"-m pilotfish.server.cli audit {on_demo} --batch 1,2,4,8 --k"
    audits = [Leg("test", f"audit-demo-{k.replace(',', '-')}", (*audit.split(), k)) for k in AUDITED_DEPTHS]
    first = Leg("test", "environment", ("-m", "tests.gpu.environment"), 120)
    long = f"-m tests.gpu.long_comparison {on_demo} --tokens 1000000"
    return [first, *tests, *audits, Leg("test", "long", tuple(long.split()))]


def bench_legs() -> list[Leg]:
    rounds = f"-m pilotfish.server.cli bench {{}} {DUMMY} --clocks --synthetic-acceptance-length 3.2 --json {{{{out}}}}"
    moe, dense = rounds.format("Qwen3.6-35B-A3B"), rounds.format("Qwen3.6-27B")
    # a round follows each of the 65 chunks of a prompt: the first sequence has written some 3 x 65 x 3.2 tokens before
    # the last one's first
    longest = f"{moe} --k 0,3 --batch 4 --context 131072 --tokens 896 --prompts-once"
    return [
        _bench("rounds-first", f"{moe} --k 0 --batch 1 --enforce-eager --tokens 64"),
        _bench("rounds-35B", f"{moe} --k 0,3 --batch 1,2,4,8 --profile"),
        _bench("linear", "tests/bench/bench_kernels_linear.py --formats NVFP4 --rows 1,4,8,16"),
        _bench("state", "-m tests.bench.bench_kernels_state --contexts 1024,32768 --batches 1,4 --widths 1,4"),
        _bench("small", "-m tests.bench.bench_kernels_small --rows 1,4,16"),
        _bench("rounds-27B", f"{dense} --k 0,3 --batch 1,2,4,8 --profile"),
        _bench("rounds-mixed", f"{moe} --dummy-layout mixed --k 0,3 --batch {WIDE}"),
        _bench("rounds-mixed-27B", f"{dense} --dummy-layout mixed --k 0,3 --batch {WIDE_DENSE}"),
        _bench("rounds-wide", f"{moe} --k 0,3 --batch {WIDE}"),
        _bench("rounds-wide-27B", f"{dense} --k 0,3 --batch {WIDE_DENSE}"),
        _bench("rounds-long", f"{moe} --k 0,3 --batch 1,4 --context 32768 --tokens 128"),
        _bench("rounds-longest", longest),
        _bench("rounds-longest-fp8", f"{longest} --kv-cache-dtype fp8"),
        _bench("starts", f"{moe} --k 0,3 --batch 1,4 --first-requests --admission 8192"),
        _bench("prompt-long", f"{moe} --k 0,3 --batch 1 --context 8192 --tokens 32 --profile"),
        _bench("prefill", "-m tests.bench.bench_kernels_state --prefill"),
        _bench("prefill-experts", "tests/bench/bench_kernels_prefill.py"),
        _bench("prefill-products", "tests/bench/bench_kernels_bulk.py"),
        _bench("layer", "tests/bench/bench_kernels_layer.py"),
        _bench("inner", "tests/bench/bench_kernels_inner.py"),
        _bench("prompts-35B", f"tests/bench/bench_prompts.py Qwen3.6-35B-A3B {DUMMY}"),
        _bench("prompts-27B", f"tests/bench/bench_prompts.py Qwen3.6-27B {DUMMY}"),
        _bench(
            "linear-tune",
            "tests/bench/bench_kernels_linear.py --tune --keep-bits --no-experts --formats NVFP4 --rows 1,16 "
            "--shapes 5120x17408,2048x4096,9216x2048,28672x2048",
        ),
        _bench(
            "experts-tune",
            "tests/bench/bench_kernels_linear.py --tune --keep-bits --no-products --formats NVFP4 --rows 1,4,8,16",
        ),
        _bench("linear-formats", "tests/bench/bench_kernels_linear.py --formats FP8,BF16 --rows 1,4,16 --no-experts"),
        _bench("linear-wide", "tests/bench/bench_kernels_linear.py --formats NVFP4 --rows 32,64,256"),
        _bench("engine-host", "-m tests.bench.bench_engine --device cuda --runs 2"),
        _bench("http-paced", "tests/bench/bench_http.py"),
        _bench(
            "http-35B", "tests/bench/bench_http.py --dummy Qwen3.6-35B-A3B -- --device cuda --num-speculative-tokens 3"
        ),
        _bench("load", "-m tests.bench.bench_load --device cuda --gib 20 --runs 2"),
        _bench("decode-demo", "tests/bench/bench_decode.py demo/model --device cuda --no-http"),
    ]


def _bench(name: str, command: str) -> Leg:
    return Leg("bench", name, tuple(command.split()))


def tools_legs() -> list[Leg]:
    """Every tool on the demo model, on whatever device there is: short runs that show that it works there."""
    command = "-m pilotfish.server.cli {}"
    tools = {
        "bench-decode": "tests/bench/bench_decode.py demo/model --no-http",
        "acceptance": command.format("acceptance demo/model --text code --k 1,3 --batch 1,4"),
        "rounds": command.format("bench demo/model --k 0,3 --batch 1,4 --tokens 64"),
        "gate": command.format("gate demo/model --watch 5"),
        "sweep": command.format(
            "sweep demo/model --out {out}.sweep --k 0,3 --max-num-seqs 1,4 --domains code --paths completions "
            "--passes 1 --single-tokens 64 --concurrency 2 --concurrent-tokens 32 --contexts 1000 --long-tokens 16"
        ),
        # so slowly that the head stays as good as it was: one that a few steps made worse would be exit status 1
        "train-head": command.format(
            "train-head demo/model --text docs --out {out}.head --learning-rate 1e-9 --steps 10 --row-tokens 256 "
            "--eval-rows 8"
        ),
        "fuzz": "-m tests.fuzz.campaign --requests 200 --seed 1 --model demo/model",
        "soak": "-m tests.soak.soak --seconds 30 --model demo/model",
        "conversations": "-m tests.soak.conversations --seconds 30 --model demo/model",
        "attacks": "-m tests.soak.attacks --seconds 2 --model demo/model",
    }
    return [Leg("tools", name, tuple(words.split()), TOOL_SECONDS) for name, words in tools.items()]


def legs_of(what: str) -> list[Leg]:
    return {"test": test_legs, "bench": bench_legs, "tools": tools_legs}[what]()


def run(leg: Leg, folder: Path, rehearse: bool = False) -> dict[str, Any]:
    """Its outcome, which is also written to the folder."""
    if not (leg.shares or rehearse) and (holders := wait_until_free()):
        end = ["memory of the device is held by others:", *holders]
        return _refused(leg, "not alone", end)
    rows = leg.file(folder, "jsonl")
    rows.unlink(missing_ok=True)
    command = [sys.executable, *(part.replace("{out}", str(rows)) for part in leg.command)]
    if leg.is_pytest:
        command += ["-W", "ignore::pytest.PytestConfigWarning"] if find_spec("pytest_timeout") is None else []
        command += ["--collect-only"] if rehearse else []
    began = perf_counter()
    with leg.file(folder, "log").open("w+", newline="") as log:
        # a group of its own: what it started ends with it
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        running.add(process)
        try:
            status = "passed" if process.wait(leg.limit_seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            running.discard(process)
        log.seek(0)
        text = log.read()
    if rehearse and status == "failed" and not leg.is_pytest and any(words in text for words in NO_GPU):
        status = "passed"
    found = [line for line in text.splitlines() if line.startswith('{"')]
    if found and not rows.exists():
        rows.write_text("\n".join(found) + "\n")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", text[-400:])}
    if leg.is_pytest and not rehearse and status == "passed" and not counts.get("passed"):
        status = "failed"  # all were skipped
    outcome = {
        "what": leg.what,
        "leg": leg.name,
        "status": status,
        "seconds": round(perf_counter() - began, 1),
        "tests": counts if leg.is_pytest else None,
        "rows": len(found) or (len(rows.read_text().splitlines()) if rows.exists() else 0),
        "commit": _commit(),
        "command": command[1:],
        "end": _end(text) if status != "passed" else [],
    }
    if not rehearse:
        leg.file(folder, "json").write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def _refused(leg: Leg, status: str, end: list[str]) -> dict[str, Any]:
    """The outcome of one that was not begun; nothing is written, so that it is run the next time."""
    return {"leg": leg.name, "status": status, "seconds": 0.0, "tests": None, "rows": 0, "end": end}


def holders_of_memory() -> list[str]:
    """Processes with memory on the device, and how much, as far as nvidia-smi sees them."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def wait_until_free() -> list[str]:
    """Who still holds memory of the device after FREED_SECONDS."""
    until = perf_counter() + FREED_SECONDS
    while (holders := holders_of_memory()) and perf_counter() < until:
        sleep(1)
    return holders


@contextmanager
def alone() -> Iterator[bool]:
    """Whether no other run of legs goes on on this machine; none begins meanwhile."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, with which `timeout` ends a run, ends its legs too: they would go on, and hold the device's memory."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(text: str) -> list[str]:
    """The last lines as a terminal would show them: of a progress bar its last state."""
    lines = text.rstrip("\n").split("\n")[-SHOWN_LINES:]
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def environment() -> dict[str, str]:
    """What a leg is started in."""
    paths = [str(ROOT / path) for path in PATHS] + [path for path in [os.environ.get("PYTHONPATH")] if path]
    # the checkout's own folder `pilotfish` holds a part of the package alone: it must not come first
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _commit() -> str | None:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or None


def outcome_before(leg: Leg, folder: Path) -> dict[str, Any] | None:
    file = leg.file(folder, "json")
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found


def passed_before(leg: Leg, folder: Path) -> bool:
    before = outcome_before(leg, folder)
    return before is not None and before["status"] == "passed"


def show_legs(legs: Sequence[Leg], folder: Path) -> None:
    """Each with its limit, how it went before, and its command."""
    for leg in legs:
        before = outcome_before(leg, folder)
        went = f"{before['status']}, {before['seconds']:.0f} s" if before else "not yet"
        print(f"{leg.name:18} at most {leg.limit_seconds:3d} s  {went:18} {' '.join(leg.command)}")


def show(outcome: dict[str, Any]) -> None:
    tests = ", ".join(f"{number} {word}" for word, number in (outcome["tests"] or {}).items())
    rows = f"{outcome['rows']} rows" if outcome["rows"] else ""
    print(f"{outcome['leg']:18} {outcome['status']:12} {outcome['seconds']:6.1f} s  {tests or rows}", flush=True)
    for line in outcome["end"]:
        print(f"    {line[:200]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("test", "bench", "tools"))
    parser.add_argument("legs", nargs="*", metavar="LEG", help="by name; all if none is given")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, help=f"legs at once (default: {TEST_JOBS} of tests, 1 of measurements)")
    parser.add_argument(
        "--within", type=float, default=inf, metavar="SECONDS", help="begin no leg that may take longer than is left"
    )
    parser.add_argument("--again", action="store_true", help="legs that have passed, too")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: collect tests, read arguments")
    parser.add_argument("--list", action="store_true", help="print the legs' commands")
    args = parser.parse_args(argv)
    known = {leg.name: leg for leg in legs_of(args.what)}
    if strange := [name for name in args.legs if name not in known]:
        parser.error(f"{', '.join(strange)}: want {', '.join(known)}")
    legs = [leg for leg in known.values() if not args.legs or leg.name in args.legs]
    if args.list:
        show_legs(legs, args.out)
        return 0
    most = TEST_JOBS if args.what == "test" else 1
    if args.what != "test" and (args.jobs or 1) > 1:
        parser.error(f"--jobs {args.jobs}: want 1, {args.what} legs run alone")
    with alone() as is_alone:
        if not (is_alone or args.rehearse):
            print("another run of legs goes on on this machine: both would find its memory taken", file=sys.stderr)
            return 1
        with ended_as_by_ctrl_c():
            return run_all(legs, args, args.jobs or most)


def run_all(legs: Sequence[Leg], args: argparse.Namespace, jobs: int) -> int:
    """Those that have not passed; 1 if one fails, or is left for want of time."""
    until = perf_counter() + args.within
    args.out.mkdir(parents=True, exist_ok=True)
    done = [leg for leg in legs if not (args.again or args.rehearse) and passed_before(leg, args.out)]
    for leg in done:
        print(f"{leg.name:18} passed before")
    todo = [leg for leg in legs if leg not in done]
    failed = False

    def run_in_time(leg: Leg) -> dict[str, Any]:
        if perf_counter() + leg.limit_seconds > until:
            return _refused(leg, "not begun", [f"it may take {leg.limit_seconds} s, which --within does not leave"])
        return run(leg, args.out.resolve(), args.rehearse)

    with ThreadPoolExecutor(jobs) as pool:
        started = [pool.submit(run_in_time, leg) for leg in todo]
        try:
            for future in as_completed(started):
                outcome = future.result()
                show(outcome)
                failed |= outcome["status"] != "passed"
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
