"""The prompt pass: a span of one sequence through trunk and head, by the same tables of operators as the round.

T = prompt rows, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from tqdm import tqdm

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.ledger import tensor_bytes
from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.parallel import sum_over_ranks
from pilotfish.engine.model.trunk import Layer, Norm
from pilotfish.engine.round.graphs import Graphs
from pilotfish.engine.round.operators import Operators, operators_of
from pilotfish.engine.round.reports import prompt_logprobs
from pilotfish.engine.round.spans import LENGTHS, Span, SpanRows, StaticSpan, padded_tokens
from pilotfish.kernels.attention import PAGE, pages_for

NULL_SLOT = 0
END = -1
"""The part after the last group."""
TIMED = 2
"""Reads that are timed together at the start."""
MOST_ROWS = 64
"""Rows of hidden states that become logits in one product."""

Taken = tuple[SpanRows, Span]
"""A piece of a prompt: the memory it goes through, and its place."""


@dataclass(frozen=True)
class Group:
    """Layers between two products of attention: the end of a full-attention layer, the linear ones after it, and the
    beginning of the next full one. Each layer with the norm of its output."""

    ended: tuple[Layer, Norm] | None
    linear: list[tuple[Layer, Norm]]
    begun: Layer | None


@dataclass(frozen=True)
class Between:
    """What a sequence carries from the first of two pieces to the second, kept when the second has been read too: as
    engine.cache.snapshots has it. s fp32 [L, Hv, dk, dv], conv [L, J-1, C], last_hidden [H]; L = linear layers."""

    s: torch.Tensor
    conv: torch.Tensor
    last_hidden: torch.Tensor

    @classmethod
    def empty(cls, state: RecurrentState) -> Between:
        return cls(*(torch.empty_like(slots) for slots in state.of_slot(NULL_SLOT)))

    def keep(self, number: int, state: RecurrentState, slot: torch.Tensor) -> None:
        """Copies linear layer `number` of a slot, int32 [1]."""
        for kept, slots in ((self.s, state.s), (self.conv, state.conv)):
            torch.index_select(slots[number], 0, slot, out=kept[number, None])

    def keep_hidden(self, state: RecurrentState, slot: torch.Tensor) -> None:
        torch.index_select(state.last_hidden, 0, slot, out=self.last_hidden[None])


class PromptPass:
    """A model's prompts; `operators` are its own table unless another is given.

    Work that looks at nothing on the host stands in groups of layers, which can be captured for a number of rows; full
    attention, whose work grows with the context, stands between them.
    """

    def __init__(self, model: Model, operators: Operators | None = None):
        self.model, self.ops = model, operators or operators_of(model)
        self.groups = _groups(model)
        self._static: list[StaticSpan] = []
        self._graphs: Graphs | None = None
        self._taken: tuple[Taken, ...] = ()
        # two whole pieces in the same steps: a dense model's weights are written out once for both; a MoE's experts are
        # multiplied as they are packed, and little else is written out. No bit depends on it
        self.reads_pairs = self.ops.fixed_shapes and not model.config.is_moe
        self.between: Between | None = None
        # of a captured step, by number of rows, attention to what stands before left out
        self.step_seconds: dict[int, float] = {}
        # of what follows the newest prompt, its first token and drafts, where steps end before they return
        self.first_token_seconds = 0.0

    def span(self, slot: int, start: int, length: int, table: list[int] | torch.Tensor) -> Span:
        return Span.build(slot, start, length, table, self.model.inv_freq, self.ops.prompt_rows(length))

    def trunk(self, tokens_T: torch.Tensor, span: Span) -> torch.Tensor:
        """Final-norm hidden [T, H] of int64 tokens; the slot's state and the pages hold the span afterwards."""
        padded = tokens_T[torch.arange(span.num_rows, device=tokens_T.device) % len(tokens_T)]
        rows = SpanRows.empty(self.model, span.num_rows, padded)
        for _ in self.steps(rows, span):
            pass
        return rows.hidden[: span.length]

    def take(self, slot: int, start: int, tokens: Sequence[int], table: list[int]) -> Taken:
        """A piece of a prompt, for `steps`: in memory that stays, if there is enough; the next piece overwrites it."""
        taken = self._take(0, slot, start, tokens, table)
        self._stays((taken,))
        return taken

    def take_pair(
        self, slot: int, start: int, middle: int, tokens: Sequence[int], table: list[int]
    ) -> tuple[Taken, Taken]:
        """Two pieces, the second from position `middle` on, for `steps`; in memory as `take`."""
        first, second = tokens[: middle - start], tokens[middle - start :]
        taken = self._take(0, slot, start, first, table), self._take(1, slot, middle, second, table)
        self.between = self.between or Between.empty(self.model.trunk.state)
        self._stays(taken)
        return taken

    def _stays(self, taken: tuple[Taken, ...]) -> None:
        """Remembers pieces whose memory all stays: what is captured works on these alone."""
        known = [static.first(span.num_rows) for static, (_, span) in zip(self._static, taken, strict=False)]
        self._taken = taken if [id(rows) for rows in known] == [id(rows) for rows, _ in taken] else ()

    def _take(self, place: int, slot: int, start: int, tokens: Sequence[int], table: list[int]) -> Taken:
        num_rows = self.ops.prompt_rows(len(tokens))
        if place >= len(self._static) or num_rows > self._static[place].num_rows:
            padded = torch.tensor(padded_tokens(tokens, num_rows), device=self.model.device)
            return SpanRows.empty(self.model, num_rows, padded), self.span(slot, start, len(tokens), table)
        static = self._static[place]
        return static.first(num_rows), static.take(slot, start, tokens, table, num_rows)

    def steps(self, rows: SpanRows, span: Span, *after: Taken) -> Iterator[None]:
        """The trunk over a span, into rows.hidden, in steps between which anything may run that leaves its slot, its
        pages and `rows` alone: a group of layers if it has been captured, else a layer. The slot's state and the pages
        hold the span after the last one. The spans `after` it of the same prompt are read in the same steps, with the
        bits that they would have one after the other; what stands between two is in `between`."""
        taken, caches = ((rows, span), *after), iter(self.model.trunk.kv)
        for number, group in enumerate(self.groups):
            if number:
                yield
            key = _key(taken, number)
            if self._is_captured(key, taken):
                self._replay(key)
            else:
                yield from self._layers(number, taken)
            if group.begun is not None:
                assert isinstance(group.begun.mixer, GatedAttention)
                cache = next(caches)
                for rows, span in taken:
                    self.ops.attend_prompt(group.begun.mixer, rows.q, rows.projected, span, cache, rows.mixed)

    def _is_captured(self, key: Key, taken: Sequence[Taken]) -> bool:
        """Whether there is a graph of it, and it would work on these rows."""
        if self._graphs is None or not self._taken:
            return False
        return [id(rows) for rows, _ in taken] == [id(rows) for rows, _ in self._taken] and key in self._graphs

    def _replay(self, key: Key) -> None:
        assert self._graphs is not None
        self._graphs.replay(key)

    def _layers(self, number: int, taken: Sequence[Taken]) -> Iterator[None]:
        """A group's own work, in a step for each layer that ends in it and one for what is left."""
        xs = [rows.x for rows, _ in taken]
        trunk, ops, group = self.model.trunk, self.ops, self.groups[number]
        caches = sum(earlier.begun is not None for earlier in self.groups[:number])
        linear = sum(len(earlier.linear) for earlier in self.groups[:number])
        if group.ended is None:
            for rows, span in taken:
                span.place(self.model.inv_freq)
                rows.x.copy_(ops.embed(trunk.embedding, rows.tokens))
            normed = [ops.norm(x, trunk.layers[0].input_norm) for x in xs]
        else:
            layer, after = group.ended
            normed = self._end(xs, ops.products(layer.mixer.output, [rows.mixed for rows, _ in taken]), layer, after)
            yield
        for place, (layer, after) in enumerate(group.linear, linear):
            assert isinstance(layer.mixer, GatedDeltaNet)
            mixed = self._mix(layer.mixer, place, ops.products(layer.mixer.in_proj, normed), taken)
            normed = self._end(xs, ops.products(layer.mixer.output, mixed), layer, after)
            yield
        if group.begun is None:
            for (rows, _), last in zip(taken, normed, strict=True):
                rows.hidden.copy_(last)
        else:
            assert isinstance(group.begun.mixer, GatedAttention)
            ops.products(group.begun.mixer.qkvg, normed, [rows.projected for rows, _ in taken])
            for rows, span in taken:
                ops.project_prompt(group.begun.mixer, rows.projected, span, trunk.kv[caches], rows.q)

    def _mix(
        self, mixer: GatedDeltaNet, number: int, projected: Sequence[torch.Tensor], taken: Sequence[Taken]
    ) -> list[torch.Tensor]:
        """Linear layer `number` over pieces, one after the other."""
        state, mixed = self.model.trunk.state, list[torch.Tensor]()
        for place, (rows, (_, span)) in enumerate(zip(projected, taken, strict=True), 1):
            mixed.append(self.ops.gdn_prompt(mixer, number, rows, span, state))
            if place < len(taken):
                assert self.between is not None
                self.between.keep(number, state, span.numbers[:1])
        return mixed

    # -- getting ready ----------------------------------------------------------------------------------------------

    def reserve(self, num_rows: int, max_length: int) -> None:
        """Memory that stays, for pieces of up to so many tokens of prompts of up to `max_length`."""
        most = self.ops.prompt_rows(min(num_rows, max_length))
        self._static = [StaticSpan(self.model, most, max_length) for _ in range(1 + self.reads_pairs)]
        if self.reads_pairs:
            self.between = Between.empty(self.model.trunk.state)

    def lengths(self) -> list[int]:
        """The numbers of rows that the memory which stays is enough for."""
        most = self._static[0].num_rows if self._static else 0
        return sorted({self.ops.prompt_rows(length) for length in range(LENGTHS[0], most + 1, LENGTHS[0])})

    def pair_lengths(self) -> list[int]:
        """The numbers of rows of each of two pieces that are read together: of the largest, and of the half that a
        prompt may begin with, where prompts are so long."""
        if len(self._static) < 2:
            return []
        most, longest = self._static[0].num_rows, self._static[0].max_length
        return [rows for rows in self.lengths() if rows in (most // 2, most) and 2 * rows <= longest]

    @property
    def num_bytes(self) -> int:
        """Memory that stays."""
        return tensor_bytes((self._static, self.between))

    def capture(self, graphs: Graphs, head_on: bool, progress: bool = True) -> None:
        """Captures every group of layers for every number of rows, the most first: what they need beside the memory
        that stays they share. Reads prompts into the null slot, so that libraries have set up what they need."""
        lengths = self.lengths()[::-1]
        several = [(rows, rows) for rows in self.pair_lengths()[::-1]] + [(rows,) for rows in lengths]
        for num_rows in tqdm(several, desc="capturing prompts", unit="length", disable=not progress):
            self._read_dummy(*num_rows)
            for number in range(len(self.groups)):
                graphs.capture((num_rows, number), partial(self._work_taken, number), warm_ups=0)
            graphs.capture((num_rows, END), partial(self._end_taken, head_on), warm_ups=1)
        self._graphs = graphs
        for rows in lengths:
            self.step_seconds[rows] = self._time(rows) / len(self.groups)
        self.model.trunk.state.reset(NULL_SLOT)

    def launch_each(self, head_on: bool) -> None:
        """Launches what a piece of each number of rows does, for those who look at what is launched."""
        for num_rows in self.lengths():
            self._read_dummy(num_rows)
            self._end_taken(head_on)

    def _read_dummy(self, num_rows: int, then: int = 0) -> None:
        """Reads a dummy prompt of so many rows, and another piece of so many, into the null slot and the null page. Its
        tokens differ, so that many experts are chosen, as in a real one."""
        # of a few more rows than the longest prompt has tokens the last are padding
        length = min(num_rows + then, self._static[0].max_length)
        tokens = [token % self.model.config.vocab_size for token in range(length)]
        if then:
            self.take_pair(NULL_SLOT, 0, num_rows, tokens, [])
        else:
            self.take(NULL_SLOT, 0, tokens, [])
        (rows, span), *after = self._taken
        for _ in self.steps(rows, span, *after):
            pass

    def _time(self, num_rows: int) -> float:
        """Seconds of reading a dummy prompt."""
        began = perf_counter()
        for _ in range(TIMED):
            self._read_dummy(num_rows)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return (perf_counter() - began) / TIMED

    def _work_taken(self, number: int) -> None:
        for _ in self._layers(number, self._taken):
            pass

    def _end_taken(self, head_on: bool) -> None:
        self._end_spans(self._taken, head_on)

    def full_layer(self, x: torch.Tensor, layer: Layer, span: Span, cache: KvCache, after: Norm) -> torch.Tensor:
        """A full-attention layer over a span, as draft heads have: the norm `after` of what x fp32 [T, H] becomes."""
        assert isinstance(layer.mixer, GatedAttention)
        rows, ops = SpanRows.empty(self.model, span.num_rows), self.ops
        ops.product(layer.mixer.qkvg, ops.norm(x, layer.input_norm), rows.projected)
        ops.project_prompt(layer.mixer, rows.projected, span, cache, rows.q)
        ops.attend_prompt(layer.mixer, rows.q, rows.projected, span, cache, rows.mixed)
        return self._end([x], [ops.product(layer.mixer.output, rows.mixed)], layer, after)[0]

    def enter_layer(self, x: torch.Tensor, layer: Layer, span: Span, cache: KvCache) -> None:
        """What a full-attention layer stores of a span, from its input x fp32 [T, H]."""
        assert isinstance(layer.mixer, GatedAttention)
        rows, ops = SpanRows.empty(self.model, span.num_rows), self.ops
        ops.product(layer.mixer.qkvg, ops.norm(x, layer.input_norm), rows.projected)
        ops.project_prompt(layer.mixer, rows.projected, span, cache, rows.q)

    def end_spans(self, taken: Sequence[Taken], head_on: bool) -> None:
        """What the text after each span goes on from, once the trunk has read it: the head's pairs of the positions
        start - 1 .. end - 2, whose tokens are the span's, and the span's last hidden row, which the state carries to
        the next pair. Looks at nothing on the host, and is captured too."""
        key = _key(taken, END)
        if self._is_captured(key, taken):
            self._replay(key)
        else:
            self._end_spans(taken, head_on)

    def _end_spans(self, taken: Sequence[Taken], head_on: bool) -> None:
        for place, (rows, span) in enumerate(taken, 1):
            self._end_span(rows, span, head_on)
            if place < len(taken):
                assert self.between is not None
                self.between.keep_hidden(self.model.trunk.state, span.numbers[:1])

    def _end_span(self, rows: SpanRows, span: Span, head_on: bool) -> None:
        carried, (slot, length, start) = self.model.trunk.state.last_hidden, span.numbers.split(1)
        if head_on:
            assert self.model.head is not None
            # before a prompt's first token there is no hidden row to pair it with
            skipped = (start == 0).int()
            pair = torch.arange(span.num_rows, device=start.device) + skipped
            before = torch.cat((carried.index_select(0, slot), rows.hidden)).index_select(0, pair)
            tokens = rows.tokens.index_select(0, pair.clamp(max=span.num_rows - 1))
            numbers = torch.cat((slot, length - skipped, start - 1 + skipped))
            pairs = span.beside(numbers, self.model.inv_freq)
            self.model.head.enter(self, tokens, before, pairs)
        carried.index_copy_(0, slot.long(), rows.hidden.index_select(0, length - 1))

    def fill(self, next_tokens_T: torch.Tensor, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """The head's hidden rows [T, H] of the pairs at a span's positions; see DraftHead.fill."""
        assert self.model.head is not None
        padding = span.num_rows - span.length
        padded = F.pad(next_tokens_T, (0, padding)), F.pad(hidden, (0, 0, 0, padding))
        return self.model.head.fill(self, *padded, span)[: span.length]

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

    def _end(
        self, xs: Sequence[torch.Tensor], mixed: Sequence[torch.Tensor], layer: Layer, after: Norm
    ) -> list[torch.Tensor]:
        """What follows the mixer; each x becomes the layer's output, of which this is the norm `after`."""
        normed = [
            self.ops.norm_of_sum(x, sum_over_ranks(delta), layer.post_norm) for x, delta in zip(xs, mixed, strict=True)
        ]
        return self.ops.feed_forward_prompt(layer.mlp, xs, normed, after)


Key = tuple[tuple[int, ...], int]
"""What is captured: pieces of so many rows, and the group of layers, or END."""


def _key(taken: Sequence[Taken], number: int) -> Key:
    return tuple(span.num_rows for _, span in taken), number


def _groups(model: Model) -> list[Group]:
    ended: tuple[Layer, Norm] | None = None
    linear: list[tuple[Layer, Norm]] = []
    groups = []
    for layer, after in zip(model.trunk.layers, model.trunk.norms_after(), strict=True):
        if isinstance(layer.mixer, GatedAttention):
            groups.append(Group(ended, linear, layer))
            ended, linear = (layer, after), []
        else:
            linear.append((layer, after))
    return [*groups, Group(ended, linear, None)]


SLOT = 1


def pages_of(num_tokens: int) -> list[int]:
    """The page table of a text that nobody else is read beside."""
    return list(range(1, 1 + pages_for(num_tokens)))


@torch.inference_mode()
def read_text(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Final-norm hidden [T, H] of int64 [T], in chunks of a page, outside of any engine; writes to slot 1 and the first
    pages."""
    table, prompt = pages_of(len(tokens)), PromptPass(model)
    model.trunk.state.reset(SLOT)
    parts = []
    for start in range(0, len(tokens), PAGE):
        part = tokens[start : start + PAGE].to(model.device)
        parts.append(prompt.trunk(part, prompt.span(SLOT, start, len(part), table)))
    return torch.cat(parts)
