"""Measured rows as text: tables of rounds, admissions and a conversation's turns, and what weights and start took."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROUND, ADMISSION, TURN = "round", "admission", "turn"
"""A row's `kind`."""
COLUMNS = (
    ("k", "k"), ("batch", "B"), ("context", "context"), ("tokens_per_second", "tok/s"), ("round_ms", "round ms"),
    ("device_plain_ms", "device ms"), ("acceptance_length", "accepted"), ("floor_ms", "floor ms"),
    ("share_of_roof", "of roof"),
    ("distinct_experts", "experts"), ("distinct_experts_uniform", "uniform"), ("first_token_ms", "first ms"),
    ("clock_mhz", "MHz"), ("power_w", "W"), ("host_ms", "host ms"), ("graph_hits", "hits"), ("graph_misses", "misses"),
    ("first_request_ms", "1st request ms"), ("second_request_ms", "2nd request ms"),
)  # fmt: skip
ADMISSION_COLUMNS = (
    ("k", "k"), ("streams", "streams"), ("context", "context"), ("prompt", "prompt"), ("largest_gap_ms", "gap ms"),
    ("round_ms", "round ms"), ("chunk_ms", "chunk ms"), ("largest_chunk_ms", "largest"), ("first_token_ms", "first ms"),
    ("first_token_alone_ms", "alone ms"),
)  # fmt: skip
TURN_COLUMNS = (
    ("k", "k"), ("turn", "turn"), ("prompt", "prompt"), ("cached", "cached"), ("read", "read"),
    ("required", "required"), ("first_token_ms", "first ms"), ("cold_first_token_ms", "cold ms"),
)  # fmt: skip
LEGEND = {
    "k": "drafted tokens a round",
    "B": "sequences at once",
    "context": "tokens of each prompt",
    "tok/s": "of all sequences together, over rounds that have all of them",
    "round ms": "median from one report to the next",
    "device ms": "a captured round alone, replayed back to back",
    "accepted": "tokens committed to a sequence by a round, the trunk's own included",
    "floor ms": "the bytes that a round must move, at the memory's measured rate",
    "of roof": "floor ms over round ms",
    "experts": "distinct ones that a round's rows choose in a layer",
    "uniform": "their number if all were chosen alike",
    "first ms": "from the requests' arrival to a token of each",
    "MHz": "the card's clock in timed rounds, median",
    "W": "the card's power in them, median",
    "host ms": "the host's share of launching a round",
    "hits": "rounds replayed from a captured graph",
    "misses": "rounds for which there was none",
    "1st request ms": "the first one at this k and batch",
    "2nd request ms": "the one after it",
}
ADMISSION_LEGEND = {
    "k": "drafted tokens a round",
    "streams": "sequences that run",
    "context": "tokens of each of their prompts",
    "prompt": "tokens of the one that arrives",
    "gap ms": "the longest between two reports of one stream meanwhile",
    "round ms": "median before it arrives",
    "chunk ms": "of the prompt alone, median of its chunks",
    "largest": "of its chunks, ms",
    "first ms": "from its arrival to its first token, beside the streams",
    "alone ms": "the same without them",
}
TURN_LEGEND = {
    "k": "drafted tokens a round",
    "turn": "of the conversation",
    "prompt": "tokens of its prompt",
    "cached": "of them, not read",
    "read": "of them, read",
    "required": "what the boundaries leave to be read",
    "first ms": "from its arrival to its first token",
    "cold ms": "the same with nothing cached",
}
"""What a column's title means; it is printed below the table."""
WIDTH = 120
MIB = 1 << 20
NAME_WIDTH = 90
PLACE_WIDTH = 24


def show(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Everything that was measured, line by line."""
    if not rows:
        return
    if rounds := [row for row in rows if row["kind"] == ROUND]:
        yield from _table(COLUMNS, rounds, LEGEND)
    if turns := [row for row in rows if row["kind"] == TURN]:
        yield from _table(TURN_COLUMNS, turns, TURN_LEGEND)
        for depth in dict.fromkeys(row["k"] for row in turns):
            yield _sum_of_turns(depth, [row for row in turns if row["k"] == depth])
    admissions = [row for row in rows if row["kind"] == ADMISSION]
    if admissions:
        yield "longest wait for a token of streams that run while a prompt is read:"
        yield from _table(ADMISSION_COLUMNS, admissions, ADMISSION_LEGEND)
    for row in rows:
        if "profile" in row:
            traced, at = row["profile"], f"k = {row['k']}, batch {row['batch']}, context {row['context']}"
            yield from _trace(f"a round at {at}", traced["round"])
            yield from _trace(f"a prompt of {row['context']} tokens at k = {row['k']}", traced["prompt"])
    row = rows[0]
    resident, packed, scratch = (row[f"{name}_bytes"] for name in ("resident", "packed", "prefill_scratch"))
    yield (
        f"weights: {resident / MIB:.1f} MiB resident, {packed / MIB:.1f} MiB as packed in the checkpoint "
        f"({resident / packed - 1:+.1%}); beside them {scratch / MIB:.1f} MiB of scratch for prompts"
    )
    for depth, row in {row["k"]: row for row in rows}.items():
        start = row["start_seconds"]
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.items())
        graphs = f", {row['num_graphs']} graphs of {row['graph_bytes'] / MIB:.1f} MiB" if row["num_graphs"] else ""
        yield f"start to ready at k = {depth}: {sum(start.values()):.1f} s ({parts}{graphs})"
    if any(row["synthetic"] for row in rows):
        yield "synthetic: random weights, or drafts replaced by a known text with seeded errors"


def _sum_of_turns(depth: int, turns: list[dict[str, Any]]) -> str:
    prompts, read, required = (sum(row[name] for row in turns) for name in ("prompt", "read", "required"))
    text = f"k = {depth}: {prompts} tokens of prompts, {read} read, {required} required"
    last = turns[-1]
    if last.get("cold_first_token_ms") and last["first_token_ms"]:
        share = last["cold_first_token_ms"] / last["first_token_ms"]
        text += f"; first token of the last turn: {share:.1f} times as fast as cold"
    return text


def _trace(subject: str, found: dict[str, Any]) -> Iterator[str]:
    """Kernels by the time that is their own (see profile.py), what the host spent in the driver; kernels by place."""
    if "nothing" in found:
        yield f"{subject}: {found['nothing']}"
        return
    whole, idle = found["gpu_us"], found["gpu_idle_share"]
    yield f"{subject}: {found['launches']:.0f} launches, {whole / 1e3:.3f} ms from first to last, idle {idle:.1%}"
    for part, counted in (("kernels", "launches"), ("driver_calls", "calls")):
        for line in found[part]:
            yield (
                f"  {line['us']:10.1f} us {line['us'] / whole:6.1%} {line[counted]:8.1f} of "
                f"{line['us'] / line[counted]:8.2f} us  {line['name'][:NAME_WIDTH]}"
            )
    for line in found["places"]:
        yield (
            f"  {line['us']:10.1f} us {line['us'] / whole:6.1%} {line['launches']:8.1f} of "
            f"{line['median_us']:8.2f} us, {line['low_us']:.2f} to {line['high_us']:.2f}: "
            f"{line['name'][:PLACE_WIDTH]} between {line['before'][:PLACE_WIDTH]} and {line['after'][:PLACE_WIDTH]}"
        )


def _table(columns: Sequence[tuple[str, str]], rows: list[dict[str, Any]], legend: Mapping[str, str]) -> Iterator[str]:
    """The table without the columns that no row has a value for, and what the others are."""
    columns = [(name, title) for name, title in columns if any(row.get(name) is not None for row in rows)]
    table = [[title for _, title in columns], *([_cell(row.get(name)) for name, _ in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
    yield from textwrap.wrap("; ".join(f"{title}: {legend[title]}" for _, title in columns), WIDTH)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:.0f}"
