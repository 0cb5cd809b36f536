"""A slot's state: the one list of what a sequence carries from round to round, and of the flags that say what it uses.

Everything else follows from it: the buffers of a device (engine.round.batch_state allocates each field once), the
arguments of kernels (they take the tuple), the columns that an admission writes, and the parts of sampling that a batch
runs.
S = slots, K = largest depth, V = vocabulary, N and M = word bans and the tokens before their last one, L = positions.
A sequence of length n has n tokens in the caches; its last committed token stands at position n and is not among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

MAX_STOP_IDS = 64
MAX_BAD_SEQUENCES = 256
MAX_BAD_LENGTH = 32
MAX_CLOSING = 64
MIN_TEMPERATURE = 1e-5
"""The temperature below which a request is greedy, as in vLLM: logits divided by less may overflow."""
ANY, NO_TOKEN = -1, -2
NEVER = 1 << 40
"""A position that no sequence reaches."""

# Bits of `flags`: what of sampling a slot's request uses. What no request of a batch uses costs nothing.
BIASED = 1
PENALISED = 2
MIN_TOKENS = 4
BAD_SEQUENCES = 8
THINKING = 16
MIN_P = 32
TOP_K = 64
TOP_P = 128
MASKED = 256
"""A grammar's mask stands in `choose`'s `allowed` words for the rows of this slot."""
SAMPLED = 512
"""Drawn, not greedy. Kernels read it off the temperature."""
FILTERED = MIN_P | TOP_K | TOP_P
EVERYTHING = 1023


@dataclass(frozen=True)
class Admission:
    """A request as a slot takes it. `params` have the fields of engine.link.messages.SamplingParams; `limit` counts all
    tokens that the sequence may have, prompt included."""

    prompt: list[int]
    params: Any
    limit: int
    own_k: int
    vocab_size: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.params.temperature >= MIN_TEMPERATURE)

    @property
    def opened(self) -> int:
        """Where a thinking block that the prompt ends in was opened."""
        rule = self.params.thinking
        return len(self.prompt) - 1 if rule is not None and rule.start_token_id is None else NEVER

    @property
    def closing(self) -> list[int]:
        """What closes a thinking block whose budget is spent."""
        rule = self.params.thinking
        return [] if rule is None else list(rule.closing)


def stop_ids_of(params: Any) -> list[int]:
    """Ids that end the request: its own, and the model's unless ignore_eos. A grammar's text ends with the model's."""
    eos = () if params.ignore_eos and params.grammar is None else params.eos_token_ids
    return sorted({*params.stop_token_ids, *eos})


def banned_tokens(params: Any) -> list[int]:
    """Bad words of one token: banned wherever they would stand."""
    return [sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1]


def banned_sequences(params: Any) -> list[tuple[int, ...]]:
    """Bad words of more than one token."""
    return [sequence for sequence in params.bad_words_token_ids if len(sequence) > 1]


Number = Callable[[Admission], float | None]
"""What an admission writes; None stands for the field's `fill`."""


@dataclass(frozen=True)
class Field:
    """A buffer [S, *shape] of a slot's state. Names in `shape` stand for sizes known when buffers are made.

    `fill`: what stands there before the first request, and in the unused places of `row`. `number` (of a field of one
    value) and `row` (of one axis): what an admission writes; fields with neither are written by name. `only`: a row
    that is written, and read, for requests with this flag alone.
    """

    dtype: torch.dtype = torch.int64
    shape: tuple[int | str, ...] = ()
    fill: int = 0
    number: Number | None = None
    row: Callable[[Admission], list[int]] | None = None
    only: int = 0


def _whole(number: Number, fill: int = 0) -> Field:
    return Field(fill=fill, number=number)


def _factor(number: Number) -> Field:
    return Field(torch.float32, number=number)


def _thinking(name: str, fill: int) -> Field:
    """A value of the request's thinking budget, `fill` without one."""
    return Field(fill=fill, number=lambda a: None if a.params.thinking is None else getattr(a.params.thinking, name))


class SlotState(NamedTuple):
    """What all slots hold: one tensor a field, contiguous, on one device. Truth values are uint8: kernels read
    bytes."""

    flags: Annotated[torch.Tensor, Field(torch.int32)]
    length: Annotated[torch.Tensor, _whole(lambda a: 0)]
    last_token: Annotated[torch.Tensor, Field()]
    limit: Annotated[torch.Tensor, _whole(lambda a: a.limit)]
    pending_count: Annotated[torch.Tensor, _whole(lambda a: 0)]
    own_k: Annotated[torch.Tensor, _whole(lambda a: a.own_k)]
    num_offered: Annotated[torch.Tensor, _whole(lambda a: 0)]
    min_until: Annotated[torch.Tensor, _whole(lambda a: len(a.prompt) + a.params.min_tokens)]
    drafts: Annotated[torch.Tensor, Field(shape=("depth",))]
    done: Annotated[torch.Tensor, Field(torch.uint8, fill=1)]
    stop_ids: Annotated[torch.Tensor, Field(shape=(MAX_STOP_IDS,), fill=-1, row=lambda a: stop_ids_of(a.params))]
    seed: Annotated[torch.Tensor, _whole(lambda a: a.params.seed)]
    choice: Annotated[torch.Tensor, _whole(lambda a: a.params.choice)]
    top_k: Annotated[torch.Tensor, _whole(lambda a: a.params.top_k if a.params.top_k > 0 else a.vocab_size)]
    temperature: Annotated[torch.Tensor, _factor(lambda a: a.params.temperature if a.is_sampled else 0)]
    top_p: Annotated[torch.Tensor, _factor(lambda a: a.params.top_p)]
    min_p: Annotated[torch.Tensor, _factor(lambda a: a.params.min_p)]
    repetition: Annotated[torch.Tensor, _factor(lambda a: a.params.repetition_penalty)]
    presence: Annotated[torch.Tensor, _factor(lambda a: a.params.presence_penalty)]
    frequency: Annotated[torch.Tensor, _factor(lambda a: a.params.frequency_penalty)]
    counts: Annotated[torch.Tensor, Field(torch.int32, ("vocabulary",))]
    """How often each token was generated, where PENALISED."""
    seen: Annotated[torch.Tensor, Field(torch.uint8, ("vocabulary",))]
    """Whether each token stands in prompt or output, where PENALISED."""
    bias: Annotated[torch.Tensor, Field(torch.float32, ("vocabulary",))]
    bad_prefixes: Annotated[torch.Tensor, Field(shape=(MAX_BAD_SEQUENCES, MAX_BAD_LENGTH - 1), fill=ANY)]
    """The tokens before each banned one, padded with ANY on the left."""
    bad_lasts: Annotated[torch.Tensor, Field(shape=(MAX_BAD_SEQUENCES,), fill=NO_TOKEN)]
    recent: Annotated[torch.Tensor, Field(shape=(MAX_BAD_LENGTH - 1,), fill=NO_TOKEN)]
    """The newest generated tokens, where BAD_SEQUENCES."""
    think_start: Annotated[torch.Tensor, _thinking("start_token_id", NO_TOKEN)]
    think_end: Annotated[torch.Tensor, _thinking("end_token_id", NO_TOKEN)]
    think_budget: Annotated[torch.Tensor, _thinking("num_tokens", NEVER)]
    think_opened: Annotated[torch.Tensor, _whole(lambda a: a.opened, NEVER)]
    """The position of the first start id, NEVER while there is none; `think_closed` of the first end id."""
    think_closed: Annotated[torch.Tensor, _whole(lambda a: NEVER, NEVER)]
    num_closing: Annotated[torch.Tensor, _whole(lambda a: len(a.closing))]
    closing: Annotated[torch.Tensor, Field(shape=(MAX_CLOSING,), fill=NO_TOKEN, row=lambda a: a.closing, only=THINKING)]
    history: Annotated[torch.Tensor | None, Field(torch.int32, ("positions",))] = None
    """Committed tokens by position, for heads that read them."""


def fields() -> dict[str, Field]:
    """The definition, by name, in the tuple's order."""
    hints = get_type_hints(SlotState, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in SlotState._fields}


FIELDS: dict[str, Field] = fields()
NUMBERS = {name: field for name, field in FIELDS.items() if field.number is not None}
"""Fields of one value that an admission writes."""
ROWS = {name: field for name, field in FIELDS.items() if field.row is not None}


def value_of(field: Field, admission: Admission) -> float:
    """What an admission writes into a field of one value."""
    assert field.number is not None
    value = field.number(admission)
    return field.fill if value is None else value


USES: dict[int, Callable[[Admission], bool]] = {
    BIASED: lambda a: bool(a.params.logit_bias or a.params.allowed_token_ids is not None or banned_tokens(a.params)),
    PENALISED: lambda a: bool(
        a.params.presence_penalty or a.params.frequency_penalty or a.params.repetition_penalty != 1
    ),
    MIN_TOKENS: lambda a: a.params.min_tokens > 0,
    BAD_SEQUENCES: lambda a: bool(banned_sequences(a.params)),
    THINKING: lambda a: a.params.thinking is not None,
    MIN_P: lambda a: a.is_sampled and a.params.min_p > 0,
    TOP_K: lambda a: a.is_sampled and a.params.top_k > 0,
    TOP_P: lambda a: a.is_sampled and a.params.top_p < 1,
    MASKED: lambda a: a.params.grammar is not None,
    SAMPLED: lambda a: a.is_sampled,
}


def flags_of(admission: Admission) -> int:
    """The bits of the parts of sampling that a request uses."""
    return sum(bit for bit, used in USES.items() if used(admission))
