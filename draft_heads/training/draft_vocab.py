"""`pilotfish draft-vocab MODEL --text ... --size N --out FILE`: the N ids that drafts are chosen from.

Counts the tokens of the texts, which should be what the model will write; ids that end a text, and all that the
tokenizer calls added tokens, are always kept. Served by `--draft-vocab FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pilotfish.draft_heads.training.command import document_ids
from pilotfish.draft_heads.training.texts import RenderChat
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.command_line.output import check_file
from pilotfish.engine.command_line.parser import Parser
from pilotfish.engine.convert.write import write_text
from pilotfish.engine.errors import OptionError, PilotfishError


def main(argv: Sequence[str], render_chat: RenderChat) -> int:
    args = _parser().parse_args(argv)
    try:
        make_draft_vocab(args, render_chat)
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 2
    return 0


def make_draft_vocab(args: argparse.Namespace, render_chat: RenderChat) -> None:
    """Raises PilotfishError naming the option or file at fault."""
    check_file(args.out, "--out")
    source = resolve_model(args.model, args.revision)
    config = open_checkpoint(source).config
    counts = np.zeros(config.vocab_size, dtype=np.int64)
    for ids in document_ids(source, args.text, render_chat):
        if ids and max(ids) >= len(counts):
            raise OptionError(f"{source}: tokenizer.json has id {max(ids)}, the model {len(counts)} ids")
        counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=len(counts))
    added = json.loads((source / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    always = {token["id"] for token in added if token["id"] < config.vocab_size} | set(config.eos_token_ids)
    ids = build_draft_vocab(counts, args.size, always)
    write_draft_vocab(args.out, ids, config.vocab_size)
    total = counts.sum()
    print(f"{total} tokens counted, {np.count_nonzero(counts)} of {len(counts)} ids among them")
    print(f"{len(ids)} ids kept: {counts[ids].sum() / total:.2%} of the tokens")
    print(f"served by: pilotfish serve {args.model} --draft-vocab {args.out}")


def build_draft_vocab(counts_V: np.ndarray, size: int, always: Iterable[int] = ()) -> list[int]:
    """The `always` ids and then the most frequent, `size` in all (ties to the lower id), in rising order."""
    kept = sorted(set(always))
    if not len(kept) <= size <= len(counts_V):
        raise OptionError(f"draft vocabulary: want {max(1, len(kept))}..{len(counts_V)} ids, got {size}")
    ranked = np.argsort(-counts_V, kind="stable")
    chosen = ranked[~np.isin(ranked, kept)][: size - len(kept)]
    return sorted([*kept, *chosen.tolist()])


def write_draft_vocab(path: Path, ids: list[int], vocab_size: int) -> None:
    write_text(path, json.dumps({"vocab_size": vocab_size, "ids": ids}) + "\n")


def _parser() -> Parser:
    parser = Parser(prog="pilotfish draft-vocab", description=__doc__, formatter_class=argparse.HelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint folder or hub id")
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    add("--text", type=Path, nargs="+", required=True, metavar="PATH", help="files or folders, as for train-head")
    add("--size", type=int, required=True, metavar="N", help="ids to keep")
    add("--out", type=Path, required=True, metavar="FILE", help="a .json file")
    return parser
