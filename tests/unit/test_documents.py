"""Pages hold what they say: each command is run by a test or says why not, its flags and targets exist, links lead
somewhere, and lines fit a screen. tests/e2e/test_documents.py runs what is to be run."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

from pilotfish.engine.command_line.parser import Parser
from pilotfish.server import cli
from tests.support.documents import COMMANDS, MOST_COLUMNS, PAGES, ROOT, anchors, blocks, links, prose, wrapped

ALL = [block for page in PAGES for block in blocks(page)]
MAKEFILE = (ROOT / "Makefile").read_text()
SPAN = r"`([^`]+)`"
SELF = Path(__file__)
OTHERS_FLAGS = {
    *("--require-hashes", "--dry-run"),  # pip, pip-audit
    *("--disable-circuit-breaker", "--health-check-endpoint", "--health-check-interval-secs"),  # routers
    *("--health-failure-threshold", "--health-check-timeout-secs", "--retry-max-retries", "--retry-initial-backoff-ms"),
    *("--retry-backoff-multiplier", "--balance-abs-threshold", "--balance-rel-threshold", "--max-payload-size"),
    *("--request-timeout-secs",),
    *("--allowedTools", "--approval-mode", "--yes-always", "--output-schema"),  # agents
    *("--checks", "--max-examples", "--phases"),  # schemathesis
    *("--from-file", "--strict", "--mtp"),  # kubectl, kubernetes-validate, llama.cpp's converter
}
WRITTEN_BY_A_MODEL = ROOT / "demo" / "README.md"


def commands(first):
    """(block, words) of every command that begins so, whatever stands before it in a pipe."""
    for block in ALL:
        if block.language != "sh":
            continue
        for line in block.lines:
            for part in re.split(r"&&|\|\||[|;]", line):
                try:
                    words = shlex.split(part)
                except ValueError:
                    continue  # a part of a quoted text
                while words and "=" in words[0]:
                    words.pop(0)
                if words and words[0].endswith(first):
                    yield block, words


def test_every_block_says_what_it_is():
    wrong = []
    for block in ALL:
        if block.language in COMMANDS and block.page != WRITTEN_BY_A_MODEL:
            is_marked = block.mark == "run" or re.fullmatch(r"not-run: \w.{8,}", block.mark)
            wrong += [] if is_marked else [f"{block}: want `run` or `not-run: why`, got {block.mark!r}"]
        elif not block.language:
            wrong.append(f"{block}: want a language")
    assert not wrong


def test_no_command_hides_in_an_indented_block():
    found = [
        f"{page.name}:{number}"
        for page in PAGES
        for number, line in prose(page)
        if re.match(r" {4,}(pilotfish|python|make|pip|curl|podman|docker) ", line)
    ]
    assert not found


class Parsed(Exception):
    """The flags were understood."""


@pytest.mark.parametrize("block, words", list(commands("pilotfish")), ids=str)
def test_flags_of_our_command_exist(block, words, monkeypatch):
    parse = Parser.parse_known_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_known_args", parse_only)
    given = list(itertools.takewhile(lambda word: word not in (">", ">>"), words[1:]))
    if given and given[0] in ("--help", "--version"):
        return
    with pytest.raises(Parsed):
        cli.main(given)


def test_targets_and_files_of_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    wrong = [f"{b}: make {w[1]}" for b, w in commands("make") if len(w) > 1 and w[1] not in targets]
    for block, words in commands("python"):
        if len(words) > 2 and words[1] == "-m":
            module = ROOT / words[2].removeprefix("pilotfish.").replace(".", "/")
            known = module.with_suffix(".py").exists() or module.is_dir() or words[2] in ("venv", "pip", "pytest")
            wrong += [] if known else [f"{block}: -m {words[2]}"]
        elif len(words) > 1 and words[1].endswith(".py") and not (ROOT / words[1]).exists():
            wrong.append(f"{block}: {words[1]}")
    assert not wrong


def test_flags_in_running_text_are_of_some_program():
    """Of one of ours: it stands in a source, quoted; or of one that is named in OTHERS_FLAGS."""
    rooms = ("deploy", "draft_heads", "engine", "server", "tests", "demo")
    sources = "".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py") if path != SELF)
    spans = [
        (page.name, span) for page in PAGES for span in re.findall(SPAN, " ".join(line for _, line in prose(page)))
    ]
    flags = {(page, flag) for page, span in spans for flag in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", span)}
    assert len(flags) > 150
    known = OTHERS_FLAGS | {flag for _, flag in flags if f'"{flag}"' in sources or f'"{positive(flag)}"' in sources}
    assert not sorted((page, flag) for page, flag in flags if flag not in known)


def positive(flag):
    """The name that argparse makes --no-NAME of."""
    return flag.replace("--no-", "--", 1)


def test_links_lead_somewhere():
    wrong = []
    for page in PAGES:
        for number, target in links(page):
            if re.match(r"https?:|mailto:", target):
                continue
            name, _, anchor = target.partition("#")
            path = page if not name else (page.parent / name).resolve()
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                wrong.append(f"{page.name}:{number}: {target}")
    assert not wrong


def test_a_name_that_is_said_to_be_in_a_file_of_ours_is_there():
    """`NAME` in some/file.py, or the two the other way round, with its folder or without. Tests are not ours here."""
    ours = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in (".venv", "tests")]
    said = []
    for page in PAGES:
        text = page.read_text()
        said += [(page.name, *pair) for pair in re.findall(r"`([\w.]+)` in `?([\w/]+\.py)", text)]
        said += [(page.name, name, path) for path, name in re.findall(r"`([\w/]+\.py)`\s`(\w+)`", text)]
    assert len(said) > 20
    wrong = []
    for where, name, path in said:
        named = [one for one in ours if f"/{one.relative_to(ROOT).as_posix()}".endswith(f"/{path}")]
        wrong += [] if any(name in one.read_text() for one in named) else [f"{where}: {name} in {path}"]
    assert not wrong


def test_every_page_is_linked_from_the_first_one():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        todo += [
            (page.parent / target.partition("#")[0]).resolve()
            for _, target in links(page)
            if not target.startswith(("http", "#"))
        ]
    assert not set(PAGES) - reached


def test_lines_fit_a_screen():
    """But for rows of tables, and what a program wrote."""
    wide = [
        f"{page.name}:{number}"
        for page in PAGES
        for number, line in prose(page)
        if len(line) > MOST_COLUMNS and not line.startswith("|")
    ]
    wide += [
        str(b) for b in ALL if b.language != "text" and max(map(len, b.text.splitlines()), default=0) > MOST_COLUMNS
    ]
    assert not wide, "python -m tests.support.documents breaks those of prose"


def test_breaking_lines_moves_no_word_and_leaves_blocks_and_tables():
    long = "word " * 40
    page = (
        f"# A heading {long}\n\n{long}\n{long}\n\n- {long}\n  goes on\n- short\n\n| {long} |\n\n```text\n{long}\n```\n"
    )
    after = wrapped(page)
    assert after.split() == page.split()
    lines = after.splitlines()
    assert [line.split()[0] for line in lines if len(line) > MOST_COLUMNS] == ["#", "|", "word"]
    assert sum(line.startswith("- ") for line in lines) == 2 and "\n  goes on\n" not in after
    assert wrapped(after) == after
