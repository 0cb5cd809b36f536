"""Chat messages: roles, text parts, and refusals that name the message."""

import pytest

from pilotfish.server.errors import BadRequest
from pilotfish.server.messages import check_messages


def refusal(message, **options):
    with pytest.raises(BadRequest) as caught:
        check_messages([{"role": "user", "content": "ok"}, message], **options)
    return caught.value


def test_developer_is_system():
    assert check_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"


def test_an_answer_can_be_sent_back_as_it_came():
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    assert check_messages([answer]) == [{"role": "assistant", "content": ""}]


def test_names_and_reasoning_reach_the_template():
    message = {"role": "assistant", "content": "x", "name": "n", "reasoning_content": "r"}
    assert check_messages([message]) == [message]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "image", None, 7])
def test_parts_other_than_text_are_refused(kind):
    error = refusal({"role": "user", "content": [{"type": kind, kind or "x": {"url": "data:"}}]})
    assert error.param == "messages[1].content[0].type"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name"),
        ({"role": "user", "content": "x", "mood": 1}, "messages[1].mood"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}, "messages[1].tool_calls"),
    ],
)
def test_bad_messages_name_the_field(message, param):
    assert refusal(message).param == param


def test_no_messages():
    with pytest.raises(BadRequest) as caught:
        check_messages([])
    assert caught.value.param == "messages"


def test_lenient_ignores_unknown_but_not_unsupported():
    assert check_messages([{"role": "user", "content": "x", "mood": 1}], ignore_unknown=True)
    assert refusal({"role": "assistant", "content": "x", "tool_calls": [1]}, ignore_unknown=True).param
