"""`pilotfish bench MODEL`: speed of rounds by k, batch and context, beside what the memory's rate allows.

MODEL is a checkpoint folder, or with --load-format dummy a released size by name (Qwen3.6-35B-A3B) or a folder with a
config.json: its weights are then random values made on the device. Batches of random prompts are decoded greedily for
--tokens tokens. Every k must write what k = 0 writes, or there are no figures. With --synthetic-acceptance-length the
head runs as ever, and its drafts are replaced by the known text with seeded errors; rows with random weights or
replaced drafts say that they are synthetic. At each k the graphs are captured that a server with the largest batch for
its cap would use. Exit status 1, and a line that names the row, where a round had no graph or a kernel was compiled
while requests waited; with --first-requests also where the first request at a k and batch was more than 10 % slower
than the second. With --conversation one prompt grows turn by turn in place of the batches: it must write what it writes
when it is read cold, and a turn that reads another number of tokens than the boundaries require is exit status 1, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pilotfish.engine.bench.admission import STREAMS
from pilotfish.engine.command_line.parser import Parser, numbers, whole_number
from pilotfish.engine.options import DUMMY_LAYOUTS, KV_CACHE_DTYPES, MAX_DEPTH
from pilotfish.engine.plan import MAX_ROWS
from pilotfish.engine.round.synthetic import acceptance_rate


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="pilotfish bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint folder; with --load-format dummy a size by name, too"
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights (default: auto, the files')",
    )
    parser.add_argument(
        "--dummy-layout",
        choices=DUMMY_LAYOUTS,
        default="nvfp4",
        help="how random weights are stored (default: %(default)s)",
    )
    parser.add_argument(
        "--k", type=numbers(0, MAX_DEPTH), default=[0, 3], metavar="LIST", help="drafted tokens a round (default: 0,3)"
    )
    parser.add_argument(
        "--batch", type=numbers(1, MAX_ROWS), default=[1], metavar="LIST", help="sequences at once (default: 1)"
    )
    parser.add_argument(
        "--context",
        type=numbers(1, 1 << 20),
        default=[1024],
        metavar="LIST",
        help="tokens of each prompt (default: 1024)",
    )
    parser.add_argument(
        "--tokens", type=whole_number(1), default=256, metavar="N", help="of each request (default: %(default)s)"
    )
    parser.add_argument(
        "--synthetic-acceptance-length",
        type=float,
        metavar="N",
        help="force so many tokens a round, 1 to K + 1 (default: the head's own drafts)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument(
        "--kernels", choices=("auto", "torch", "fused"), default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as for serve, at scale 1 (default: auto)"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--no-pdl", action="store_true", help="no programmatic dependent launch between kernels")
    parser.add_argument(
        "--draft-vocab-size",
        type=whole_number(1),
        metavar="N",
        help="draft from the first N token ids alone (default: all)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="trace which kernels a round and a prompt spend their time in"
    )
    parser.add_argument(
        "--prompts-once",
        action="store_true",
        help="for long ones: no pause while one is read, which would let rounds of some sequences alone run, and no "
        "replays and no count of experts, for which the prompts are read again",
    )
    parser.add_argument(
        "--clocks", action="store_true", help="the card's clock and power in the timed rounds, by nvidia-smi"
    )
    parser.add_argument(
        "--admission",
        type=whole_number(1, 1 << 20),
        metavar="N",
        help=f"the longest wait of {STREAMS} running streams (of the least context) while a prompt of N tokens is read",
    )
    parser.add_argument(
        "--first-requests", action="store_true", help="check that the first request at each k and batch is no slower"
    )
    _add_conversation(parser)
    parser.add_argument(
        "--prefill-chunk",
        type=whole_number(1),
        metavar="N",
        help="tokens of a prompt's largest piece (default: 2048 on a GPU, 256 on a CPU)",
    )
    parser.add_argument("--num-threads", type=whole_number(1), metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts and random weights (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON line a row, too")
    args = parser.parse_args(argv)
    if args.picture is not None and not args.conversation:
        parser.error("--picture: want --conversation, which is what it shows")
    beside = [
        flag
        for flag in ("admission", "first_requests", "profile", "prompts_once", "clocks")
        if args.conversation and getattr(args, flag)
    ]
    if beside:
        parser.error(f"--{beside[0].replace('_', '-')}: is about batches, which --conversation takes the place of")
    if args.prompts_once and args.profile:
        parser.error("--profile: want no --prompts-once, a trace reads them again")
    if args.synthetic_acceptance_length is not None:
        try:
            for depth in filter(None, args.k):
                acceptance_rate(args.synthetic_acceptance_length, depth)
        except ValueError as error:
            parser.error(f"--synthetic-acceptance-length: {error}")
    return args


def _add_conversation(parser: Parser) -> None:
    group = parser.add_argument_group("a conversation that grows, in place of batches")
    group.add_argument(
        "--conversation", action="store_true", help="what each turn reads of its prompt, and its first token's time"
    )
    group.add_argument(
        "--turns", type=whole_number(1, 10_000), default=50, metavar="N", help="turns (default: %(default)s)"
    )
    group.add_argument(
        "--system",
        type=whole_number(0, 1 << 20),
        default=5454,
        metavar="N",
        help="tokens of the system prompt (default: %(default)s)",
    )
    group.add_argument(
        "--growth",
        type=whole_number(1, 1 << 20),
        default=546,
        metavar="N",
        help="tokens that a turn adds, its answer included (default: %(default)s)",
    )
    group.add_argument(
        "--cold-every",
        type=whole_number(0),
        default=1,
        metavar="N",
        help="turns that are read cold as well: every N-th, and the last (default: all; 0: none)",
    )
    group.add_argument("--picture", type=Path, metavar="FILE.png", help="draw it, with matplotlib")
