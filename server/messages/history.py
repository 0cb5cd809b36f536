"""Anthropic's messages of blocks as chat messages: results of tools are messages of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pilotfish.server.chat.history import arguments_of, newest
from pilotfish.server.chat.parts import left_out, shown_json
from pilotfish.server.errors import BadRequest, missing_field
from pilotfish.server.fields import FieldNotes

Block = dict[str, Any]

COMMON = frozenset({"type", "cache_control"})
FIELDS = {
    "text": COMMON | {"text", "citations"},
    "thinking": COMMON | {"thinking", "signature"},
    "redacted_thinking": COMMON | {"data"},
    "tool_use": COMMON | {"id", "name", "input", "caller"},
    "tool_result": COMMON | {"tool_use_id", "content", "is_error"},
    "document": COMMON | {"source", "title", "context", "citations"},
    "search_result": COMMON | {"source", "title", "content", "citations"},
}


def chat_messages(messages: Sequence[Any], notes: FieldNotes) -> Iterator[dict[str, Any]]:
    """Each has a role, and content that is a text or blocks. Raises BadRequest naming the block."""
    own = newest([_role(message) for message in messages])
    for index, message in enumerate(messages):
        where, content = f"messages[{index}]", message.content
        if not isinstance(content, list):
            yield {"role": message.role, "content": content or ""}
        elif message.role == "assistant":
            yield _assistant(content, f"{where}.content", notes)
        else:
            yield from _said(message.role, content, f"{where}.content", notes, past=index != own)


def _role(message: Any) -> str:
    """Pictures beside a tool's result are the tool's."""
    blocks = message.content if isinstance(message.content, list) else []
    has_result = any(block.get("type") == "tool_result" for block in blocks)
    return "tool" if has_result else message.role


def _assistant(blocks: list[Block], where: str, notes: FieldNotes) -> dict[str, Any]:
    """What the model wrote itself is put together as it was; what others' services did in between is left out."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = _kind(block, place, notes)
        if kind == "text":
            message["content"] += _string(block, "text", place, past=True)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(
                block, "thinking", place, past=True
            )
        elif kind == "tool_use":
            function = {"name": _string(block, "name", place, past=True), "arguments": arguments_of(block.get("input"))}
            message["tool_calls"].append({"id": block.get("id"), "type": "function", "function": function})
        else:
            notes.ignore(f"{place}.{kind}")
    return message


def _said(role: str, blocks: list[Block], where: str, notes: FieldNotes, *, past: bool) -> Iterator[dict[str, Any]]:
    """Results are messages of their own, text around them stays in order."""
    said: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") == "tool_result" and role == "user":
            notes.check(block, FIELDS["tool_result"], place)
            if said:
                yield {"role": role, "content": "\n".join(said)}
                said = []
            text = _result(block.get("content"), f"{place}.content", notes)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        else:
            said.append(_text(block, place, notes, past=past))
    if said or not blocks:
        yield {"role": role, "content": "\n".join(said)}


def _result(content: Any, where: str, notes: FieldNotes) -> str:
    """The text of a tool's result: whatever comes is shown."""
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return "\n".join(_text(block, f"{where}[{index}]", notes, past=True) for index, block in enumerate(content))
    return content if isinstance(content, str) else "" if content is None else shown_json(content)


def _text(block: Block, where: str, notes: FieldNotes, *, past: bool) -> str:
    """A block as text, or a note in its place. Raises BadRequest for what is neither text nor past."""
    kind = _kind(block, where, notes)
    text = None
    if kind == "text":
        text = _string(block, "text", where, past=past)
    elif kind == "document":
        text = _document(block, where, notes)
    elif kind == "search_result":
        text = _tagged("search_result", block, ("source", "title"), _result(block.get("content"), where, notes))
    if text is not None:
        return text
    if not past:
        # in these words Claude Code takes the part out of its history
        what = {"document": "PDF"}.get(kind, kind[:60])
        raise BadRequest(
            f"Could not process {what}: only text can be read here, and documents of text.",
            param=f"{where}.{kind[:60]}",
            code="unsupported_content",
        )
    notes.ignore(f"{where}.{kind}")
    return left_out(kind)


def _document(block: Block, where: str, notes: FieldNotes) -> str | None:
    """None for one that is no text."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif source.get("type") == "content":
        text = _result(source.get("content"), f"{where}.source.content", notes)
    else:
        return None
    return _tagged("document", block, ("title", "context"), text)


def _tagged(tag: str, block: Block, names: tuple[str, ...], text: str) -> str:
    attributes = "".join(f' {name}="{block[name]}"' for name in names if isinstance(block.get(name), str))
    return f"<{tag}{attributes}>\n{text}\n</{tag}>"


def _kind(block: Block, where: str, notes: FieldNotes) -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise missing_field(f"{where}.type")
    if kind in FIELDS:
        notes.check(block, FIELDS[kind], where)
    return kind


def _string(block: Block, name: str, where: str, *, past: bool) -> str:
    value = block.get(name)
    if not isinstance(value, str) and not (past and value is None):
        raise BadRequest("Want a string.", param=f"{where}.{name}", code="invalid_value")
    return value or ""
