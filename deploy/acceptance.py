"""`pilotfish acceptance`: does a model's head pay, on which text, at which k? Answered without serving.

    pilotfish acceptance /path/to/checkpoint --text code essay my-notes.txt --k 1,2,3,5

Each text is read by the trunk, and at every place the head drafts with the text's own tokens before it
(teacher-forced): how often is draft 1, 2, .. the trunk's own greedy token? Lengths are those of rounds of depth k that
run along the text. Beside them stands what a round must commit to be worth its time: rounds timed here, at each k,
number of sequences and context, over rounds at k = 0. A text that the model would not write itself drafts worse than
what it serves.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from pilotfish.deploy.arguments import aligned, numbers
from pilotfish.deploy.prompts import domains, long_text
from pilotfish.engine.assemble import Engine
from pilotfish.engine.check import cost_table, teacher_forcing
from pilotfish.engine.check.cost_table import Cost
from pilotfish.engine.check.teacher_forcing import Agreement
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.command_line.output import check_file, write_file
from pilotfish.engine.command_line.parser import Parser
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.options import KV_CACHE_DTYPES, MAX_DEPTH, EngineOptions
from pilotfish.engine.start import start_engine

CHARS_A_TOKEN = 8
"""No more than this many characters of a text are tokenised for each token that is wanted."""


@dataclass(frozen=True)
class TextAcceptance:
    """How a head did on one text: agreement by depth, and committed tokens a round for each k."""

    name: str
    tokens: int
    trunk_top1: float
    agreement: tuple[float, ...]
    lengths: dict[int, float]


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        check_file(args.json, "--json")
        args.model = str(resolve_model(args.model, args.revision))
        tokenizer = read_tokenizer(Path(args.model))
        texts = {name: tokens_of(name, tokenizer, args.max_tokens, max(args.k)) for name in args.text}
        engine = load(args, max(map(len, texts.values())))
        found = read_texts(engine, texts, args)
        costs = [] if args.no_cost else time_rounds(engine, tokenizer, args)
        if args.json:
            text = json.dumps(as_json(engine, found, costs), indent=1, ensure_ascii=False) + "\n"
            write_file(args.json, text, "--json")
    except PilotfishError as error:
        print(f"pilotfish acceptance: {error}", file=sys.stderr)
        return 2
    overall = found[-1]
    print(text_table(found, args.k))
    if costs:
        print("\n" + cost_lines(costs, overall))
    return 0


def tokens_of(name: str, tokenizer: Tokenizer, most: int, depth: int) -> list[int]:
    """Tokens of a shipped domain, or of a file. Raises OptionError for a text that is too short or cannot be read."""
    known = domains()
    try:
        text = known[name].completion if name in known else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--text {name}: want a file, or one of {', '.join(known)}: {error}") from error
    ids: list[int] = tokenizer.encode(text[: most * CHARS_A_TOKEN], add_special_tokens=False).ids[:most]
    if len(ids) < depth + 2:
        raise OptionError(f"--text {name}: want at least {depth + 2} tokens, got {len(ids)}")
    return ids


def load(args: argparse.Namespace, longest: int) -> Engine:
    """An engine with room for the longest text and for the timed rounds. Raises PilotfishError."""
    depth, most = max(args.k), max(args.batch)
    contexts = [] if args.no_cost else [c + cost_table.room(depth, most, c) for c in args.contexts]
    limit = ModelConfig.load(Path(args.model)).max_position_embeddings
    if longest + depth + 1 > limit:
        raise OptionError(f"--max-tokens: want at most {limit - depth - 1} for this model, got a text of {longest}")
    wanted = max([longest + depth + 1, *contexts])
    engine = start_engine(
        EngineOptions(
            model=args.model,
            num_speculative_tokens=depth,
            max_num_seqs=1 if args.no_cost else most,
            max_model_len=min(wanted, limit),
            draft_head=args.draft_head,
            # what is measured here may be bad
            head_check="off",
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            device=args.device,
            num_threads=args.num_threads,
        )
    )
    if engine.ready.num_speculative_tokens == 0:
        raise OptionError(f"no head to measure: {engine.ready.speculation_disabled_reason}")
    return engine


def read_texts(engine: Engine, texts: dict[str, list[int]], args: argparse.Namespace) -> list[TextAcceptance]:
    """Each text, and all of them as one."""
    depth, found = max(args.k), {}
    places = sum(len(ids) - 1 - depth for ids in texts.values())
    with bar(places, "place", args) as progress:
        for name, ids in texts.items():
            progress.set_description(name)
            found[name] = teacher_forcing.agreement(engine.executor.model, ids, depth, progress.update)
    rows = [text_row(name, [agreement], args.k) for name, agreement in found.items()]
    return rows if len(rows) == 1 else [*rows, text_row("all", list(found.values()), args.k)]


def text_row(name: str, agreements: list[Agreement], depths: Sequence[int]) -> TextAcceptance:
    """Shares by place, lengths by round."""
    places = [a.num_places for a in agreements]

    def mean(values: list[float]) -> float:
        return sum(v * n for v, n in zip(values, places, strict=True)) / sum(places)

    shares = zip(*(a.shares() for a in agreements), strict=True)
    rounds = {k: [n for a in agreements for n in a.rounds(k)] for k in depths}
    return TextAcceptance(
        name,
        sum(places),
        mean([a.trunk_top1 for a in agreements]),
        tuple(mean(list(column)) for column in shares),
        {k: sum(found) / len(found) for k, found in rounds.items()},
    )


def time_rounds(engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Cost]:
    plan = engine.plan
    assert plan is not None
    places = [(batch, context) for context in args.contexts for batch in args.batch]
    timed = [place for place in places if cost_table.fits(plan, *place)]
    for batch, context in places:
        if (batch, context) not in timed:
            print(f"not timed: {batch} at once of {context} tokens do not fit", file=sys.stderr)
    ids = tokenizer.encode(long_text(4096 * CHARS_A_TOKEN), add_special_tokens=False).ids[:4096]
    with bar(len(timed) * cost_table.BLOCKS * (len(args.k) + 1), "block", args) as progress:

        def tell(what: str) -> None:
            progress.set_description(what)
            progress.update()

        return cost_table.measure(engine.executor.model, plan, ids, args.k, timed, tell)


def bar(total: int, unit: str, args: argparse.Namespace) -> tqdm:
    return tqdm(total=total, unit=unit, disable=args.quiet or None, leave=False)


def text_table(found: Sequence[TextAcceptance], depths: Sequence[int]) -> str:
    """Agreement by draft, then committed tokens a round by k."""
    drafts = len(found[0].agreement)
    heads = ["text", "places", "trunk", *(f"draft {d}" for d in range(1, drafts + 1)), *(f"k = {k}" for k in depths)]
    rows = [
        [t.name, str(t.tokens), f"{t.trunk_top1:.0%}", *(f"{a:.0%}" for a in t.agreement)]
        + [f"{t.lengths[k]:.2f}" for k in depths]
        for t in found
    ]
    legend = "trunk: tokens it ranks first; draft d: drafts that are the trunk's token; k: tokens a round"
    return f"{aligned([heads, *rows])}\n{legend}"


def cost_lines(costs: Sequence[Cost], overall: TextAcceptance) -> str:
    heads = ["k", "at once", "context", "round, k = 0", "round", "break-even", f"length ({overall.name})", "speed-up"]
    rows = [
        [
            *(str(c.k), str(c.batch), str(c.context)),
            *(f"{seconds * 1e3:.2f} ms" for seconds in (c.plain_seconds, c.seconds)),
            *(f"{n:.2f}" for n in (c.break_even, overall.lengths[c.k], overall.lengths[c.k] / c.break_even)),
        ]
        for c in costs
    ]
    legend = (
        "round: its time at k, beside k = 0; break-even: tokens that it must commit to gain; length: what it commits"
        " on the texts; speed-up: length over break-even"
    )
    return f"{aligned([heads, *rows])}\n{legend}"


def as_json(engine: Engine, found: Sequence[TextAcceptance], costs: Sequence[Cost]) -> dict[str, Any]:
    ready = engine.ready
    return {
        "frame": {
            "device": ready.device,
            "dtype": ready.dtype,
            "kv_dtype": ready.execution.kv_dtype if ready.execution else None,
            "head": ready.draft_head,
        },
        "texts": [
            {
                "name": t.name,
                "places": t.tokens,
                "trunk_top1": t.trunk_top1,
                "agreement": list(t.agreement),
                "acceptance_length": {str(k): length for k, length in t.lengths.items()},
            }
            for t in found
        ],
        "costs": [
            {
                "k": c.k,
                "sequences": c.batch,
                "context": c.context,
                "round_seconds": c.seconds,
                "plain_round_seconds": c.plain_seconds,
                "break_even_acceptance_length": c.break_even,
            }
            for c in costs
        ],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pilotfish acceptance", description=__doc__)
    add, known = parser.add_argument, list(domains())
    add("model", metavar="MODEL", help="checkpoint folder or hub id")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--draft-head", metavar="PATH", help="a folder or file with a head, as for serve")
    add("--text", nargs="+", default=known, metavar="NAME", help=f"of {', '.join(known)}, or files (default: all four)")
    add("--k", type=numbers(1, MAX_DEPTH), default=[1, 2, 3], metavar="LIST", help="drafts (default: 1,2,3)")
    add("--max-tokens", type=int, default=512, metavar="N", help="of each text (default: %(default)s)")
    add("--batch", type=numbers(1, 256), default=[1, 4], metavar="LIST", help="sequences at once (default: 1,4)")
    add(
        "--contexts",
        type=numbers(1, 1 << 20),
        default=[256, 2048],
        metavar="LIST",
        help="tokens before a timed round (default: 256,2048)",
    )
    add("--no-cost", action="store_true", help="time no rounds")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="as for serve (default: auto)")
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as for serve (default: auto)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="as for serve (default: auto)")
    add("--num-threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
