"""What the inputs of each matrix look like on a given text: the weights of `quantize --calibrate`.

The source model reads the text by the engine's own prefill on the CPU, so it must fit in memory. T = tokens, K = input
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.convert.fidelity import load_model
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import CacheSizes, Model
from pilotfish.engine.model.mlp import MoeMlp
from pilotfish.engine.model.trunk import Layer
from pilotfish.engine.round.prompt import SLOT, PromptPass, read_text
from pilotfish.kernels.attention import pages_for
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp

MIN_ROWS = 16
"""Rows below which nothing is known of an expert."""


@dataclass
class Moments:
    """What the inputs of one matrix are like: sums of squares fp32 [K], number of rows, largest magnitude."""

    squares: torch.Tensor
    num_rows: int = 0
    largest: float = 0.0

    def add(self, x: torch.Tensor) -> None:
        rows = x.float()
        self.squares += rows.square().sum(0)
        self.num_rows += len(rows)
        self.largest = max(self.largest, float(rows.abs().max())) if len(rows) else self.largest

    @property
    def importance(self) -> torch.Tensor | None:
        """Mean squares [K]; None where too little was seen."""
        return self.squares / self.num_rows if self.num_rows >= MIN_ROWS else None


@torch.inference_mode()
def collect(checkpoint: Checkpoint, ids: list[int]) -> dict[str, Moments]:
    """Moments by normalised name of each matrix, experts one by one; those that are computed as one share what they
    saw."""
    num_pages = pages_for(len(ids))
    model = load_model(checkpoint, CacheSizes(num_pages + 1, SLOT + 1, 1))
    found: dict[str, Moments] = {}
    for names, linear in _linears(model):
        moments = Moments(torch.zeros(linear.in_features))
        _watch(linear, moments)
        found |= dict.fromkeys(names, moments)
    tokens = torch.tensor(ids)
    hidden = read_text(model, tokens)
    found["lm_head"] = Moments(torch.zeros(hidden.shape[1]))
    found["lm_head"].add(hidden)
    if isinstance(model.head, MtpHead):
        table = list(range(1, num_pages + 1))
        prompt = PromptPass(model)
        prompt.fill(tokens[1:], hidden[:-1], prompt.span(SLOT, 0, len(ids) - 1, table))
    return found


def _watch(linear: AnyLinear, moments: Moments) -> None:
    product: Callable[[torch.Tensor], torch.Tensor] = linear.bulk

    def bulk(x_TK: torch.Tensor) -> torch.Tensor:
        moments.add(x_TK)
        return product(x_TK)

    linear.bulk = bulk  # type: ignore[misc]


def _linears(model: Model) -> Iterator[tuple[list[str], AnyLinear]]:
    """Every product of the layers that may be packed, with the matrices it holds."""
    for index, layer in enumerate(model.trunk.layers):
        yield from _linears_of(layer, f"model.layers.{index}")
    if isinstance(model.head, MtpHead):
        yield from _linears_of(model.head.layer, "mtp.layers.0")


def _linears_of(layer: Layer, name: str) -> Iterator[tuple[list[str], AnyLinear]]:
    if isinstance(layer.mixer, GatedAttention):
        yield [f"{name}.self_attn.{part}_proj" for part in "qkv"], layer.mixer.qkvg
        yield [f"{name}.self_attn.o_proj"], layer.mixer.output
    else:
        yield [f"{name}.linear_attn.in_proj_{part}" for part in ("qkv", "z")], layer.mixer.in_proj
        yield [f"{name}.linear_attn.out_proj"], layer.mixer.output
    if isinstance(layer.mlp, GatedMlp):
        yield from _linears_of_mlp(layer.mlp, f"{name}.mlp")
        return
    assert isinstance(layer.mlp, MoeMlp)
    yield from _linears_of_mlp(layer.mlp.shared, f"{name}.mlp.shared_expert")
    for number, expert in enumerate(layer.mlp.experts):
        yield from _linears_of_mlp(expert, f"{name}.mlp.experts.{number}")


def _linears_of_mlp(mlp: object, name: str) -> Iterator[tuple[list[str], AnyLinear]]:
    assert isinstance(mlp, GatedMlp)
    yield [f"{name}.gate_proj", f"{name}.up_proj"], mlp.gate_up
    yield [f"{name}.down_proj"], mlp.down
