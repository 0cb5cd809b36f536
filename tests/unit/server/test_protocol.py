"""Bodies to requests: every refusal is a 400 that names the field; nothing is ignored silently."""

import json

import msgspec
import pytest

from pilotfish.server import dialects, unused
from pilotfish.server.chat.history import check_messages
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.completions.request import CompletionRequest
from pilotfish.server.errors import ApiError, BadRequest, Overloaded, from_status
from pilotfish.server.fields import FieldNotes
from pilotfish.server.messages.request import MessagesRequest
from pilotfish.server.protocol import NOT_YET, decode_request
from pilotfish.server.responses.request import ResponsesRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def decode(kind=CompletionRequest, notes=None, **fields):
    base = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "hi"}
    return decode_request(json.dumps({**base, **fields}).encode(), kind, notes or FieldNotes())


def refusal(body, kind=CompletionRequest, strict=False):
    with pytest.raises(BadRequest) as caught:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        decode_request(text, kind, FieldNotes(strict=strict))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, 2.1, "1", True, [], {})),
        *(("top_p", v) for v in (-0.1, -1, 1.01, "x")),
        *(("top_k", v) for v in (-2, 1.5, 10**30)),
        *(("min_p", v) for v in (-0.1, 1.1)),
        *(("presence_penalty", v) for v in (-2.1, 2.1)),
        *(("frequency_penalty", v) for v in (-2.1, 2.1)),
        *(("repetition_penalty", v) for v in (0, -1, 11)),
        *(("max_tokens", v) for v in (-2, 1.5, 10**30, "7")),
        *(("n", v) for v in (0, -1, 129)),
        *(("seed", v) for v in (2**63, -(2**63) - 1, 0.5)),
        *(("stop", v) for v in ("", [""], [1], ["a"] * 65, "x" * 1025)),
        *(("stop_token_ids", v) for v in ([-1], ["a"], list(range(33)))),
        *(("min_tokens", v) for v in (-1,)),
        *(("logprobs", v) for v in (-1, 21, True)),
        *(("logit_bias", v) for v in ({"1": 101}, {"1": "a"}, [])),
        *(("stream", v) for v in ("yes", 1)),
        *(("stream_options", v) for v in ([], "x")),
        *(("model", v) for v in (1, [])),
        *(("prompt", v) for v in (1, {}, True)),
        *(("ignore_eos", v) for v in (1, "x")),
    ],
)
def test_bad_values_name_their_field(field, value):
    assert refusal({"prompt": "hi", field: value}).param.split("[")[0].split(".")[0] == field


def test_types_have_the_names_of_json():
    assert refusal({"prompt": "hi", "stream": "yes"}).message == (
        "Invalid 'stream': Expected `boolean | null`, got `string`."
    )
    assert refusal({"prompt": 1.5}).message == "Invalid 'prompt': Expected `string | array | null`, got `number`."


@pytest.mark.parametrize("field", ["temperature", "top_p", "n", "seed", "stop", "max_tokens", "stream", "logit_bias"])
def test_null_means_absent(field):
    assert getattr(decode(**{field: None}), field) is None


def test_a_byte_order_mark_is_no_part_of_a_body():
    assert decode_request(b'\xef\xbb\xbf{"prompt": "hi"}', CompletionRequest).prompt == "hi"


def test_a_whole_number_is_an_integer_however_it_is_written():
    request = decode(max_tokens=7.0, seed=-1.0, top_k=5.0, temperature=1.0)
    assert (request.max_tokens, request.seed, request.top_k, request.temperature) == (7, -1, 5, 1.0)
    assert refusal({"prompt": "x", "max_tokens": 1e300}).param == "max_tokens"


def test_edges_of_ranges_are_in():
    request = decode(
        temperature=2,
        top_p=1,
        top_k=-1,
        min_p=1,
        presence_penalty=-2,
        n=128,
        seed=-(2**63),
        logprobs=20,
        stop=["a"] * 64,
    )
    assert request.temperature == 2.0
    assert request.seed == -(2**63)
    assert decode(seed=2**63 - 1, temperature=0).seed == 2**63 - 1


def test_unknown_fields_are_let_through_and_told():
    notes = FieldNotes()
    body = {"prompt": "hi", "no_such_thing": 2, "stream": True, "stream_options": {"pace": 3, "none": None}}
    assert decode_request(json.dumps(body).encode(), CompletionRequest, notes).prompt == "hi"
    assert notes.ignored == ["no_such_thing", "stream_options.pace"]
    error = refusal(body, strict=True)
    assert (error.param, error.code) == ("no_such_thing", "unknown_parameter")
    # what belongs to the other endpoint is unknown here
    assert refusal({"prompt": "hi", "messages": []}, strict=True).param == "messages"


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"max_token": 5}, "max_token", "max_tokens"),
        ({"max_tokens": 5, "max_token": 5}, "max_token", "max_tokens"),
        ({"temprature": 1}, "temprature", "temperature"),
        ({"tempreature": 1}, "tempreature", "temperature"),
        ({"maxTokens": 5}, "maxTokens", "max_tokens"),
        ({"topP": 0.5}, "topP", "top_p"),
        ({"stop_tokens_id": [1]}, "stop_tokens_id", "stop_token_ids"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
    ],
)
def test_a_misspelling_is_refused_and_the_right_name_said(body, param, meant):
    error = refusal({"prompt": "hi", **body})
    assert (error.param, error.code) == (param, "unknown_parameter")
    assert f"Did you mean '{meant}'?" in error.message


@pytest.mark.parametrize("field", sorted(unused.FIELDS))
def test_fields_for_the_callers_own_records_are_accepted(field):
    counted = []
    for body, kind in (({"prompt": "hi", field: "x"}, CompletionRequest), ({"messages": [], field: {}}, ChatRequest)):
        decode_request(json.dumps(body).encode(), kind, FieldNotes(on_unused=counted.append))
        decode_request(json.dumps({**body, field: None}).encode(), kind, FieldNotes(on_unused=counted.append))
    assert counted == [field, field]


def test_what_has_no_effect_inside_other_fields_is_counted_too():
    counted = []
    tools = [{"type": "function", "function": {"name": name, "strict": name == "f"}} for name in "fgh"]
    content = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "y"}]
    body = {"messages": [{"role": "user", "content": content}, {"role": "user", "content": "z"}], "tools": [*tools, 1]}
    decode_request(json.dumps(body).encode(), ChatRequest, FieldNotes(on_unused=counted.append))
    assert sorted(counted) == ["cache_control", "tools.strict"]
    decode_request(json.dumps({**body, "mood": 1}).encode(), ChatRequest, FieldNotes(on_unused=counted.append))
    assert sorted(counted)[-1] == "unknown" and set(counted) <= set(unused.NAMES)


@pytest.mark.parametrize("field", sorted(NOT_YET))
@pytest.mark.parametrize("strict", [False, True])
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(field, strict):
    kind = ChatRequest if field not in ChatRequest.__struct_fields__ else CompletionRequest
    for harmless in NOT_YET[field]:
        decode(kind, FieldNotes(strict=strict), **{field: harmless})
    body = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "hi"}
    error = refusal({**body, field: {"type": "something"}}, kind, strict)
    assert error.param == field
    assert "not supported" in error.message


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"nul", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"temperature": NaN}', b'{"temperature": Infinity}'),
        *(b'{"temperature": 1e999}', b'{"max_tokens": ' + b"9" * 5000 + b"}", b"[" * 70_000, b"{" * 70_000),
        *(b'{"prompt": ' + b"[" * 50_000 + b"]" * 100_000 + b"}", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        *(
            rb'{"prompt": "\ud8zz lone"}',
            rb'{"prompt": "\ud800',
            b"{} {}",
            b"'x'",
        ),
    ],
)
def test_broken_json_is_a_400(body):
    assert refusal(body).code in ("invalid_json", "invalid_value")


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"x"', b"true"])
def test_bodies_that_are_no_object(body):
    assert refusal(body).code == "invalid_json"


def test_a_missing_field_is_named():
    assert refusal({}, ChatRequest).param == "messages"


def test_stream_options_inside():
    assert decode(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    assert refusal({"prompt": "x", "stream_options": {"usage": 1}}, strict=True).param == "stream_options.usage"
    assert refusal({"prompt": "x", "stream_options": {"include_usage": "x"}}).param == "stream_options.include_usage"


def test_errors_have_openais_shape():
    body = msgspec.json.decode(BadRequest("no", param="n", code="c").body())
    assert body == {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}}
    assert "?" in msgspec.json.decode(BadRequest("\ud800", param="\udcff").body())["error"]["message"]
    assert len(BadRequest("x" * 10**6).body()) < 3000
    assert Overloaded("full").headers == {"Retry-After": "1"}
    assert (ApiError("x").status, ApiError("x").type) == (500, "server_error")
    assert from_status(413, "big").reason == "too_large"
    assert from_status(404, "").type == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), [("best_of", True), ("use_beam_search", 0)])
def test_true_is_not_one(field, value):
    assert refusal({"prompt": "hi", field: value}).param == field


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [%s]}' % b",".join([b"[]"] * 250_000),
        b'{"prompt": [%s]}' % b",".join([b"7"] * 310_000),
        b'{"prompt": [%s]}' % b",".join([b'"a,["'] * 310_000),
        b'{"prompt": %s}' % (b'{"a":' * 300_000),
        b'{"prompt": [%s]}' % b",".join([b'"\\\\"', b"[]"] * 250_000),
    ],
    ids=["lists", "numbers", "strings", "depth", "escapes"],
)
def test_bodies_of_too_many_values_are_refused_before_they_are_decoded(body, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("decoded"))
    assert refusal(body).code == "too_many_values"


@pytest.mark.parametrize("text", ["," * 1_100_000, "[{" * 200_000, '\\",[' * 300_000, "\\" * 9 + "[" * 300_000])
def test_what_stands_in_a_string_is_one_value(text):
    assert decode(prompt=text).prompt == text
    assert decode(prompt=[text, "[,"]).prompt == [text, "[,"]


def test_arguments_in_a_history_are_bounded_too():
    """What would take long to decode stays the text that it is."""
    text = json.dumps({"a": [[]] * 250_000})
    call = {"id": "c", "function": {"name": "f", "arguments": text}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [call]}], FieldNotes())
    assert message["tool_calls"][0]["function"]["arguments"] == {"arguments": text}


ROUTER = {
    "no_stop_trim": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
    "logprobs": False,
}
"""What vllm-router 0.1.17 puts into every chat."""


def test_what_a_router_adds_is_known():
    notes = FieldNotes(strict=True)
    decode(ChatRequest, notes, **ROUTER)
    assert notes.ignored == []


@pytest.mark.parametrize(("name", "own"), sorted(dialects.CHAT.items()))
def test_other_services_names_mean_ours(name, own):
    value = {"guided_regex": "a+", "guided_grammar": "x", "include_stop_str_in_output": True}.get(own, 2)
    strict = FieldNotes(strict=True)
    assert getattr(decode(ChatRequest, strict, **{name: value}), own) == value
    assert getattr(decode(ChatRequest, strict, **{name: "x", own: value}), own) == value
    if not own.startswith("guided"):
        error = refusal({"messages": MESSAGES, name: "x"}, ChatRequest)
        assert error.param == name and name in error.message


@pytest.mark.parametrize("name", dialects.BEGUN)
def test_an_answer_that_says_it_is_begun_is_gone_on_with(name):
    begun = {"role": "assistant", "content": "x", name: True}
    request = decode(ChatRequest, FieldNotes(strict=True), messages=[*MESSAGES, begun], continue_final_message=False)
    assert request.continue_final_message and request.messages[-1] == {"role": "assistant", "content": "x"}
    for other in ([*MESSAGES, {**begun, name: False}], [*MESSAGES, begun, *MESSAGES], [{**MESSAGES[0], name: True}]):
        assert not decode(ChatRequest, messages=other).continue_final_message


@pytest.mark.parametrize("name", ["min_tokens", "mode", "top_a", "typical", "typ_p"])
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest])
def test_names_of_other_services_are_no_misspellings(kind, name):
    body = {"messages": MESSAGES, "prompt": None, "input": "x", "max_tokens": 1, name: 0 if name == "top_a" else 1}
    decode_request(json.dumps(body).encode(), kind)


def test_openrouters_usage_and_dashscopes_switch():
    streamed = decode(ChatRequest, FieldNotes(strict=True), usage={"include": True}, stream=True)
    assert streamed.stream_options.include_usage
    assert decode(ChatRequest, usage={"include": True}).stream_options is None
    switched = decode(ChatRequest, FieldNotes(strict=True), preserve_thinking=True, chat_template_kwargs={"a": 1})
    assert switched.chat_template_kwargs == {"preserve_thinking": True, "a": 1}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00 x", "\ufffd x"),
        (rb"\ud83d\u0041", "\ufffdA"),
        (rb"\ud83d\ude00\ude00", "\U0001f600\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\\\\ud83d", "\\\\\ufffd"),
        (rb"\\ud83d\ud83d", "\\ud83d\ufffd"),
    ],
)
def test_halves_of_characters_are_replaced(written, read):
    """JavaScript cuts a tool's output between them: it stands in the history ever after."""
    assert decode_request(b'{"prompt": "%s"}' % written, CompletionRequest).prompt == read
