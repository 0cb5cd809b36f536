"""One line of JSON a request that asks for text, when it has ended, refused ones included.

The middleware stands outside of the others and writes what they and the handlers have noted on the way. What somebody
wrote or was answered is not in it, unless prompts are asked for.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import BinaryIO

import msgspec
from aiohttp import web

from pilotfish.server.answer import metrics_of, usage_of
from pilotfish.server.generation import Choice
from pilotfish.server.plan import GenerationPlan
from pilotfish.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
REQUEST_ID = "X-Request-Id"
GOOD_ID = re.compile(r"[!-~]{1,128}")
CLIENT_GONE = 499
"""nginx's status for a client that left before its answer was whole."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is written. Everything after `error` is null for a request that was refused before it was planned.

    `client_id` is the client's own X-Request-Id; `finish_reasons` has one entry a choice; seconds are counted from the
    request's arrival, `ttft_seconds` to its first token. `cached_tokens` of the prompt were not read.
    """

    time: str
    endpoint: str
    key: str
    client_id: str | None
    status: int
    seconds: float
    error: str | None
    id: str | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str | None] | None = None
    ttft_seconds: float | None = None
    k: int | None = None
    mean_acceptance_length: float | None = None
    prompts: list[str] | msgspec.UnsetType = msgspec.UNSET


class Notes(msgspec.Struct):
    """What is learnt of a request while it is served."""

    plan: GenerationPlan | None = None
    choices: Sequence[Choice] = ()
    error: str | None = None


NOTES: ContextVar[Notes | None] = ContextVar("notes", default=None)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def client_id(request: web.Request) -> str | None:
    """The client's own id of its request, if it may be repeated."""
    given = request.headers.get(REQUEST_ID, "")
    return given if GOOD_ID.fullmatch(given) else None


def note_choices(plan: GenerationPlan, choices: Sequence[Choice]) -> None:
    if (notes := NOTES.get()) is not None:
        notes.plan, notes.choices = plan, choices


def note_error(code: str) -> None:
    if (notes := NOTES.get()) is not None:
        notes.error = code


class RequestLog:
    """Writes lines to `output`, stdout if None. With `prompts` they hold what the model read, special tokens included.

    `key` gives the label of the API key of the request that is being served.
    """

    def __init__(
        self, key: Callable[[], str], tokenizer: Tokenizer, *, prompts: bool = False, output: BinaryIO | None = None
    ) -> None:
        self._key = key
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._output = output or sys.stdout.buffer
        self._encode = msgspec.json.Encoder().encode
        self._broken = False

    def middleware(self, root_path: str) -> Callable:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path.removeprefix(root_path) not in ENDPOINTS:
                return await handler(request)
            began, notes, status = time.monotonic(), Notes(), 500
            NOTES.set(notes)
            try:
                response = await handler(request)
                status = response.status
                return response
            except (asyncio.CancelledError, ConnectionError):
                status = CLIENT_GONE
                raise
            finally:
                self._write(
                    LogLine(
                        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                        endpoint=request.path,
                        key=self._key(),
                        client_id=client_id(request),
                        status=status,
                        seconds=round(time.monotonic() - began, 6),
                        error=notes.error,
                        **self._of_choices(notes.plan, notes.choices),
                    )
                )

        return middleware

    def _of_choices(self, plan: GenerationPlan | None, choices: Sequence[Choice]) -> dict:
        if plan is None:
            return {}
        usage, speculation = usage_of(plan, choices), metrics_of(plan, choices).speculative_decoding
        length = speculation.mean_acceptance_length
        fields: dict = {
            "id": plan.id,
            "model": plan.model,
            "stream": plan.stream,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": [choice.finish_reason or choice.end for choice in choices],
            "ttft_seconds": min(
                (round(one.first_token_seconds, 6) for one in choices if one.first_token_seconds is not None),
                default=None,
            ),
            "k": speculation.k,
            "mean_acceptance_length": None if length is None else round(length, 3),
        }
        if self._prompts:
            decode = self._tokenizer.decode
            fields["prompts"] = [decode(prompt.token_ids, skip_special_tokens=False) for prompt in plan.prompts]
        return fields

    def _write(self, line: LogLine) -> None:
        try:
            self._output.write(self._encode(line) + b"\n")
            self._output.flush()
        except OSError as error:
            # nobody's request fails for it, and one line in the log is enough
            if not self._broken:
                logger.error("the request log cannot be written: %s", error)
            self._broken = True
