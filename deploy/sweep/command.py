"""`pilotfish sweep`: which k and how many sequences to serve, measured.

    pilotfish sweep MODEL --k 0,1,3,5 --max-num-seqs 1,4,8 --out sweep/ [-- --max-model-len 32768 ...]
    pilotfish sweep --url http://127.0.0.1:8000 --out sweep-other/

Each cell is a fresh start of `pilotfish serve` with one k and one number of sequences; with --url the endpoint that
runs there is the only cell, ours or another. A cell is written when it is whole: run the same command again to go on
after an interruption. The folder then holds report.md, measurements.tsv, sweep.json and, with matplotlib, pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from tqdm import tqdm

import pilotfish
from pilotfish.deploy.arguments import add_endpoint_flags, is_address, numbers, some_of, split_flags, words
from pilotfish.deploy.prompts import domains
from pilotfish.deploy.sweep import plots
from pilotfish.deploy.sweep.cell import CellRun, work_of
from pilotfish.deploy.sweep.client import TIMEOUT, Endpoint, EndpointError
from pilotfish.deploy.sweep.recommend import Recommendation, recommend
from pilotfish.deploy.sweep.records import MAX, Cell, Folder, SettingsDiffer, SweepSettings, merged, pretty, tsv, write
from pilotfish.deploy.sweep.report import markdown
from pilotfish.deploy.sweep.target import StartError, WrongCommand, started
from pilotfish.engine.command_line.output import check_folder
from pilotfish.engine.command_line.parser import Parser, whole_number

OF_A_CELL = ("max_num_seqs:", "num_speculative_tokens:", "kv cache:", "memory:")
"""Words with which the engine refuses a size: another cell may have another one, or none of it."""


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    check_folder(args.out, "--out")
    try:
        return sweep(args)
    except OSError as error:
        # of the folder: what a cell meets is written down as its own
        print(f"pilotfish sweep: {error.filename or args.out}: {error.strerror or error}", file=sys.stderr)
        return 2


def sweep(args: argparse.Namespace) -> int:
    """The exit status. Raises OSError where the folder cannot be written any more."""
    settings = settings_of(args)
    try:
        folder = Folder(args.out, settings)
    except SettingsDiffer as error:
        print(f"pilotfish sweep: {error}", file=sys.stderr)
        return 2
    # a shell starts what it puts into the background with SIGINT ignored
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    places = [(None, None)] if args.url else [(k, size) for size in args.max_num_seqs for k in args.k]
    wanted = [Cell(k=k, max_num_seqs=size, run=run) for run in range(args.repeats) for k, size in places]
    try:
        run_all(folder, settings, wanted, args)
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on with the cell that was running", file=sys.stderr)
        report(folder, settings, args.target_concurrency)
        return 130
    except WrongCommand as error:
        print(f"pilotfish sweep: {error}", file=sys.stderr)
        return 2
    advice = report(folder, settings, args.target_concurrency)
    say(folder, advice)
    return 1 if any(cell.error for cell in folder.cells()) or advice is None else 0


def run_all(folder: Folder, settings: SweepSettings, wanted: Sequence[Cell], args: argparse.Namespace) -> None:
    """Every cell that is not there yet. One that cannot start is written down and left behind. Raises WrongCommand."""
    done = folder.done()
    todo = [cell for cell in wanted if cell.name not in done]
    if len(todo) < len(wanted):
        print(f"{len(wanted) - len(todo)} of {len(wanted)} cells are there already", file=sys.stderr)
    work = sum(work_of(settings, cell.max_num_seqs) for cell in todo)
    layout = "{desc} |{bar}| {percentage:3.0f}% [{elapsed} gone, {remaining} left]"
    with tqdm(total=work, bar_format=layout, disable=args.quiet, mininterval=0.5) as bar:
        for cell in todo:

            def tell(what: str, share: float, name: str = cell.name) -> None:
                bar.set_description(f"{name}: {what}", refresh=False)
                bar.update(share)

            bar.set_description(f"{cell.name}: starting")
            before = bar.n
            looked = msgspec.structs.replace(cell, busy_before=busy_share())
            folder.replace(cell, run_cell(looked, settings, args, folder.path, tell))
            report(folder, settings, args.target_concurrency, draw=False)
            # estimates apart, and what a failed cell did not do
            bar.update(before + work_of(settings, cell.max_num_seqs) - bar.n)


def run_cell(
    cell: Cell, settings: SweepSettings, args: argparse.Namespace, out: Path, tell: Callable[[str, float], None]
) -> Cell:
    def failed(error: Exception) -> Cell:
        return msgspec.structs.replace(cell, error=str(error) or type(error).__name__)

    if settings.url is not None:
        try:
            return asyncio.run(measure(cell, settings.url, settings, args, tell))
        except (EndpointError, aiohttp.ClientError, OSError) as error:
            return failed(error)
    flags = ["--num-speculative-tokens", str(cell.k), "--max-num-seqs", str(cell.max_num_seqs), *settings.server_flags]
    began = time.monotonic()
    try:
        with started(settings.model, flags, out / "logs" / f"{cell.name}.log", args.port) as url:
            seconds = time.monotonic() - began
            whole = asyncio.run(measure(cell, url, settings, args, tell))
            return msgspec.structs.replace(whole, start_seconds=seconds)
    except WrongCommand as error:
        if not any(words in str(error) for words in OF_A_CELL):
            raise
        return failed(error)
    except (StartError, EndpointError, aiohttp.ClientError, OSError) as error:
        return failed(error)


async def measure(
    cell: Cell, url: str, settings: SweepSettings, args: argparse.Namespace, tell: Callable[[str, float], None]
) -> Cell:
    """The cell with its measurements, and with what the endpoint says of itself."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        direct = Endpoint(http, url, args.served_model, args.api_key)
        facts = await direct.describe()
        relay = Endpoint(http, settings.relay, direct.model, args.api_key, direct.salted) if settings.relay else None
        told = facts.get("num_speculative_tokens")
        if cell.k is not None and told is not None and told != cell.k:
            raise EndpointError(f"the server serves k = {told}, not {cell.k}: see its log")
        run = CellRun(settings, direct, relay, facts.get("max_model_len"), tell)
        size = cell.max_num_seqs or facts.get("max_num_seqs")
        measurements = await run.run(size)
    return msgspec.structs.replace(
        cell,
        k=told if cell.k is None else cell.k,
        max_num_seqs=size,
        max_model_len=facts.get("max_model_len"),
        binding_limit=facts.get("binding_limit"),
        measurements=tuple(measurements),
        notes=tuple(run.notes),
    )


def report(
    folder: Folder, settings: SweepSettings, concurrency: int | None, draw: bool = True
) -> Recommendation | None:
    """Everything that is made from the cells; written anew each time."""
    cells = merged(folder.cells())
    advice = recommend(cells, settings, concurrency)
    pictures: list[str] = []
    if draw and advice is not None and plots.available():
        pictures = plots.draw(cells, settings, advice.cell.max_num_seqs, folder.path)
    write(folder.path / "report.md", markdown(cells, settings, advice, frame(), pictures))
    write(folder.path / "measurements.tsv", tsv(folder.cells()))
    found = {"command": advice.command, "reasons": advice.reasons, "cell": advice.cell.name} if advice else None
    whole = {"frame": frame(), "settings": settings, "recommendation": found, "cells": folder.cells()}
    write(folder.path / "sweep.json", pretty(whole))
    return advice


def say(folder: Folder, advice: Recommendation | None) -> None:
    for cell in folder.cells():
        if cell.error:
            print(f"{cell.name} did not run: {cell.error}")
    if advice is None:
        print("nothing was measured, so there is nothing to recommend")
        return
    print(f"recommended: {advice.command or advice.cell.name}")
    for reason in advice.reasons:
        print(f"  {reason}")
    print(f"report: {folder.path / 'report.md'}")


def frame() -> dict[str, str]:
    """Where and with what: figures of two machines are no comparison."""
    return {
        "machine": f"{cpu_name()}, {platform.system()} {platform.machine()}, {_devices()}",
        "pilotfish": pilotfish.__version__,
        "date": datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def busy_share(seconds: float = 1.0) -> float | None:
    """How much of the processors is in use while we use nothing; None where the system does not tell."""
    try:
        before = _times()
        time.sleep(seconds)
        after = _times()
    except OSError:
        return None
    idle, whole = (after[i] - before[i] for i in (0, 1))
    return 1 - idle / whole if whole else None


def _times() -> tuple[int, int]:
    """Idle and all ticks of all processors."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _devices() -> str:
    return f"{len(os.sched_getaffinity(0))} cores"


def settings_of(args: argparse.Namespace) -> SweepSettings:
    return SweepSettings(
        model=args.model or "",
        url=args.url,
        relay=args.relay,
        server_flags=tuple(args.server_flags),
        domains=tuple(args.domains),
        paths=tuple(args.paths),
        passes=args.passes,
        single_tokens=args.single_tokens,
        concurrency=tuple(args.concurrency),
        concurrent_tokens=args.concurrent_tokens,
        contexts=tuple(args.contexts),
        long_tokens=args.long_tokens,
        temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="pilotfish sweep", description=__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint folder to serve")
    parser.add_argument("--url", metavar="URL", help="measure the endpoint that runs there instead of starting servers")
    parser.add_argument(
        "--out", type=Path, default=Path("sweep"), metavar="DIR", help="folder for the report (default: %(default)s)"
    )
    _add_matrix(parser)
    _add_sizes(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="measure all cells N times, take medians (default: %(default)s)",
    )
    parser.add_argument("--target-concurrency", type=int, metavar="N", help="recommend for N at once (default: most)")
    parser.add_argument("--relay", metavar="URL", help="a relay before --port: single streams go through it too")
    parser.add_argument(
        "--port", type=whole_number(0, 65535), metavar="N", help="port of the servers (default: any free one)"
    )
    add_endpoint_flags(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(own)
    args.server_flags = flags
    if args.url and not is_address(parser, args.url):
        parser.error(f"--url: want an http:// or https:// address, got {args.url}")
    if (args.model is None) == (args.url is None):
        parser.error("want either MODEL or --url")
    if args.relay and not (args.port or args.url):
        parser.error("--relay wants --port: the relay must know where the server is")
    return args


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--k",
        type=numbers(0),
        default=[0, 1, 2, 3, 5],
        metavar="LIST",
        help="drafted tokens a round (default: 0,1,2,3,5)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=numbers(1),
        default=[1, 2, 4],
        metavar="LIST",
        help="sequences that run at once (default: 1,2,4)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    known = list(domains())
    parser.add_argument(
        "--domains",
        type=some_of(known),
        default=known,
        metavar="LIST",
        help=f"kinds of text (default: {','.join(known)})",
    )
    paths = ["completions", "chat"]
    parser.add_argument(
        "--paths", type=some_of(paths), default=paths, metavar="LIST", help="APIs (default: completions,chat)"
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=2,
        metavar="N",
        help="of single streams, the first discarded (default: %(default)s)",
    )
    parser.add_argument(
        "--single-tokens", type=int, default=384, metavar="N", help="of a single stream (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency",
        type=numbers(2),
        default=[2, 4, 8],
        metavar="LIST",
        help="requests sent at once (default: 2,4,8)",
    )
    parser.add_argument(
        "--concurrent-tokens", type=int, default=256, metavar="N", help="of each request (default: %(default)s)"
    )
    parser.add_argument(
        "--contexts",
        type=_contexts,
        default=[3000, 12000, MAX],
        metavar="LIST",
        help="tokens of long prompts (default: 3000,12000,max)",
    )
    parser.add_argument(
        "--long-tokens", type=int, default=128, metavar="N", help="written after a long prompt (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--no-ignore-eos", action="store_true", help="for endpoints that know no ignore_eos")


def _contexts(text: str) -> list[int | str]:
    if strange := [word for word in words(text) if word != MAX and not word.isdecimal()]:
        raise argparse.ArgumentTypeError(f"want numbers and {MAX}, got {','.join(strange)}")
    return [word if word == MAX else int(word) for word in words(text)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
