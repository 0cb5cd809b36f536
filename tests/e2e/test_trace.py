"""`speculation.trace`: of each token the round and whose it was, held against what the scripted engine was told."""

import openai
import pytest
from serving import PATIENCE, script

TRACE = {"speculation": {"trace": True}}
REPLY = "abcdefghij"
# the prompt's token, then rounds of 3, 1, 3, 1, ..
RUNS = [("a", 0), ("b", 1), ("c", 1), ("d", 1), ("e", 2), ("f", 3), ("g", 3), ("h", 3), ("i", 4), ("j", 5)]
DRAFTS = {"b": 1, "c": 2, "f": 1, "g": 2, "j": None}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def token(text, number, origin=None):
    draft = DRAFTS.get(text)
    return {"text": text, "round": number, "origin": origin or ("draft" if draft else "trunk"), "draft": draft}


EXPECTED = [token(*entry) for entry in RUNS]


def ask(client, api, prompt, *, max_tokens=100, **fields):
    if api == "chat":
        return client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, **fields
        )
    return client.completions.create(model="scripted", prompt=prompt, max_tokens=max_tokens, **fields)


def of(choice):
    return (choice.model_extra or {}).get("trace")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_trace_is_what_the_engine_said(client, api):
    prompt = script(reply=REPLY, runs=[3, 1])
    assert of(ask(client, api, prompt, extra_body=TRACE).choices[0]) == EXPECTED
    told = []
    for chunk in ask(client, api, prompt, extra_body=TRACE, stream=True):
        for choice in chunk.choices:
            traced = of(choice)
            text = choice.delta.content if api == "chat" else choice.text
            # each event brings the tokens of its own text
            assert "".join(entry["text"] for entry in traced or []) == (text or "")
            told += traced or []
    assert told == EXPECTED


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_nobody_gets_a_trace_unasked(client, api):
    for extra in ({}, {"speculation": {"k": 3}}, {"speculation": {"trace": False}}):
        assert of(ask(client, api, script(reply=REPLY), extra_body=extra).choices[0]) is None
        assert all(
            of(choice) is None
            for chunk in ask(client, api, script(reply=REPLY), extra_body=extra, stream=True)
            for choice in chunk.choices
        )


def test_a_round_s_first_tokens_are_the_grammar_s_drafted_or_not(client):
    answer = ask(client, "completions", script(reply="abcdef", runs=[3, 1], forced=2), extra_body=TRACE)
    assert [(entry["text"], entry["origin"], entry["draft"]) for entry in of(answer.choices[0])] == [
        ("a", "trunk", None),
        ("b", "grammar", 1),
        ("c", "grammar", 2),
        ("d", "trunk", None),
        ("e", "grammar", None),
        ("f", "grammar", None),
    ]


def test_each_choice_has_its_own_rounds_and_a_character_comes_with_its_last_byte(client):
    answer = ask(client, "completions", script(reply="a€b", runs=[2]), extra_body=TRACE, n=2)
    expected = [("a", 0), ("", 1), ("", 1), ("€", 2), ("b", 2)]
    for choice in answer.choices:
        assert [(entry["text"], entry["round"]) for entry in of(choice)] == expected


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_character_that_the_limit_cuts_is_in_the_trace_as_in_the_text(client, api, size):
    prompt = script(reply="a€b", runs=[2])
    choice = ask(client, api, prompt, extra_body=TRACE, max_tokens=size).choices[0]
    text = choice.message.content if api == "chat" else choice.text
    assert text == {2: "a\ufffd", 3: "a\ufffd", 4: "a€"}[size] and len(of(choice)) == size
    assert "".join(entry["text"] for entry in of(choice)) == text
    chunks = ask(client, api, prompt, extra_body=TRACE, max_tokens=size, stream=True)
    assert [entry for chunk in chunks for one in chunk.choices for entry in of(one) or []] == of(choice)


def test_a_stop_string_cuts_the_trace_as_it_cuts_the_tokens(client):
    fields = {"extra_body": {**TRACE, "return_token_ids": True}, "stop": "fg"}
    choice = ask(client, "completions", script(reply=REPLY, runs=[3, 1]), **fields).choices[0]
    assert choice.text == "abcde"
    assert of(choice) == EXPECTED[: len(choice.model_extra["token_ids"])]


def test_a_chat_traces_what_is_thought_and_its_markers_too(client):
    reply = "Hm.</think>Yes"
    extra = {**TRACE, "chat_template_kwargs": {"enable_thinking": True}}
    choice = ask(client, "chat", script(reply=reply, runs=[4]), extra_body=extra).choices[0]
    assert choice.message.content == "Yes" and choice.message.model_extra["reasoning"] == "Hm."
    assert "".join(entry["text"] for entry in of(choice)) == reply


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"input": "x"}),
        ("/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    ],
)
def test_the_other_apis_refuse_it_by_name(client, path, body):
    with pytest.raises(openai.BadRequestError, match=r"speculation\.trace"):
        client.post(path, body={**body, **TRACE}, cast_to=object)
    client.post(path, body={**body, "speculation": {"trace": False}}, cast_to=object)


def test_a_trace_that_is_no_yes_or_no_is_a_400(client):
    with pytest.raises(openai.BadRequestError, match=r"speculation\.trace"):
        ask(client, "completions", "x", extra_body={"speculation": {"trace": "all"}})
