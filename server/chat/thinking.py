"""Whether a model is to think, for all three APIs: one rule over the many fields that say so.

The template's own switch goes first (`chat_template_kwargs`), then `thinking` and budgets, then the effort (none and
minimal are off, others on), then the API's default. An effort is passed on where the template reads one.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

from msgspec import Struct

from pilotfish.server import unused
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.protocol import Count

SWITCH, EFFORT = "enable_thinking", "reasoning_effort"
"""Names that chat templates read."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OFF = ("none", "minimal")


class ThinkingField(Struct, frozen=True, kw_only=True):
    """Anthropic's, which other services took over for chats. `display` omitted: thought, but not shown."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningField(Struct, frozen=True, kw_only=True):
    """OpenRouter's, in chats: `exclude` hides what was thought."""

    effort: str | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: str | None = None


class Wish(Struct, frozen=True, kw_only=True):
    """What a request says of thinking, where it says anything; `default` is the API's own."""

    on: bool | None = None
    budget: int | None = None
    effort: str | None = None
    default: bool | None = None


def template_values(given: Mapping[str, Any], wish: Wish, variables: Set[str], notes: FieldNotes) -> dict[str, Any]:
    """Keyword values for a template that reads these variables: `given` ones, and what they leave open.

    Raises BadRequest for an effort that is none of EFFORTS and that no template reads.
    """
    values = dict(given)
    if wish.effort is not None and EFFORT in variables:
        values.setdefault(EFFORT, wish.effort)
    elif wish.effort is not None and wish.effort not in EFFORTS:
        raise BadRequest(f"Want one of {', '.join(EFFORTS)}, got {wish.effort[:40]!r}.", param=EFFORT)
    elif wish.effort is not None and (SWITCH not in variables or SWITCH in given or wish.on is not None or wish.budget):
        notes.unused(unused.EFFORT)
    on = _is_on(wish)
    if on is not None and SWITCH in variables:
        values.setdefault(SWITCH, on)
    return values


def _is_on(wish: Wish) -> bool | None:
    if wish.on is not None:
        return wish.on
    if wish.budget:
        return True
    if wish.effort is not None:
        return wish.effort not in OFF
    return wish.default
