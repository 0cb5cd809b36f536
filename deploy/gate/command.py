"""`pilotfish gate`: is this server fit for traffic? What it really does is looked at, not how it was configured.

    pilotfish gate http://127.0.0.1:8000 --k 3 --json gates.json
    pilotfish gate /path/to/checkpoint [-- --num-speculative-tokens 3 --max-model-len 32768 ...]

With a checkpoint a server is started (flags after `--` go to `pilotfish serve`), put through the gates and ended, and
`pilotfish audit` follows. A gate that cannot run has not passed. Exit status: 0 if all passed, 1 if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pilotfish
from pilotfish.deploy.arguments import add_endpoint_flags, is_address, some_of, split_flags
from pilotfish.deploy.gate import after, audit, facts, quality, requests
from pilotfish.deploy.gate.gate import CannotRun, Found, Gate, Subject, Wanted
from pilotfish.deploy.gate.server import Refused, Server, Unreachable
from pilotfish.deploy.sweep.target import StartError, started
from pilotfish.engine.command_line.output import check_file, check_folder, write_file
from pilotfish.engine.command_line.parser import Parser, whole_number
from pilotfish.engine.errors import OptionError
from pilotfish.engine.options import KV_DTYPES

ANSWERS = Gate("answers", facts.answers)
GATES = (
    ANSWERS,
    Gate("version", facts.version),
    Gate("k served", requests.k_served),
    Gate("trunk", facts.trunk_text),
    Gate("head weights", facts.head_weights),
    Gate("head rank", facts.head_rank),
    Gate("kernel routes", facts.routes),
    Gate("slow ways", facts.slow),
    Gate("KV dtype", facts.kv_dtype),
    Gate("tokenizer", requests.tokenizer),
    Gate("chat template", requests.template),
    Gate("streamed chat", requests.streamed_chat),
    Gate("tool call", requests.tool_call),
    Gate("JSON schema", requests.json_schema),
    Gate("exactness", requests.exactness),
    Gate("quality", quality.look),
    Gate("graphs", facts.graphs),
    Gate("compiled", facts.compiled),
    Gate("memory", facts.memory),
    Gate("metrics", after.metrics),
    Gate("stays up", after.stays_up),
)
FULL_AUDIT = "full audit"
NAMES = (*(gate.name for gate in GATES), FULL_AUDIT)


@dataclass(frozen=True)
class GateResult:
    name: str
    passed: bool
    wanted: str
    came: str
    seconds: float


@dataclass
class GateReport:
    """Grows gate by gate, and is printed as it grows."""

    url: str
    results: list[GateResult] = field(default_factory=list)
    wanted: Sequence[str] = NAMES
    """The names of the gates to run."""

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    def skipped(self) -> list[str]:
        """Left out on purpose; the audit needs a model, and is not missed where there is none."""
        return [name for name in NAMES if name not in (*self.wanted, FULL_AUDIT)]

    def run(self, name: str, look: Callable[[], Found]) -> GateResult:
        if sys.stderr.isatty():
            print(f"      {name} ..", end="\r", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            found = look()
        except (CannotRun, Refused, Unreachable) as error:
            found = Found(False, "an answer to look at", f"could not run: {error}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            found = Found(False, "an answer of the known form", f"could not run: {type(error).__name__}: {error}")
        result = GateResult(name, found.passed, found.wanted, found.came, round(time.monotonic() - began, 3))
        self.results.append(result)
        show(result)
        return result

    def as_json(self) -> str:
        whole = {
            "url": self.url,
            "passed": self.passed,
            "gates": [dataclasses.asdict(result) for result in self.results],
            "skipped": self.skipped(),
            "gate_version": pilotfish.__version__,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def show(result: GateResult) -> None:
    """One row; wanted stands on a line of its own where it was not met."""
    width = max(60, shutil.get_terminal_size((120, 40)).columns)
    indent = " " * 24
    rows = [f"came:   {result.came}", f"wanted: {result.wanted}"] if not result.passed else [result.came]
    lines = [line for row in rows for line in textwrap.wrap(row, width - len(indent), subsequent_indent="  ")]
    first, *rest = lines or [""]
    print(f"{'PASS' if result.passed else 'FAIL'}  {result.name:<14}{first and '    '}{first}")
    for line in rest:
        print(indent + line)
    sys.stdout.flush()


def run_gates(report: GateReport, server: Server, expected: Wanted) -> Subject:
    """A server that does not answer, or that is none, fails them all, by name."""
    subject = Subject(server, expected, time.monotonic())
    for gate in GATES:
        if gate is ANSWERS or gate.name in report.wanted:
            there = gate is ANSWERS or report.results[0].passed
            report.run(gate.name, partial(gate.look, subject) if there else _not_run)
    return subject


def _not_run() -> Found:
    raise CannotRun(f"the gate {ANSWERS.name!r} did not pass")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    check_file(args.json, "--json")
    check_folder(args.log.parent if args.log else None, "--log")
    report = GateReport(
        args.target if args.is_url else "", wanted=[n for n in args.only or NAMES if n not in args.skip]
    )
    try:
        if args.is_url:
            run_gates(report, Server(args.target, args.api_key, args.served_model), expected_of(args))
        else:
            run_on_model(report, args)
    except OSError as error:
        # of a folder for its log: a server that cannot be reached is what gates say themselves
        raise OptionError(f"the server's log: {error}; --log says where") from error
    finally:
        if args.json:
            write_file(args.json, report.as_json(), "--json")
    failed = [result.name for result in report.results if not result.passed]
    if report.skipped():
        print(f"not looked at, as asked: {', '.join(report.skipped())}")
    print(f"{len(failed)} of {len(report.results)} gates FAILED: {', '.join(failed)}" if failed else "all gates passed")
    return 0 if report.passed else 1


def run_on_model(report: GateReport, args: argparse.Namespace) -> None:
    """A server of our own, ended before the audit needs its memory."""
    # the head's own gates tell more than a server that does not start
    flags = ["--head-check", "warn", *args.server_flags]
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "server.log"
        try:
            with started(args.target, flags, log, args.port) as url:
                report.url = url
                server = Server(url, args.api_key, args.served_model)
                subject = run_gates(report, server, expected_of(args))
                k, most = subject.k, subject.capacity["max_num_seqs"]
        except StartError as error:
            message = str(error)
            report.run(ANSWERS.name, lambda: Found(False, "a server that starts", message))
            return
        except (Refused, Unreachable, CannotRun, KeyError):
            k, most = 1, 1
    if FULL_AUDIT in report.wanted:
        report.run(FULL_AUDIT, lambda: audit.full(args.target, args.server_flags, k, most))


def expected_of(args: argparse.Namespace) -> Wanted:
    return Wanted(
        version=args.expect_version,
        k=args.k,
        kv_dtype=KV_DTYPES.get(args.kv_dtype, args.kv_dtype) or kv_dtype_of(args.server_flags),
        memory_margin=args.memory_margin,
        score=args.score,
        score_margin=args.score_margin,
        watch_seconds=args.watch,
    )


def kv_dtype_of(server_flags: Sequence[str]) -> str | None:
    """What a server with these flags should hold keys and values in; None: whatever the model is computed in."""
    return next((KV_DTYPES.get(value) for flag, value in pairwise(server_flags) if flag == "--kv-cache-dtype"), None)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="pilotfish gate", description=__doc__)
    add = parser.add_argument
    add("target", metavar="URL-or-MODEL", help="a server that runs, or a checkpoint folder to serve")
    add("--k", type=int, metavar="K", help="drafted tokens a round it must serve (default: what it was asked for)")
    add(
        "--expect-version",
        default=pilotfish.__version__,
        metavar="V",
        help="the server's (default: this command's, %(default)s)",
    )
    add("--kv-dtype", metavar="NAME", help="of the key-value cache (default: --kv-cache-dtype's, or the model's)")
    add(
        "--memory-margin",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="memory allowed over the ledger (default: %(default)s)",
    )
    add("--score", type=float, metavar="SHARE", help="recorded score of `pilotfish eval` to be met (default: any)")
    add(
        "--score-margin",
        type=float,
        default=0.04,
        metavar="SHARE",
        help="by which the score may fall (default: %(default)s)",
    )
    add("--watch", type=float, default=10.0, metavar="SECONDS", help="for which it must stay up (default: %(default)g)")
    add("--only", type=some_of(NAMES), metavar="LIST", help="these gates, and whether it answers (default: all)")
    add(
        "--skip",
        type=some_of(NAMES),
        default=[],
        metavar="LIST",
        help=f"not these (default: none); gates: {', '.join(NAMES)}",
    )
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add(
        "--port",
        type=whole_number(0, 65535),
        metavar="N",
        help="port of the server that is started (default: any free one)",
    )
    add("--log", type=Path, metavar="FILE", help="log of the server that is started (default: not kept)")
    add_endpoint_flags(parser)
    args = parser.parse_args(own)
    args.is_url = is_address(parser, args.target)
    args.server_flags = flags
    if args.is_url and (flags or args.port):
        parser.error("flags after -- and --port are for a server that is started: want a MODEL")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
