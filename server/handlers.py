"""The endpoints: decode, ask the engine, encode. No torch, no text handling."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import msgspec
from aiohttp import HttpVersion11, web

import pilotfish
from pilotfish.engine.link.client import EngineClient, EngineUnavailable
from pilotfish.engine.link.messages import Ready
from pilotfish.metrics.collectors import Collector
from pilotfish.server import unused
from pilotfish.server.answer import AnswerFormat, join
from pilotfish.server.chat.answer import ChatFormat
from pilotfish.server.chat.request import ChatRequest, tokens_of
from pilotfish.server.completions.answer import CompletionFormat
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import ApiError, BadRequest, NotFound, Overloaded, Unavailable, renamed
from pilotfish.server.fields import HEADER, SCHEMA_HEADER, FieldLog, FieldNotes
from pilotfish.server.generation import Generation, Piece
from pilotfish.server.http.auth import NO_KEY
from pilotfish.server.http.bodies import JSON, Bodies, read_body
from pilotfish.server.http.limits import Limiter
from pilotfish.server.http.request_log import note_choices, note_error
from pilotfish.server.http.turns import Turns
from pilotfish.server.lane import WorkLane, run_steps
from pilotfish.server.messages import request as messages_request
from pilotfish.server.messages.answer import MessagesFormat, TokenCount
from pilotfish.server.messages.request import CountTokensRequest, MessagesRequest
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.plan import Context, GenerationPlan, completion_steps, count_prompt, plan_chat
from pilotfish.server.protocol import (
    MAX_VALUES,
    AnyRequest,
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    Tokens,
    decode_request,
    encode,
)
from pilotfish.server.responses import answer as responses_answer
from pilotfish.server.responses import request as responses_request
from pilotfish.server.responses.answer import ResponsesFormat
from pilotfish.server.responses.memory import ItemMemory
from pilotfish.server.responses.request import ResponsesRequest
from pilotfish.server.text.prompts import check_ids
from pilotfish.server.waker import Waker

KEY: ContextVar[str] = ContextVar("key", default=NO_KEY)
"""The label of the request's API key, left here by the authentication."""
HEARTBEAT_SECONDS = 15.0
"""Relays cut connections that are silent for long, and a queue or a prompt may take long."""
MAX_MODEL_NAME = 256
"""Characters of a name that is answered to because any is."""
HEADERS_SECONDS = 2.0
"""A stream whose first token takes longer gets its headers anyway; sooner, a refusal still has its own status."""
SMALL_BODY = 1024
"""Bodies up to this size are worked on by the event loop: about a millisecond."""
LARGE_BODY = 256 << 10
"""Larger ones of a key have turns of their own: its others need not wait for all of them."""

Prepared = TypeVar("Prepared")


def is_known() -> bool:
    """The request came with a key. Where keys are not wanted nobody is known."""
    return KEY.get() != NO_KEY


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What the handlers work with; made once, in app.py."""

    client: EngineClient
    files: ModelFiles
    metrics: Collector
    served_names: tuple[str, ...]
    started: int
    any_model_name: bool = False
    strict_fields: bool = False
    tool_pieces: bool = False
    isolates_keys: bool = False
    field_log: FieldLog = msgspec.field(default_factory=FieldLog)
    items: ItemMemory = msgspec.field(default_factory=ItemMemory)
    limiter: Limiter = msgspec.field(default_factory=Limiter)
    bodies: Bodies = msgspec.field(default_factory=lambda: Bodies(shared=False))
    turns: Turns = msgspec.field(default_factory=Turns)
    lane: WorkLane = msgspec.field(default_factory=WorkLane)
    waker: Waker = msgspec.field(default_factory=Waker)

    def engine(self) -> Ready:
        """Raises Unavailable unless the engine can take requests."""
        ready, failure = self.client.ready, self.client.failure
        if failure is not None:
            message = f"The engine has failed ({failure.part})."
            raise Unavailable(message, code="engine_failed", retry_after=5, detail=failure.message)
        if self.client.state == "closed":
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
        if ready is None:
            raise Unavailable("The model is loading.", code="loading", retry_after=5)
        if self.client.stalled:
            message = f"The engine has not answered for {self.client.seconds_silent:.0f} s."
            raise Unavailable(message, code="engine_stalled", retry_after=5)
        return ready

    def context(self, arrived: float, label: str) -> Context:
        """What a request of this key is planned against. Raises Unavailable."""
        ready = self.engine()

        def check_room(num_new: int) -> None:
            self.check_room(ready, num_new)
            self.limiter.check(label, num_new)

        return Context(
            model=self.served_names[0],
            files=self.files,
            ready=ready,
            arrived=arrived,
            notes=FieldNotes(
                strict=self.strict_fields,
                on_unused=self.metrics.on_unused_field,
                on_left_out=self.metrics.on_schema_left_out,
                on_volatile=self.metrics.on_volatile_line,
            ),
            check_room=check_room,
            tool_pieces=self.tool_pieces,
            cache_owner=label if self.isolates_keys else "",
        )

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names and not (self.any_model_name and len(name) <= MAX_MODEL_NAME):
            shown = ", ".join(self.served_names)
            raise NotFound(
                f"The model {name[:100]!r} does not exist. Served: {shown}.", param="model", code="model_not_found"
            )
        return name

    def check_place(self, label: str) -> None:
        """Refuses a request for text that could not be taken whatever it asks for: before it is read, so that a refusal
        costs little. Raises Unavailable, Overloaded or TooManyRequests."""
        ready = self.engine()
        num_taken = self.client.num_open + self.limiter.num_held
        if num_taken >= ready.max_num_seqs + ready.max_waiting:
            raise _queue_full(num_taken)
        self.limiter.check_place(label)

    def check_room(self, ready: Ready, num_new: int) -> None:
        """Refuses what the engine's queue could not hold. Raises Overloaded."""
        capacity = ready.max_num_seqs + ready.max_waiting
        if num_new > capacity:
            raise BadRequest(f"Want at most {capacity} sequences a request, got {num_new}.", param="n")
        if self.client.num_open + num_new > capacity:
            raise _queue_full(self.client.num_open)


def _queue_full(num_taken: int) -> Overloaded:
    return Overloaded(f"The queue is full: {num_taken} sequences run or wait. Try again later.")


NOTES: web.RequestKey[FieldNotes] = web.RequestKey("notes", FieldNotes)
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


async def completions(request: web.Request) -> web.StreamResponse:
    def prepare(body: bytes, context: Context) -> Generator[None, None, tuple[GenerationPlan, AnswerFormat]]:
        wanted, context = _decode(request, body, CompletionRequest, context)
        plan = yield from completion_steps(wanted, context)
        return plan, CompletionFormat(plan, context.files.tokenizer, _fingerprint(context.ready))

    return await _answer(request, *await _prepared(request, prepare, generates=True))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    def prepare(body: bytes, context: Context) -> tuple[GenerationPlan, AnswerFormat]:
        wanted, context = _decode(request, body, ChatRequest, context)
        plan = plan_chat(wanted, context)
        return plan, ChatFormat(plan, context.files.tokenizer, _fingerprint(context.ready))

    return await _answer(request, *await _prepared(request, prepare, generates=True))


async def responses(request: web.Request) -> web.StreamResponse:
    items, label = request.app[SERVICE].items, KEY.get()

    def keep(item: responses_answer.Item) -> None:
        items.keep(label, item.id, item)

    def prepare(body: bytes, context: Context) -> tuple[GenerationPlan, AnswerFormat]:
        wanted, context = _decode(request, body, ResponsesRequest, _recalling(request, context, label))
        with renamed(responses_request.RENAMED):
            chat = responses_request.chat_request(wanted, context)
            plan = plan_chat(chat, context, "resp_")
        told = ChatFormat(plan, context.files.tokenizer, _fingerprint(context.ready))
        return plan, ResponsesFormat(wanted, plan, told, *([] if wanted.store is False else [keep]))

    return await _answer(request, *await _prepared(request, prepare, generates=True))


async def count_input(request: web.Request) -> web.Response:
    """OpenAI's count of what a Responses request would have as its prompt."""

    def prepare(body: bytes, context: Context) -> responses_answer.InputTokens:
        wanted, context = _decode(request, body, ResponsesRequest, _recalling(request, context, label))
        with renamed(responses_request.RENAMED):
            count = count_prompt(responses_request.chat_request(wanted, context), context)
        return responses_answer.InputTokens(count)

    label = KEY.get()
    return json_answer(await _prepared(request, prepare))


def _recalling(request: web.Request, context: Context, label: str) -> Context:
    """The context with what is remembered of answers to this key."""
    items = request.app[SERVICE].items
    return msgspec.structs.replace(context, recall=lambda item_id: items.recall(label, item_id))


async def messages(request: web.Request) -> web.StreamResponse:
    def prepare(body: bytes, context: Context) -> tuple[GenerationPlan, AnswerFormat]:
        wanted, context = _decode(request, body, MessagesRequest, context)
        with renamed(messages_request.RENAMED):
            plan = plan_chat(_chat_of(request, wanted, context), context, "msg_")
        return plan, MessagesFormat(plan)

    return await _answer(request, *await _prepared(request, prepare, generates=True))


async def count_tokens(request: web.Request) -> web.Response:
    def prepare(body: bytes, context: Context) -> TokenCount:
        wanted, context = _decode(request, body, CountTokensRequest, context)
        with renamed(messages_request.RENAMED):
            return TokenCount(count_prompt(_chat_of(request, wanted, context), context))

    return json_answer(await _prepared(request, prepare))


def _chat_of(request: web.Request, wanted: CountTokensRequest, context: Context) -> ChatRequest:
    if unused.ANTHROPIC_BETA in request.headers:
        context.notes.unused(unused.ANTHROPIC_BETA)
    return messages_request.chat_request(wanted, context)


async def tokenize(request: web.Request) -> web.Response:
    def prepare(body: bytes, context: Context) -> Tokens:
        wanted, context = _decode(request, body, TokenizeRequest, context)
        ids = tokens_of(wanted, context.files, context.ready, context.notes)
        text_of = context.files.tokenizer.token_text
        texts = [text_of(token_id) for token_id in ids] if wanted.return_token_strs else None
        return Tokens(len(ids), context.ready.max_model_len, ids, texts)

    return json_answer(await _prepared(request, prepare))


async def detokenize(request: web.Request) -> web.Response:
    def prepare(body: bytes, context: Context) -> Text:
        wanted, context = _decode(request, body, DetokenizeRequest, context)
        check_ids(wanted.tokens, context.ready)
        return Text(context.files.tokenizer.decode(wanted.tokens, skip_special_tokens=False))

    return json_answer(await _prepared(request, prepare))


@overload
async def _prepared(
    request: web.Request,
    prepare: Callable[[bytes, Context], Generator[None, None, Prepared]],
    generates: bool = False,
) -> Prepared: ...


@overload
async def _prepared(
    request: web.Request, prepare: Callable[[bytes, Context], Prepared], generates: bool = False
) -> Prepared: ...


async def _prepared(request: web.Request, prepare: Callable[[bytes, Context], Any], generates: bool = False) -> Any:
    """What `prepare` makes of the body: a small one here, others off the event loop, where keys take turns.

    The request is counted before anything of it is read, so that one that is refused counts too. One that `generates`
    wants a place: it is refused unread where there is none, and holds one once it has come whole. Raises ApiError.
    """
    arrived, service, label = time.monotonic(), request.app[SERVICE], KEY.get()
    service.limiter.count(label)
    if generates:
        service.check_place(label)
    with service.bodies.hold(label, on_end=service.lane.tidy_soon) as held:
        parts = await read_body(request, held)
        await service.turns.begin(request, label)
        context = service.context(arrived, label)
        request[NOTES] = context.notes
        if not generates:
            return await _worked_out(service, label, prepare, parts, context)
        # others may have come while it was read and waited; it holds none meanwhile
        service.check_place(label)
        with service.limiter.hold_place(label):
            return await _worked_out(service, label, prepare, parts, context)


async def _worked_out(
    service: Service, label: str, prepare: Callable[[bytes, Context], Any], parts: list[bytearray], context: Context
) -> Any:
    num_bytes = sum(map(len, parts))
    if num_bytes <= SMALL_BODY:
        prepared = prepare(_joined(parts), context)
        return run_steps(prepared) if isinstance(prepared, Generator) else prepared
    turn = label if num_bytes <= LARGE_BODY else f"{label}, large"
    prepared = await service.lane.run(turn, lambda: prepare(_joined(parts), context))
    return await service.lane.run_steps(turn, prepared) if isinstance(prepared, Generator) else prepared


def _joined(parts: list[bytearray]) -> bytes:
    """Takes the parts, so that a body is not held twice."""
    body = b"".join(parts)
    parts.clear()
    return body


def _decode(request: web.Request, body: bytes, kind: type[AnyRequest], context: Context) -> tuple[AnyRequest, Context]:
    """The body, and what it is planned against: the model that it names. Raises ApiError."""
    # a prompt of ids may be as long as the context
    most_values = max(MAX_VALUES, 2 * context.ready.max_model_len)
    wanted = decode_request(body, kind, context.notes, most_values=most_values)
    return wanted, msgspec.structs.replace(context, model=request.app[SERVICE].check_model(wanted.model))


async def tell_ignored_fields(request: web.Request, response: web.StreamResponse) -> None:
    """What a request has that nobody here knows stands in a header of its answer, refusals too."""
    notes = request.get(NOTES)
    if notes is not None and notes.schema_header:
        response.headers[SCHEMA_HEADER] = notes.schema_header
    if notes is not None and notes.header:
        response.headers[HEADER] = notes.header
        request.app[SERVICE].field_log.tell(notes.ignored)


def _fingerprint(ready: Ready) -> str:
    """What the text of a seed depends on besides the model."""
    return f"pilotfish-{pilotfish.__version__}-{ready.device}-{ready.dtype}"


async def _answer(request: web.Request, plan: GenerationPlan, shape: AnswerFormat) -> web.StreamResponse:
    service = request.app[SERVICE]
    num_sequences = len(plan.prompts) * plan.n
    service.check_room(service.engine(), num_sequences)
    generation = Generation(plan, service.client, service.waker, service.files.tokenizer, service.metrics, KEY.get())
    note_choices(plan, generation.choices)
    try:
        with service.limiter.admit(KEY.get(), num_sequences, generation.when_gone), generation:
            await generation.begin()
            if plan.stream:
                return await _stream(request, service, plan, shape, generation)
            return await _whole(plan, shape, generation)
    except EngineUnavailable as error:
        message = f"The engine has failed ({error.part})."
        raise Unavailable(message, code="engine_failed", retry_after=5, detail=str(error)) from error
    finally:
        service.metrics.on_key(KEY.get(), sum(choice.num_tokens for choice in generation.choices))


async def _whole(plan: GenerationPlan, shape: AnswerFormat, generation: Generation) -> web.Response:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    async for batch in generation.pieces():
        for choice, piece in batch:
            pieces[choice.index].append(piece)
    response = shape.whole([join(parts) for parts in pieces], generation.choices)
    return web.Response(body=encode(response), content_type=JSON, headers={"X-Request-Id": plan.id})


async def _stream(
    request: web.Request, service: Service, plan: GenerationPlan, shape: AnswerFormat, generation: Generation
) -> web.StreamResponse:
    await generation.first(HEADERS_SECONDS)
    response = web.StreamResponse(headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"})
    response.headers["X-Request-Id"] = plan.id
    response.content_type, response.charset = "text/event-stream", "utf-8"
    if request.version < HttpVersion11:
        # without chunks a stream's end is the connection's
        response.force_close()
    await response.prepare(request)
    # a client that has gone cancels this handler; a write to it may come first
    with contextlib.suppress(ConnectionError):
        await _send_events(response, service, shape, generation)
        await response.write_eof()
    return response


async def _send_events(
    response: web.StreamResponse, service: Service, shape: AnswerFormat, generation: Generation
) -> None:
    opening = b"".join(map(shape.event, shape.opening(generation.choices)))
    if opening:
        await response.write(opening)
    written = time.monotonic()
    try:
        async for batch in generation.pieces(HEARTBEAT_SECONDS):
            events = [shape.event(chunk) for choice, piece in batch for chunk in shape.chunks(choice, piece)]
            # thinking that is not shown is silence to a relay
            if events or time.monotonic() - written >= HEARTBEAT_SECONDS:
                await response.write(b"".join(events) or shape.heartbeat)
                written = time.monotonic()
    except ApiError as error:
        # the status line is out: the error is an event, and nothing follows
        service.metrics.on_rejection(error.reason)
        if is_known():
            error.reveal()
        note_error(error.code or error.reason)
        await response.write(shape.failure(error))
        return
    await response.write(b"".join([*map(shape.event, shape.closing(generation.choices)), shape.end]))


def json_answer(body: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), content_type=JSON, status=status)
