"""The official client, unmodified: what it sends we take, what we answer it parses."""

import asyncio
import json
import urllib.request

import openai
import pytest
from serving import PATIENCE, script

EURO = "Hello € 😀 there STOP and more"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def ask(reply=EURO, **commands):
    return [{"role": "user", "content": script(reply=reply, **commands)}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["scripted", "alias"]
    assert client.models.retrieve("alias").max_model_len == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    answer = client.chat.completions.create(model="scripted", messages=ask(runs=[4]), seed=7)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert answer.model == "scripted" and answer.system_fingerprint and answer.seed == 7
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", EURO, "stop")
    size = len(EURO.encode())
    assert answer.usage.completion_tokens == size
    assert answer.usage.total_tokens == size + answer.usage.prompt_tokens
    # one token by prefill, then rounds of 4 out of 3 drafts, the last one shorter
    rounds = [4] * ((size - 1) // 4) + [(size - 1) % 4] * ((size - 1) % 4 > 0)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == sum(count - 1 for count in rounds)
    assert details.rejected_prediction_tokens == 3 * len(rounds) - details.accepted_prediction_tokens


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="alias", messages=ask(runs=[1, 2], delay=0.02), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(EURO.encode())
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == EURO
    assert len([text for text in texts if text]) > 3
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]


def test_continuous_usage_grows_with_the_text(client):
    """vLLM's option; load generators ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chat in (True, False):
        if chat:
            chunks = list(
                client.chat.completions.create(
                    model="scripted", messages=ask(runs=[3], delay=0.05), stream=True, stream_options=options
                )
            )
        else:
            prompt = script(reply=EURO, runs=[3], delay=0.05)
            chunks = list(
                client.completions.create(
                    model="scripted", prompt=prompt, max_tokens=99, stream=True, stream_options=options
                )
            )
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and len(set(counts)) > 1
        assert counts[-2] == counts[-1] == len(EURO.encode())
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_any(client):
    chunks = list(client.chat.completions.create(model="scripted", messages=ask(), stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("usage", [False, True])
def test_the_events_of_a_stream_byte_by_byte(server, usage):
    body = {"prompt": script(reply="ab", runs=[1]), "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        server.v1 + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache, no-transform"
        assert response.headers["X-Accel-Buffering"] == "no"
        *events, done, end = response.read().decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    # asked for, every chunk has the field, null but in the last
    assert [chunk.get("usage", "absent") is None for chunk in chunks[:-1]] == [usage] * (len(chunks) - 1)
    assert ("usage" in chunks[-1]) == usage


def test_completion_and_its_stream_agree(client):
    prompt = script(reply=EURO, runs=[3], delay=0.02)
    whole = client.completions.create(model="scripted", prompt=prompt, max_tokens=99)
    assert whole.id.startswith("cmpl-") and whole.choices[0].text == EURO
    parts = client.completions.create(model="scripted", prompt=prompt, max_tokens=99, stream=True)
    assert "".join(part.choices[0].text for part in parts) == EURO


@pytest.mark.parametrize("runs", [[1], [2], [3], [4], [1, 4, 2]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_text_usage_and_logprobs_alike_for_every_run(client, runs, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(
        model="scripted",
        prompt=script(reply=EURO, runs=runs),
        max_tokens=99,
        stop=["STOP", "never"],
        logprobs=1,
        stream=stream,
        **options,
    )
    if stream:
        chunks = list(answer)
        usage, choices = chunks[-1].usage, [chunk.choices[0] for chunk in chunks[:-1]]
    else:
        usage, choices = answer.usage, answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert text == "Hello € 😀 there "
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "STOP")
    # one token a byte: usage and log-probabilities end where the text ends
    assert usage.completion_tokens == len(tokens) == len(text.encode())
    assert tokens[-2:] == ["e", " "] and offsets == sorted(offsets)


def test_max_tokens_is_never_passed(client):
    for limit in range(1, 9):
        answer = client.completions.create(
            model="scripted", prompt=script(reply="abcdefgh" * 3, runs=[4]), max_tokens=limit
        )
        assert answer.choices[0].text == ("abcdefgh" * 3)[:limit]
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", limit)


def test_text_cut_inside_a_character_is_never_half_shown(client):
    answer = client.completions.create(model="scripted", prompt=script(reply="a€"), max_tokens=3)
    assert answer.choices[0].text == "a\ufffd"
    parts = client.completions.create(model="scripted", prompt=script(reply="a€b"), max_tokens=9, stream=True)
    assert "".join(part.choices[0].text for part in parts) == "a€b"


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="scripted", messages=ask("h€", runs=[2]), logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[104], [0xE2], [0x82], [0xAC]]
    assert content[0].token == "h" and content[0].logprob == -0.25
    assert [top.token for top in content[0].top_logprobs] == ["h", "i"]
    stream = client.chat.completions.create(
        model="scripted", messages=ask("h€", runs=[2]), logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == content


def test_several_choices_share_the_seed_and_are_numbered(client, server):
    answer = client.chat.completions.create(model="scripted", messages=ask("abc"), n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["abc"] * 3
    assert answer.usage.completion_tokens == 9
    stream = client.chat.completions.create(model="scripted", messages=ask("abc"), n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "abc", 1: "abc"}


def test_several_prompts_and_choices(client):
    prompts = [script(reply="one"), script(reply="two")]
    answer = client.completions.create(model="scripted", prompt=prompts, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
    ]
    ids = client.completions.create(model="scripted", prompt=[list(prompt.encode()) for prompt in prompts])
    assert [choice.text for choice in ids.choices] == ["one", "two"]


def test_echo(client):
    prompt = script(reply="out")
    assert client.completions.create(model="scripted", prompt=prompt, echo=True).choices[0].text == prompt + "out"
    parts = client.completions.create(model="scripted", prompt=prompt, echo=True, stream=True)
    assert "".join(part.choices[0].text for part in parts) == prompt + "out"


def test_extensions_through_extra_body(client):
    extra = {"stop_token_ids": [99], "top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(model="scripted", prompt=script(reply="abcd", runs=[4]), extra_body=extra)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", 99)
    assert choice.token_ids == [97, 98, 99] and answer.usage.completion_tokens == 3


def test_fields_for_the_callers_own_records(client):
    client.chat.completions.create(
        model="scripted", messages=ask("x"), user="me", metadata={"a": "b"}, store=False, service_tier="auto"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"extra_body": {"best_off": 1}}, "best_off"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "scripted", "messages": ask("x"), **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=ask("x"))
    assert caught.value.code == "model_not_found"


def test_a_request_the_engine_itself_refuses_is_a_400_in_a_stream_too(client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="a refused request"):
            client.completions.create(model="scripted", prompt=script(fault="refuse"), stream=stream)


def test_the_async_client(server):
    async def body():
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="unused", timeout=PATIENCE, max_retries=0) as client:
            whole = client.chat.completions.create(model="scripted", messages=ask("whole", runs=[2]))
            stream = await client.chat.completions.create(
                model="scripted", messages=ask("parts", runs=[2]), stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert ((await whole).choices[0].message.content, text) == ("whole", "parts")
            many = [
                client.completions.create(model="scripted", prompt=script(reply=f"reply {i}", runs=[1 + i % 4]))
                for i in range(30)
            ]
            assert [a.choices[0].text for a in await asyncio.gather(*many)] == [f"reply {i}" for i in range(30)]

    asyncio.run(body())


def test_the_streaming_helper_of_the_client(client):
    with client.chat.completions.stream(model="scripted", messages=ask("helped", runs=[2])) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "helped"
