"""What the trunk itself writes behind pieces of text, greedily, with its hidden states: many pieces in lockstep.

All pieces have one length, so a step is the same position of each, and reads every weight once for all of them: a
prompt pass over a table in which a row is a piece, not a position. It is prefill's arithmetic in other shapes than
serving has: where two tokens are nearly as likely, the text may go another way than the served one. It is text to train
on, nothing that was promised.
B = pieces, P = tokens of a piece, N = tokens written, T = P + N, H = hidden, kv = key heads, D = head width, Hv = value
heads, dk / dv = their widths, C = convolution channels, J = convolution width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.round.prompt import SLOT, PromptPass, read_text
from pilotfish.engine.round.spans import Span, SpanRows
from pilotfish.engine.round.torch_table import TorchOperators, gated_norm, project_heads, split_gates, split_heads
from pilotfish.kernels.activation import sigmoid
from pilotfish.kernels.attention import pages_for
from pilotfish.kernels.conv import causal_conv


@torch.inference_mode()
def write_on(model: Model, pieces: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B, T], and hidden states [B, T, H] in the model's dtype, of int64 pieces [B, P] with `num_tokens`
    >= 1 behind each; all on the model's device. The model needs pages for one piece."""
    pieces = pieces.to(model.device)
    batch, length = pieces.shape
    table, hidden = Lockstep(model, batch, length, num_tokens), []
    for number, piece in enumerate(pieces):
        hidden.append(read_text(model, piece))
        table.take(number)
    prompt, lm_head = PromptPass(model, table), model.trunk.lm_head
    parts, tokens = [torch.stack(hidden)], [pieces]
    for position in range(length, length + num_tokens):
        token = table.product(lm_head, parts[-1][:, -1]).argmax(-1, keepdim=True)
        tokens.append(token)
        # angles for all pieces alike; where keys go is no matter of pages here
        span = prompt.span(SLOT, position, 1, list(range(pages_for(position + 1))))
        rows = SpanRows.empty(model, batch, token[:, 0])
        for _ in prompt.steps(rows, span):
            pass
        parts.append(rows.hidden[:, None])
    return torch.cat(tokens, 1), torch.cat(parts, 1)


class Lockstep(TorchOperators):
    """The prompt's operators for one token of each of many pieces, all at one position, from memory of its own."""

    def __init__(self, model: Model, batch: int, length: int, num_tokens: int):
        trunk = model.trunk
        self.keys = {id(cache): _Keys.empty(cache, batch, length, num_tokens) for cache in trunk.kv}
        mixers = [layer.mixer for layer in trunk.layers if isinstance(layer.mixer, GatedDeltaNet)]
        sources = zip(mixers, trunk.state.s, trunk.state.conv, strict=True)
        self.states = {id(mixer): _State.empty(s, conv, batch) for mixer, s, conv in sources}

    def take(self, number: int) -> None:
        """Copies what the model has of the piece that was read last."""
        memories: list[_Keys | _State] = [*self.keys.values(), *self.states.values()]
        for memory in memories:
            memory.take(number)

    def project_prompt(
        self, mixer: GatedAttention, projected: torch.Tensor, span: Span, cache: KvCache, q: torch.Tensor
    ) -> None:
        """q [B, h, D]."""
        keys = self.keys[id(cache)]
        rows, k, v, _ = project_heads(mixer, projected, span.cos, span.sin)
        keys.k[:, :, span.start], keys.v[:, :, span.start] = k, v
        q.copy_(rows)

    def attend_prompt(
        self, mixer: GatedAttention, q: torch.Tensor, projected: torch.Tensor, span: Span, cache: KvCache,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """out [B, h D]."""
        keys, seen = self.keys[id(cache)], slice(span.start + 1)
        rows = q.float().unflatten(1, (mixer.num_kv_heads, -1)) * mixer.head_dim**-0.5
        weights = (rows @ keys.k[:, :, seen].mT).softmax(-1)
        mixed = (weights @ keys.v[:, :, seen]).flatten(1)
        out.copy_(mixed.flatten(1) * sigmoid(projected[:, -out.shape[1] :].float()))

    def gdn_prompt(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, span: Span, recurrent: RecurrentState
    ) -> torch.Tensor:
        """[B, Hv dv]; the model's own state and history stay."""
        own = self.states[id(mixer)]
        u, z, beta, log_decay = split_gates(mixer, projected)
        inputs = torch.cat((own.conv, u[:, None]), 1)
        own.conv.copy_(inputs[:, 1:])
        q, k, v = (part[:, 0] for part in split_heads(mixer, causal_conv(inputs, mixer.conv_weight)))
        # `delta_step` as products, for which the state is read once and written once
        beta, decay = beta[..., None], log_decay.exp()[..., None]
        old_k, old_q = (torch.stack((k, q), -2) @ own.s).unbind(-2)
        delta = beta * (v - decay * old_k)
        own.s.mul_(decay[..., None])
        flat = own.s.flatten(0, 1)
        flat.baddbmm_(k.flatten(0, 1)[:, :, None], delta.flatten(0, 1)[:, None])
        read = decay * old_q + (k * q).sum(-1, keepdim=True) * delta
        return gated_norm(mixer, read, z).to(mixer.dtype)


@dataclass(frozen=True)
class _Keys:
    """Keys and values fp32 [B, kv, T, D] of one attention layer; `source` has those of the piece that was read last."""

    source: KvCache
    k: torch.Tensor
    v: torch.Tensor
    length: int

    @classmethod
    def empty(cls, source: KvCache, batch: int, length: int, num_tokens: int) -> _Keys:
        _, kv, _, dim = source.k.shape
        k, v = (source.k.new_empty((batch, kv, length + num_tokens, dim), dtype=torch.float32) for _ in range(2))
        return cls(source, k, v, length)

    def take(self, number: int) -> None:
        pages = slice(1, 1 + pages_for(self.length))
        for own, cache in ((self.k, self.source.k), (self.v, self.source.v)):
            own[number, :, : self.length] = cache[pages].transpose(0, 1).flatten(1, 2)[:, : self.length]


@dataclass(frozen=True)
class _State:
    """State fp32 [B, Hv, dk, dv] and the last convolution inputs [B, J-1, C] of one layer; the sources [slots, ...]
    have those of the piece that was read last."""

    source: tuple[torch.Tensor, torch.Tensor]
    s: torch.Tensor
    conv: torch.Tensor

    @classmethod
    def empty(cls, s: torch.Tensor, conv: torch.Tensor, batch: int) -> _State:
        return cls((s, conv), *(t.new_empty((batch, *t.shape[1:])) for t in (s, conv)))

    def take(self, number: int) -> None:
        for own, source in zip((self.s, self.conv), self.source, strict=True):
            own[number] = source[SLOT]
