"""The one list of what requests may carry without any effect on the answer. Each use is counted, by name.

They are the caller's own records, hints to caches and tiers that are not here, and promises about quality that no
text can show. A field that would change the text is never here: it is honoured or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FIELDS = frozenset(
    {
        "cache_salt",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""At the top of a body, on every endpoint."""

STRICT = "tools.strict"
"""Arguments are typed by the schema, not constrained by it."""
CACHE_CONTROL = "cache_control"
"""Anthropic's mark on a part of a message."""
UNKNOWN = "unknown"
"""Whatever --ignore-unknown-fields lets through: its names are the client's, and no labels."""
NAMES = (*sorted(FIELDS), CACHE_CONTROL, STRICT, UNKNOWN)


def unused_in(body: dict[str, Any]) -> Iterator[str]:
    """Names of NAMES but UNKNOWN that this body uses; null is no use."""
    yield from (name for name in FIELDS if body.get(name) is not None)
    functions = (tool.get("function") for tool in _objects(body.get("tools")))
    if any(isinstance(function, dict) and function.get("strict") for function in functions):
        yield STRICT
    parts = (part for message in _objects(body.get("messages")) for part in _objects(message.get("content")))
    if any(part.get("cache_control") is not None for part in parts):
        yield CACHE_CONTROL


def _objects(values: Any) -> Iterator[dict[str, Any]]:
    yield from (value for value in values if isinstance(value, dict)) if isinstance(values, list) else ()
