"""Tools: what a request offers, and which of them it demands."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from pilotfish.server import unused
from pilotfish.server.calls.parameters import Parameters, Schema, check_names
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes

NAME = re.compile(r"(?!')[^\s<>\"]{1,256}")
MAX_TOOLS = 1024
TOOL_FIELDS = frozenset({"type", "function", "custom", "cache_control"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict", "cache_control"})
CUSTOM_FIELDS = frozenset({"name", "description", "format", "cache_control"})
GRAMMAR_FIELDS = frozenset({"syntax", "definition"})
FORMAT_FIELDS = GRAMMAR_FIELDS | {"type", "grammar"}
CHOICE_FIELDS = frozenset({"type", "function", "custom", "allowed_tools"})
SHOWN_FIELDS = ("name", "description", "parameters")
INPUT = "input"
"""The one parameter that the model fills of a tool that takes a text."""
HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search|file_search|code_interpreter|image_generation|computer"
    r"|computer_use|mcp|mcp_toolset|local_shell|shell|apply_patch|advisor)(_tool)?(_(preview|regex|bm25))?"
    r"(_[0-9_]{4,10})?"
)
"""Types of tools that run at OpenAI or Anthropic, or are known to their own models alone: left out here."""

log = logging.getLogger(__name__)
_told: set[str] = set()


class Custom(msgspec.Struct, frozen=True):
    """A tool that takes a text. `syntax`: lark or regex, of the grammar that the text keeps to, if there is one."""

    syntax: Literal["", "lark", "regex"] = ""
    definition: str = ""


class FunctionTool(msgspec.Struct, frozen=True):
    """`custom` of one that takes a text: then the parameters are INPUT alone."""

    parameters: Parameters
    strict: bool = False
    custom: Custom | None = None


class ToolDemand(msgspec.Struct, frozen=True):
    """`named` only with mode "named"."""

    mode: Literal["none", "auto", "required", "named"]
    named: str = ""


class Tools(msgspec.Struct, frozen=True):
    """`shown` is what the template prints, `offered` what may be called, by name."""

    shown: list[dict[str, Any]]
    offered: dict[str, FunctionTool]
    choice: ToolDemand

    @property
    def parameters(self) -> dict[str, Parameters]:
        return {name: tool.parameters for name, tool in self.offered.items()}

    @property
    def custom_names(self) -> frozenset[str]:
        """Those that take a text."""
        return frozenset(name for name, tool in self.offered.items() if tool.custom is not None)

    @property
    def has_grammar(self) -> bool:
        """Whether the text of one of the tools keeps to a grammar of its own."""
        return any(tool.custom is not None and tool.custom.syntax for tool in self.offered.values())

    @property
    def is_demanded(self) -> bool:
        return self.choice.mode in ("required", "named")


def input_of(arguments: str) -> str:
    """The text that a tool of one text is called with: all of what came where it is not that alone."""
    given = json.loads(arguments)
    text = given.get(INPUT) if given.keys() == {INPUT} else None
    return text if isinstance(text, str) else arguments


# -- as chat completions have them ---------------------------------------------------------------------------------


def function_tool(
    name: str, description: str | None, parameters: Schema | None, strict: bool | None = None
) -> dict[str, Any]:
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def custom_tool(name: str, description: str | None, form: dict[str, Any] | None) -> dict[str, Any]:
    fields = {"name": name, "description": description, "format": form}
    return {"type": "custom", "custom": {key: value for key, value in fields.items() if value is not None}}


def allowed_choice(mode: str, names: Iterable[str]) -> dict[str, Any]:
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}


# -- reading -------------------------------------------------------------------------------------------------------


def is_hosted(kind: Any) -> bool:
    return isinstance(kind, str) and HOSTED.fullmatch(kind) is not None


def leave_out(kind: str, notes: FieldNotes) -> None:
    """Counts a tool that runs elsewhere, and says once of each type that the model is not shown it."""
    notes.unused(unused.HOSTED)
    if kind not in _told and len(_told) < MAX_TOOLS:
        _told.add(kind)
        log.warning("tools of type %s run elsewhere: they are left out of what the model is shown", kind)


def read_tools(tools: list[Any] | None, choice: Any, notes: FieldNotes) -> Tools | None:
    """None where no tool may be called. Raises BadRequest naming the field."""
    if len(tools or ()) > MAX_TOOLS:
        raise BadRequest(f"Want at most {MAX_TOOLS} tools, got {len(tools or ())}.", param="tools")
    shown: dict[str, dict[str, Any]] = {}
    offered: dict[str, FunctionTool] = {}
    for index, given in enumerate(tools or ()):
        if isinstance(given, dict) and is_hosted(given.get("type")):
            leave_out(given["type"], notes)
            continue
        printed, tool = _read_tool(given, f"tools[{index}]", notes)
        name = printed["function"]["name"]
        if name in offered:
            raise BadRequest(f"Want different names, got {name!r} twice.", param=f"tools[{index}]")
        shown[name], offered[name] = printed, tool
    chosen, allowed = _read_choice(choice, offered, notes)
    if chosen.mode == "none" or not allowed:
        return None
    return Tools([shown[name] for name in allowed], {name: offered[name] for name in allowed}, chosen)


def _read_tool(tool: Any, where: str, notes: FieldNotes) -> tuple[dict[str, Any], FunctionTool]:
    """What the model is shown, and what it is."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise BadRequest(
            "Want an object with type 'function' or 'custom'.", param=f"{where}.type", code="unsupported_parameter"
        )
    notes.check(tool, TOOL_FIELDS, where)
    inner, where_inner = tool.get(kind), f"{where}.{kind}"
    if not isinstance(inner, dict):
        raise BadRequest("Want an object.", param=where_inner)
    notes.check(inner, FUNCTION_FIELDS if kind == "function" else CUSTOM_FIELDS, where_inner)
    name = inner.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest("Want a name of 1 to 256 characters without spaces.", param=f"{where_inner}.name")
    kinds: dict[str, type] = {"description": str, "parameters": dict, "strict": bool, "format": dict}
    for field, wanted in kinds.items():
        if inner.get(field) is not None and not isinstance(inner[field], wanted):
            raise BadRequest(f"Want {wanted.__name__}.", param=f"{where_inner}.{field}")
    if kind == "custom":
        return _read_custom(name, inner, where_inner, notes)
    parameters = Parameters(inner.get("parameters"))
    check_names(parameters, f"{where_inner}.parameters")
    # only what is for the model to read: strict is a promise about the decoder
    printed = {"type": "function", "function": {field: inner[field] for field in inner if field in SHOWN_FIELDS}}
    return printed, FunctionTool(parameters, strict=bool(inner.get("strict")))


def _read_custom(
    name: str, given: dict[str, Any], where: str, notes: FieldNotes
) -> tuple[dict[str, Any], FunctionTool]:
    """Shown as a function of one text: the form has no other."""
    custom = _read_format(given.get("format"), f"{where}.format", notes)
    description = given.get("description") or ""
    if custom.syntax:
        kind = "grammar in Lark" if custom.syntax == "lark" else "regular expression"
        description += f"\n\nThe {INPUT} must match this {kind}:\n{custom.definition}"
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return function_tool(name, description.strip() or None, schema), FunctionTool(Parameters(schema), custom=custom)


def _read_format(given: dict[str, Any] | None, where: str, notes: FieldNotes) -> Custom:
    """Chat completions hold a grammar in an object of its own, Responses do not."""
    if given is None:
        return Custom()
    kind = given.get("type")
    notes.check(given, FORMAT_FIELDS, where)
    if kind == "text":
        return Custom()
    if kind != "grammar":
        raise BadRequest("Want type text or grammar.", param=f"{where}.type")
    holder = given
    if isinstance(given.get("grammar"), dict):
        holder = given["grammar"]
        notes.check(holder, GRAMMAR_FIELDS, f"{where}.grammar")
    syntax, definition = holder.get("syntax"), holder.get("definition")
    if syntax not in ("lark", "regex"):
        raise BadRequest("Want lark or regex.", param=f"{where}.syntax")
    if not isinstance(definition, str) or not definition:
        raise BadRequest("Want a grammar.", param=f"{where}.definition")
    return Custom(syntax, definition)


def _read_choice(choice: Any, offered: dict[str, FunctionTool], notes: FieldNotes) -> tuple[ToolDemand, list[str]]:
    """The choice, and the names of what may be called."""
    names = list(offered)
    if choice is None or choice == "auto":
        return ToolDemand("auto"), names
    if choice == "none":
        return ToolDemand("none"), []
    if choice == "required":
        if not names:
            raise BadRequest("'tool_choice' wants 'tools'.", param="tool_choice")
        return ToolDemand("required"), names
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice, offered, notes)
    name = _chosen(choice, "tool_choice", notes)
    if name is None:
        raise BadRequest("Want 'none', 'auto', 'required', allowed_tools, or a function by name.", param="tool_choice")
    if name not in offered:
        raise BadRequest(f"No tool is called {name[:100]!r}.", param="tool_choice.function.name")
    return ToolDemand("named", name), names


def _chosen(choice: Any, where: str, notes: FieldNotes) -> str | None:
    """The name in `{"type": "function", "function": {"name": ..}}`, or the same of custom."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    inner = choice.get(kind) if kind in ("function", "custom") else None
    if isinstance(choice, dict) and isinstance(inner, dict):
        notes.check(choice, CHOICE_FIELDS, where)
        notes.check(inner, frozenset({"name"}), f"{where}.{kind}")
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _read_allowed(
    choice: dict[str, Any], offered: dict[str, FunctionTool], notes: FieldNotes
) -> tuple[ToolDemand, list[str]]:
    """Those that are not allowed are not shown either. Hosted ones may be in the list: they are left out."""
    given = choice.get("allowed_tools")
    given = given if isinstance(given, dict) else {}
    mode, listed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise BadRequest("Want a mode of auto or required, and tools.", param="tool_choice.allowed_tools")
    notes.check(choice, CHOICE_FIELDS, "tool_choice")
    notes.check(given, frozenset({"mode", "tools"}), "tool_choice.allowed_tools")
    allowed = set()
    for index, entry in enumerate(listed):
        if isinstance(entry, dict) and is_hosted(entry.get("type")):
            continue
        name = _chosen(entry, f"tool_choice.allowed_tools.tools[{index}]", notes)
        if name not in offered:
            shown = name[:100] if name is not None else entry
            raise BadRequest(f"No tool is called {shown!r}.", param=f"tool_choice.allowed_tools.tools[{index}]")
        allowed.add(name)
    names = [name for name in offered if name in allowed]
    if mode == "required" and not names:
        raise BadRequest("No tool that is allowed can be called here.", param="tool_choice.allowed_tools")
    return ToolDemand(mode), names
