"""The one list of what requests may carry without any effect on the answer. Each use is counted, by name.

They are the caller's own records, hints to tiers that are not here and to a cache that needs none, texts to draft from,
and wishes about quality that no text can show. A field that would change the text is never here: it is honoured or
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

VERBOSITY = "verbosity"
"""A wish for longer or shorter answers, which no chat template reads; in Responses it stands in `text`."""
FIELDS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        VERBOSITY,
    }
)
"""At the top of a body, on the endpoints that OpenAI and vLLM share."""
RESPONSES_FIELDS = FIELDS - {"metadata", "prediction", "store", VERBOSITY} | {
    *("client_metadata", "max_tool_calls", "truncation")
}
"""The same of /v1/responses, where metadata comes back, and what is not to be stored is not remembered. Only calls of
hosted tools are limited there; a prompt that does not fit is a 400 however it might be cut."""
MESSAGES_FIELDS = frozenset({"cache_control", "inference_geo", "metadata", "service_tier", "speed"})
"""The same of Anthropic's endpoints."""

STRICT = "tools.strict"
"""Arguments are typed by the schema, and constrained by it only where a call is demanded."""
HOSTED = "tools.hosted"
"""Tools that run at OpenAI or Anthropic: the model is not shown them."""
CACHE_CONTROL = "cache_control"
"""Anthropic's mark on a part of a prompt."""
IS_ERROR = "tool_result.is_error"
"""The result's text is what the model reads."""
BUDGET = "thinking.budget_tokens"
"""A field that a model which does not think has no use for."""
EFFORT = "effort"
"""A field of Anthropic's API and of OpenAI's Responses that a chat template may not read."""
SUMMARY = "reasoning.summary"
"""The reasoning itself is shown."""
INCLUDE = "include"
"""Details of tools that are not here, and reasoning in a form that only OpenAI reads."""
ANTHROPIC_BETA = "anthropic-beta"
"""The header: what it announces is judged by the fields that come with it."""
UNKNOWN = "unknown"
"""Whatever nobody here knows: its names are the client's, and no labels."""
NAMES = (
    *sorted(FIELDS | RESPONSES_FIELDS | MESSAGES_FIELDS),
    *(ANTHROPIC_BETA, BUDGET, EFFORT, HOSTED, INCLUDE, IS_ERROR, STRICT, SUMMARY, UNKNOWN),
)


def unused_in(body: dict[str, Any], fields: Set[str] = FIELDS) -> Iterator[str]:
    """Names that this body uses by itself; null is no use."""
    yield from (name for name in fields - {CACHE_CONTROL} if body.get(name) is not None)
    tools = list(_objects(body.get("tools")))
    functions = [tool.get("function") for tool in tools]
    if any(isinstance(function, dict) and function.get("strict") for function in (*tools, *functions)):
        yield STRICT
    parts = [*_objects(body.get("system"))]
    parts += [part for message in _objects(body.get("messages")) for part in _objects(message.get("content"))]
    inner = [part for outer in parts for part in _objects(outer.get("content"))]
    if any(holder.get("cache_control") is not None for holder in (body, *tools, *parts, *inner)):
        yield CACHE_CONTROL
    if any(part.get("is_error") for part in parts):
        yield IS_ERROR
    if isinstance(text := body.get("text"), dict) and text.get(VERBOSITY) is not None:
        yield VERBOSITY


def _objects(values: Any) -> Iterator[dict[str, Any]]:
    yield from (value for value in values if isinstance(value, dict)) if isinstance(values, list) else ()
