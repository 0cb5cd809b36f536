"""bad_words, allowed_token_ids and thinking budgets over HTTP on the demo model: kept, and the same for every k."""

import functools

import openai
import pytest
from demo_models import DEMO
from tokenizers import Tokenizer

ASK = [{"role": "user", "content": "Tell me a story about a fish."}]


def ask(client, *, max_tokens=60, temperature=0.0, **extra):
    answer = client.chat.completions.create(
        model="scripted", messages=ASK, max_tokens=max_tokens, temperature=temperature, seed=3, extra_body=extra
    )
    message = answer.choices[0].message
    return message.content, (message.model_extra or {}).get("reasoning"), answer.usage


def complete(client, temperature, **extra):
    answer = client.completions.create(
        model="scripted",
        prompt="Once upon a time",
        max_tokens=48,
        temperature=temperature,
        seed=3,
        extra_body={"return_token_ids": True, "ignore_eos": True, **extra},
    )
    return answer.choices[0].text, answer.choices[0].token_ids


def same(written, name, value):
    assert written.setdefault(name, value) == value


@pytest.mark.parametrize("temperature", (0, 0.9))
def test_bad_words_do_not_come(demo_client, written, temperature):
    text, _ = complete(demo_client, temperature)
    words = [word for word in dict.fromkeys(word.strip('.,"!?') for word in text.split()) if word][2:8]
    assert len(words) == 6
    kept, ids = complete(demo_client, temperature, bad_words=words)
    assert kept != text
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    # as sequences of ids, which is what vLLM promises; the text may have a word in another spelling
    for word in words:
        for spelling in (word, " " + word):
            banned = tokenizer.encode(spelling, add_special_tokens=False).ids
            runs = [ids[i : i + len(banned)] for i in range(len(ids))]
            if spelling == word or len(banned) == len(tokenizer.encode(word, add_special_tokens=False).ids):
                assert banned not in runs, spelling
    same(written, temperature, kept)


def test_only_allowed_ids_come(demo_client, written):
    allowed = list(range(300, 700))
    text, ids = complete(demo_client, 0.9, allowed_token_ids=allowed)
    assert len(ids) == 48 and set(ids) <= set(allowed)
    same(written, "allowed", text)


def test_bans_that_leave_nothing_are_a_400(demo_client):
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        complete(demo_client, 0, allowed_token_ids=[300], min_tokens=3, stop_token_ids=[300])


@pytest.mark.parametrize("budget", (0, 1, 9))
def test_a_thinking_block_ends_at_its_budget(demo_client, written, budget):
    thinking = functools.partial(ask, demo_client, chat_template_kwargs={"enable_thinking": True}, temperature=0.7)
    # left alone, the model thinks for longer; the grammar begins in the row after the block's end
    content, _, usage = thinking(thinking_token_budget=budget, structured_outputs={"regex": "[a-z]{3} [a-z]{3}"})
    assert usage.completion_tokens_details.reasoning_tokens == budget
    assert [len(word) for word in content.split(" ")] == [3, 3]
    same(written, ("budget", budget), content)
    free, reasoning, usage = thinking(thinking_token_budget=budget)
    assert usage.completion_tokens_details.reasoning_tokens == budget
    assert usage.completion_tokens > budget + 1
    same(written, ("free", budget), (free, reasoning))
