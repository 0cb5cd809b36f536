"""The bodies of requests and responses: OpenAI's fields, and vLLM's names for what OpenAI does not have.

A request is decoded in two steps, so that every refusal can name its field: JSON to plain values, where unknown and
unsupported fields are found, then plain values to a frozen struct, where types and ranges are. A field is honoured,
refused by name, listed in `unused.py`, or, if nobody here knows it, let through and told (`fields.py`).
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pilotfish.server import dialects, unused
from pilotfish.server.errors import BadRequest, missing_field, unsupported_field
from pilotfish.server.fields import FieldNotes

NOT_YET = {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None,),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "tool_choice": (None, "none"),
    "thinking_token_budget": (None,),
    "tools": (None, []),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "continue_final_message": (None, False),
    "spaces_between_special_tokens": (None, True),
    **dialects.NEUTRAL,
}
"""Known fields that are not supported, and the values that ask for nothing."""

MAX_VALUES = 300_000
"""Values in a body; decoding as many takes about 10 ms."""
COUNTED_BYTES = 1 << 20
"""They are counted in so many bytes at a time."""
CONTAINER = 4
"""A list or object costs as much as so many numbers."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASED = 1024
MAX_STOP_IDS = 32
"""Stop ids beside the model's own end ids; the engine holds 64 a sequence."""
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 1 << 20
MAX_SALT_LENGTH = 256
MAX_INT = 2**63 - 1

Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INT)]
MaxTokens = Annotated[int, Meta(ge=-1, le=MAX_INT)]
"""-1: as many as fit; 0: the prompt is read, and kept for those that follow, and nothing written."""
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Seed = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Priority = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class Body(Struct, frozen=True, kw_only=True):
    """A request. `REFUSED`: known fields that are not supported, and their values that ask for nothing; `UNUSED`:
    fields without effect; `KINDS`: what may stand in `type` inside a field, for messages; `SAME_AS`: other names of
    fields; `ALSO`: those that `prepare` reads."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_YET
    UNUSED: ClassVar[Set[str]] = unused.FIELDS
    KINDS: ClassVar[Mapping[str, str]] = {}
    SAME_AS: ClassVar[Mapping[str, str]] = {}
    ALSO: ClassVar[Set[str]] = frozenset()

    model: str | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """What a body leaves to be understood, written out."""
        return raw


class StreamOptions(Struct, frozen=True):
    """`continuous_usage_stats` is vLLM's: with `include_usage`, each chunk has its choice's usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: a text, or messages through the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]


class SpeculationField(Struct, frozen=True):
    """`k` drafted tokens a round for this request, at most those served. `trace`: the answer says of each token which
    round wrote it, and whose it was."""

    k: Count | None = None
    trace: bool | None = None


def without_trace(field: SpeculationField | None) -> SpeculationField | None:
    """The field where answers have no place for a trace. Raises BadRequest where one is asked for."""
    if field is not None and field.trace:
        raise unsupported_field("speculation.trace")
    return field


class LoopGuardField(Struct, frozen=True):
    """A text ends once its last tokens have come `repeats` times in a row, over at least `tokens` tokens."""

    repeats: Annotated[int, Meta(ge=2, le=1000)] = 4
    tokens: Annotated[int, Meta(ge=0, le=100_000)] = 256


class RepetitionField(Struct, frozen=True):
    """vLLM's form of the same. `max_pattern_size` 0 switches it off."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    min_count: Annotated[int, Meta(ge=0, le=1000)] = 0


class SamplingFields(Body, frozen=True, kw_only=True):
    """What both endpoints share. None means: the checkpoint's default, else the neutral value."""

    SAME_AS: ClassVar = dialects.SAMPLING
    ALSO: ClassVar = frozenset({"usage"})

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASED)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    speculation: SpeculationField | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    loop_guard: bool | LoopGuardField | None = None
    repetition_detection: RepetitionField | None = None
    include_metrics: bool | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,128}$")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        return dialects.with_usage(raw)


AnyRequest = TypeVar("AnyRequest", bound=Body)

LONE_HIGH = re.compile(rb"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
LONE_LOW = re.compile(rb"(?<!\\)((?:\\\\)*)(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}")
REPLACED = rb"\1\\ufffd"
"""Halves of a character: JavaScript cuts a text between them, and writes what is left as an escape."""
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_TYPES = re.compile(r"(?<=[`| ])(int|float|str|bool)(?=[`| ])")
_PATH = re.compile(r"^(?P<what>.*?) - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)


def decode_request(
    body: bytes,
    kind: type[AnyRequest],
    notes: FieldNotes | None = None,
    *,
    most_values: int = MAX_VALUES,
) -> AnyRequest:
    """Raises BadRequest naming the field for anything that is not a request of this kind.

    `notes` are told what the request has and nothing here reads.
    """
    check_num_values(body, most_values)
    raw = _decode(body)
    if not isinstance(raw, dict):
        raise BadRequest(f"Want a JSON object, got {type(raw).__name__}.", code="invalid_json")
    notes = notes or FieldNotes()
    raw = {name: _as_integer(value) for name, value in raw.items()}
    _check_names(raw, kind, notes)
    others = {own: name for name, own in kind.SAME_AS.items() if raw.get(name) is not None and raw.get(own) is None}
    try:
        prepared = kind.prepare(raw | {own: raw[name] for own, name in others.items()}, notes)
        known = {name: value for name, value in prepared.items() if name in kind.__struct_fields__}
        _check_stream_options(known.get("stream_options"))
        request = msgspec.convert(known, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _named(str(error), kind.KINDS, others) from error
    _check_inside(known, request, "", notes)
    for name in unused.unused_in(raw, kind.UNUSED):
        notes.unused(name)
    return request


def _decode(body: bytes) -> Any:
    """JSON without a byte order mark, halves of characters that somebody cut replaced by U+FFFD. Raises BadRequest."""
    if body.startswith(codecs.BOM_UTF8):
        body = body[len(codecs.BOM_UTF8) :]
    try:
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            whole = LONE_LOW.sub(REPLACED, LONE_HIGH.sub(REPLACED, body))
            if whole == body:
                raise
            return msgspec.json.decode(whole)
    # ValueError: what is no UTF-8, by msgspec before 0.23
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error


def _as_integer(value: Any) -> Any:
    """A number as an integer where it is one: some clients write 100 as 100.0."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MAX_INT
    return int(value) if is_whole else value


def check_num_values(text: bytes, most: int = MAX_VALUES) -> None:
    """Raises BadRequest for JSON of more than `most` values: decoding them holds the interpreter's lock.

    A name of an object's field is a value too, a list or object as many as CONTAINER.
    """
    # far more often than not this quick look is enough, though it counts what stands in strings too
    if _weight(text, 0, len(text)) <= most:
        return
    weight, place = 0, 0
    while weight <= most and place < len(text):
        start = text.find(b'"', place)
        begin = start if start >= 0 else len(text)
        weight += _weight(text, place, begin) + 1
        place = _string_end(text, begin + 1)
    if weight > most:
        wanted = f"Want at most {most} values, a list or object counted as {CONTAINER}."
        raise BadRequest(wanted, code="too_many_values")


def _weight(text: bytes, start: int, end: int) -> int:
    weight = 0
    # a call that counts holds the interpreter's lock, 8 ms for 30 MB
    for begin in range(start, end, COUNTED_BYTES):
        part = begin, min(begin + COUNTED_BYTES, end)
        containers = text.count(b"[", *part) + text.count(b"{", *part)
        weight += text.count(b",", *part) + text.count(b":", *part) + CONTAINER * containers
    return weight


def _string_end(text: bytes, place: int) -> int:
    """The place after the quote that ends the string: one with an even number of backslashes before it."""
    while (end := text.find(b'"', place)) >= 0:
        slashes = end
        while text[slashes - 1] == 0x5C and slashes > place:
            slashes -= 1
        if (end - slashes) % 2 == 0:
            return end + 1
        place = end + 1
    return len(text)


def _check_names(raw: dict[str, Any], kind: type[Body], notes: FieldNotes) -> None:
    """Raises BadRequest for a known field that is not served, unless its value asks for nothing."""
    for name, value in raw.items():
        if name in kind.REFUSED and name not in kind.__struct_fields__ and not _asks_for_nothing(name, value, kind):
            raise unsupported_field(name)
    notes.check(raw, _names_of(kind))


@functools.cache
def _names_of(kind: type[Struct]) -> frozenset[str]:
    """What an object of this type may have."""
    tag = kind.__struct_config__.tag_field
    names = {*kind.__struct_fields__, *([tag] if tag is not None else [])}
    if issubclass(kind, Body):
        names |= {*kind.REFUSED, *kind.UNUSED, *kind.SAME_AS, *kind.ALSO}
    return frozenset(names)


def _check_inside(raw: Any, value: Any, where: str, notes: FieldNotes) -> None:
    """Looks at the names of all typed parts of a request.

    Raises BadRequest where a part does not say its type: msgspec wants it only where there are others.
    """
    if isinstance(value, Struct) and isinstance(raw, dict):
        tag = value.__struct_config__.tag_field
        if tag is not None and tag not in raw:
            raise missing_field(f"{where}.{tag}")
        if where:
            notes.check(raw, _names_of(type(value)), where)
        for name, inner in raw.items():
            # scalars have no fields
            if isinstance(inner, dict | list) and name in value.__struct_fields__:
                _check_inside(inner, getattr(value, name), f"{where}.{name}" if where else name, notes)
    # token ids are many, and have no fields
    elif isinstance(value, list) and value and isinstance(value[0], Struct | list):
        for index, (inner, typed) in enumerate(zip(raw, value, strict=True)):
            _check_inside(inner, typed, f"{where}[{index}]", notes)


def _asks_for_nothing(name: str, value: Any, kind: type[Body]) -> bool:
    return any(_is_same(value, nothing) for nothing in kind.REFUSED[name])


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are the same in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _check_stream_options(options: Any) -> None:
    """`include_obfuscation` false asks for nothing."""
    if isinstance(options, dict) and options.get("include_obfuscation"):
        raise unsupported_field("stream_options.include_obfuscation")


def _named(message: str, kinds: Mapping[str, str], others: Mapping[str, str]) -> BadRequest:
    """msgspec's `Expected ... - at `$.field`` as a refusal that names the field as the client does, types by JSON's
    names."""
    found = _PATH.match(_TYPES.sub(lambda name: _JSON_TYPES[name[0]], message))
    if found:
        path = found["path"].lstrip(".")
        param = others.get(path, path) or None
        field = re.search(r"(\w+)(\[\d+\])?\.type$", param or "")
        wanted = f", want {kinds[field[1]]}" if field and field[1] in kinds else ""
        return BadRequest(f"Invalid '{param or 'body'}': {found['what']}{wanted}.", param=param, code="invalid_value")
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return missing_field(missing[1])
    return BadRequest(message)


# -- responses ---------------------------------------------------------------------------------------------------


class TokensDetails(Struct, frozen=True):
    """Drafted tokens that became part of the text, and those that did not; tokens inside the thinking block."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class PromptTokensDetails(Struct, frozen=True):
    """Prompt tokens that were not read, because an earlier prompt began with them; of a prompt that several choices go
    on from, those that none of them read. `cache_write_tokens`: those that later prompts need not read because of this
    one."""

    cached_tokens: int
    cache_write_tokens: int = 0


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: TokensDetails


class TracedToken(Struct, frozen=True, kw_only=True):
    """A token of the answer: its text, as far as it makes characters certain, and the round that wrote it, 0 for the
    prompt. `draft`: the place, from 1 on, of the accepted draft that it was. `origin`: "draft"; "trunk", its own
    choice; "grammar" where nothing else could follow, drafted or not."""

    text: str
    round: int
    origin: Literal["trunk", "draft", "grammar"]
    draft: int | None


class SpeculationMetrics(Struct, frozen=True, kw_only=True):
    """What speculation did for all choices of a request. Rounds are those that added tokens; the first token of a
    choice comes from its prompt, in no round. `committed_per_round[n]`: rounds that added n + 1 tokens."""

    k: int
    rounds: int
    drafted: int
    accepted: int
    mean_acceptance_length: float | None
    committed_per_round: list[int]


class ResponseMetrics(Struct, frozen=True):
    speculative_decoding: SpeculationMetrics


AnyChoice = TypeVar("AnyChoice", bound=Struct)


class Response(Struct, Generic[AnyChoice], frozen=True, kw_only=True):
    """A whole answer, or one chunk of it. `usage` is unset in chunks unless they were asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnyChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: ResponseMetrics | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str
    seed: int
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


class Tokens(Struct, frozen=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct, frozen=True):
    """The answer of /detokenize."""

    prompt: str


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pilotfish"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: str = "list"


encode = msgspec.json.Encoder().encode
