"""Chat messages: roles, text parts, and refusals that name the message."""

import pytest

from pilotfish.server.chat import history
from pilotfish.server.chat.history import lead_with_system
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.text.chat_template import ChatTemplate


def check_messages(messages, **options):
    return history.check_messages(messages, FieldNotes(**options))


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


def test_what_came_is_told_as_json():
    assert refusal({"role": "user", "content": None}).message.endswith("got null.")
    assert refusal({"role": True}).message.endswith("got true.")


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
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": 1}, "messages[1].content"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name"),
        ({"role": "user", "content": "x", "nmae": "y"}, "messages[1].nmae"),
        *(
            ({"role": "assistant", "tool_calls": calls}, f"messages[1].tool_calls{where}")
            for calls, where in (
                (1, ""),
                ([1], "[0].type"),
                ([{"type": "custom"}], "[0].type"),
                ([{"id": "a"}], "[0].function.name"),
                ([{"function": {"name": ""}}], "[0].function.name"),
                ([{"function": {"name": "f"}, "id": 1}], "[0].id"),
                ([{"function": {"name": "f"}, "fucntion": 1, "tyep": 1}], "[0].tyep"),
                ([{"function": {"name": "f", "arguments": "{"}}], "[0].function.arguments"),
                ([{"function": {"name": "f", "arguments": "[1]"}}], "[0].function.arguments"),
                ([{"function": {"name": "f"}}, {"function": {"name": "f", "arguments": 1}}], "[1].function.arguments"),
            )
        ),
    ],
)
def test_bad_messages_name_the_field(message, param):
    assert refusal(message).param == param


def test_no_messages():
    with pytest.raises(BadRequest) as caught:
        check_messages([])
    assert caught.value.param == "messages"


def test_unknown_fields_are_told_unsupported_ones_refused():
    notes = FieldNotes()
    call = {"id": "c", "function": {"name": "f"}, "mood": 1}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x", "mood": 1}]
    assert history.check_messages(messages, notes)
    assert notes.ignored == ["messages.tool_calls.mood", "messages.mood"]
    assert refusal(messages[1], strict=True).param == "messages[1].mood"
    assert refusal({"role": "assistant", "content": "x", "function_call": {}}).param


def test_calls_reach_the_template_with_arguments_as_objects():
    def sent(arguments):
        call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}
        (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message["content"] == ""
        return message["tool_calls"]

    expected = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "x"]}}}]
    assert sent('{"a": [1, "x"]}') == sent({"a": [1, "x"]}) == expected
    assert [call["function"]["arguments"] for given in ("", "{}", None) for call in sent(given)] == [{}, {}, {}]


def test_results_of_tools():
    message = {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "c"}
    assert check_messages([message]) == [{"role": "tool", "content": "42", "tool_call_id": "c"}]
    assert check_messages([{"role": "tool", "content": []}])[0]["content"] == ""


def test_both_names_of_reasoning():
    (message,) = check_messages([{"role": "assistant", "content": "x", "reasoning": "r"}])
    assert message["reasoning_content"] == "r"


def test_system_messages_lead_where_the_template_wants_it():
    late = ChatTemplate("{% for message in messages %}{{ message.role }};{% endfor %}")
    strict = ChatTemplate(
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}{{ message.role }};{% endfor %}"
    )
    assert (late.takes_late_system, strict.takes_late_system) == (True, False)
    given = [
        {"role": role, "content": role[0] + str(number)}
        for number, role in enumerate(("system", "developer", "user", "system", "assistant"))
    ]
    assert lead_with_system(given, late) == given
    assert lead_with_system(given, strict) == [{"role": "system", "content": "s0\n\nd1\n\ns3"}, given[2], given[4]]
    assert lead_with_system(given[2:3], strict) == given[2:3]
    assert strict.render(lead_with_system(given, strict)) == "system;user;assistant;"
