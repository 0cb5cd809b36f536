"""Names and defaults in the pages' running text are the code's: a word in code type that no source has is a slip, or
what is left of something that went."""

import argparse
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pilotfish.engine.command_line.parser import Parser
from pilotfish.metrics.collectors import Collector
from pilotfish.server import cli
from pilotfish.server.http.openapi import OPERATIONS
from tests.support.documents import PAGES, ROOT, blocks, prose

FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
TEXTS = (".py", ".js", ".mjs", ".html", ".yaml", ".yml", ".cfg", ".conf", ".sh", ".service", ".toml", ".json", ".css")
SELF = Path(__file__).relative_to(ROOT)
ROOMS = ("spec", "kernels", "draft_heads", "engine", "server", "metrics", "deploy", "demo", "tests", "docs")
SPANS = [
    (f"{page.relative_to(ROOT)}:{number}", span)
    for page in PAGES
    for number, line in prose(page)
    for span in re.findall(r"`([^`]+)`", line)
]
ELSEWHERE = {
    *("SSL_CERT_FILE", "O_DIRECT", "POSIX_FADV_WILLNEED", "overcommit_memory"),  # Python, Linux
    *("kv_aware", "power_of_two"),  # routers
    *("mcp_list_tools", "text_editor_"),  # OpenAI, Anthropic
    *("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod", "CompressedTensorsW8A8Fp8"),  # vLLM
    *("CompressedTensorsW8A8Fp8MoEMethod", "ModelOptNvFp4FusedMoE", "Qwen3_5MTP", "Qwen3_5MoeMTP"),
    "split_qwen3_5_mtp",  # mlx-vlm
    *("my_task", "GROUP__NAME", "test_rejects_float_ids"),  # examples
}
"""Names of other programs."""
OTHERS_PATHS = {
    *("/add_worker", "/remove_worker", "/workers", "/workers/ID"),  # routers
    "/v1/models/NAME",
}


def names(path):
    """Words of a source, and what makes up its name."""
    return {*re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")), path.stem}


@pytest.fixture(scope="module")
def words():
    found = {SELF.stem}
    for file in map(Path, FILES):
        if file.suffix in TEXTS and file != SELF and not str(file).startswith("demo/model/"):
            found |= names(file)
    return found


def metric_names():
    registry = CollectorRegistry()
    Collector(registry)
    return {sample.name for family in registry.collect() for sample in family.samples} | {
        family.name + end
        for family in registry.collect()
        for end in (("_total",) if family.type == "counter" else ("", "_bucket", "_sum", "_count"))
    }


def test_metrics_that_are_named_exist():
    known = metric_names()
    found = {(at, name) for at, span in SPANS for name in re.findall(r"\bpilotfish_\w+", span)}
    assert len(found) > 10
    assert not sorted((at, name) for at, name in found if name not in known and not name.endswith("_"))


def test_names_in_code_type_stand_in_the_sources(words):
    known = words | ELSEWHERE | metric_names() | {name.removeprefix("pilotfish_") for name in metric_names()}
    wrong = [
        (at, name)
        for at, span in SPANS
        for name in re.findall(r"(?<![\w\\])[A-Za-z][A-Za-z0-9_]*", span)
        if ("_" in name.strip("_") or re.search(r"[a-z][A-Z]", name))
        and name not in known
        # a name's beginning, `web_search_...`, or its end
        and not any(word.startswith(name) for word in known if name.endswith("_"))
    ]
    assert not wrong


def test_files_that_are_named_exist():
    folders = {str(parent) for file in FILES for parent in Path(file).parents}
    commands = [(str(b), f"{b.mark} {b.text}") for page in PAGES for b in blocks(page) if b.language == "sh"]
    wrong = []
    for at, span in SPANS + commands:
        for word in re.findall(r"(?<![\w/.~$-])[\w.@-]+(?:/[\w.@-]+)*/?", span):
            path = word.rstrip("/.")
            is_ours = path.split("/")[0] in ROOMS and "/" in path
            is_file = path.endswith((".py", ".sh", ".mjs")) and path != ".py"
            if not (is_ours or is_file) or path in folders:
                continue
            if not any(file in (path, f"{path}.py") or file.endswith(f"/{path}") for file in FILES):
                wrong.append((at, path))
    assert not wrong


def test_endpoints_that_are_named_are_served():
    served = {operation.path for operation in OPERATIONS}
    found = {
        (at, path)
        for at, span in SPANS
        for path in re.findall(r"(?:(?<=GET )|(?<=POST )|(?<![\w.:}])(?=/v1/\w))(/[\w./]*\w)(?![\w/])", span)
    }
    assert len({path for _, path in found}) > 10
    assert not sorted((at, path) for at, path in found if path not in served | OTHERS_PATHS)


def defaults():
    """Of the flags of all commands; one that has several is held to any of them."""
    parsers = []

    def stop(self, args=None, namespace=None):
        parsers.append(self)
        raise SystemExit

    commands = next(a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parsers += [commands.choices[name] for name in ("serve", "generate")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Parser, "parse_known_args", stop)
        for name in cli.OWN_PARSERS:
            with pytest.raises(SystemExit):
                cli.main([name])
    found = {}
    for action in (action for parser in parsers for action in parser._actions):
        for flag in action.option_strings:
            found.setdefault(flag, []).append(action.default)
    return found


def test_defaults_that_are_given_behind_a_flag_are_its_own():
    """`--flag` (3), `--flag` seconds (10): the number is the default."""
    known, seen, wrong = defaults(), 0, []
    for page in PAGES:
        text = " ".join(line for _, line in prose(page))
        for flag, number in re.findall(r"`(--[a-z][\w-]*)[^`]*` (?:\w+ )?\((\d+(?:\.\d+)?)(?: (?:s|%))?\)", text):
            if flag in known:
                seen += 1
                wrong += [] if float(number) in known[flag] else [(page.name, flag, number, known[flag])]
    assert seen >= 10
    assert not wrong
