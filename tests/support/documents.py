"""The pages of the repository, their blocks of code and their links, as GitHub reads them.

A block of commands says after its language whether tests run it: `sh run`, or `sh not-run: why`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "demo" / "README.md"])
COMMANDS = ("sh", "python", "javascript")
FENCE = re.compile(r"^ *(`{3,})(.*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """Commands, those that go on in the next line put together; comments left out."""
        whole = re.sub(r"\\\n\s*", "", self.text)
        found = (re.sub(r"(^|\s)#\s.*", "", line).strip() for line in whole.splitlines())
        return [line for line in found if line]


def blocks(page: Path) -> list[Block]:
    found, fence, begin, info, body = [], "", 0, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = FENCE.match(line)
        if match and not fence:
            fence, begin, info, body = match[1], number, match[2].strip(), []
        elif fence and line.strip() == fence:
            language, _, mark = info.partition(" ")
            found.append(Block(page, begin, language, mark.strip(), "\n".join(body)))
            fence = ""
        elif fence:
            body.append(line)
    assert not fence, f"{page}:{begin}: the block has no end"
    return found


def prose(page: Path) -> list[tuple[int, str]]:
    """Lines outside of blocks, with their numbers."""
    found, fence = [], ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif fence:
            fence = "" if line.strip() == fence else fence
        else:
            found.append((number, line))
    return found


def links(page: Path) -> list[tuple[int, str]]:
    """Targets of links and pictures; code spans hold none."""
    return [(number, target) for number, line in prose(page) for target in LINK.findall(re.sub(r"`[^`]*`", "", line))]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings."""
    found: dict[str, int] = {}
    for _, line in prose(page):
        if match := re.match(r"#+ +(.*)", line):
            plain = re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", match[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            count = found.get(slug, 0)
            found[slug] = count + 1
            if count:
                found[f"{slug}-{count}"] = 1
    return set(found)
