"""What a client may be told has gone wrong, in OpenAI's shape.

    ApiError                 {"error": {"message", "type", "param", "code"}} and an HTTP status
    ├── BadRequest           400, names the field
    │   └── ContextExceeded  400, more tokens than the model takes
    ├── Unauthorized         401
    ├── Forbidden            403, a web page that may not call this server
    ├── NotFound             404, no such model or path
    ├── TooManyRequests      429, the key's own limit; carries Retry-After
    ├── Overloaded           503, the queue is full; carries Retry-After
    ├── Unavailable          503, the engine loads, or has failed
    └── EngineFailed         500, the engine failed while it served this request

`reason` is the label under which a refusal is counted.
"""

from __future__ import annotations

import contextlib
import http
from collections.abc import Iterable, Iterator

import msgspec

MAX_MESSAGE = 2000
MAX_PARAM = 200


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """Base: subclasses fix the status, the type and the label. `detail`: an exception's own words, which may name
    files and hosts; only who has a key is told."""

    status = 500
    type = "server_error"
    reason = "internal"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, detail: str = "") -> None:
        super().__init__(message)
        self.message = _printable(message, MAX_MESSAGE)
        self.detail = detail
        self.param = None if param is None else _printable(param, MAX_PARAM)
        self.code = code
        self.headers: dict[str, str] = {}

    def reveal(self) -> None:
        """The message with what strangers are not told."""
        if self.detail:
            self.message, self.detail = _printable(f"{self.message.rstrip('.')}: {self.detail}", MAX_MESSAGE), ""

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))


@contextlib.contextmanager
def renamed(names: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Refusals of what is inside name fields as another API calls them: `names` holds (ours, theirs)."""
    try:
        yield
    except BadRequest as error:
        for ours, theirs in names:
            error.param = error.param and error.param.replace(ours, theirs)
        raise


class BadRequest(ApiError):
    """400: `param` names the field at fault; code is OpenAI's where it has one."""

    status = 400
    type = "invalid_request_error"
    reason = "invalid"


class ContextExceeded(BadRequest):
    """A prompt, or a prompt and `asked` tokens, of more than the model takes: in words that clients recover by.

    OpenAI's in the message; `anthropic` has the other API's, which its clients read the numbers from: they ask for less
    or put the conversation in fewer words. `about` stands before a number that is only known to be passed, `more` after
    all.
    """

    def __init__(
        self, num_prompt: int, limit: int, *, param: str, asked: int | None = None, about: str = "", more: str = ""
    ) -> None:
        told = f"This model's maximum context length is {limit} tokens. However, "
        if asked is None:
            told += f"your messages resulted in {about}{num_prompt} tokens, and at least 1 is to be generated."
            told += " Please reduce the length of the messages."
            self.anthropic = f"prompt is too long: {num_prompt} tokens > {limit - 1} maximum"
        else:
            told += (
                f"you requested {num_prompt + asked} tokens ({num_prompt} in the messages, {asked} in the completion)."
            )
            told += " Please reduce the length of the messages or completion."
            self.anthropic = f"input length and `max_tokens` exceed context limit: {num_prompt} + {asked} > {limit}"
        super().__init__(told + more, param=param, code="context_length_exceeded")


def unknown_field(param: str, meant: str | None = None) -> BadRequest:
    question = f". Did you mean '{meant}'?" if meant else ""
    return BadRequest(
        f"Unrecognized request argument supplied: {param}{question}", param=param, code="unknown_parameter"
    )


def unsupported_field(param: str) -> BadRequest:
    return BadRequest(f"'{param}' is not supported yet.", param=param, code="unsupported_parameter")


def missing_field(param: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_parameter")


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    reason = "unauthorized"


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"
    reason = "unauthorized"

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message, code=f"{what}_not_allowed")


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    reason = "not_found"


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"
    reason = "rate_limited"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.headers = {"Retry-After": str(retry_after)}


class Overloaded(ApiError):
    status = 503
    type = "overloaded_error"
    reason = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, code="queue_full")
        self.headers = {"Retry-After": str(retry_after)}


class Unavailable(ApiError):
    status = 503
    reason = "unavailable"

    def __init__(self, message: str, code: str, retry_after: int | None = None, detail: str = "") -> None:
        super().__init__(message, code=code, detail=detail)
        if retry_after is not None:
            self.headers = {"Retry-After": str(retry_after)}


class EngineFailed(ApiError):
    reason = "engine_failed"

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message, code="engine_failed", detail=detail)


def _printable(text: str, limit: int) -> str:
    """Short enough to send back, and free of the lone surrogates that undecodable headers become."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return shown.encode("utf-8", "replace").decode("utf-8")


def from_status(status: int, message: str) -> ApiError:
    """aiohttp's own refusals (unknown path, wrong method, body too large) in our shape, status kept."""
    error = ApiError(message or http.HTTPStatus(status).phrase)
    error.status = status
    error.type = "invalid_request_error" if status < 500 else "server_error"
    error.reason = "too_large" if status == 413 else "not_found" if status == 404 else "invalid"
    return error
