"""`pilotfish audit MODEL`: proof, on this checkpoint and machine, that speculation changes no token and no bit.

Every request is first decoded alone, one row at a time (k = 0). Then all of them again for each k, in batches of each
size with forced drafts that agree for 0, 1, .. k tokens in turn, and with the head's own drafts. Compared for every
committed row: the output of each layer half, the logits, the penalties' history, the chosen token, the head's hidden
state and its next draft, all bit for bit. So are prompts that the prefix cache has, beside the same prompts read from
nothing. The first difference is named by request, position and tensor. A faulty head changes speed and never text, so
its acceptance is shown beside what a sound one reaches teacher-forced.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from functools import partial
from pathlib import Path

import msgspec
import torch

from pilotfish.engine.assemble import build_planned
from pilotfish.engine.check.audit.hits import Hits
from pilotfish.engine.check.audit.matchers import Matchers
from pilotfish.engine.check.audit.prefixes import NUM_TOKENS, Script, modes
from pilotfish.engine.check.audit.report import Report
from pilotfish.engine.check.audit.requests import load_prompts, long_prompt, make_requests
from pilotfish.engine.check.audit.rules import RULE_TOKENS, derive
from pilotfish.engine.check.audit.run import Auditor, audit
from pilotfish.engine.check.audit.scratch import ScratchHead
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.command_line.parser import Parser, numbers
from pilotfish.engine.command_line.speculation import speculative_config
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.options import KV_CACHE_DTYPES, MAX_DEPTH, EngineOptions
from pilotfish.engine.plan import make_plan, reserved_pages
from pilotfish.kernels.attention import PAGE

MAX_BATCH = 64


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="pilotfish audit", description=__doc__.split("\n\n")[0], formatter_class=argparse.HelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--draft-head", metavar="PATH", help="a folder or file with an MTP head, as for serve")
    parser.add_argument(
        "--speculative-config", type=speculative_config, metavar="JSON", help="as for serve; its k is the --max-depth"
    )
    parser.add_argument(
        "--max-depth", type=int, default=MAX_DEPTH, metavar="K", help="largest k to check (default: %(default)s)"
    )
    parser.add_argument("--max-batch", type=int, default=4, metavar="N", help="largest batch (default: %(default)s)")
    parser.add_argument(
        "--k", type=numbers(1, MAX_DEPTH), metavar="LIST", help="of k = 1 up to --max-depth these alone (default: all)"
    )
    parser.add_argument(
        "--batch", type=numbers(1, MAX_BATCH), metavar="LIST", help="these batches (default: 1 up to --max-batch)"
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=3,
        metavar="N",
        help="prompts, each greedy, sampled and penalised (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, metavar="N", help="tokens a request (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument(
        "--kernels", choices=("auto", "torch", "fused"), default="auto", help="as for serve (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a run, and a last one for all")
    args = parser.parse_args(argv)
    args.speculation = {"draft_head": args.draft_head} | (args.speculative_config or {})
    args.max_depth = args.speculation.pop("num_speculative_tokens", args.max_depth)
    for name, most in (("max_depth", MAX_DEPTH), ("max_batch", MAX_BATCH), ("num_prompts", 64), ("max_tokens", 4096)):
        value = getattr(args, name)
        if not 1 <= value <= most:
            parser.error(f"--{name.replace('_', '-')}: want 1..{most}, got {value}")
    args.k = args.k or list(range(1, args.max_depth + 1))
    args.batch = args.batch or list(range(1, args.max_batch + 1))
    args.max_batch = args.batch[-1]
    if args.k[-1] > args.max_depth:
        parser.error(f"--k: want at most --max-depth, {args.max_depth}, got {args.k[-1]}")
    return args


def make_auditor(args: argparse.Namespace) -> Auditor:
    """Loads the checkpoint with caches for the largest depth and batch, and for prompts that are kept beside them."""
    checkpoint = open_checkpoint(args.model)
    if args.speculation["draft_head"] is not None:
        checkpoint = attach_head(checkpoint, args.speculation["draft_head"])
    config = checkpoint.config
    has_head = checkpoint.has_mtp or args.speculation.get("speculative_method") == "ngram"
    if not has_head:
        reason = checkpoint.mtp_problem or "none in the checkpoint"
        print(f"no head to audit ({reason}): forced drafts only", file=sys.stderr if args.json else sys.stdout)
    prompts = load_prompts(Path(args.model), args.num_prompts, config.vocab_size)
    # a text that a stop ended is continued for as many drafts
    longest = max(map(len, prompts)) + args.max_tokens + args.max_depth
    if longest > config.max_position_embeddings:
        raise OptionError(f"--max-tokens: {longest} tokens in all, the model takes {config.max_position_embeddings}")
    # one more request is written across the end of a page
    pages = long_prompt(prompts)
    with_pages = len(pages) + RULE_TOKENS + args.max_depth
    has_pages = with_pages <= config.max_position_embeddings
    longest = max(longest, with_pages if has_pages else 0)
    options = EngineOptions(
        model=args.model,
        num_speculative_tokens=args.max_depth if has_head else 0,
        **args.speculation,
        max_num_seqs=args.max_batch,
        max_model_len=longest,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        kernels=args.kernels,
    )
    eos, vocab = config.eos_token_ids, config.vocab_size
    matchers = Matchers(Path(args.model), vocab)
    requests = make_requests(prompts, args.max_tokens, eos, vocab)
    # a prompt's boundaries are those of the engine that is planned
    room = config.max_position_embeddings - args.max_depth
    script = Script(
        prompts, modes(requests, eos or (vocab - 1,), matchers.usable), make_plan(options, checkpoint).grid, room
    )
    if script.boundaries:
        with_hits = max(longest, script.longest + NUM_TOKENS + args.max_depth)
        pages_held = args.max_batch * reserved_pages(with_hits, args.max_depth)
        kv_cache_tokens = pages_held * PAGE + script.num_kept
        options = msgspec.structs.replace(options, max_model_len=with_hits, kv_cache_tokens=kv_cache_tokens)
    plan = dataclasses.replace(make_plan(options, checkpoint), depth=args.max_depth)
    weights = load_weights(checkpoint, plan.device)
    has_weights = plan.uses_mtp_head and any(is_mtp(name) for name in weights)
    kept = {name: weight for name, weight in weights.items() if has_weights and ScratchHead.takes(name)}
    model = build_planned(weights, config, plan)
    make_rules = partial(derive, prompts, pages if has_pages else None, args.max_tokens, eos, vocab, matchers.usable)
    scratch = ScratchHead(kept, config, model.inv_freq) if kept else None
    hits = Hits(script, plan) if script.boundaries else None
    # engines of shorter prompts get ready faster, where that is captured
    plan = dataclasses.replace(plan, max_model_len=longest, num_snapshots=0)
    return Auditor(model, plan, requests, make_rules, matchers, scratch, hits)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if every run agrees, 1 if one does not, 2 if the audit could not run."""
    args = parse(argv)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    try:
        args.model = str(resolve_model(args.model, args.revision))
        auditor = make_auditor(args)
    except PilotfishError as error:
        print(f"pilotfish audit: {error}", file=sys.stderr)
        return 2
    plan = auditor.plan
    if not args.json:
        dtypes = f"{str(plan.dtype)[6:]}, KV cache {str(plan.cache_sizes.kv_dtype)[6:]}"
        print(f"{args.model} on {plan.device}, {dtypes}; {len(auditor.requests)} requests")
    report = Report(auditor, args.k, args.batch, args.json, auditor.hits)
    for result in audit(auditor, args.k, args.batch, auditor.hits):
        report.add(result)
    return report.end()
