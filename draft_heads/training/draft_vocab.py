"""`pilotfish draft-vocab MODEL --text ... --size N --out FILE`: the N ids that drafts are chosen from.

Counts the tokens of the texts, which should be what the model will write; ids that end a text, and all that the
tokenizer calls added tokens, are always kept. Served by `--draft-vocab FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pilotfish.draft_heads.training.command import document_ids
from pilotfish.draft_heads.vocabulary import build_draft_vocab, write_draft_vocab
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        make_draft_vocab(args)
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return 2
    return 0


def make_draft_vocab(args: argparse.Namespace) -> None:
    """Raises PilotfishError naming the option or file at fault."""
    source = resolve_model(args.model, args.revision)
    config = open_checkpoint(source).config
    counts = np.zeros(config.vocab_size, dtype=np.int64)
    for ids in document_ids(source, args.text):
        if ids and max(ids) >= len(counts):
            raise OptionError(f"{source}: tokenizer.json has id {max(ids)}, the model {len(counts)} ids")
        counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=len(counts))
    added = json.loads((source / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    always = {token["id"] for token in added if token["id"] < config.vocab_size} | set(config.eos_token_ids)
    ids = build_draft_vocab(counts, args.size, always)
    if not args.out.parent.is_dir():
        raise OptionError(f"--out: {args.out.parent}: no such folder")
    write_draft_vocab(args.out, ids, config.vocab_size)
    total = counts.sum()
    print(f"{total} tokens counted, {np.count_nonzero(counts)} of {len(counts)} ids among them")
    print(f"{len(ids)} ids kept: {counts[ids].sum() / total:.2%} of the tokens")
    print(f"served by: pilotfish serve {args.model} --draft-vocab {args.out}")


def _parser() -> Parser:
    parser = Parser(prog="pilotfish draft-vocab", description=__doc__, formatter_class=argparse.HelpFormatter)
    add = parser.add_argument
    add("model", help="folder or hub id")
    add("--revision", help="of a hub id")
    add("--text", type=Path, nargs="+", required=True, metavar="PATH", help="files or folders, as for train-head")
    add("--size", type=int, required=True, metavar="N", help="ids to keep")
    add("--out", type=Path, required=True, metavar="FILE", help="a .json file")
    return parser
