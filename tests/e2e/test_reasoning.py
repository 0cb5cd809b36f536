"""Reasoning beside content: whole and streamed, hidden, counted, sent back."""

import json
import urllib.request

import openai
import pytest
from serving import PATIENCE, script, serving_in_thread

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
REPLY = "Both € and 😀.\n</think>\n\nYes."


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def ask(client, reply=REPLY, *, runs=(3, 1, 4), extra=(), messages=(), **fields):
    prompt = [*messages, {"role": "user", "content": script(reply=reply, runs=list(runs))}]
    return client.chat.completions.create(
        model="scripted", messages=prompt, extra_body={**THINKING, **dict(extra)}, **fields
    )


def collect(chunks):
    reasoning, content = "", ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        extra = delta.model_extra or {}
        assert extra.get("reasoning") == extra.get("reasoning_content")
        assert not (delta.content and extra.get("reasoning")), "one kind a chunk"
        assert not (content and extra.get("reasoning")), "reasoning comes first"
        reasoning += extra.get("reasoning") or ""
        content += delta.content or ""
    return reasoning, content


@pytest.mark.parametrize("runs", [(1,), (3, 1, 4), (100,)])
def test_reasoning_has_both_names(client, runs):
    answer = ask(client, runs=runs)
    message = answer.choices[0].message
    assert message.reasoning == message.reasoning_content == "Both € and 😀."
    assert message.content == "Yes."
    assert answer.usage.completion_tokens == len(REPLY.encode())
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(REPLY.partition("</think>")[0].encode())
    assert collect(ask(client, runs=runs, stream=True)) == ("Both € and 😀.", "Yes.")


def test_reasoning_can_be_left_out_and_still_counts(client):
    hidden = {"include_reasoning": False}
    answer = ask(client, extra=hidden)
    assert not answer.choices[0].message.model_extra
    assert answer.choices[0].message.content == "Yes."
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(REPLY.partition("</think>")[0].encode())
    chunks = list(ask(client, extra=hidden, stream=True, stream_options={"include_usage": True}))
    assert collect(chunks[:-1]) == ("", "Yes.")
    assert chunks[-1].usage == answer.usage


def test_thinking_that_is_hidden_is_no_silence(server, monkeypatch):
    monkeypatch.setattr("pilotfish.server.handlers.HEARTBEAT_SECONDS", 0.5)
    body = {
        "messages": [{"role": "user", "content": script(reply="abcdefgh" * 25 + "</think>x", delay=0.01)}],
        "stream": True,
        "include_reasoning": False,
        **THINKING,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.v1 + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        events = response.read().decode().split("\n\n")
    # now and then, not with each token
    assert 2 <= events.count(": waiting") <= 100


def test_thinking_cut_off_is_reasoning(client):
    answer = ask(client, max_tokens=6)
    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == ("Both \ufffd", "")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6


def test_without_thinking_nothing_is_reasoning(client):
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(client, "a</think>b", extra=extra)
    assert answer.choices[0].message.content == "a</think>b" and not answer.choices[0].message.model_extra
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    # 303 is the token <think>
    prompt = script(ids=[303, *b"\na\n</think>\n\nb"], runs=[2])
    answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": prompt}])
    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == ("a", "b")


def test_stop_strings_count_in_the_answer(client):
    """A model that thinks of the word that is to end its answer must not end before it."""
    reply = "A simple one.\n</think>\n\nNot simple at all."
    for runs in ((1,), (3, 1, 4), (100,)):
        choice = ask(client, reply, runs=runs, stop=["simple"]).choices[0]
        assert (choice.message.reasoning, choice.message.content) == ("A simple one.", "Not ")
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "simple")
    choice = ask(client, reply, stop=["one"]).choices[0]
    assert (choice.message.content, choice.stop_reason) == ("Not simple at all.", None)


def test_as_in_vllm_they_end_the_whole_text_where_asked_for(client):
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "stop_in_reasoning": True}
    choice = ask(client, stop=["and"], extra=extra).choices[0]
    assert (choice.message.reasoning.strip(), choice.message.content) == ("Both €", "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "and")
    # a stop string across the markers is found in the text as it was written
    choice = ask(client, stop=[".\n</think>"], extra=extra).choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("Both € and 😀", "")


def test_a_call_inside_thinking(client):
    tool = {"type": "function", "function": {"name": "f"}}
    reply = "I call.\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
    for extra, reasoning in (({}, "I call."), ({"include_reasoning": False}, None)):
        choice = ask(client, reply, tools=[tool], extra=extra).choices[0]
        assert choice.message.tool_calls[0].function.name == "f" and choice.finish_reason == "tool_calls"
        assert getattr(choice.message, "reasoning", None) == reasoning


def test_reasoning_goes_back_to_the_template(client, server):
    message = ask(client).choices[0].message.model_dump(exclude_none=True)
    history = [{"role": "user", "content": "?"}, message]
    again = ask(client, messages=history, extra={"return_token_ids": True})
    prompt = server.service.files.tokenizer.decode(again.prompt_token_ids, skip_special_tokens=False)
    assert "assistant\n<think>\nBoth € and 😀.\n</think>\n\nYes.<|im_end|>" in prompt


def test_logprobs_are_those_of_all_tokens(client):
    answer = ask(client, logprobs=True, top_logprobs=1)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    chunks = ask(client, logprobs=True, top_logprobs=1, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == answer.choices[0].logprobs.content


def test_effort_none_is_no_thinking(client):
    answer = ask(client, "a</think>b", extra={"chat_template_kwargs": {}}, reasoning_effort="none")
    assert answer.choices[0].message.content == "a</think>b"
    thought = ask(client, "a</think>b", extra={"chat_template_kwargs": {}}, reasoning_effort="high")
    assert (thought.choices[0].message.content, thought.choices[0].message.reasoning_content) == ("b", "a")
    with pytest.raises(openai.BadRequestError, match="immense"):
        ask(client, reasoning_effort="immense")


def test_completions_are_text(client):
    assert (
        client.completions.create(model="scripted", prompt=script(reply="a</think>b")).choices[0].text == "a</think>b"
    )


def test_without_parsers_all_is_content(folder):
    files = {"reasoning_parser": "none", "tool_call_parser": "none"}
    with (
        serving_in_thread(folder, files=files) as running,
        openai.OpenAI(base_url=running.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as client,
    ):
        assert ask(client).choices[0].message.content == REPLY
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tools=[{"type": "function", "function": {"name": "f"}}])
        assert caught.value.param == "tools"
