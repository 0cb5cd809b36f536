"""The endpoints: decode, ask the engine, encode. No torch, no text handling."""

from __future__ import annotations

import contextlib
import time
from contextvars import ContextVar

import msgspec
from aiohttp import web

import pilotfish
from pilotfish.engine.link.client import EngineClient, EngineUnavailable
from pilotfish.engine.link.messages import Ready
from pilotfish.metrics.collectors import Collector
from pilotfish.server import unused
from pilotfish.server.answer import Format, join
from pilotfish.server.chat.answer import ChatFormat
from pilotfish.server.chat.request import ChatRequest, tokens_of
from pilotfish.server.completions.answer import CompletionFormat
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import ApiError, BadRequest, NotFound, Overloaded, Unavailable, from_status, renamed
from pilotfish.server.generation import Generation, Piece
from pilotfish.server.http.auth import NO_KEY
from pilotfish.server.http.limits import Limiter
from pilotfish.server.http.request_log import note_choices, note_error
from pilotfish.server.messages import request as messages_request
from pilotfish.server.messages.answer import MessagesFormat, TokenCount
from pilotfish.server.messages.request import CountTokensRequest, MessagesRequest
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.plan import Context, Plan, count_prompt, plan_chat, plan_completion
from pilotfish.server.protocol import (
    AnyRequest,
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    Tokens,
    decode_request,
    encode,
)
from pilotfish.server.responses import request as responses_request
from pilotfish.server.responses.answer import ResponsesFormat
from pilotfish.server.responses.request import ResponsesRequest
from pilotfish.server.text.prompts import check_ids

JSON = "application/json"
MAX_BODY_BYTES = 32 << 20
KEY: ContextVar[str] = ContextVar("key", default=NO_KEY)
"""The label of the request's API key, left here by the authentication."""
HEARTBEAT_SECONDS = 15.0
"""Relays cut connections that are silent for long, and a queue or a prompt may take long."""
HEADERS_SECONDS = 2.0
"""A stream whose first token takes longer gets its headers anyway; sooner, a refusal still has its own status."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What the handlers work with; made once, in app.py."""

    client: EngineClient
    files: ModelFiles
    metrics: Collector
    served_names: tuple[str, ...]
    started: int
    ignore_unknown_fields: bool = False
    limiter: Limiter = msgspec.field(default_factory=Limiter)

    def engine(self) -> Ready:
        """Raises Unavailable unless the engine can take requests."""
        ready, failure = self.client.ready, self.client.failure
        if failure is not None:
            retry_after = 5 if self.client.state == "restarting" else None
            message = f"The engine has failed ({failure.part}): {failure.message}"
            raise Unavailable(message, code="engine_failed", retry_after=retry_after)
        if self.client.state == "closed":
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
        if ready is None:
            raise Unavailable("The model is loading.", code="loading", retry_after=5)
        return ready

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            shown = ", ".join(self.served_names)
            raise NotFound(
                f"The model {name[:100]!r} does not exist. Served: {shown}.", param="model", code="model_not_found"
            )
        return name

    def check_room(self, ready: Ready, num_new: int) -> None:
        """Refuses what the engine's queue could not hold. Raises Overloaded."""
        capacity = ready.max_num_seqs + ready.max_waiting
        if num_new > capacity:
            raise BadRequest(f"Want at most {capacity} sequences a request, got {num_new}.", param="n")
        if self.client.num_open + num_new > capacity:
            raise Overloaded(f"The queue is full: {self.client.num_open} sequences run or wait. Try again later.")


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


async def completions(request: web.Request) -> web.StreamResponse:
    wanted, context = await _asked(request, CompletionRequest)
    plan = await plan_completion(wanted, context)
    return await _answer(request, plan, CompletionFormat(plan, context.files.tokenizer, _fingerprint(context.ready)))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    wanted, context = await _asked(request, ChatRequest)
    plan = await plan_chat(wanted, context)
    return await _answer(request, plan, ChatFormat(plan, context.files.tokenizer, _fingerprint(context.ready)))


async def responses(request: web.Request) -> web.StreamResponse:
    wanted, context = await _asked(request, ResponsesRequest)
    with renamed(responses_request.RENAMED):
        chat = responses_request.chat_request(wanted, context, request.app[SERVICE].metrics.on_unused_field)
        plan = await plan_chat(chat, context, "resp_")
    return await _answer(request, plan, ResponsesFormat(wanted, plan))


async def messages(request: web.Request) -> web.StreamResponse:
    wanted, context = await _asked(request, MessagesRequest)
    with renamed(messages_request.RENAMED):
        plan = await plan_chat(_chat_of(request, wanted, context), context, "msg_")
    return await _answer(request, plan, MessagesFormat(plan))


async def count_tokens(request: web.Request) -> web.Response:
    wanted, context = await _asked(request, CountTokensRequest)
    with renamed(messages_request.RENAMED):
        count = await count_prompt(_chat_of(request, wanted, context), context)
    return json_answer(TokenCount(count))


def _chat_of(request: web.Request, wanted: CountTokensRequest, context: Context) -> ChatRequest:
    count = request.app[SERVICE].metrics.on_unused_field
    if unused.ANTHROPIC_BETA in request.headers:
        count(unused.ANTHROPIC_BETA)
    return messages_request.chat_request(wanted, context, count)


async def tokenize(request: web.Request) -> web.Response:
    wanted, context = await _asked(request, TokenizeRequest)
    ids = await tokens_of(wanted, context.files, ignore_unknown=context.ignore_unknown)
    texts = [context.files.tokenizer.token_text(token_id) for token_id in ids] if wanted.return_token_strs else None
    return json_answer(Tokens(len(ids), context.ready.max_model_len, ids, texts))


async def detokenize(request: web.Request) -> web.Response:
    wanted, context = await _asked(request, DetokenizeRequest)
    check_ids(wanted.tokens, context.ready.vocab_size)
    return json_answer(Text(context.files.tokenizer.decode(wanted.tokens, skip_special_tokens=False)))


async def _asked(request: web.Request, kind: type[AnyRequest]) -> tuple[AnyRequest, Context]:
    """The body, and what it is planned against. Raises ApiError."""
    arrived, service = time.monotonic(), request.app[SERVICE]
    body = await read_body(request)
    ready = service.engine()
    lenient = service.ignore_unknown_fields
    wanted = decode_request(body, kind, ignore_unknown=lenient, on_unused=service.metrics.on_unused_field)
    model = service.check_model(wanted.model)
    return wanted, Context(model=model, files=service.files, ready=ready, arrived=arrived, ignore_unknown=lenient)


def _fingerprint(ready: Ready) -> str:
    """What the text of a seed depends on besides the model."""
    return f"pilotfish-{pilotfish.__version__}-{ready.device}-{ready.dtype}"


async def read_body(request: web.Request) -> bytes:
    """The body of a JSON request. Raises BadRequest for another content type, and 413 before a byte is read."""
    kind = request.content_type
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise from_status(413, f"Want at most {MAX_BODY_BYTES} bytes, got {request.content_length}.")
    if "Content-Type" in request.headers and not (kind == JSON or kind.endswith("+json")):
        raise BadRequest(f"Want Content-Type: {JSON}, got {kind[:100]}.", code="unsupported_content_type")
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise BadRequest(f"The body cannot be read: {error}", code="invalid_body") from error


async def _answer(request: web.Request, plan: Plan, shape: Format) -> web.StreamResponse:
    service = request.app[SERVICE]
    num_sequences = len(plan.prompts) * plan.n
    service.check_room(service.engine(), num_sequences)
    generation = Generation(plan, service.client, service.files.tokenizer, service.metrics)
    note_choices(plan, generation.choices)
    try:
        with service.limiter.admit(KEY.get(), num_sequences), generation:
            if plan.stream:
                return await _stream(request, service, plan, shape, generation)
            return await _whole(plan, shape, generation)
    except EngineUnavailable as error:
        raise Unavailable(f"The engine has failed ({error.part}): {error}", code="engine_failed") from error
    finally:
        service.metrics.on_key(KEY.get(), sum(choice.num_tokens for choice in generation.choices))


async def _whole(plan: Plan, shape: Format, generation: Generation) -> web.Response:
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    async for batch in generation.pieces():
        for choice, piece in batch:
            pieces[choice.index].append(piece)
    response = shape.whole([join(parts) for parts in pieces], generation.choices)
    return web.Response(body=encode(response), content_type=JSON, headers={"X-Request-Id": plan.id})


async def _stream(
    request: web.Request, service: Service, plan: Plan, shape: Format, generation: Generation
) -> web.StreamResponse:
    await generation.first(HEADERS_SECONDS)
    response = web.StreamResponse(headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"})
    response.headers["X-Request-Id"] = plan.id
    response.content_type, response.charset = "text/event-stream", "utf-8"
    await response.prepare(request)
    # a client that has gone cancels this handler; a write to it may come first
    with contextlib.suppress(ConnectionError):
        await _send_events(response, service, shape, generation)
        await response.write_eof()
    return response


async def _send_events(response: web.StreamResponse, service: Service, shape: Format, generation: Generation) -> None:
    opening = b"".join(map(shape.event, shape.opening()))
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
        note_error(error.code or error.reason)
        await response.write(shape.failure(error))
        return
    await response.write(b"".join([*map(shape.event, shape.closing(generation.choices)), shape.end]))


def json_answer(body: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), content_type=JSON, status=status)
