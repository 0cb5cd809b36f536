"""Content as clients send it, brought to text: parts joined, and a short note where a part is no text.

Nothing that stands in a history may end a session: an image that somebody showed three turns ago, or that a tool gave
back, becomes a note that the model can read. Only what the user has just sent is refused for not being text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any

from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes

TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text"})
THOUGHT_TYPES = frozenset({"thinking", "reasoning", "reasoning_text", "redacted_thinking"})
PART_FIELDS = frozenset({"type", "text", "cache_control", "annotations", "citations", "logprobs"})


def left_out(kind: str) -> str:
    """What the model reads in place of a part of this type, such as image_url or input_file."""
    name = re.sub(r"^input_|_url$", "", re.sub(r"[^A-Za-z0-9_]", "", kind))[:40] or "part"
    return f"[{name} left out: only text can be read here]"


def text_of(content: Any, where: str, notes: FieldNotes, *, past: bool, own: bool = False) -> str:
    """A string as it is, text parts joined without a separator.

    `own`: of the assistant itself, which would learn to write notes; what is no text is left out there, and told.
    Raises BadRequest for what is not text and not `past`; of the past, other JSON is shown as it is written.
    """
    if isinstance(content, str | None):
        return content or ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]", notes, past, own) for index, part in enumerate(content))
    if past:
        return shown_json(content)
    raise BadRequest(f"Want a string or a list of text parts, got {shown(content)}.", param=where)


def thought_of(content: Any) -> str:
    """What parts of an assistant's message say was thought."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "".join(thought_in(part) for part in parts if _is_of(part.get("type"), THOUGHT_TYPES))


def thought_in(part: dict[str, Any]) -> str:
    """The text of one thought, whichever name it stands under; Mistral's holds parts of its own."""
    for name in ("thinking", "reasoning", "text"):
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "".join(inner["text"] for inner in value if isinstance(inner, dict) and _has_text(inner))
    return ""


def _is_of(kind: Any, kinds: Set[str]) -> bool:
    """A type may be anything that JSON has; only text can be looked for in a set."""
    return isinstance(kind, str) and kind in kinds


def _has_text(part: dict[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _part(part: Any, where: str, notes: FieldNotes, past: bool, own: bool) -> str:
    if isinstance(part, str | None) and past:
        return part or ""
    if not isinstance(part, dict):
        raise BadRequest(f"Want an object with a type, got {shown(part)}.", param=where)
    kind = part.get("type")
    if past and kind is None:
        if not _has_text(part):
            # as the lines that a shell gave back
            return "" if own else shown_json(part)
        kind = "text"
    if _is_of(kind, TEXT_TYPES):
        notes.check(part, PART_FIELDS, where)
        if not _has_text(part) and not (past and part.get("text") is None):
            raise BadRequest("Want a text part with 'type' and 'text'.", param=f"{where}.text")
        return part.get("text") or ""
    if _is_of(kind, THOUGHT_TYPES):
        return ""
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if past and isinstance(kind, str):
        notes.ignore(f"{where}.{kind}")
        return "" if own else left_out(kind)
    raise BadRequest(
        f"Content of type {shown(kind)} is not supported: want text.",
        param=f"{where}.type",
        code="unsupported_content",
    )


def shown(value: Any) -> str:
    """A short quotation for a message; of containers only what they are."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:60]) if isinstance(value, str) else json.dumps(value)


def shown_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
