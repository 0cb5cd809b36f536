"""One request as a client sees it, and the server's own counters around it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

COUNTER = re.compile(r"^(?:pilotfish_|vllm:)spec_decode_(num_\w+)_total(?:\{.*\})? ([0-9.e+]+)$", re.M)
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
OUTPUT = ("content", "reasoning_content", "reasoning", "tool_calls")
"""What a chat's delta may carry; servers differ in the name of reasoning."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=1800)


class EndpointError(Exception):
    """The endpoint refused a request or broke off; the message is its own."""


@dataclass(frozen=True)
class TimedAnswer:
    """Times since the request was sent. Tokens are those of `usage`: an event may carry any number of them."""

    prompt_tokens: int
    completion_tokens: int
    first_seconds: float
    seconds: float

    @property
    def decode_rate(self) -> float:
        """Tokens after the first over the time after the first event."""
        span = self.seconds - self.first_seconds
        return (self.completion_tokens - 1) / span if span > 0 and self.completion_tokens > 1 else 0.0


class Endpoint:
    """An OpenAI endpoint. `url` with or without /v1; /metrics and /v1/capacity are read where it has them.

    `salted`: each request has a cache_salt of its own, so that every prompt is read, not remembered; a server of ours
    is found to know the field.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        model: str | None = None,
        key: str | None = None,
        salted: bool = False,
    ) -> None:
        self._http = http
        self.root = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.salted = salted
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def describe(self) -> dict[str, Any]:
        """The first served model (or the one that was named), and /v1/capacity where there is one."""
        answer = await self._get("/v1/models")
        try:
            models = {model["id"]: model for model in answer["data"]}
            self.model = self.model or next(iter(models))
        except (LookupError, TypeError, StopIteration):
            raise EndpointError("/v1/models: the answer names no model") from None
        chosen = models.get(self.model)
        if chosen is None:
            raise EndpointError(f"no model {self.model!r}: it serves {', '.join(models)}")
        try:
            capacity = await self._get("/v1/capacity")
        except EndpointError:
            capacity = {}
        self.salted = bool(capacity)
        return {"max_model_len": chosen.get("max_model_len")} | capacity

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._http.get(self.root + path, headers=self._headers) as response:
            if response.status != 200:
                raise EndpointError(f"GET {path}: {response.status} {told(await response.text())}")
            return await response.json()

    async def counters(self) -> dict[str, int] | None:
        """Drafts, drafted and accepted tokens since the server started; None where it shows none."""
        async with self._http.get(self.root + "/metrics", headers=self._headers) as response:
            text = await response.text() if response.status == 200 else ""
        return read_counters(text)

    async def complete(self, path: str, prompt: str, fields: Mapping[str, Any]) -> TimedAnswer:
        """Streams one answer over "completions" or "chat". Raises EndpointError."""
        if path == "chat":
            body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            body = {"prompt": prompt}
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        if self.salted:
            body["cache_salt"] = secrets.token_hex(8)
        url = f"{self.root}/v1/{'chat/completions' if path == 'chat' else path}"
        sent, first, last, usage = time.perf_counter(), None, 0.0, None
        async with self._http.post(url, json=body, headers=self._headers) as response:
            if response.status != 200:
                raise EndpointError(f"POST {path}: {response.status} {told(await response.text())}")
            async for event in events(response.content):
                if "error" in event:
                    raise EndpointError(f"{path} broke off: {event['error'].get('message', event['error'])}")
                if says_something(event):
                    last = time.perf_counter() - sent
                    first = last if first is None else first
                usage = event.get("usage") or usage
        if usage is None:
            raise EndpointError(f"{path}: the stream ended without `usage`, so tokens cannot be counted")
        last = last or time.perf_counter() - sent
        return TimedAnswer(usage["prompt_tokens"], usage["completion_tokens"], last if first is None else first, last)


def told(body: str) -> str:
    """What an error's body says, without its wrapping where that is OpenAI's."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:300]


def read_counters(text: str) -> dict[str, int] | None:
    """The three counters in an exposition of ours or vLLM's, summed over labels."""
    totals: dict[str, int] = {}
    for name, value in COUNTER.findall(text):
        if name in COUNTERS:
            totals[name] = totals.get(name, 0) + int(float(value))
    return {name: totals.get(name, 0) for name in COUNTERS} if totals else None


async def events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, [DONE] left out."""
    async for line in stream:
        if line.startswith(b"data:") and (data := line[5:].strip()) and data != b"[DONE]":
            yield json.loads(data)


def says_something(event: dict[str, Any]) -> bool:
    """Whether an event carries output. A chat's opening event names the role only, and comes before any token."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta.get(name) for name in OUTPUT):
            return True
    return False
