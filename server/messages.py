"""Chat messages as clients send them, checked and brought to what a chat template reads."""

from __future__ import annotations

from typing import Any

from pilotfish.server.errors import BadRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
FIELDS = frozenset({"role", "content", "name", "reasoning_content"})
NOT_YET = frozenset({"tool_calls", "function_call", "tool_call_id", "audio", "refusal", "annotations"})
MAX_MESSAGES = 65536


def check_messages(messages: list[dict[str, Any]], *, ignore_unknown: bool = False) -> list[dict[str, Any]]:
    """Plain role and text pairs. Raises BadRequest naming the message and field."""
    if not messages:
        raise BadRequest("Want at least one message, got none.", param="messages", code="empty_array")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"Want at most {MAX_MESSAGES} messages, got {len(messages)}.", param="messages")
    return [_check(message, f"messages[{index}]", ignore_unknown) for index, message in enumerate(messages)]


def _check(message: dict[str, Any], where: str, ignore_unknown: bool) -> dict[str, Any]:
    role = message.get("role")
    if role in ("tool", "function"):
        raise BadRequest(f"Role '{role}' is not supported yet.", param=f"{where}.role", code="unsupported_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"Want a role of {', '.join(ROLES)}, got {_shown(role)}.", param=f"{where}.role")
    for name in message.keys() - FIELDS:
        # answers come back in histories with these fields empty
        if name in NOT_YET and message[name] not in (None, []):
            raise BadRequest(f"'{name}' is not supported yet.", param=f"{where}.{name}", code="unsupported_parameter")
        if name not in NOT_YET and not ignore_unknown:
            param = f"{where}.{name}"
            raise BadRequest(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    checked = {"role": ROLES[role], "content": _text(message.get("content"), f"{where}.content", role)}
    for name in ("name", "reasoning_content"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"Want a string, got {_shown(value)}.", param=f"{where}.{name}")
        if value is not None:
            checked[name] = value
    return checked


def _text(content: Any, where: str, role: str) -> str:
    """A string as it is, text parts joined without a separator; nothing at all only from the assistant."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if content is None and role == "assistant":
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
    return repr(value[:60]) if isinstance(value, str) else repr(value)
