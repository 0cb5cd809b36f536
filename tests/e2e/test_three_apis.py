"""One conversation through chat completions, Responses and Messages on the demo model: the same text, bit for bit."""

from pathlib import Path

import anthropic
import openai
import pytest
from serving import serving_in_thread

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
ASK = [{"role": "user", "content": "Tell me a story about a fish."}]
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def clients():
    engine = {"num_speculative_tokens": 3, "max_model_len": 1024, "num_threads": 1}
    with (
        serving_in_thread(MODEL, core="pilotfish.engine.start:make_core", engine=engine) as server,
        openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120) as ours,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as theirs,
    ):
        yield ours, theirs


@pytest.mark.parametrize("think", [False, True])
def test_the_same_text(clients, think):
    ours, theirs = clients
    extra = {"seed": 11, **SAMPLED}
    chat = ours.chat.completions.create(
        model="scripted",
        messages=ASK,
        max_tokens=60,
        extra_body={**extra, "chat_template_kwargs": {"enable_thinking": think}},
    )
    message = chat.choices[0].message
    expected = [getattr(message, "reasoning", None) or "", message.content]
    assert any(expected)
    response = ours.responses.create(
        model="scripted",
        input=ASK,
        max_output_tokens=60,
        reasoning={"effort": "high" if think else "none"},
        extra_body=extra,
    )
    parts = {item.type: item.content[0].text for item in response.output}
    assert [parts.get("reasoning", ""), parts.get("message", "")] == expected
    switch = {"type": "adaptive" if think else "disabled"}
    fields = {"model": "scripted", "messages": ASK, "max_tokens": 60, "thinking": switch, "extra_body": extra}
    with theirs.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for answer in (theirs.messages.create(**fields), streamed):
        blocks = {block.type: getattr(block, block.type) for block in answer.content}
        assert [blocks.get("thinking", ""), blocks.get("text", "")] == expected
        assert answer.usage.output_tokens == chat.usage.completion_tokens
    counted = theirs.messages.count_tokens(model="scripted", messages=ASK, thinking=switch)
    assert counted.input_tokens == chat.usage.prompt_tokens == response.usage.input_tokens


def test_a_budget_ends_the_thinking(clients):
    _, theirs = clients
    fields = {"model": "scripted", "messages": ASK, "max_tokens": 60, "extra_body": {"seed": 3, "temperature": 0.7}}
    free = theirs.messages.create(thinking={"type": "adaptive"}, **fields)
    kept = theirs.messages.create(thinking={"type": "enabled", "budget_tokens": 6}, **fields)
    # left alone the model thinks for longer
    assert kept.content[0].type == "thinking" and free.content[0].thinking.startswith(kept.content[0].thinking)
    assert len(kept.content[0].thinking) < len(free.content[0].thinking)
    assert kept.content[1].type == "text"
