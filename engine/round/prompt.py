"""The prompt pass: a span of one sequence through trunk and head, by the same tables of operators as the round.

T = prompt rows, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.parallel import sum_over_ranks
from pilotfish.engine.model.trunk import Layer, Norm
from pilotfish.engine.round.operators import Operators, operators_of
from pilotfish.engine.round.reports import prompt_logprobs
from pilotfish.kernels.attention import PAGE, pages_for
from pilotfish.kernels.rope import rope_angles

MOST_ROWS = 64
"""Rows of hidden states that become logits in one product."""


@dataclass(frozen=True)
class Span:
    """Positions [start, start + length) of one prompt, whose sequence owns `slot` and the pages `table`, int64."""

    slot: int
    start: int
    length: int
    table: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, slot: int, start: int, length: int, table: list[int] | torch.Tensor, inv_freq: torch.Tensor) -> Span:
        positions = torch.arange(start, start + length, device=inv_freq.device)
        owned = torch.as_tensor(table, device=inv_freq.device)
        return cls(slot, start, length, owned, positions, *rope_angles(positions, inv_freq))


class PromptPass:
    """A model's prompts; `operators` are its own table unless another is given."""

    def __init__(self, model: Model, operators: Operators | None = None):
        self.model, self.ops = model, operators or operators_of(model)

    def span(self, slot: int, start: int, length: int, table: list[int] | torch.Tensor) -> Span:
        return Span.build(slot, start, length, table, self.model.inv_freq)

    def trunk(self, tokens_T: torch.Tensor, span: Span) -> torch.Tensor:
        """Final-norm hidden [T, H] of int64 tokens; the slot's state and the pages hold the span afterwards."""
        trunk, ops = self.model.trunk, self.ops
        x = ops.embed(trunk.embedding, tokens_T)
        normed = ops.norm(x, trunk.layers[0].input_norm)
        caches, number = iter(trunk.kv), 0
        for layer, after in zip(trunk.layers, trunk.norms_after(), strict=True):
            if isinstance(layer.mixer, GatedAttention):
                mixed = self._attention(layer.mixer, normed, span, next(caches))
            else:
                projected = ops.product(layer.mixer.in_proj, normed)
                state, history = trunk.state.s[number, span.slot], trunk.state.conv[number, span.slot]
                mixed = ops.product(layer.mixer.output, ops.gdn_prompt(layer.mixer, projected, state, history))
                number += 1
            normed = self._end(x, mixed, layer, after)
        return normed

    def full_layer(self, x: torch.Tensor, layer: Layer, span: Span, cache: KvCache, after: Norm) -> torch.Tensor:
        """A full-attention layer over a span, as draft heads have: the norm `after` of what x fp32 [T, H] becomes."""
        assert isinstance(layer.mixer, GatedAttention)
        mixed = self._attention(layer.mixer, self.ops.norm(x, layer.input_norm), span, cache)
        return self._end(x, mixed, layer, after)

    def end_span(self, tokens_T: torch.Tensor, hidden: torch.Tensor, span: Span, head_on: bool) -> None:
        """What the text after a span goes on from, once the trunk gave `hidden` for its tokens: the head's pairs of the
        positions start - 1 .. end - 2, whose tokens are the span's, and the span's last hidden row, which the state
        carries to the next pair."""
        carried = self.model.trunk.state.last_hidden[span.slot]
        # before a prompt's first token there is no hidden row to pair it with
        skipped = int(span.start == 0)
        if head_on and span.length > skipped:
            before = hidden[:-1] if skipped else torch.cat((carried[None], hidden[:-1]))
            pairs = self.span(span.slot, span.start - 1 + skipped, span.length - skipped, span.table)
            self.fill(tokens_T[skipped:], before, pairs)
        carried.copy_(hidden[-1])

    def fill(self, next_tokens_T: torch.Tensor, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """The head's hidden rows [T, H] of the pairs at a span's positions; see DraftHead.fill."""
        assert self.model.head is not None
        return self.model.head.fill(self, next_tokens_T, hidden, span)

    def logprobs(self, hidden: torch.Tensor, next_tokens: list[int], wanted: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens that follow hidden rows [n, H]; logits are held of MOST_ROWS rows at once."""
        found = []
        for start in range(0, len(next_tokens), MOST_ROWS):
            tokens = next_tokens[start : start + MOST_ROWS]
            found += prompt_logprobs(self.logits(hidden[start : start + len(tokens)]), tokens, wanted)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [n, V] of hidden rows [n, H], each as a round has it."""
        lm_head, parts = self.model.trunk.lm_head, []
        for rows in hidden.split(MOST_ROWS):
            padded = self.ops.padded(len(rows))
            out = torch.empty((padded, lm_head.out_features), dtype=torch.float32, device=hidden.device)
            self.ops.linear(lm_head, F.pad(rows, (0, 0, 0, padded - len(rows))), out)
            parts.append(out[: len(rows)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attention(self, mixer: GatedAttention, normed: torch.Tensor, span: Span, cache: KvCache) -> torch.Tensor:
        projected = self.ops.product(mixer.qkvg, normed)
        return self.ops.product(mixer.output, self.ops.attention_prompt(mixer, projected, span, cache))

    def _end(self, x: torch.Tensor, mixed: torch.Tensor, layer: Layer, after: Norm) -> torch.Tensor:
        """What follows the mixer; x becomes the layer's output, of which this is the norm `after`."""
        normed = self.ops.norm_of_sum(x, sum_over_ranks(mixed), layer.post_norm)
        return self.ops.feed_forward_prompt(layer.mlp, x, normed, after)


SLOT = 1


@torch.inference_mode()
def read_text(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Final-norm hidden [T, H] of int64 [T], in chunks of a page, outside of any engine; writes to slot 1 and the first
    pages."""
    table, prompt = list(range(1, pages_for(len(tokens)) + 1)), PromptPass(model)
    model.trunk.state.reset(SLOT)
    parts = []
    for start in range(0, len(tokens), PAGE):
        part = tokens[start : start + PAGE].to(model.device)
        parts.append(prompt.trunk(part, prompt.span(SLOT, start, len(part), table)))
    return torch.cat(parts)
