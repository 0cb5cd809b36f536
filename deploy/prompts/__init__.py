"""Fixed prompts, one a domain: what is measured today can be compared with what was measured last year.

`chat` is a user's message, `completion` a text to be continued. Written for this project; changing one breaks every
comparison, so add domains instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("domains.json")


@dataclass(frozen=True)
class DomainPrompt:
    chat: str
    completion: str


def domains() -> dict[str, DomainPrompt]:
    """essay, code, prose, chinese."""
    return {name: DomainPrompt(**texts) for name, texts in json.loads(FILE.read_text(encoding="utf-8")).items()}


def long_text(num_chars: int) -> str:
    """At least `num_chars` characters of the domains' completions in turn, each under a number of its own: no two
    sections are equal, so nothing that repeats can be looked up."""
    texts = [prompt.completion for prompt in domains().values()]
    parts: list[str] = []
    length = 0
    while length < num_chars:
        part = f"\n\nSection {len(parts) + 1}.\n\n{texts[len(parts) % len(texts)]}"
        parts.append(part)
        length += len(part)
    return "".join(parts)
