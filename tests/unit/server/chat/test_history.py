"""Chat messages: roles, text parts, and refusals that name the message."""

import contextlib
import json

import pytest

from pilotfish.server.chat import history
from pilotfish.server.chat.history import place_system
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
    assert refusal({"role": "user", "content": [None]}).message.endswith("got null.")
    assert refusal({"role": True}).message.endswith("got true.")


def test_names_and_reasoning_reach_the_template():
    message = {"role": "assistant", "content": "x", "name": "n", "reasoning_content": "r"}
    assert check_messages([message]) == [message]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "image", None, 7, [[1]], {}, ""])
def test_parts_other_than_text_are_refused(kind):
    error = refusal({"role": "user", "content": [{"type": kind, "url": "data:"}]})
    assert error.param == "messages[1].content[0].type"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name"),
        ({"role": "user", "content": "x", "nmae": "y"}, "messages[1].nmae"),
        *(
            ({"role": "assistant", "tool_calls": calls}, f"messages[1].tool_calls{where}")
            for calls, where in (
                (1, ""),
                ([1], "[0]"),
                ([{"type": "custom"}], "[0].function"),
                ([{"id": "a"}], "[0].function"),
                ([{"function": {"name": 7}}], "[0].function.name"),
                ([{"function": {"name": "f"}, "fucntion": 1, "tyep": 1}], "[0].tyep"),
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
    assert refusal({"role": "assistant", "content": "x", "function_call": {"name": 7}}).param


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


@pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": ""}]])
def test_a_message_of_nothing_is_an_empty_one(content):
    assert check_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("role", ["assistant", "tool", "system"])
def test_a_text_that_is_null_in_a_history_is_empty(role):
    message = {"role": role, "content": [None, {"type": "text", "text": None}, {"type": "text", "text": "x"}]}
    assert check_messages([message, {"role": "user", "content": "hi"}])[0]["content"] == "x"


def test_what_a_shell_gave_back_is_shown_as_it_came():
    lines = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    (result,) = check_messages([{"role": "tool", "content": lines}])
    assert json.loads(result["content"]) == lines[0]


@pytest.mark.parametrize("name", [None, ""])
def test_a_call_without_a_name_is_left_out_and_told(name):
    calls = [{"id": "a", "function": {"name": name, "arguments": ""}}, {"id": "b", "function": {"name": "f"}}]
    notes = FieldNotes()
    (answer,) = history.check_messages([{"role": "assistant", "tool_calls": calls}], notes)
    assert [call["id"] for call in answer["tool_calls"]] == ["b"]
    assert notes.ignored == ["messages.tool_calls"]
    (answer,) = check_messages([{"role": "assistant", "content": "x", "function_call": {"name": name}}])
    assert answer == {"role": "assistant", "content": "x"}


def test_both_names_of_reasoning():
    (message,) = check_messages([{"role": "assistant", "content": "x", "reasoning": "r"}])
    assert message["reasoning_content"] == "r"


LATE = ChatTemplate("{% for message in messages %}{{ message.role }};{% endfor %}")
STRICT = ChatTemplate(
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('first') }}{% endif %}{{ message.role }};{% endfor %}"
)


def test_late_system_messages_keep_their_place():
    """So that a prompt's beginning stays the same from turn to turn."""
    given = [
        {"role": role, "content": role[0] + str(number)}
        for number, role in enumerate(("system", "system", "user", "system", "assistant"))
    ]
    led = {"role": "system", "content": "s0\n\ns1"}
    assert place_system(given, LATE) == [led, *given[2:]]
    marked = {"role": "user", "content": "<system>\ns3\n</system>"}
    assert place_system(given, STRICT) == [led, given[2], marked, given[4]]
    assert place_system(given[2:3], STRICT) == given[2:3]
    assert STRICT.render(place_system(given, STRICT)) == "system;user;user;assistant;"
    for length in range(3, 6):
        assert place_system(given[:length], STRICT) == place_system(given, STRICT)[: length - 1]
    front = [{"role": "system", "content": "s0\n\ns1\n\ns3"}, given[2], given[4]]
    assert place_system(given, STRICT, "front") == place_system(given, LATE, "front") == front


def test_a_history_without_a_user_gets_one_where_the_template_wants_it():
    asks = ChatTemplate(
        "{% set ns = namespace(found=false) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}"
        "{% if not ns.found %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    )
    assert (asks.wants_user, LATE.wants_user, STRICT.wants_user) == (True, False, False)
    led, answered = {"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}
    empty = {"role": "user", "content": ""}
    assert place_system([led, answered], asks) == [led, empty, answered]
    assert place_system([led], asks) == [led, empty]
    assert place_system([answered, empty], asks) == [answered, empty]
    assert place_system([led, answered], LATE) == [led, answered]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"city": "Zür', {"arguments": '{"city": "Zür'}),
        ("[1]", {"arguments": "[1]"}),
        ('"x"', {"arguments": '"x"'}),
        ("1e999", {"arguments": "1e999"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        (r'{"a": "\ud800"}', {"arguments": r'{"a": "\ud800"}'}),
        ("{" * 200_000, {"arguments": "{" * 200_000}),
        ("null", {"arguments": "null"}),
        ("  ", {}),
        ([1], {"arguments": [1]}),
        (3, {"arguments": 3}),
    ],
)
def test_arguments_that_are_no_object_are_one_of_that_name(given, read):
    assert history.arguments_of(given) == read


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NOTE = "[image left out: only text can be read here]"


def test_what_is_no_text_becomes_a_note_but_in_the_users_newest_message():
    shown = {"role": "user", "content": [IMAGE, {"type": "text", "text": "what is it?"}]}
    with pytest.raises(BadRequest) as caught:
        check_messages([shown])
    assert caught.value.param == "messages[0].content[0].type"
    ask = {"role": "user", "content": "and now?"}
    noted = {"role": "user", "content": NOTE + "what is it?"}
    for later in ([ask], [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "a"}, ask]):
        assert check_messages([shown, *later])[0] == noted
    result = {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}
    assert check_messages([ask, result])[1]["content"] == NOTE
    # what a tool gave back comes in a message of the user's right after it
    assert check_messages([ask, result, shown])[2] == noted
    notes = FieldNotes()
    history.check_messages([ask, result], notes)
    assert notes.ignored == ["messages.content.image_url"]


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": {"a": "ö"}}, {"content": '{"a": "ö"}'}),
        ({"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "r"}]}, {"reasoning_content": "r"}),
        ({"content": "x", "reasoning_details": [{"type": "reasoning.text", "text": "r"}]}, {"reasoning_content": "r"}),
        ({"content": [{"type": "thinking", "thinking": "r"}]}, {"content": "", "reasoning_content": "r"}),
        ({"content": "x", "reasoning": "r", "reasoning_content": "r"}, {"reasoning_content": "r"}),
        ({"content": "x", "reasoning_content": {"a": 1}}, {"content": "x"}),
        ({"content": "x", "provider_specific_fields": {"a": 1}, "id": "m"}, {"content": "x"}),
        ({"content": "x", "annotations": [{}], "audio": {"id": "a"}, "name": 7}, {"content": "x"}),
    ],
)
def test_answers_of_other_services_are_read(answer, read):
    (message,) = check_messages([{"role": "assistant", **answer}])
    assert read.items() <= message.items()


def test_old_and_other_forms_of_calls_and_results():
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    new = {"role": "assistant", "tool_calls": [custom]}
    result = {"role": "function", "name": "f", "content": {"rain": True}}
    first, second, third = check_messages([old, result, new])
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert second == {"role": "tool", "name": "f", "content": '{"rain": true}'}
    assert third["tool_calls"][0]["function"] == {"name": "run", "arguments": {"input": "ls"}}


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
@pytest.mark.parametrize("kind", [[], [[1]], {}, {"a": 1}, 1, 1.5, True])
def test_a_part_whose_type_is_no_text_is_refused_by_name(role, kind):
    messages = [{"role": role, "content": [{"type": kind, "text": "x"}]}, {"role": "user", "content": "hi"}]
    with pytest.raises(BadRequest) as caught:
        check_messages(messages)
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("strange", [7, [[1]], {"a": 1}, True])
def test_wrong_types_anywhere_in_an_answer_raise_nothing_else(strange):
    """Not even where a part's type cannot be looked up."""
    texts = (
        "content",
        "reasoning_content",
        "refusal",
        "name",
        "tool_call_id",
        "function_call",
        "annotations",
        "thinking",
    )
    for name in texts:
        with contextlib.suppress(BadRequest):
            check_messages([{"role": "assistant", "content": "x", name: strange}])
    for name in ("type", "text", "thinking"):
        for kind in ("text", "thinking", "refusal"):
            with contextlib.suppress(BadRequest):
                check_messages([{"role": "assistant", "content": [{"type": kind, name: strange}]}])
    for name in ("id", "type", "function", "custom", "index"):
        with contextlib.suppress(BadRequest):
            call = {"id": "c", "type": "function", "function": {"name": "f"}, name: strange}
            check_messages([{"role": "assistant", "tool_calls": [call]}])
