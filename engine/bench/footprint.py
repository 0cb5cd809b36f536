"""Memory that a model of the family takes, by layout, without loading any: from its config, by the planner's own sums.

python -m pilotfish.engine.bench.footprint      prints the table of docs/models.md
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.engine.bench.sizes import SIZES, released_config
from pilotfish.engine.checkpoint.dummy import stored_bytes
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.options import DummyLayout
from pilotfish.engine.plan import GPU_RESERVE_BYTES, SNAPSHOT_SHARE, buffer_bytes, page_bytes
from pilotfish.kernels.attention import PAGE

LAYOUTS: dict[DummyLayout, str] = {
    "nvfp4": "NVFP4",
    "mixed": "mixed",
    "bf16": "BF16",
}
CARDS = (24, 48, 80, 141)
"""GB of cards that many have; as GiB that CUDA can give, a few percent less."""
USABLE = 0.95
UTILIZATION = 0.9
K, SEQUENCES = 3, 4
GIB = 1 << 30


@dataclass(frozen=True)
class Footprint:
    """Bytes of the weights as packed, of a token's keys and values, of a sequence, and of SEQUENCES sequences' and
    rounds' buffers with what the planner leaves free beside them."""

    weights: int
    token: int
    sequence: int
    fixed: int

    def tokens_on(self, card: int) -> int:
        """Tokens whose keys and values fit a card of so many GB beside all else, prefix snapshots included; negative
        where the rest does not fit."""
        room = int(card * 1e9 * USABLE * UTILIZATION) - self.weights - self.fixed
        pages = room // (self.token * PAGE) * SNAPSHOT_SHARE // (SNAPSHOT_SHARE + 1)
        return pages * PAGE


def footprint(config: ModelConfig, layout: DummyLayout) -> Footprint:
    whole, less = buffer_bytes(config, K, SEQUENCES), buffer_bytes(config, K, SEQUENCES - 1)
    token = page_bytes(config, torch.bfloat16, with_head=True) // PAGE
    return Footprint(stored_bytes(config, layout), token, whole - less, whole + GPU_RESERVE_BYTES)


def table() -> list[str]:
    """In Markdown."""
    cards = [f"{card} GB" for card in CARDS]
    rows = [["model", "layout", "weights, GiB", "a token, KiB", "a sequence, MiB", *cards], ["---"] * (5 + len(cards))]
    for size in SIZES:
        config = released_config(size)
        assert config is not None
        for layout, name in LAYOUTS.items():
            found = footprint(config, layout)
            each = [f"{found.weights / GIB:.1f}", f"{found.token / 1024:g}", f"{found.sequence / 2**20:.0f}"]
            rows.append([size, name, *each, *(_tokens(found.tokens_on(card)) for card in CARDS)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _tokens(count: int) -> str:
    if count < 4096:
        return "-"
    return f"{count / 1000:.0f} k" if count < 1_000_000 else f"{count / 1e6:.1f} M"


if __name__ == "__main__":
    print("\n".join(table()))
