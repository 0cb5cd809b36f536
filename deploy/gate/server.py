"""The server under the gates, as a client sees it: JSON in and out, streams, metrics."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pilotfish.deploy.sweep.client import told

PREFIX = "pilotfish_"
TIMEOUT = 120.0


class Unreachable(Exception):
    """Nobody answers, or the connection broke off."""


class Refused(Exception):
    """The answer is an error; the message is the server's."""


class Metrics:
    """One scrape. Names are written without the prefix; a name that was never seen counts 0."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples = [(s.name, s.labels, s.value) for family in families for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series that have these labels."""
        wanted = labels.items()
        return sum(value for n, found, value in self.samples if n == PREFIX + name and wanted <= found.items())

    def has(self, name: str) -> bool:
        return any(n == PREFIX + name for n, _, _ in self.samples)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        keys = {found[label] for n, found, _ in self.samples if n == PREFIX + name}
        return {key: self.total(name, **{label: key}, **labels) for key in keys}


class Server:
    """`requests` and `tokens` count what was generated here, by the server's own `usage`."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.requests = self.tokens = 0
        self.key = key
        self._counting = threading.Lock()

    def get(self, path: str) -> Any:
        with self._send(path) as response:
            text = _read(response)
        try:
            return json.loads(text)
        except ValueError:
            raise Refused(f"{path}: the answer is no JSON: {text[:40]!r}") from None

    def first_model(self) -> str:
        """The name that the server lists first. Raises Refused where it lists none."""
        found = self.get("/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            raise Refused("/v1/models: the answer names no model") from None

    def metrics(self) -> Metrics:
        with self._send("/metrics") as response:
            return Metrics(_read(response).decode())

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._send(path, body) as response:
            answer = json.loads(_read(response))
        self._count(answer)
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
        """The events as they come; None for [DONE]."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with self._send(path, {**body, **options}) as response:
            for line in _lines(response):
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data == b"[DONE]":
                    yield None
                elif line.startswith(b"data:"):
                    event = json.loads(data)
                    self._count(event)
                    yield event

    def _count(self, answer: Mapping[str, Any]) -> None:
        if usage := answer.get("usage"):
            with self._counting:
                self.requests += 1
                self.tokens += usage.get("completion_tokens", 0)

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps({**({"model": self.model} if self.model else {}), **body}).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(f"{path}: {error.code} {told(error.read().decode(errors='replace'))}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{path}: {getattr(error, 'reason', None) or error or type(error).__name__}") from None


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"the answer broke off: {error or type(error).__name__}") from None


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"the stream broke off: {error or type(error).__name__}") from None
