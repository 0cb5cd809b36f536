"""Anthropic's blocks as chat messages: nothing that stands in a history is fatal."""

from types import SimpleNamespace

import pytest

from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.messages.history import chat_messages

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
NOTE = "[image left out: only text can be read here]"


def read(*messages, notes=None):
    given = [SimpleNamespace(role=role, content=content) for role, content in messages]
    return list(chat_messages(given, notes or FieldNotes()))


def result(*blocks, **fields):
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks), **fields}


def text(written):
    return {"type": "text", "text": written}


@pytest.mark.parametrize("block", [IMAGE, PDF, {"type": "container_upload"}])
def test_only_what_the_user_has_just_sent_is_refused(block):
    with pytest.raises(BadRequest) as caught:
        read(("user", [text("x"), block]))
    assert caught.value.param == f"messages[0].content[1].{block['type']}"
    notes = FieldNotes()
    (first, *_) = read(("user", [text("x"), block]), ("assistant", "a"), ("user", "y"), notes=notes)
    assert first["content"].startswith("x\n[") and "left out" in first["content"]
    assert notes.ignored == [f"messages.content.{block['type']}"]


def test_what_a_tool_gives_back_is_noted_in_the_same_turn():
    said = read(("user", "look"), ("assistant", [USE]), ("user", [result(text("a"), IMAGE), IMAGE]))
    assert said[2:] == [
        {"role": "tool", "tool_call_id": "t", "content": f"a\n{NOTE}"},
        {"role": "user", "content": NOTE},
    ]
    assert read(("user", [{**result(), "content": {"a": 1}}]))[0]["content"] == '{"a": 1}'
    assert read(("user", [{**result(), "content": None}]))[0]["content"] == ""


def test_documents_and_search_results_are_text():
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "data": "words"},
    }
    parts = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {"type": "search_result", "source": "http://x", "title": "S", "content": [text("c")]}
    (said,) = read(("user", [document, parts, found]))
    assert said["content"] == (
        '<document title="T">\nwords\n</document>\n<document>\na\nb\n</document>\n'
        '<search_result source="http://x" title="S">\nc\n</search_result>'
    )
    assert "<search_result" in read(("user", [result(found)]))[0]["content"]


def test_the_assistants_blocks():
    notes = FieldNotes()
    blocks = [
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        text("a"),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {**USE, "input": '{"city": "Zür', "caller": {"type": "direct"}},
    ]
    (message,) = read(("assistant", blocks), notes=notes)
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"arguments": '{"city": "Zür'}}}
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call]}
    assert notes.ignored == [
        f"messages.content.{kind}" for kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result")
    ]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(
    ("block", "param"),
    [({}, "type"), ({"type": "text", "text": 1}, "text"), ({"type": "text", "txt": "x"}, "txt")],
)
def test_malformed_blocks_are_named(role, block, param):
    with pytest.raises(BadRequest) as caught:
        read((role, [block]))
    assert caught.value.param == f"messages[0].content[0].{param}"


def test_a_text_that_is_null_is_empty_but_in_the_users_newest_message():
    null = {"type": "text", "text": None}
    assert read(("assistant", [null, text("a"), {"type": "thinking", "thinking": None}]))[0]["content"] == "a"
    assert read(("user", [result(null, text("a"))]))[0]["content"] == "\na"
    with pytest.raises(BadRequest) as caught:
        read(("user", [null]))
    assert caught.value.param == "messages[0].content[0].text"
