"""Whatever the official clients' types allow in a history is taken, and in the three APIs by one rule.

Values are made from the types themselves: each field that may be left out is once there, each alternative once taken.
"""

import itertools
import json
import types
import typing

import msgspec
import openai.types.chat
import pytest
import typing_extensions
from anthropic.types.beta import BetaContentBlockParam
from loaded import ready
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.messages import request as messages_request
from pilotfish.server.messages.request import MessagesRequest
from pilotfish.server.plan import Context, plan_chat
from pilotfish.server.protocol import decode_request
from pilotfish.server.responses import request as responses_request
from pilotfish.server.responses.request import ResponsesRequest

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "x"}
SIMPLE = {str: "x", int: 1, float: 0.5, type(None): None, object: "x", typing.Any: "x"}
WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)
MOST = 40
"""Values of one field that are tried."""
DEEPEST = 3


def bare(kind):
    while typing.get_origin(kind) in WRAPPERS:
        kind = typing.get_args(kind)[0]
    return kind


def values(kind, depth):
    kind = bare(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing_extensions.is_typeddict(kind):
        yield from objects(kind, depth + 1)
    elif origin is typing.Literal:
        yield from arguments
    elif origin in (typing.Union, types.UnionType):
        yield from itertools.chain.from_iterable(values(argument, depth) for argument in arguments)
    elif kind is bool:
        yield from (True, False)
    elif origin is dict or (origin is not None and issubclass(origin, typing.Mapping)):
        yield from ({}, {"a": "b"})
    elif origin is not None and issubclass(origin, typing.Iterable):
        yield []
        yield from ([value] for value in values(arguments[0], depth + 1)) if depth < DEEPEST else ()
    else:
        yield SIMPLE.get(kind, "x")


def objects(kind, depth=0):
    """One with what must be there, and one for each other value of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    # annotations that are text hide from the type itself which of its fields are wanted
    needed = {name for name, hint in hints.items() if typing.get_origin(hint) is typing_extensions.Required}
    least = {name: next((v for v in values(hints[name], depth) if v not in (None, [])), None) for name in needed}
    yield least
    for name, hint in hints.items():
        for value in itertools.islice(values(hint, depth), MOST if depth == 0 else DEEPEST):
            if name not in least or least[name] != value:
                yield {**least, name: value}


def members(union):
    return [kind for kind in map(bare, typing.get_args(union)) if typing_extensions.is_typeddict(kind)]


def in_chat(message):
    return [([USER, message, ANSWER, USER], ChatRequest, "messages")]


def in_responses(item):
    return [([USER, item, USER], ResponsesRequest, "input")]


def in_messages(block):
    turns = [{"role": role, "content": [block]} for role in ("assistant", "user")]
    return [([USER, turn, ANSWER, USER], MessagesRequest, "messages") for turn in turns]


def plan(history, kind, field, files):
    context = Context(model="m", files=files, ready=ready(max_model_len=50000), arrived=0.0, notes=FieldNotes())
    body = {field: history, "model": "m", "max_tokens": 9} if kind is MessagesRequest else {field: history}
    request = decode_request(json.dumps(body).encode(), kind, context.notes)
    if kind is ResponsesRequest:
        request = responses_request.chat_request(request, context)
    elif kind is MessagesRequest:
        request = messages_request.chat_request(request, context)
    return plan_chat(request, context)


HISTORIES = {
    "chat": (openai.types.chat.ChatCompletionMessageParam, in_chat),
    "responses": (ResponseInputItemParam, in_responses),
    "messages": (BetaContentBlockParam, in_messages),
}


@pytest.mark.parametrize("api", HISTORIES)
def test_a_history_of_any_official_shape_is_taken(api, files):
    union, placed = HISTORIES[api]
    tried, refused = 0, {}
    for kind in members(union):
        for history, request, field in (entry for value in objects(kind) for entry in placed(value)):
            tried += 1
            try:
                plan(history, request, field, files)
            except BadRequest as error:
                refused.setdefault(f"{kind.__name__}: {error.param}: {error.message}", msgspec.json.encode(history))
    assert not refused
    assert tried > 50
