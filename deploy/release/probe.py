"""What a server says about itself over HTTP, in few words."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
BUSY = ("pilotfish_num_requests_running", "pilotfish_num_requests_waiting")
RESTARTS = "pilotfish_engine_restarts_total"
QUESTION = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}


def readiness(url: str) -> str | None:
    """None for a server that takes requests, else why it does not."""
    try:
        with urllib.request.urlopen(url + "/ready", timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"/ready is {error.code}: {error.read(300).decode(errors='replace').strip()}"
    except (OSError, http.client.HTTPException) as error:
        return f"/ready: {error}"


def gauges(url: str) -> dict[str, float]:
    """The metrics without labels. Raises OSError or HTTPException."""
    with urllib.request.urlopen(url + "/metrics", timeout=TIMEOUT_SECONDS) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


def answer(url: str, key: str | None) -> str:
    """What came of a request for one token. Raises OSError or HTTPException unless one came.

    A server that wants a key, where none is known, has at least said so.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/completions", json.dumps(QUESTION).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return f"{json.load(response)['usage']['completion_tokens']} token"
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401 and not key:
                return "ready, not asked: PILOTFISH_API_KEY is not set"
        raise
