"""docs/api.md says of every field what the code does with it."""

import re
from pathlib import Path

import pytest

from pilotfish.server import dialects, unused
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.messages.request import CountTokensRequest, MessagesRequest
from pilotfish.server.protocol import DetokenizeRequest, TokenizeRequest
from pilotfish.server.responses.request import ResponsesRequest

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()


def table(heading):
    """{field: [what each endpoint does]}"""
    section = TEXT.split(heading)[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    fields = {}
    for names, *marks in rows[1:]:
        for name in re.findall(r"`(\w+)`", names):
            assert name not in fields, f"{name} twice"
            fields[name] = marks[:-1]
    return fields


def expected(field, kind, others):
    if field in kind.__struct_fields__ or field not in others:
        return "=" if field in kind.__struct_fields__ else ""
    return "0" if field in kind.UNUSED else "400" if field in kind.REFUSED else ""


@pytest.mark.parametrize(
    ("heading", "kinds", "with_others"),
    [
        ("## POST /v1/completions", (CompletionRequest, ChatRequest), True),
        ("## POST /v1/responses and", (ResponsesRequest,), True),
        ("## POST /v1/messages", (MessagesRequest, CountTokensRequest), True),
        ("## POST /tokenize", (TokenizeRequest, DetokenizeRequest), False),
    ],
)
def test_the_matrix_is_what_the_code_does(heading, kinds, with_others):
    others = {*kinds[0].REFUSED, *kinds[0].UNUSED} if with_others else set()
    fields = others.union(*(kind.__struct_fields__ for kind in kinds))
    assert table(heading) == {field: [expected(field, kind, others) for kind in kinds] for field in fields}


def test_counted_names_are_in_the_docs():
    for name in unused.NAMES:
        assert f"`{name}`" in TEXT


def test_other_services_names_are_in_the_docs():
    section = TEXT.split("## Other services' names")[1]
    assert {*dialects.CHAT, *dialects.SWITCHES, "usage"} <= set(re.findall(r"`(\w+)", section))
