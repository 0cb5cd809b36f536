"""Chat messages as clients send them, checked and brought to what a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pilotfish.server.errors import BadRequest, unsupported_field
from pilotfish.server.fields import FieldNotes
from pilotfish.server.protocol import check_num_values
from pilotfish.server.text.chat_template import ChatTemplate

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FIELDS = frozenset({"role", "content", "name"})
ROLE_FIELDS = {"assistant": frozenset({"reasoning", "reasoning_content", "tool_calls"}), "tool": {"tool_call_id"}}
NOT_YET = frozenset({"tool_calls", "function_call", "tool_call_id", "audio", "refusal", "annotations"})
"""Refused unless empty, where the role does not have them: answers come back in histories with these fields empty."""
CALL_FIELDS = frozenset({"id", "type", "function", "index"})
MAX_MESSAGES = 65536
MAX_ARGUMENT_VALUES = 100_000
"""Of one call, as protocol.py counts them."""


def check_messages(messages: list[dict[str, Any]], notes: FieldNotes) -> list[dict[str, Any]]:
    """Role and text, and what assistants thought and called. Raises BadRequest naming the message and field."""
    if not messages:
        raise BadRequest("Want at least one message, got none.", param="messages", code="empty_array")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"Want at most {MAX_MESSAGES} messages, got {len(messages)}.", param="messages")
    return [_check(message, f"messages[{index}]", notes) for index, message in enumerate(messages)]


def lead_with_system(messages: Iterable[dict[str, Any]], template: ChatTemplate | None) -> list[dict[str, Any]]:
    """For APIs that have system messages anywhere: one that leads, unless the template takes them where they stand."""
    given = list(messages)
    texts = [message["content"] for message in given if ROLES[message["role"]] == "system"]
    if not texts or (template is not None and template.takes_late_system):
        return given
    others = [message for message in given if ROLES[message["role"]] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _check(message: dict[str, Any], where: str, notes: FieldNotes) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise BadRequest(f"Role '{role}' is not supported yet.", param=f"{where}.role", code="unsupported_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"Want a role of {', '.join(ROLES)}, got {_shown(role)}.", param=f"{where}.role")
    own = FIELDS | ROLE_FIELDS.get(role, frozenset())
    for name in NOT_YET - own:
        if message.get(name) not in (None, []):
            raise unsupported_field(f"{where}.{name}")
    notes.check(message, own | NOT_YET, where)
    checked: dict[str, Any] = {"role": ROLES[role], "content": _text(message.get("content"), f"{where}.content", role)}
    for name, target in (
        ("name", "name"),
        ("tool_call_id", "tool_call_id"),
        ("reasoning", "reasoning_content"),
        ("reasoning_content", "reasoning_content"),
    ):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"Want a string, got {_shown(value)}.", param=f"{where}.{name}")
        if value is not None:
            checked[target] = value
    if role == "assistant" and message.get("tool_calls") not in (None, []):
        checked["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls", notes)
    return checked


def _calls(calls: Any, where: str, notes: FieldNotes) -> list[dict[str, Any]]:
    """Calls that were made, their arguments as objects: that is what templates print."""
    if not isinstance(calls, list):
        raise BadRequest(f"Want a list, got {_shown(calls)}.", param=where)
    return [_call(call, f"{where}[{index}]", notes) for index, call in enumerate(calls)]


def _call(call: Any, where: str, notes: FieldNotes) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise BadRequest("Want a call of type 'function'.", param=f"{where}.type", code="unsupported_parameter")
    notes.check(call, CALL_FIELDS, where)
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadRequest("Want a function's name.", param=f"{where}.function.name")
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise BadRequest(f"Want a string, got {_shown(call['id'])}.", param=f"{where}.id")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            check_num_values(given.encode("utf-8", "surrogatepass"), MAX_ARGUMENT_VALUES)
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            raise BadRequest("Want the JSON of an object.", param=where) from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRequest(f"Want the JSON of an object, got {_shown(given)}.", param=where)
    return given


def _text(content: Any, where: str, role: str) -> str:
    """A string as it is, text parts joined without a separator; nothing at all only from assistants and tools."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if content in (None, []) and role in ("assistant", "tool"):
        return ""
    raise BadRequest(f"Want a string or a list of text parts, got {_shown(content)}.", param=where)


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise BadRequest(f"Want an object with a type, got {_shown(part)}.", param=where)
    if part.get("type") != "text":
        raise BadRequest(
            f"Content of type {_shown(part.get('type'))} is not supported: want text.",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if not isinstance(part.get("text"), str) or part.keys() - {"type", "text", "cache_control"}:
        raise BadRequest("Want a text part with exactly 'type' and 'text'.", param=f"{where}.text")
    return part["text"]


def _shown(value: Any) -> str:
    """A short quotation for a message; of containers only what they are."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value[:60]) if isinstance(value, str) else json.dumps(value)
