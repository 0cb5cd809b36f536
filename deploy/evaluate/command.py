"""`pilotfish eval`: how well a served model answers, by lm-eval through its OpenAI client.

    pilotfish eval http://127.0.0.1:8000                              # the fifty questions that ship
    pilotfish eval http://127.0.0.1:8000 --tasks gsm8k,ifeval --chat --limit 100
    pilotfish eval /path/to/checkpoint --k 0 [-- --max-model-len 8192 ...]

With a checkpoint a server is started (flags after `--` go to `pilotfish serve`) and ended. Tasks that rank given
endings by their log-probability take the checkpoint's tokenizer: --tokenizer, where the target is an address.
Speculation changes no answer, so --k 0 must give the same scores. Needs `pip install 'pilotfish[eval]'`, or --client
own for the shipped questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.deploy.arguments import add_endpoint_flags, aligned, is_address, split_flags, words
from pilotfish.deploy.evaluate import harness, quality
from pilotfish.deploy.gate.server import Refused, Server, Unreachable
from pilotfish.deploy.sweep.target import StartError, started
from pilotfish.engine.command_line.output import check_file, write_file
from pilotfish.engine.command_line.parser import Parser

Rows = list[tuple[str, str, float, int]]


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.client == "lm-eval" and not harness.is_installed():
        print("pilotfish eval: want lm-eval: pip install 'pilotfish[eval]', or --client own", file=sys.stderr)
        return 2
    check_file(args.json, "--json")
    try:
        if args.is_url:
            rows, whole = evaluate(args.target, args)
        else:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "server.log"
                with started(args.target, args.server_flags, log) as url:
                    rows, whole = evaluate(url, args)
    except (StartError, Refused, Unreachable, ValueError, ImportError, OSError) as error:
        print(f"pilotfish eval: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if args.json:
        scores = [dict(zip(("task", "metric", "value", "questions"), row, strict=True)) for row in rows]
        report = {"target": args.target, "k": args.k, "scores": scores, "results": whole}
        write_file(args.json, json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n", "--json")
    return 0 if rows else 1


def evaluate(url: str, args: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """Scores, and whatever else the client has to say."""
    server = Server(url, args.api_key, args.served_model)
    if args.client == "own":
        asked = quality.items()[: args.limit]
        texts = quality.answers(server, asked, args.k)
        answers = [{"prompt": i.prompt, "answer": i.answer, "came": t} for i, t in zip(asked, texts, strict=True)]
        return [(harness.OWN_GROUP, "exact_match", quality.score(asked, texts), len(asked))], {"answers": answers}
    model = args.served_model or server.first_model()
    results = harness.run(
        server.url,
        model,
        args.tasks,
        key=args.api_key,
        k=args.k,
        chat=args.chat,
        limit=args.limit,
        include_path=args.include_path,
        tokenizer=args.tokenizer,
    )
    wanted = ("results", "samples", "versions", "lm_eval_version")
    kept: dict[str, Any] = {name: results[name] for name in wanted if name in results}
    return harness.scores(results), kept


def table(rows: Rows) -> str:
    figures = [(task, metric, f"{value:.4f}", str(count)) for task, metric, value, count in rows]
    return aligned([("task", "metric", "value", "questions"), *figures])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    own, flags = split_flags(argv)
    parser = Parser(prog="pilotfish eval", description=__doc__)
    add = parser.add_argument
    add("target", metavar="URL-or-MODEL", help="a server that runs, or a checkpoint folder to serve")
    add(
        "--tasks",
        type=words,
        default=[harness.OWN_GROUP],
        metavar="LIST",
        help=f"of lm-eval (default: {harness.OWN_GROUP}, which ships)",
    )
    add("--include-path", type=Path, metavar="DIR", help="a folder with tasks of your own, in lm-eval's YAML")
    add("--tokenizer", type=Path, metavar="DIR", help="the checkpoint's folder, for tasks that rank endings")
    add("--chat", action="store_true", help="over chat completions, for tasks that want a chat template")
    add("--k", type=int, metavar="K", help="drafted tokens a round (default: what is served)")
    add("--limit", type=int, metavar="N", help="questions of each task (default: all)")
    add(
        "--client", choices=("lm-eval", "own"), default="lm-eval", help="what asks the questions (default: %(default)s)"
    )
    add("--json", type=Path, metavar="FILE", help="write scores and answers there")
    add_endpoint_flags(parser)
    args = parser.parse_args(own)
    args.is_url = is_address(parser, args.target)
    if args.tokenizer is None and not args.is_url:
        args.tokenizer = Path(args.target)
    args.server_flags = flags
    if args.is_url and flags:
        parser.error("flags after -- are for a server that is started: want a MODEL")
    if args.client == "own" and args.tasks != [harness.OWN_GROUP]:
        parser.error(f"--client own knows {harness.OWN_GROUP} alone")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
