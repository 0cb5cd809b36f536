"""Fifty questions with one right word each, and how answers are scored.

Half are choices of four, answered by a letter; half are beginnings of code or text, answered by what must follow. They
are short and easy, so that a small model has a score that can fall; written for this project. lm-eval reads the same
file by the same rules (tasks/).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FILE = Path(__file__).with_name("items.jsonl")
RULES = {"choice": re.compile(r"\b([ABCD])\b"), "completion": re.compile(r"(\S+)")}
"""What counts of an answer: the first of the four letters that stands alone, the first word."""
MAX_TOKENS = 8
AT_ONCE = 8
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Item:
    kind: str
    prompt: str
    answer: str

    def is_right(self, text: str) -> bool:
        found = RULES[self.kind].search(text)
        return found is not None and found.group(1) == self.answer


class Poster(Protocol):
    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...


def items() -> list[Item]:
    return [Item(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def answers(server: Poster, asked: Sequence[Item], k: int | None = None) -> list[str]:
    """Greedy continuations up to the end of a line, several at a time; `k` lowers the drafted tokens of a round."""
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0, "stop": ["\n"]}
    fields |= {} if k is None else {"speculation": {"k": k}}

    def ask(item: Item) -> str:
        return server.post(COMPLETIONS, {"prompt": item.prompt, **fields})["choices"][0]["text"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, asked))


def score(asked: Sequence[Item], texts: Sequence[str]) -> float:
    """Share of right answers."""
    return sum(item.is_right(text) for item, text in zip(asked, texts, strict=True)) / len(asked)
