"""The small files of a checkpoint folder that the HTTP side needs: tokenizer, template, end ids, sampling defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from pilotfish.engine.config import read_json_object
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.link.messages import LoopRule
from pilotfish.server.calls.parser import END_THINK, FUNCTION
from pilotfish.server.errors import BadRequest
from pilotfish.server.protocol import PositiveCount, RepetitionPenalty, Temperature, TokenId, TopK, TopP, Unit
from pilotfish.server.text.beginnings import Beginnings
from pilotfish.server.text.chat_template import RESERVED, ChatTemplate, load_chat_template, token_content
from pilotfish.server.text.tokenizer import Tokenizer


class ModelFilesError(PilotfishError):
    """A file of the folder is missing or malformed; the message names it."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds where a request is silent; None means the neutral value. What a request may not ask for, they may
    not either."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: PositiveCount | None = None


EndIds = TokenId | list[TokenId] | None


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    parses_reasoning: bool = False
    parses_tool_calls: bool = False
    reasoning_end: str = END_THINK
    """What ends a thinking block whose budget is spent."""
    late_system: Literal["keep", "front"] = "keep"
    """Where system messages go that do not lead: they keep their place, or all lead."""
    loop_rule: LoopRule | None = None
    """What ends a text that repeats itself, where a request says nothing about it."""
    volatile_lines: Literal["drop", "keep"] = "drop"
    """Whether lines of system prompts that change with every request are left out (chat/volatile.py)."""
    template_values: dict[str, Any] = {}
    """The template's switches where a request says nothing of them."""
    beginnings: Beginnings | None = None
    """Finds the end of system prompt and tools; there is one beside each chat template."""


def load_model_files(
    folder: Path,
    *,
    generation_config: str = "auto",
    override: dict[str, Any] | None = None,
    chat_template: Path | None = None,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
    reasoning_end: str = END_THINK,
    late_system: Literal["keep", "front"] = "keep",
    loop_rule: LoopRule | None = None,
    volatile_lines: Literal["drop", "keep"] = "drop",
    template_values: dict[str, Any] | None = None,
) -> ModelFiles:
    """`generation_config`: "auto" reads the folder's defaults, "vllm" none, anything else is a folder to read.
    `override` then replaces single values.

    The parsers are on, or "none", or, with "auto", on where the chat template writes what they read.

    The end ids of config.json, generation_config.json and the tokenizer all stop, whichever is chosen.
    """
    if reserved := set(template_values or ()) & set(RESERVED):
        raise ModelFilesError(f"--default-chat-template-kwargs: cannot set {sorted(reserved)[0]!r}")
    if not folder.is_dir():
        raise ModelFilesError(f"want a checkpoint folder, got {folder}")
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    config, beside = folder / "config.json", folder / "generation_config.json"
    own = chosen = _read_json(beside)
    defaults = beside
    if generation_config == "vllm":
        chosen = {}
    elif generation_config != "auto":
        defaults = Path(generation_config, "generation_config.json")
        chosen = read_json_object(defaults)
    eos = [*_end_ids(_read_json(config), config), *_end_ids(own, beside), *_end_ids(chosen, defaults)]
    named = token_content(tokenizer_config.get("eos_token"))
    if named is not None and (token_id := tokenizer.token_to_id(named)) is not None:
        eos.append(token_id)
    template = load_chat_template(folder, tokenizer_config, chat_template)
    return ModelFiles(
        folder=folder,
        tokenizer=tokenizer,
        chat_template=template,
        parses_reasoning=_is_on(reasoning_parser, template, END_THINK),
        parses_tool_calls=_is_on(tool_call_parser, template, FUNCTION),
        reasoning_end=reasoning_end,
        late_system=late_system,
        loop_rule=loop_rule,
        volatile_lines=volatile_lines,
        template_values=template_values or {},
        beginnings=Beginnings(template, tokenizer) if template is not None else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        defaults=_defaults({**chosen, **(override or {})}, defaults),
    )


def render_chat(folder: Path, messages: list[dict[str, Any]]) -> str:
    """The text of a chat that has taken place, by the folder's template. Raises OptionError where it has none."""
    try:
        template = load_model_files(folder).chat_template
        if template is None:
            raise OptionError(f"{folder}: has no chat template for messages")
        return template.render(messages, add_generation_prompt=False)
    except (ModelFilesError, BadRequest) as error:
        raise OptionError(f"messages: {error}") from None


def _is_on(parser: str, template: ChatTemplate | None, marker: str) -> bool:
    if parser == "auto":
        return template is not None and marker in template.source
    return parser != "none"


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is not there."""
    return read_json_object(path) if os.path.lexists(path) else {}


def _end_ids(config: dict[str, Any], where: Path) -> list[int]:
    """eos_token_id, a number or a list of them, at the top and under text_config."""
    inner = config.get("text_config")
    found: list[int] = []
    for level in (config, inner if isinstance(inner, dict) else {}):
        try:
            named = msgspec.convert(level.get("eos_token_id"), EndIds)
        except msgspec.ValidationError as error:
            raise ModelFilesError(f"{where}: eos_token_id: {error}") from error
        found += named if isinstance(named, list) else [] if named is None else [named]
    return found


def _defaults(config: dict[str, Any], where: Path) -> SamplingDefaults:
    known = {name: config[name] for name in SamplingDefaults.__struct_fields__ if config.get(name) is not None}
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelFilesError(f"{where}: {error}") from error
