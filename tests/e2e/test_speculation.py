"""Speculation of a single request: turned down, turned off, refused above what is served, and measured."""

import openai
import pytest
from serving import PATIENCE, script, serving_in_thread


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def complete(client, reply="a" * 12, *, runs=(4,), stream=False, k=None, **fields):
    extra = {"include_metrics": True} | ({} if k is None else {"speculation": {"k": k}})
    prompt = script(reply=reply, runs=list(runs))
    return client.completions.create(model="scripted", prompt=prompt, extra_body=extra, stream=stream, **fields)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        # 12 tokens, the first from the prompt: rounds of k + 1 out of 11
        (None, {"k": 3, "rounds": 3, "drafted": 9, "accepted": 8, "committed_per_round": [0, 0, 1, 2]}),
        (3, {"k": 3, "rounds": 3, "drafted": 9, "accepted": 8, "committed_per_round": [0, 0, 1, 2]}),
        (1, {"k": 1, "rounds": 6, "drafted": 6, "accepted": 5, "committed_per_round": [1, 5]}),
        (0, {"k": 0, "rounds": 11, "drafted": 0, "accepted": 0, "committed_per_round": [11]}),
    ],
)
def test_k_of_a_request_and_its_metrics(client, k, expected):
    answer = complete(client, k=k)
    assert answer.choices[0].text == "a" * 12
    found = answer.model_extra["metrics"]["speculative_decoding"]
    assert found.pop("mean_acceptance_length") == pytest.approx(11 / expected["rounds"])
    assert found == expected
    *_, last = complete(client, k=k, stream=True)
    assert last.choices == [] and last.usage is None
    assert last.model_extra["metrics"]["speculative_decoding"].items() >= expected.items()
    *_, last = complete(client, k=k, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 12
    assert last.model_extra["metrics"]["speculative_decoding"].items() >= expected.items()


def test_choices_are_added_up_and_a_stop_string_cuts(client):
    found = complete(client, n=3).model_extra["metrics"]["speculative_decoding"]
    assert (found["rounds"], found["committed_per_round"]) == (9, [0, 0, 3, 6])
    found = complete(client, reply="abcdefgh", stop="d").model_extra["metrics"]["speculative_decoding"]
    assert (found["rounds"], found["accepted"], found["committed_per_round"]) == (1, 3, [0, 0, 1])


def test_no_rounds_no_length(client):
    found = complete(client, reply="a").model_extra["metrics"]["speculative_decoding"]
    assert found["mean_acceptance_length"] is None and found["committed_per_round"] == []


def test_nobody_gets_metrics_unasked(client):
    answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}])
    assert not answer.model_extra.keys() & {"metrics"}
    asked = {"include_metrics": True}
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "x"}], extra_body=asked
    )
    assert answer.model_extra["metrics"]["speculative_decoding"]["k"] == 3


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"k": 4}, "speculation.k"),
        ({"k": -1}, "speculation.k"),
        ({"k": 1.5}, "speculation.k"),
        (3, "speculation"),
    ],
)
def test_refusals_name_the_field(client, speculation, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="x", extra_body={"speculation": speculation})
    assert caught.value.param == param


def test_without_speculation_only_k_0(folder):
    with (
        serving_in_thread(folder, engine={"num_speculative_tokens": 0}) as running,
        openai.OpenAI(base_url=running.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as client,
    ):
        assert complete(client, k=0).choices[0].text == "a" * 12
        with pytest.raises(openai.BadRequestError, match="no head in a scripted core"):
            complete(client, k=1)
