"""The pages of the repository, their blocks of code and their links, as GitHub reads them.

A block of commands says after its language whether tests run it: `sh run`, or `sh not-run: why`.

python -m tests.support.documents      breaks lines of prose that are too long
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "demo" / "README.md"])
MOST_COLUMNS = 129
"""Of a line of prose, and of what stands in a block."""
COLUMNS = 124
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


def wrapped(text: str) -> str:
    """The page, its paragraphs and items of lists broken anew where a line is too long; blocks, tables and headings
    stay."""
    done, paragraph, fence = [], [], ""
    for line in [*text.split("\n"), ""]:
        match = FENCE.match(line)
        begins = fence or match or not line.strip() or re.match(r"\s*([|#<!]|[-*] |\d+\. )", line)
        if begins:
            done += _broken(paragraph)
            paragraph = []
        if not fence and not match and re.match(r"\s*([^|#<!\s])", line):
            paragraph.append(line)
        else:
            done.append(line)
        if match:
            fence = match[1] if not fence else "" if line.strip() == fence else fence
    return "\n".join(done[:-1])


def _broken(paragraph: list[str]) -> list[str]:
    if max(map(len, paragraph), default=0) <= MOST_COLUMNS:
        return paragraph
    first = re.match(r"\s*([-*] |\d+\. )?", paragraph[0])[0]
    words = " ".join(line.strip() for line in (paragraph[0][len(first) :], *paragraph[1:]))
    for columns in range(COLUMNS, COLUMNS - 30, -1):
        lines = textwrap.wrap(
            words, columns, initial_indent=first, subsequent_indent=" " * len(first),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        # a line that begins like an item would be one
        if not any(re.match(r"\s*([-+*#>|]|\d+[.)])\s", line) for line in lines[1:]):
            return lines
    return lines


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := wrapped(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
