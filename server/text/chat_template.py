"""Messages to prompt text through the checkpoint's own Jinja template, in a sandbox.

The template gets what Hugging Face's libraries give it: trimmed blocks, `tojson` that keeps non-ASCII text,
`raise_exception`, `strftime_now`, break and continue. It comes from the checkpoint or from the operator, never from
a client; a client gives messages and keyword values.
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta

from pilotfish.engine.checkpoint.foreign import look_at
from pilotfish.engine.errors import PilotfishError
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.bounded_jinja import BoundedEnvironment, bounded_filter, bounded_rendering

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")

MARK = "\ue000to be continued\ue000"
"""Where the last message's text ends: what a template strips and what it adds stands on either side."""


class TemplateError(PilotfishError):
    """The operator's template cannot be used; the message names the file."""


class ChatTemplate:
    """A compiled template of this `source`. `variables` are the names it reads and does not define."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        # what the compilers of Jinja and of Python say to deep nesting
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise TemplateError(f"chat template: it cannot be compiled: {error}") from error
        self._special_tokens = special_tokens or {}
        self.source = source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        tools: list[dict[str, Any]] | None = None,
        values: dict[str, Any] | None = None,
    ) -> str:
        """The prompt; with `continue_last` it ends with the last message's text, and `add_generation_prompt` is off.

        Raises BadRequest naming `messages` for whatever the template objects to.
        """
        values = values or {}
        for name in values:
            if name in RESERVED:
                raise BadRequest(f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs")
        if continue_last:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + MARK}]
        try:
            with bounded_rendering():
                text = self._template.render(
                    {
                        **self._special_tokens,
                        **values,
                        "messages": messages,
                        "tools": tools,
                        "documents": None,
                        "add_generation_prompt": add_generation_prompt and not continue_last,
                    }
                )
        # a sandboxed template can fail in any way Python can: all are about what the client sent
        except Exception as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        if not continue_last:
            return text
        before, mark, _ = text.rpartition(MARK)
        if not mark:
            raise BadRequest("the chat template does not show the last message's text", param="messages")
        return before

    @functools.cached_property
    def takes_late_system(self) -> bool:
        """Whether a system message may follow others: many templates object."""
        return self._takes("user", "assistant", "system", "user")

    @functools.cached_property
    def wants_user(self) -> bool:
        """Whether a conversation without a user's message is refused, as by Qwen3.5's template."""
        return self._takes("user", "assistant") and not self._takes("assistant")

    def keeps_history(self, values: dict[str, Any]) -> bool:
        """Whether an assistant's turn that thought and called a tool is written alike once the user has said more; a
        template without tools is asked about one that only thought."""
        call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {}}}
        thought: dict[str, Any] = {"role": "assistant", "content": "x", "reasoning_content": "y"}
        asked, answered = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        called: list[dict[str, Any]] = [asked, {**thought, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
        for turn in (called, [asked, thought]):
            try:
                now = self.render(turn, add_generation_prompt=False, values=values)
                later = self.render([*turn, answered, asked], add_generation_prompt=False, values=values)
            except BadRequest:
                continue
            return later.startswith(now)
        return True

    def _takes(self, *roles: str) -> bool:
        try:
            self.render([{"role": role, "content": "x"} for role in roles])
        except BadRequest:
            return False
        return True


def load_chat_template(folder: Path, tokenizer_config: dict[str, Any], override: Path | None) -> ChatTemplate | None:
    """The operator's file, else chat_template.jinja, else the tokenizer's own; None if there is none."""
    source = _find_source(folder, tokenizer_config, override)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: token_content(tokenizer_config.get(name)) for name in names}
    return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})


def token_content(entry: Any) -> str | None:
    """A special token in tokenizer_config.json is a string, or an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _find_source(folder: Path, tokenizer_config: dict[str, Any], override: Path | None) -> str | None:
    path = override or folder / "chat_template.jinja"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if override is not None:
            raise TemplateError(f"chat template {override} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {path} cannot be read: {error}") from error
    else:
        # each chat would begin with it
        if (what := look_at(path)) is not None:
            raise TemplateError(f"chat template {path} cannot be read: {what}")
        return text
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
        source = next(named, {}).get("template")
    return source if isinstance(source, str) else None


def _environment() -> jinja2.Environment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = bounded_filter(_to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and text stays as it is."""
    known = {name: options[name] for name in ("indent", "separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, **known)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
