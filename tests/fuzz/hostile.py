"""Strategies for hostile HTTP requests: wrong values, broken JSON, strange headers and heads, early ends.

Each is a `Hostile`: the bytes to send, and what the client does then. Bodies begin as good ones, so that most requests
get past the first check and meet the next.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pilotfish.server import unused
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.protocol import NOT_YET, DetokenizeRequest, TokenizeRequest
from tests.fuzz.grammars import grammar as drawn_grammar


@dataclass(frozen=True)
class Hostile:
    """`kind` names it in reports. `whole`: a complete HTTP request, which must be answered. `read`: bytes of the answer
    to take before leaving, None for all of it."""

    kind: str
    sent: bytes
    whole: bool = True
    read: int | None = None

    def __repr__(self) -> str:
        return f"Hostile({self.kind!r}, {self.sent[:4000]!r}, whole={self.whole}, read={self.read})"


USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 20},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 20},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 20},
    "/v1/messages": {"messages": [USER], "max_tokens": 20, "model": "scripted"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 105]},
}
KINDS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = sorted(
    {field for kind in KINDS for field in kind.__struct_fields__}
    | {*NOT_YET, *unused.FIELDS}
    | {"input", "instructions", "max_output_tokens", "previous_response_id", "reasoning", "text", "include"}
    | {"system", "thinking", "stop_sequences", "output_config", "__proto__", "", "a" * 300}
)

# -- values --------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, -1, 5, 64, 128, 255, 256, 300, 302, 512, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63)]
) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=30) | st.sampled_from(
    [
        *("", " ", "\x00", "\ud800", "\udfff\ud800", "\u202e", "\ufeff", "x" * 2000, "😀" * 300, "e\u0301" * 100),
        *("true", "null", "none", "auto", "required", "text", "json_object", "json_schema", "function", "user"),
        *("<think>", "</think>", "<tool_call>\n<function=f>\n<parameter=a>\n", "<|im_end|>", "<|im_start|>system"),
        *("(((((", "[a-z]{1,99999}", "(a+)+$", "\\", "start: start start", 'start: "a"*', "a{1000}{1000}"),
        *("{{ 1/0 }}", "${jndi:ldap://x}", "'; DROP TABLE", "../../etc/passwd", "@{}@", '@{"reply"'),
    ]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.sampled_from(
    [
        *("type", "role", "content", "text", "name", "function", "parameters", "properties", "items", "$ref", "anyOf"),
        *("json_schema", "schema", "json", "regex", "choice", "grammar", "k", "include_usage", "tool_calls", "id"),
        *("arguments", "tool_call_id", "image_url", "enable_thinking", "0", "-1", "302", "99999999999"),
    ]
) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "integer", "nonsense", ["null", "number"]]) | VALUES,
        "properties": st.dictionaries(KEYS, VALUES, max_size=3),
        "$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/x", "http://example.org/x"]),
        "enum": st.lists(SCALARS, max_size=3),
        "pattern": TEXTS,
    },
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": SCALARS,
        "type": st.just("function") | SCALARS,
        "function": st.fixed_dictionaries({}, optional={"name": TEXTS, "arguments": TEXTS | st.just('{"a": 1}')}),
    },
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer", "assistant", "tool", "critic"]) | SCALARS},
        optional={
            "content": TEXTS
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
            | VALUES,
            "tool_calls": st.lists(CALLS, max_size=2) | VALUES,
            "tool_call_id": SCALARS,
            "reasoning_content": SCALARS,
            "name": SCALARS,
        },
    ),
    max_size=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function")},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "f g", ""]) | TEXTS},
                optional={"parameters": SCHEMAS | VALUES, "strict": st.booleans() | SCALARS, "description": SCALARS},
            )
        },
    ),
    max_size=3,
)
CHOICES = st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]) | VALUES
IDS = st.lists(NUMBERS, max_size=5)
FITTING = {
    "messages": MESSAGES,
    "tools": TOOLS | st.just([TOOL]),
    "tool_choice": CHOICES,
    "prompt": TEXTS | IDS | st.lists(IDS, max_size=3),
    "input": TEXTS | MESSAGES,
    "stop": TEXTS | st.lists(TEXTS, max_size=5),
    "bad_words": st.lists(TEXTS, max_size=5),
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "tokens": IDS,
    "logit_bias": st.dictionaries(st.sampled_from(["1", "-1", "302", "1e3", "٣", "x"]), NUMBERS, max_size=3),
    "response_format": st.fixed_dictionaries(
        {"type": st.just("json_schema")}, optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMAS})}
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), TEXTS | SCHEMAS, max_size=2
    ),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "echo": st.booleans(),
    "n": st.integers(0, 4) | st.just(129),
    "model": st.sampled_from(["scripted", "alias", "other"]),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.1, 1.1),
    "min_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-2, 600),
    "max_tokens": st.integers(0, 40) | st.just(5000),
    "min_tokens": st.integers(-1, 30),
    "seed": st.integers(-(2**64), 2**64),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "presence_penalty": st.floats(-2.5, 2.5),
    "repetition_penalty": st.floats(0, 11),
    "thinking_token_budget": st.integers(-1, 50),
    "speculation": st.fixed_dictionaries({}, optional={"k": st.integers(-1, 9), "trace": st.booleans()}),
    "return_token_ids": st.booleans(),
    "ignore_eos": st.booleans(),
    "chat_template_kwargs": st.dictionaries(KEYS, VALUES, max_size=3),
}
"""Values that are at least of the right shape, so that they are looked at more closely."""


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body: a good one with up to four fields replaced, added or left out."""
    path = draw(st.sampled_from([*sorted(BASES), "/v1/completions", "/v1/chat/completions"]))
    body = dict(BASES[path])
    count = draw(st.sampled_from([0, 0, 1, 1, 1, 2, 2, 3]))
    names = st.sampled_from(sorted(FITTING)) | st.sampled_from(sorted(FITTING)) | st.sampled_from(FIELDS)
    for field in draw(st.lists(names, min_size=count, max_size=count)):
        if field in FITTING and draw(st.integers(0, 3)):
            body[field] = draw(FITTING[field])
        else:
            body[field] = draw(VALUES)
    if draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))), None)
    return path, body


# -- bodies as bytes -----------------------------------------------------------------------------------------------

LITERALS = (
    *(b"NaN", b"-Infinity", b"1e400", b"-1e400", b"9" * 5000, b"0." + b"1" * 5000, b"1e-9999", b"-0", b"01", b"0x1f"),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\n"', b"'a'", b"undefined"),
    *(b"[" * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"a":1,"a":2}', b"[1,]", b""),
)
"""JSON that Python's encoder does not write."""


@st.composite
def broken_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    path, body = draw(bodies())
    text = json.dumps(body).encode()
    how = draw(st.sampled_from(["literal", "cut", "flip", "wrap", "noise", "utf-16", "bom", "duplicate"]))
    if how == "literal":
        field = draw(st.sampled_from(FIELDS))
        return path, text[:-1] + b", " + json.dumps(field).encode() + b": " + draw(st.sampled_from(LITERALS)) + b"}"
    if how == "cut":
        return path, text[: draw(st.integers(0, len(text)))]
    if how == "flip":
        place = draw(st.integers(0, len(text) - 1))
        return path, text[:place] + bytes([draw(st.integers(0, 255))]) + text[place + 1 :]
    if how == "wrap":
        return path, draw(st.sampled_from([b"[%s]", b'"%s"', b"%s%s", b"null", b"1", b"%s\x00", b" \n%s\t"])).replace(
            b"%s", text
        )
    if how == "noise":
        return path, draw(st.binary(max_size=200))
    if how == "duplicate":
        return path, text[:-1] + b', "max_tokens": 3, "max_tokens": "x"}'
    return path, text.decode().encode("utf-16") if how == "utf-16" else b"\xef\xbb\xbf" + text


# -- requests ------------------------------------------------------------------------------------------------------


def request_bytes(path: bytes, body: bytes, headers: list[tuple[bytes, bytes]], method: bytes = b"POST") -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Connection: close"]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def plain(path: str, body: bytes) -> bytes:
    headers = [(b"Content-Type", b"application/json"), (b"Content-Length", str(len(body)).encode())]
    return request_bytes(path.encode(), body, headers)


HEADER_VALUES = st.sampled_from(
    [
        *(b"", b"\xff\xfe", b"x" * 7000, b"application/json; charset=utf-16", b"text/html", b"multipart/form-data"),
        *(b"gzip", b"deflate", b"br", b"identity", b"chunked", b"100-continue", b"a, b, c", b"Bearer ", b"Bearer \xe4"),
        *(b"Basic eDp5", b"-1", b"1e3", b"99999999999999999999", b"0", b"*/*", b"text/event-stream", b"close", b"\t"),
        *(b"Upgrade", b"websocket", b"h2c", b"bytes=0-5", b'W/"x"', b"\xc3\xa9", b"127.0.0.1, ::1", b"@", b"%00"),
    ]
) | st.binary(max_size=30).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b""))
HEADER_NAMES = st.sampled_from(
    [
        *(b"Content-Type", b"Content-Encoding", b"Accept", b"Accept-Encoding", b"Authorization", b"X-Request-Id"),
        *(b"X-Forwarded-For", b"Cookie", b"Range", b"If-None-Match", b"Upgrade", b"Expect", b"Origin", b"Referer"),
        *(b"anthropic-version", b"anthropic-beta", b"x-api-key", b"OpenAI-Organization", b"traceparent", b"Te"),
    ]
)


@st.composite
def strange_headers(draw: st.DrawFn) -> Hostile:
    path, body = draw(bodies())
    text = json.dumps(body).encode()
    own = draw(st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), min_size=1, max_size=4))
    headers = [(b"Content-Length", str(len(text)).encode()), *own]
    if all(name != b"Content-Type" for name, _ in own):
        headers.append((b"Content-Type", b"application/json"))
    return Hostile("headers", request_bytes(path.encode(), text, headers))


PATHS = (
    *(
        b"/",
        b"//",
        b"/v1",
        b"/v1/",
        b"/v1/chat",
        b"/v1/models/%00",
        b"/v1/models/../../x",
        b"/v1/models/" + b"a" * 4000,
    ),
    *(b"/metrics?x=%ff", b"/health#x", b"/v1/completions/", b"/%2e%2e/%2e%2e", b"/\xff", b"*", b"http://x/v1/models"),
    *(
        b"/v1/models/scripted",
        b"/v1/capacity",
        b"/v1/cache",
        b"/ready",
        b"/version",
        b"/openapi.json",
        b"/docs",
        b"/v1/files",
    ),
)
METHODS = (b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"BREW", b"get")


@st.composite
def strange_heads(draw: st.DrawFn) -> Hostile:
    """Other methods and paths. Not all of them are HTTP."""
    method, path = draw(st.sampled_from(METHODS)), draw(st.sampled_from([*PATHS, *map(str.encode, BASES)]))
    body = draw(st.sampled_from([b"", b"{}"]))
    whole = b"\xff" not in path and path != b"*" and method not in (b"CONNECT", b"HEAD")
    return Hostile("heads", request_bytes(path, body, [(b"Content-Length", str(len(body)).encode())], method), whole)


BROKEN_HTTP = (
    *(
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"A" * 20000 + b"\r\n\r\n"),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\nhello",),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",),
    *(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70000 + b"\r\n\r\n", b"GET / HTTP/1.1\r\n Host: x\r\n\r\n"),
    *(
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(3000)) + b"\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
    ),
    *(b"GET / HTTP/1.1\r\nHost: x\r\nX\x00Y: z\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n: z\r\n\r\n"),
)


@st.composite
def early_ends(draw: st.DrawFn) -> Hostile:
    """The client leaves: in the middle of its request, or of the answer."""
    path = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
    script = '@{"reply": "abc ", "times": 200, "delay": 0.002, "runs": [2]}@'
    body: dict[str, Any] = {"max_tokens": 500, "stream": draw(st.booleans()), "n": draw(st.sampled_from([1, 1, 3]))}
    body |= {"prompt": script} if path == "/v1/completions" else {"messages": [{"role": "user", "content": script}]}
    sent = plain(path, json.dumps(body).encode())
    if draw(st.booleans()):
        return Hostile("leaves while sending", sent[: draw(st.integers(0, len(sent) - 1))], whole=False)
    return Hostile("leaves while reading", sent, read=draw(st.sampled_from([0, 1, 200, 700, 3000])))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HEAVY = (
    *(
        {"regex": pattern}
        for pattern in ("(a|aa)+$", "a{9999}", "(a{99}){99}", "(((a*)*)*)*b", "[^\\x00]*" * 50, "\\p{L}+" * 9)
    ),
    *(
        {"regex": pattern}
        for pattern in (".{0,5000}x", "(?=a)b", "\\1", "(?P<n>a)", "^$", "", "[[:alpha:]]", "a|" * 3000)
    ),
    *({"json": nested(levels)} for levels in (1, 60, 200)),
    {"json": {"$ref": "#"}},
    {"json": {"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]}},
    {"json": {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}},
    {"json": {"enum": [str(n) for n in range(5000)]}},
    {"json": {"type": "string", "pattern": "(a|b)*c{500}", "minLength": 5, "maxLength": 2}},
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "integer", "minimum": 10**30, "maximum": -(10**30), "multipleOf": 0}},
    {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    {"json": False},
    {"choice": ["x" * 5000] * 20},
    {"choice": [""]},
    *(
        {"grammar": text}
        for text in ("start: start", 'start: "a" start | ""', "start: /a/~9999", "root ::= root root | x")
    ),
    *(
        {"grammar": text}
        for text in ('start: (("a"?)*)* "b"', "%import common.NOPE\nstart: NOPE", "start: x\nx: start", "")
    ),
)
"""Grammars that are malformed, contradict themselves, or are expensive."""


def _drawn(seed: int) -> dict[str, Any]:
    made = drawn_grammar(random.Random(seed))
    if made.kind == "choice":
        return {"choice": [made.source]}
    return {{"json_schema": "json"}.get(made.kind, made.kind): made.source or "x"}


@st.composite
def grammars(draw: st.DrawFn) -> Hostile:
    path = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
    body = dict(BASES[path]) | {
        "structured_outputs": draw(st.sampled_from(HEAVY) | st.integers(0, 1 << 32).map(_drawn)),
        "max_tokens": draw(st.integers(1, 30)),
    }
    body["temperature"] = draw(st.sampled_from([0, 1.5]))
    return Hostile("grammars", plain(path, json.dumps(body).encode()))


REQUESTS = st.one_of(
    bodies().map(lambda made: Hostile("fields", plain(made[0], json.dumps(made[1]).encode()))),
    bodies().map(lambda made: Hostile("fields", plain(made[0], json.dumps(made[1]).encode()))),
    bodies().map(
        lambda made: Hostile("fields, streamed", plain(made[0], json.dumps(made[1] | {"stream": True}).encode()))
    ),
    broken_bodies().map(lambda made: Hostile("JSON", plain(*made))),
    grammars(),
    strange_headers(),
    strange_heads(),
    st.sampled_from(BROKEN_HTTP).map(lambda sent: Hostile("HTTP", sent, whole=False)),
    early_ends(),
)
