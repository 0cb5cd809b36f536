"""The OpenAPI 3.1 document at /openapi.json, made from the structs that bodies are decoded to and answers encoded from.

What a struct cannot say is added here: fields without effect, and known fields that are only accepted with a value that
asks for nothing. The schema of a stream is that of one event, as OpenAPI 3.2 has it in `itemSchema`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

import pilotfish
from pilotfish.server import errors, protocol
from pilotfish.server.chat.answer import ChatChoice, ChatChunkChoice
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.completions.answer import CompletionChoice
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.http import cache, status, watch
from pilotfish.server.http.bodies import JSON
from pilotfish.server.messages import answer as messages_answer
from pilotfish.server.messages.request import CountTokensRequest, MessagesRequest
from pilotfish.server.protocol import Body, Response
from pilotfish.server.responses import answer as responses_answer
from pilotfish.server.responses.request import ResponsesRequest

DOCUMENT: web.AppKey[bytes] = web.AppKey("document", bytes)
REFERENCE = "#/components/schemas/"
PACKAGE = "pilotfish.server."


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`answer` is a struct, or the content type of what is no JSON. `also`: statuses with the same body. `query`: names
    of numbers that the address may have."""

    path: str
    summary: str
    answer: Any
    body: type[Body] | None = None
    events: tuple[Any, ...] = ()
    error: type[msgspec.Struct] = errors.ErrorBody
    also: tuple[int, ...] = ()
    query: tuple[str, ...] = ()


OPERATIONS = (
    Operation(
        path="/v1/completions",
        summary="Text completion",
        body=CompletionRequest,
        answer=Response[CompletionChoice],
        events=(Response[CompletionChoice], errors.ErrorBody),
    ),
    Operation(
        path="/v1/chat/completions",
        summary="Chat completion",
        body=ChatRequest,
        answer=Response[ChatChoice],
        events=(Response[ChatChunkChoice], errors.ErrorBody),
    ),
    Operation(
        path="/v1/responses",
        summary="OpenAI's Responses API, nothing stored",
        body=ResponsesRequest,
        answer=responses_answer.Response,
        events=responses_answer.EVENTS,
    ),
    Operation(
        path="/v1/responses/input_tokens",
        summary="How many tokens a response's prompt has",
        body=ResponsesRequest,
        answer=responses_answer.InputTokens,
    ),
    Operation(
        path="/v1/messages",
        summary="Anthropic's Messages API",
        body=MessagesRequest,
        answer=messages_answer.Message,
        events=(*messages_answer.EVENTS, messages_answer.ErrorBody),
        error=messages_answer.ErrorBody,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="How many tokens a message's prompt has",
        body=CountTokensRequest,
        answer=messages_answer.TokenCount,
        error=messages_answer.ErrorBody,
    ),
    Operation(
        path="/tokenize",
        summary="The ids of a text or of messages",
        body=protocol.TokenizeRequest,
        answer=protocol.Tokens,
    ),
    Operation(path="/detokenize", summary="The text of ids", body=protocol.DetokenizeRequest, answer=protocol.Text),
    Operation(path="/v1/models", summary="The served names", answer=protocol.ModelList),
    Operation(path="/v1/models/{name}", summary="One of the served names", answer=protocol.Model),
    Operation(path="/v1/capacity", summary="How many sequences may run, and why", answer=status.Capacity),
    Operation(path="/v1/cache", summary="What the prefix cache saves, and why it missed", answer=cache.CacheStatus),
    Operation(path="/v1/watch", summary="The last minutes in numbers", answer=watch.Watch, query=("after",)),
    Operation(path="/health", summary="Which part fails, if one does", answer=status.Health, also=(503,)),
    Operation(path="/ready", summary="Whether requests are taken", answer=status.Readiness, also=(503,)),
    Operation(path="/metrics", summary="Prometheus metrics", answer="text/plain"),
    Operation(path="/", summary="A page to look at; who asks for JSON gets /version", answer="text/html"),
    Operation(path="/version", summary="The server's version", answer=status.Version),
    Operation(path="/ping", summary="pong", answer="text/plain"),
    Operation(path="/openapi.json", summary="This document", answer=dict[str, Any]),
)
"""One for each path: those with a body are POST, the others GET."""


def openapi_document(root_path: str = "") -> dict[str, Any]:
    types = list(dict.fromkeys(kind for operation in OPERATIONS for kind in _types(operation)))
    schemas, components = msgspec.json.schema_components(types, ref_template=REFERENCE + "{name}")
    for operation in OPERATIONS:
        if operation.body is not None:
            _complete(components[operation.body.__name__], operation.body)
    # what has a role needs no type
    components["MessageItem"]["required"].remove("type")
    schema_of = dict(zip(types, schemas, strict=True))
    document = {
        "openapi": "3.1.0",
        "info": {"title": "pilotfish", "version": pilotfish.__version__},
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            operation.path: {"post" if operation.body else "get": _operation(operation, schema_of)}
            for operation in OPERATIONS
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    # defaults are Python's until they have been JSON
    return _short_names(msgspec.json.decode(msgspec.json.encode(document)))


def _types(operation: Operation) -> Iterable[Any]:
    yield operation.error
    yield from operation.events
    if operation.body is not None:
        yield operation.body
    if not isinstance(operation.answer, str):
        yield operation.answer


def _complete(schema: dict[str, Any], kind: type[Body]) -> None:
    """The fields that are known and not in the struct."""
    for name in sorted(kind.UNUSED - schema["properties"].keys()):
        schema["properties"][name] = {"description": "Without effect on the answer."}
    for name, values in sorted(kind.REFUSED.items()):
        schema["properties"].setdefault(name, {"description": "Not supported.", "enum": list(values)})


def _operation(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    answer = operation.answer
    content: dict[str, Any] = (
        {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else {JSON: {"schema": schema_of[answer]}}
    )
    if operation.events:
        data = {"anyOf": [schema_of[kind] for kind in operation.events]}
        written = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
        event = {"type": "object", "properties": {"event": {"type": "string"}, "data": written}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    error = {"description": "A refusal or failure", "content": {JSON: {"schema": schema_of[operation.error]}}}
    responses = {"200": {"description": "The answer", "content": content}, "4XX": error, "5XX": error}
    for code in operation.also:
        responses[str(code)] = responses["200"]
    described: dict[str, Any] = {
        "operationId": operation.path.strip("/").replace("/", "_").replace(".", "_").replace("{name}", "name"),
        "summary": operation.summary,
        "responses": responses,
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[operation.body]}}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": {"type": "number"}} for name in operation.query
    ]
    if "{name}" in operation.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


def _short_names(value: Any) -> Any:
    """Where two structs have one name, msgspec calls both by their module, and ours need not be told whose it is."""
    if isinstance(value, dict):
        return {name.removeprefix(PACKAGE): _short_names(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short_names(inner) for inner in value]
    return value.replace(REFERENCE + PACKAGE, REFERENCE) if isinstance(value, str) else value


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=request.app[DOCUMENT], content_type=JSON)
