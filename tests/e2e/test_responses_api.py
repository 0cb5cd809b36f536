"""OpenAI's official client on /v1/responses: whole and streamed answers, tools, reasoning, refusals."""

import json
import urllib.request

import openai
import pydantic
import pytest
from serving import PATIENCE, script, serving_in_thread

EURO = "Hello € 😀 there STOP and more"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
THINK = {"effort": "high", "summary": "auto"}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def asking(reply=EURO, **commands):
    return script(reply=reply, **{"runs": [3, 1, 4], **commands})


def create(client, reply=EURO, **fields):
    return client.responses.create(**{"model": "scripted", "input": asking(reply), **fields})


@pytest.fixture
def prompt_of(client, server, monkeypatch):
    """What the model reads of a request, from the ids that the engine is given."""
    submitted = []
    submit = server.service.client.submit
    monkeypatch.setattr(
        server.service.client, "submit", lambda request, feed: submitted.append(request) or submit(request, feed)
    )

    def prompt_of(**fields):
        create(client, "x", **fields)
        return server.service.files.tokenizer.decode(submitted[-1].prompt_token_ids, skip_special_tokens=False)

    return prompt_of


def test_an_answer(client):
    answer = create(
        client,
        metadata={"a": "b"},
        store=True,
        user="me",
        temperature=0.5,
        max_output_tokens=99,
        extra_body={"seed": 7},
    )
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "scripted")
    assert answer.id.startswith("resp_") and answer.output_text == EURO
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.store, answer.metadata, answer.temperature) == (False, {"a": "b"}, 0.5)
    assert (answer.max_output_tokens, answer.incomplete_details, answer.error) == (99, None, None)
    size = len(EURO.encode())
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (size, size + answer.usage.input_tokens)
    assert answer.seed == 7


def test_an_answer_that_is_cut_is_incomplete(client):
    answer = create(client, max_output_tokens=5)
    assert (answer.output_text, answer.status, answer.incomplete_details.reason) == (
        "Hello",
        "incomplete",
        "max_output_tokens",
    )
    assert answer.output[0].status == "incomplete"


REPLIES = [
    EURO,
    f"I look.\n{CALL}\n{CALL}\nDone.",
    f"Hm €.\n</think>\n\nI look.\n{CALL}",
    "Only thought",
    f"Hm. {CALL} more\n</think>\n\nYes.",
    "It is\n<tool_call>\n<function=weather>\n<parameter=city>\nZür",
    "It is\n<tool_call>\n<function=weather>\nno call at all",
    "<|im_end|>",
]


def comparable(response):
    """Without what differs from request to request."""
    dumped = response.model_dump(exclude={"id", "created_at", "completed_at", "seed"})
    for item in dumped["output"]:
        item.pop("id"), item.pop("call_id", None), item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return dumped


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("fields", [{}, {"reasoning": THINK}, {"max_output_tokens": 20}])
def test_a_stream_builds_the_whole_answer(client, reply, fields):
    fields = {"model": "scripted", "input": asking(reply), "tools": [TOOL], **fields}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert comparable(last.response) == comparable(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("reply", REPLIES)
def test_every_step_of_a_stream_adds_up(client, reply):
    """By the documented order: an item is added, its part is added, filled and done, then the item is done."""
    stream = client.responses.create(
        model="scripted", input=asking(reply), tools=[TOOL], reasoning=THINK, stream=True, max_output_tokens=200
    )
    first, second, *events, last = stream
    assert (first.type, second.type) == ("response.created", "response.in_progress")
    assert (first.response.status, first.response.output) == ("in_progress", [])
    items, opened, filled = [], None, ""
    for event in events:
        name = event.type.removeprefix("response.")
        if name == "output_item.added":
            assert opened is None and event.output_index == len(items)
            opened, filled = event.item, ""
            assert opened.status == "in_progress"
            continue
        assert event.output_index == len(items)
        if name == "output_item.done":
            assert event.item.id == opened.id and event.item.status != "in_progress"
            shown = event.item.arguments if event.item.type == "function_call" else event.item.content[0].text
            assert shown == filled
            items.append(event.item)
            opened = None
            continue
        assert event.item_id == opened.id
        if name.endswith(".delta"):
            filled += event.delta
        elif name in ("output_text.done", "reasoning_text.done"):
            assert event.text == filled
        elif name == "function_call_arguments.done":
            assert event.arguments == filled and event.name == opened.name
        elif name == "content_part.done":
            assert event.part.text == filled
        else:
            assert name == "content_part.added" and event.part.text == ""
    assert opened is None and last.response.output == items


def test_the_frame_of_a_stream(server):
    body = {"model": "scripted", "input": asking("ab", runs=[1]), "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.v1 + "/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *blocks, end = response.read().decode().split("\n\n")
    assert end == ""
    for block in blocks:
        name, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "response.completed" in blocks[-1]


def test_a_conversation_with_tools_goes_back_item_by_item(client, prompt_of):
    reply = f"Hm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    answer = create(client, reply, tools=[TOOL], reasoning=THINK)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(answer.output[2].arguments) == {"city": "Zürich", "days": 3}
    history = [{"role": "user", "content": "Well?"}, *(item.model_dump(exclude_none=True) for item in answer.output)]
    for call in answer.output[2:]:
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    history.append({"role": "user", "content": [{"type": "input_text", "text": asking("Rain.")}]})
    prompt = prompt_of(input=history, instructions="Be brief.", tools=[TOOL])
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n" in prompt
    thought = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look."
    assert thought + CALL + CALL + "<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nrain" in prompt
    assert '{"type": "function", "function": {"name": "weather"' in prompt and "strict" not in prompt
    assert create(client, input=history, tools=[TOOL]).output_text == "Rain."


def test_answers_that_follow_each_other_stay_apart(prompt_of):
    said = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": t}]} for t in "ab"]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    prompt = prompt_of(input=[*said, call, refusal, summary, {"role": "user", "content": asking("x")}])
    called = "b<tool_call>\n<function=f>\n</function>\n</tool_call>"
    turns = ["a", called, "no", "<think>\ns\n</think>\n\n"]
    assert "".join(f"<|im_start|>assistant\n{turn}<|im_end|>\n" for turn in turns) in prompt


def test_tool_choice(client):
    answer = create(client, CALL, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    assert json.loads(answer.output[0].arguments) == {"city": "Zürich", "days": 3}
    answer = create(client, CALL, tools=[TOOL], tool_choice="required")
    assert answer.output[0].name == "weather"
    assert create(client, CALL, tools=[TOOL], tool_choice="none").output_text == CALL
    assert len(create(client, CALL + CALL, tools=[TOOL], parallel_tool_calls=False).output) == 1


def test_reasoning(client, prompt_of):
    reply = "Both € and 😀.\n</think>\n\nYes."
    answer = create(client, reply, reasoning=THINK)
    thought, said = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Both € and 😀.", [])
    assert (said.content[0].text, answer.reasoning.effort) == ("Yes.", "high")
    assert answer.usage.output_tokens_details.reasoning_tokens == len(reply.partition("</think>")[0].encode())
    assert prompt_of(reasoning={"effort": "low"}).endswith("<think>\n")
    assert not prompt_of(reasoning={"effort": "none"}).endswith("<think>\n")


def test_structured_output(client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert json.loads(create(client, '{"a": 1}', text={"format": form}).output_text) == {"a": 1}

    class Parsed(pydantic.BaseModel):
        a: int

    parsed = client.responses.parse(model="scripted", input=asking('{"a": 3}'), text_format=Parsed).output_parsed
    assert parsed == Parsed(a=3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.lobprogs"]}, "include.message.output_text.lobprogs"),
        ({"text": {"verbosity": "long"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "tools[0].name"),
        ({"max_output_tokens": 50000}, "max_output_tokens"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": "x", "statsu": "x"}]}, "input[0].statsu"),
        ({"extra_body": {"top_j": 3}}, "top_j"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_nothing_is_stored(client):
    answer = create(client, store=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_an_error_in_a_stream_is_its_last_event(folder):
    with (
        serving_in_thread(folder, api_keys=("x",)) as server,
        openai.OpenAI(base_url=server.v1, api_key="x", max_retries=0, timeout=PATIENCE) as client,
    ):
        text = asking("abcdefgh", fault="raise", at=5, runs=[1], delay=0.05)
        *_, last = client.responses.create(model="scripted", input=text, stream=True)
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error.code == "server_error" and "scripted fault" in last.response.error.message
        assert last.response.output == []


def test_items_may_be_named_in_place_of_sending_them_back(client, prompt_of):
    """As Vercel's AI SDK does, unless it is told that nothing is stored."""
    said = create(client, "Hm.</think>I look." + CALL, tools=[TOOL], reasoning=THINK)
    thought, message, call = said.output
    ask = {"role": "user", "content": asking("x")}
    named = [{"type": "item_reference", "id": item.id} for item in (thought, message, call)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    sent = [item.model_dump(exclude_none=True) for item in said.output]
    assert prompt_of(input=[ask, *named, result, ask]) == prompt_of(input=[ask, *sent, result, ask])
    other = create(client, "Not kept.", store=False).output[0]
    for item_id in (other.id, "msg_unknown", None):
        answer = client.responses.with_raw_response.create(
            model="scripted", input=[ask, {"type": "item_reference", "id": item_id}, ask]
        )
        assert answer.headers["X-Ignored-Fields"] == "input.item_reference"


def test_a_prompt_is_counted(client):
    fields = {"model": "scripted", "input": asking("x"), "instructions": "Be brief.", "tools": [TOOL]}
    counted = client.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**fields).usage.input_tokens


def test_log_probabilities_of_the_answers_text(client):
    """What is thought and what is called have none; a stream tells the same, piece by piece."""
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [TOOL], "reasoning": THINK}
    reply = "Hm €.\n</think>\n\nI look." + CALL
    whole = create(client, reply, **fields)
    (text,) = next(item for item in whole.output if item.type == "message").content
    assert "".join(token.token for token in text.logprobs).strip() == text.text == "I look."
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in text.logprobs)
    with client.responses.stream(model="scripted", input=asking(reply), **fields) as stream:
        told = [event for event in stream if event.type in ("response.output_text.delta", "response.output_text.done")]
    assert [token.token for token in told[-1].logprobs] == [token.token for token in text.logprobs]
    assert "".join(token.token for event in told[:-1] for token in event.logprobs or ()).strip().startswith("I look.")
    assert create(client, reply, tools=[TOOL]).output[0].content[0].logprobs in ([], None)
