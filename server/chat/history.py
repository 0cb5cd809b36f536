"""Chat messages as clients send them, checked and brought to what a chat template reads.

What stands in a history is never fatal. Clients send back what they got, from here or elsewhere, and a turn that was
refused once would be refused for ever: what cannot be read of it becomes text, or is left out and told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pilotfish.server.chat.parts import shown, text_of, thought_in, thought_of
from pilotfish.server.errors import BadRequest, missing_field
from pilotfish.server.fields import FieldNotes
from pilotfish.server.protocol import check_num_values
from pilotfish.server.text.chat_template import ChatTemplate

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
FIELDS = frozenset({"role", "content", "name"})
ANSWER_FIELDS = frozenset({"tool_calls", "function_call", "tool_call_id", "audio", "refusal", "annotations"})
"""Answers come back with these fields, full or empty."""
THOUGHT_FIELDS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
    "thinking_blocks",
    "reasoning_details",
)
"""Where clients and relays keep what was thought, as text or in parts; the first that has any counts."""
KNOWN = {role: FIELDS | ANSWER_FIELDS | frozenset(THOUGHT_FIELDS if role == "assistant" else ()) for role in ROLES}
READ = {"assistant": frozenset({"tool_calls", "function_call", "refusal"}), "tool": frozenset({"tool_call_id"})}
MISPLACED = {role: tuple(sorted(ANSWER_FIELDS - READ.get(role, frozenset()))) for role in ROLES}
CALL_FIELDS = frozenset({"id", "type", "function", "custom", "index"})
FUNCTION_FIELDS = frozenset({"name", "arguments", "input", "description", "parsed_arguments"})
MAX_MESSAGES = 65536
MAX_ARGUMENT_VALUES = 100_000
"""Values of one call's arguments, as protocol.py counts them."""

LateSystem = Literal["keep", "front"]


def check_messages(messages: list[dict[str, Any]], notes: FieldNotes) -> list[dict[str, Any]]:
    """Role and text, and what assistants thought and called. Raises BadRequest naming the message and field."""
    if not messages:
        raise BadRequest("Want at least one message, got none.", param="messages", code="empty_array")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"Want at most {MAX_MESSAGES} messages, got {len(messages)}.", param="messages")
    own = newest([message.get("role") for message in messages])
    return [_check(message, f"messages[{index}]", notes, past=index != own) for index, message in enumerate(messages)]


def newest(roles: Sequence[Any]) -> int:
    """Where the user's own newest message stands, if nothing of the assistant follows it; else -1.

    A user's message right after a tool's is the harness's: pictures that the tool gave back come in one.
    """
    for index in reversed(range(len(roles))):
        if roles[index] == "assistant":
            return -1
        if roles[index] == "user":
            return -1 if index and roles[index - 1] in ("tool", "function") else index
    return -1


def place_system(
    messages: list[dict[str, Any]], template: ChatTemplate | None, late: LateSystem = "keep"
) -> list[dict[str, Any]]:
    """System messages where the template takes them: those that lead as one.

    A late one keeps its place, since the beginning of the prompt stays the same then: as a marked user turn where the
    template wants one system message. With "front" all of them lead. A history that was cut until no user's message is
    left gets an empty one where the template wants one.
    """
    if late == "front":
        messages = sorted(messages, key=lambda message: message["role"] != "system")
    count = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    leading, others = messages[:count], messages[count:]
    if count > 1:
        leading = [{**leading[0], "content": "\n\n".join(message["content"] for message in leading)}]
    if template is None or not template.takes_late_system:
        others = [_as_user(message) if message["role"] == "system" else message for message in others]
    if template is not None and not any(message["role"] == "user" for message in others) and template.wants_user:
        others = [{"role": "user", "content": ""}, *others]
    return [*leading, *others]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def _check(message: dict[str, Any], where: str, notes: FieldNotes, *, past: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"Want a role of {', '.join(ROLES)}, got {shown(role)}.", param=f"{where}.role")
    notes.check(message, KNOWN[role], where)
    if "content" not in message and not past:
        raise missing_field(f"{where}.content")
    content = message.get("content")
    checked: dict[str, Any] = {
        "role": ROLES[role],
        "content": text_of(content, f"{where}.content", notes, past=past or role != "user", own=role == "assistant"),
    }
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if isinstance(value, str):
            checked[name] = value
        elif value is not None and not past:
            raise BadRequest(f"Want a string, got {shown(value)}.", param=f"{where}.{name}")
        elif value is not None:
            notes.ignore(f"{where}.{name}")
    if role == "assistant":
        _add_answer(message, checked, where, notes)
    for name in MISPLACED[role]:
        if message.get(name):
            notes.ignore(f"{where}.{name}")
    return checked


def _add_answer(message: dict[str, Any], checked: dict[str, Any], where: str, notes: FieldNotes) -> None:
    """What an answer has beside its text."""
    thought = next(filter(None, (_thought(message.get(name)) for name in THOUGHT_FIELDS)), "")
    if thought := thought or thought_of(message.get("content")):
        checked["reasoning_content"] = thought
    refusal = message.get("refusal")
    if isinstance(refusal, str) and not checked["content"]:
        checked["content"] = refusal
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRequest(f"Want a list, got {shown(calls)}.", param=f"{where}.tool_calls")
    read = [_call(call, f"{where}.tool_calls[{index}]", notes) for index, call in enumerate(calls)]
    if isinstance(message.get("function_call"), dict):
        read.append(_call({"function": message["function_call"]}, f"{where}.function_call", notes))
    if made := [call for call in read if call is not None]:
        checked["tool_calls"] = made


def _thought(value: Any) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    return "".join(thought_in(part) for part in parts if isinstance(part, dict))


def _call(call: Any, where: str, notes: FieldNotes) -> dict[str, Any] | None:
    """A call that was made, its arguments as an object: that is what templates print. `custom`: a tool of one text.

    None for a call without a name, as one is that broke off before it: it is left out and told.
    """
    if not isinstance(call, dict):
        raise BadRequest(f"Want a call, got {shown(call)}.", param=where)
    notes.check(call, CALL_FIELDS, where)
    custom = call.get("custom")
    function = call.get("function") if not isinstance(custom, dict) else custom
    if not isinstance(function, dict):
        raise BadRequest("Want a function.", param=f"{where}.function")
    notes.check(function, FUNCTION_FIELDS, f"{where}.function")
    name = function.get("name")
    if name in (None, ""):
        notes.ignore(where)
        return None
    if not isinstance(name, str):
        raise BadRequest("Want a function's name.", param=f"{where}.function.name")
    arguments = {"input": custom.get("input")} if isinstance(custom, dict) else arguments_of(function.get("arguments"))
    given_id = call.get("id")
    return {
        "id": given_id if isinstance(given_id, str) else None,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def arguments_of(given: Any) -> dict[str, Any]:
    """A call's arguments as an object. What is none, as text that broke off, is one argument of that name."""
    if isinstance(given, str) and not given.strip():
        return {}
    read = _read_json(given) if isinstance(given, str) else given
    if read is None and not isinstance(given, str):
        return {}
    return read if isinstance(read, dict) else {"arguments": given}


def _read_json(text: str) -> Any:
    """None for what is no JSON, or more of it than can be read in a moment. Lone surrogates are no text either."""
    try:
        check_num_values(text.encode("utf-8", "surrogatepass"), MAX_ARGUMENT_VALUES)
        return msgspec.json.decode(text)
    except (BadRequest, msgspec.DecodeError, ValueError, RecursionError):
        return None
