"""The demo model behind the real server: speculated and plain answers are the same, and /metrics says what it gave."""

import json
import random
from itertools import pairwise
from pathlib import Path

import openai
import pytest
from serving import serving_in_thread

from pilotfish.server.model_files import load_model_files

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
CODE = "def is_prime(number):\n    "
TOKENS = 16
TIMEOUT = 240


def client_of(server):
    return openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def speculated():
    engine = {"num_speculative_tokens": 3, "max_model_len": 2048, "max_num_seqs": 4, "num_threads": 1}
    with serving_in_thread(MODEL, core="pilotfish.engine.start:make_core", engine=engine) as server:
        yield server


@pytest.fixture(scope="module")
def answers(speculated):
    """The same requests to a plain server and to the speculating one, side by side in its batch."""
    engine = {"num_speculative_tokens": 0, "max_model_len": 2048, "max_num_seqs": 1, "num_threads": 1}
    with serving_in_thread(MODEL, core="pilotfish.engine.start:make_core", engine=engine) as plain:
        return [complete(plain), complete(speculated)]


def complete(server):
    with client_of(server) as client:
        base = {"model": "scripted", "max_tokens": TOKENS, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
        return [
            client.completions.create(prompt=CODE, temperature=0, **base),
            client.completions.create(prompt=CODE, temperature=0.8, seed=11, n=2, **base),
            client.completions.create(prompt=CODE, temperature=0, frequency_penalty=0.7, presence_penalty=0.3, **base),
        ]


def test_k_changes_no_token(answers):
    plain, speculated = answers
    for expected, got in zip(plain, speculated, strict=True):
        assert [choice.token_ids for choice in got.choices] == [choice.token_ids for choice in expected.choices]
        assert [choice.text for choice in got.choices] == [choice.text for choice in expected.choices]
        assert got.usage.completion_tokens == expected.usage.completion_tokens
    assert all(answer.usage.completion_tokens_details.accepted_prediction_tokens == 0 for answer in plain)


def test_sampled_choices_differ_from_each_other(answers):
    choices = answers[1][1].choices
    assert len({tuple(choice.token_ids) for choice in choices}) > 1


def test_an_echoed_prompt_has_its_log_probabilities(speculated):
    """As lm-eval asks for them: what comes after the context is judged, and nothing is written."""
    with client_of(speculated) as client:
        base = {"model": "scripted", "prompt": CODE, "echo": True, "logprobs": 2, "temperature": 0}
        read = client.completions.create(max_tokens=0, **base).choices[0]
        written = client.completions.create(max_tokens=3, extra_body={"ignore_eos": True}, **base).choices[0]
        chunks = list(client.completions.create(max_tokens=3, stream=True, extra_body={"ignore_eos": True}, **base))
    assert read.text == CODE and read.finish_reason == "length"
    logprobs, count = read.logprobs, len(read.logprobs.tokens)
    assert "".join(logprobs.tokens) == CODE and logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert [CODE[a:b] for a, b in pairwise([*logprobs.text_offset, len(CODE)])] == logprobs.tokens
    for token, value, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        1:
    ]:
        assert top[token] == value and 2 <= len(top) <= 3
    # the same bits whatever is written after it, and in a stream
    assert written.logprobs.token_logprobs[:count] == logprobs.token_logprobs
    assert len(written.logprobs.tokens) == count + 3 and written.text.startswith(CODE)
    assert written.logprobs.text_offset[count:] == sorted(written.logprobs.text_offset[count:])
    assert written.logprobs.text_offset[count] == len(CODE)
    entries = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [value for entry in entries for value in entry.token_logprobs] == written.logprobs.token_logprobs
    assert [place for entry in entries for place in entry.text_offset] == written.logprobs.text_offset
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == written.text


def test_prompt_logprobs_come_in_vllm_s_form(speculated):
    with client_of(speculated) as client:
        extra = {"prompt_logprobs": 1}
        answer = client.completions.create(model="scripted", prompt=CODE, max_tokens=1, extra_body=extra)
        chat = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body=extra
        )
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="scripted", prompt=CODE, stream=True, extra_body=extra)
        # a cache is filled in this way
        none = client.completions.create(model="scripted", prompt=CODE, max_tokens=0)
        assert (none.choices[0].text, none.usage.completion_tokens) == ("", 0)
    found = answer.choices[0].prompt_logprobs
    assert len(found) == answer.usage.prompt_tokens and found[0] is None
    assert "".join(next(reversed(entry.values()))["decoded_token"] for entry in found[1:]) == CODE[len("def") :]
    for entry in found[1:]:
        ranks = [value["rank"] for value in entry.values()]
        assert 1 in ranks and (len(ranks) == 1 or max(ranks) > 1)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_streamed_text_is_the_whole_text(speculated, answers):
    with client_of(speculated) as client:
        stream = client.completions.create(
            model="scripted",
            prompt=CODE,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == answers[1][0].choices[0].text


def test_a_stop_string_from_inside_the_text_cuts_it_there(speculated, answers):
    whole = answers[1][0].choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    with client_of(speculated) as client:
        answer = client.completions.create(
            model="scripted",
            prompt=CODE,
            max_tokens=TOKENS,
            temperature=0,
            stop=stop,
            logprobs=1,
            extra_body={"ignore_eos": True},
        )
    (choice,) = answer.choices
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens < TOKENS
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_chat_through_the_checkpoints_template(speculated):
    with client_of(speculated) as client:
        answer = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0
        )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 12


@pytest.mark.parametrize("values", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_prompt_and_text_are_those_of_transformers(values):
    from transformers import AutoTokenizer

    files, reference = load_model_files(MODEL), AutoTokenizer.from_pretrained(MODEL)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "é € 😀 <b>"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"},
        {"role": "user", "content": "and?"},
    ]
    text = files.chat_template.render(messages, values=values)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values)
    ids = files.tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False)
    for seed in range(100):
        ids = random.Random(seed).choices(range(len(files.tokenizer.token_bytes)), k=30)
        assert files.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), f"seed {seed}"


def test_metrics_and_usage_count_the_same_drafts(speculated, answers):
    import urllib.request

    with urllib.request.urlopen(speculated.url + "/metrics", timeout=TIMEOUT) as response:
        lines = response.read().decode().splitlines()
    series = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
    drafted = series["pilotfish_spec_decode_num_draft_tokens_total"]
    accepted = series["pilotfish_spec_decode_num_accepted_tokens_total"]
    assert drafted > 0
    details = [answer.usage.completion_tokens_details for answer in answers[1]]
    # later tests of this file may have added to the counters, none takes away
    assert accepted >= sum(entry.accepted_prediction_tokens for entry in details)
    assert drafted - accepted >= sum(entry.rejected_prediction_tokens for entry in details)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_it_calls_tools_and_k_changes_no_call(speculated, choice):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    with client_of(speculated) as client:
        base = {"model": "scripted", "temperature": 0, "max_tokens": 80, "tools": [tool], "tool_choice": choice}
        base["messages"] = [{"role": "user", "content": "What is the weather in Paris?"}]
        answers = [
            client.chat.completions.create(**base, extra_body={"speculation": {"k": k}, "include_metrics": True})
            for k in (3, 0)
        ]
    calls = [[call.function for call in answer.choices[0].message.tool_calls] for answer in answers]
    assert calls[0] == calls[1] and calls[0][0].name == "get_weather"
    assert json.loads(calls[0][0].arguments).keys() == {"city"}
    fast, slow = (answer.model_extra["metrics"]["speculative_decoding"] for answer in answers)
    assert fast["mean_acceptance_length"] > 1.5 and slow["mean_acceptance_length"] == 1
