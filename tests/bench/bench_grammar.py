"""Grammar libraries: seconds to compile a grammar, and for the masks of a window's rows.

    python tests/bench/bench_grammar.py                     # demo/model's tokenizer, 8 k tokens
    python tests/bench/bench_grammar.py --ranks FILE.tiktoken    # a larger vocabulary (needs tiktoken)
    python tests/bench/bench_grammar.py --first-use [--tokenizer FILE]    # the engine's whole path, by the clock

llguidance, and xgrammar where it is installed. A text of each grammar is walked as a k = 3 engine does it: four rows
with the masks before and after three drafts (the text's own tokens: all are accepted), then a roll-back, then the
commit. A row is a mask of V bits; writing it alone takes V / 8 bytes, 31 kB at 248 k. Correctness first: every token of
the text must be allowed by its row, in both libraries. Times are CPU times of the one thread that works.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
WIDTH = 4
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "state": {"enum": ["open", "paid", "shipped", "returned"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "maxLength": 12},
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["sku", "count", "price", "note"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "state", "items"],
    "additionalProperties": False,
}
ITEM = {"sku": "A-1", "count": 3, "price": 12.5, "note": "a gift, wrapped"}
WIDE = {
    "type": "object",
    "properties": {f"field_{n}": {"type": ["string", "integer"][n % 2]} for n in range(60)},
    "required": [f"field_{n}" for n in range(60)],
    "additionalProperties": False,
}
CASES: dict[str, tuple[Any, Any]] = {
    "3 fields": (PERSON, {"name": "Ada Lovelace, Countess", "age": 36, "ok": True}),
    "order with items": (ORDER, {"id": "AB-1234", "state": "shipped", "items": [ITEM, {**ITEM, "note": None}] * 2}),
    "60 fields": (WIDE, {f"field_{n}": ["some words", n][n % 2] for n in range(60)}),
    "any object": ({"type": "object"}, {"a": [1, 2.5, "x y", {"b": None}], "text": "what comes to mind " * 4}),
}


@dataclass
class Times:
    """Seconds: to compile the first time, of every row's mask, and of a window's roll-back."""

    compile: float
    rows: list[float]
    rollbacks: list[float]


def walk(ids: list[int], bits: np.ndarray, fill: Callable, accept: Callable, rollback: Callable) -> Times:
    """The rounds of a text; raises ValueError at a token that its row forbids."""
    times = Times(0.0, [], [])
    for start in range(0, len(ids), WIDTH):
        window = ids[start : start + WIDTH]
        for row, token in enumerate(window):
            begun = time.thread_time()
            fill(row)
            times.rows.append(time.thread_time() - begun)
            if not bits[row, token // 32] >> token % 32 & 1:
                raise ValueError(f"token {token} at {start + row} is forbidden")
            if row + 1 < len(window):
                accept(token)
        begun = time.thread_time()
        rollback(len(window) - 1)
        times.rollbacks.append(time.thread_time() - begun)
        for token in window:
            accept(token)
    return times


def check(done: bool) -> None:
    assert done, "a token of the text is refused"


def with_llguidance(tokenizer: LLTokenizer, schema: Any, ids: list[int]) -> Times:
    begun = time.thread_time()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS))
    compiled = time.thread_time() - begun
    bits = np.zeros((WIDTH, -(-tokenizer.vocab_size // 32)), dtype=np.int32)
    times = walk(
        ids,
        bits,
        lambda row: fill_next_token_bitmask(matcher, bits, row),
        lambda token: check(matcher.consume_token(token)),
        lambda count: check(not count or matcher.rollback(count)),
    )
    times.compile = compiled
    return times


def with_xgrammar(info: Any, schema: Any, ids: list[int]) -> Times:
    import torch
    import xgrammar

    # one thread, as the engine's masks have; nothing kept from an earlier case
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    begun = time.thread_time()
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), any_whitespace=True))
    compiled = time.thread_time() - begun
    bits = torch.zeros((WIDTH, -(-info.vocab_size // 32)), dtype=torch.int32)
    times = walk(
        ids,
        bits.numpy(),
        lambda row: matcher.fill_next_token_bitmask(bits, row),
        lambda token: check(matcher.accept_token(token)),
        lambda count: matcher.rollback(count) if count else None,
    )
    times.compile = compiled
    return times


def first_use(file: Path, repeats: int) -> None:
    """Milliseconds by the clock from asking to having a constraint: of a new source, and of one that is known."""
    given = json.loads(file.read_text())
    vocab_size = 1 + max(*given["model"]["vocab"].values(), *(token["id"] for token in given["added_tokens"]))
    begun = time.perf_counter()
    library = GrammarLibrary(file, vocab_size, (given["added_tokens"][0]["id"],))
    library.wait_read()
    library.constraint(Grammar(kind="regex", source="x"), (given["added_tokens"][0]["id"],))
    print(f"{vocab_size} tokens, read twice and a first grammar in {time.perf_counter() - begun:.1f} s")
    print("| grammar | first use of a source, ms: median | largest | known, ms: median |\n|---|---|---|---|")
    for name, (schema, _) in CASES.items():
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(repeats * 4):
            grammar = Grammar(kind="json_schema", source=json.dumps(schema | {"title": str(number)}))
            for kept in times:
                begun = time.perf_counter()
                library.constraint(grammar, (given["added_tokens"][0]["id"],))
                kept.append(1e3 * (time.perf_counter() - begun))
        new, known = times
        print(
            f"| {name} | {statistics.median(new):.1f} | {max(new):.1f} | {statistics.median(known):.2f} |", flush=True
        )
    library.close()


def load(ranks: Path | None) -> tuple[LLTokenizer, list[bytes], int, Callable[[str], list[int]]]:
    """llguidance's tokenizer, the bytes of every id, the end id, and an encoder."""
    if ranks is None:
        text = (DEMO / "tokenizer.json").read_text()
        tokenizer = Tokenizer.from_str(text)
        end = tokenizer.token_to_id("<|im_end|>")
        llguidance = LLTokenizer(text, eos_token=end)
        raw = [bytes(llguidance.decode_bytes([i])) for i in range(llguidance.vocab_size)]
        return llguidance, raw, end, lambda given: tokenizer.encode(given, add_special_tokens=False).ids
    import tiktoken
    from llguidance.tiktoken import lltokenizer_from_encoding

    lines = [line.split() for line in ranks.read_bytes().splitlines() if line]
    table = {base64.b64decode(token): int(rank) for token, rank in lines}
    end = len(table)
    encoding = tiktoken.Encoding("ranks", pat_str=QWEN_SPLIT, mergeable_ranks=table, special_tokens={"<|im_end|>": end})
    raw = [token for token, _ in sorted(table.items(), key=lambda item: item[1])] + [b"<|im_end|>"]
    return lltokenizer_from_encoding(encoding, eos_token=end), raw, end, encoding.encode_ordinary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=Path, help="a .tiktoken file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-use", action="store_true", help="of a grammar through trial and compiler")
    parser.add_argument("--tokenizer", type=Path, default=DEMO / "tokenizer.json", help="a tokenizer.json for it")
    args = parser.parse_args()
    if args.first_use:
        first_use(args.tokenizer, args.repeats)
        return 0
    begun = time.thread_time()
    tokenizer, raw, end, encode = load(args.ranks)
    print(f"{len(raw)} tokens, read in {time.thread_time() - begun:.1f} s (llguidance)")
    libraries: dict[str, Callable[[Any, list[int]], Times]] = {
        "llguidance": lambda schema, ids: with_llguidance(tokenizer, schema, ids)
    }
    try:
        import xgrammar
    except ImportError:
        print("xgrammar is not installed: llguidance alone")
    else:
        begun = time.thread_time()
        info = xgrammar.TokenizerInfo(raw, xgrammar.VocabType.RAW, stop_token_ids=[end])
        print(f"read in {time.thread_time() - begun:.1f} s (xgrammar)")
        libraries["xgrammar"] = lambda schema, ids: with_xgrammar(info, schema, ids)
    print("| grammar | library | compile ms | row us, median | p99 | largest | window of 4, us | roll-back us |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (schema, value) in CASES.items():
        ids = [*encode(json.dumps(value)), end]
        # interleaved, so that both meet the same machine
        runs: dict[str, list[Times]] = {library: [] for library in libraries}
        for _ in range(args.repeats):
            for library, run in libraries.items():
                runs[library].append(run(schema, ids))
        for library, done in runs.items():
            rows = sorted(1e6 * second for times in done for second in times.rows)
            backs = [1e6 * second for times in done for second in times.rollbacks]
            print(
                f"| {name} ({len(ids)} tokens) | {library} | {1e3 * statistics.median(t.compile for t in done):.1f} "
                f"| {statistics.median(rows):.0f} | {rows[int(0.99 * len(rows))]:.0f} | {rows[-1]:.0f} "
                f"| {WIDTH * statistics.mean(rows):.0f} | {statistics.median(backs):.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
