"""Tools as the Responses API has them: functions, groups of them by namespace, tools of one text, hosted ones.

The model sees flat names; its calls go out with namespace and name apart, and come back in histories in that form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from pilotfish.server.calls.tools import (
    allowed_choice,
    custom_tool,
    function_choice,
    function_tool,
    is_hosted,
)
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes

FUNCTION = frozenset({"type", "name", "description", "parameters", "strict", "defer_loading", "output_schema"})
CUSTOM = frozenset({"type", "name", "description", "format", "defer_loading"})
ALLOWED = frozenset({"type", "mode", "tools"})
CHOSEN = frozenset({"type", "name", "namespace"})
NAMESPACE = frozenset({"type", "name", "description", "tools"})


class ToolPlace(Struct, frozen=True):
    """Where a tool stands in what was asked. `is_custom`: it takes a text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def flat_name(namespace: str | None, name: str) -> str:
    """What the model reads for a function of a group."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def chat_tools(tools: list[dict[str, Any]], notes: FieldNotes) -> list[dict[str, Any]]:
    """Tools as chat completions have them; hosted ones as they are. Raises BadRequest naming the field."""
    return [tool for index, given in enumerate(tools) for tool in _chat_tools(given, f"tools[{index}]", None, notes)]


def _chat_tools(tool: dict[str, Any], where: str, namespace: str | None, notes: FieldNotes) -> Iterator[dict[str, Any]]:
    kind = tool.get("type")
    if is_hosted(kind):
        yield {"type": kind}
        return
    if kind == "namespace" and namespace is None:
        notes.check(tool, NAMESPACE, where)
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise BadRequest("Want a list of tools.", param=f"{where}.tools")
        for index, member in enumerate(members):
            yield from _chat_tools(member, f"{where}.tools[{index}]", _name_of(tool, where), notes)
        return
    if kind not in ("function", "custom"):
        raise BadRequest(
            "Want type function, custom, namespace or a hosted one.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    name = flat_name(namespace, _name_of(tool, where))
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest("Want a string.", param=f"{where}.description")
    if kind == "function":
        notes.check(tool, FUNCTION, where)
        yield function_tool(name, description, tool.get("parameters"), tool.get("strict"))
    else:
        notes.check(tool, CUSTOM, where)
        yield custom_tool(name, description, tool.get("format"))


def _name_of(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest("Want a name.", param=f"{where}.name")
    return name


def places(tools: list[dict[str, Any]]) -> dict[str, ToolPlace]:
    """Places by flat name, of tools that have been read."""
    found: dict[str, ToolPlace] = {}
    for tool in tools:
        namespace = tool.get("name") if tool.get("type") == "namespace" else None
        for member in tool["tools"] if namespace is not None else [tool]:
            if member.get("type") in ("function", "custom"):
                place = ToolPlace(member["name"], namespace, member["type"] == "custom")
                found[flat_name(namespace, member["name"])] = place
    return found


def chat_choice(choice: str | dict[str, Any] | None, notes: FieldNotes) -> Any:
    """The choice as chat completions have it. Raises BadRequest."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        notes.check(choice, ALLOWED, "tool_choice")
        listed = choice.get("tools")
        if not isinstance(listed, list):
            raise BadRequest("Want a list of tools.", param="tool_choice.tools")
        allowed = [entry for entry in listed if not (isinstance(entry, dict) and is_hosted(entry.get("type")))]
        names = [_chosen(entry, f"tool_choice.tools[{index}]", notes) for index, entry in enumerate(allowed)]
        return allowed_choice(choice.get("mode", "auto"), names)
    return function_choice(_chosen(choice, "tool_choice", notes))


def _chosen(entry: Any, where: str, notes: FieldNotes) -> str:
    if not isinstance(entry, dict) or entry.get("type") not in ("function", "custom"):
        raise BadRequest("Want a function or a custom tool by its name.", param=where, code="unsupported_parameter")
    notes.check(entry, CHOSEN, where)
    namespace = entry.get("namespace")
    return flat_name(namespace if isinstance(namespace, str) else None, _name_of(entry, where))
