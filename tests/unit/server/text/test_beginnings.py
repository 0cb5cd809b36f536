"""The end of system prompt and tools: always a beginning of the prompt's own ids, and where it ought to be."""

from array import array
from pathlib import Path

import pytest

from pilotfish.server.chat.request import ChatRequest, chat_prompt
from pilotfish.server.fields import FieldNotes
from pilotfish.server.model_files import load_model_files
from pilotfish.server.text.beginnings import Beginnings, num_common
from pilotfish.server.text.chat_template import ChatTemplate

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "You are brief. " * 20}


def measured(model, messages, tools=None):
    """(ids of the prompt, what was measured)"""
    chat = chat_prompt(ChatRequest(messages=messages, tools=tools), model, FieldNotes())
    ids = model.tokenizer.encode(chat.text, add_special_tokens=False)
    return ids, model.beginnings.measure(ids, chat.messages, chat.tools.shown if chat.tools else None, chat.values)


@pytest.fixture(scope="module", params=["bytes", "demo"])
def model(request, model_folder):
    return load_model_files(model_folder if request.param == "bytes" else DEMO)


@pytest.mark.parametrize("first", ["hello", "\n\nhello", " hello", "€", "x", ""])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_it_ends_with_the_system_prompt(model, first, tools):
    ids, count = measured(model, [SYSTEM, {"role": "user", "content": first}], tools)
    other, same = measured(model, [SYSTEM, {"role": "user", "content": "quite another"}], tools)
    assert count == same
    assert ids[:count] == other[:count]
    shown = model.tokenizer.decode(ids[:count], skip_special_tokens=False)
    assert shown.rstrip().endswith("<|im_start|>user")
    assert "You are brief." in shown
    assert ("weather" in shown) == (tools is not None)


def test_a_long_system_prompt_is_encoded_once(model, monkeypatch):
    encode, lengths = model.tokenizer.encode, []

    def counted(text, **options):
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(type(model.tokenizer), "encode", lambda self, text, **options: counted(text, **options))
    system = {"role": "system", "content": "You are quite another. " * 200}
    _, count = measured(model, [system, {"role": "user", "content": "x"}])
    assert count and sum(length > 1000 for length in lengths) == 2  # the prompt, and what it is compared with
    assert measured(model, [system, {"role": "user", "content": "y"}])[1] == count
    assert sum(length > 1000 for length in lengths) == 3


def test_a_conversation_that_begins_otherwise_shares_less(model):
    ids, count = measured(model, [SYSTEM, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "x"}])
    shown = model.tokenizer.decode(ids[:count], skip_special_tokens=False)
    assert shown.endswith("<|im_start|>")


def test_nothing_is_known_without_system_prompt_and_tools(model):
    assert measured(model, [{"role": "user", "content": "x"}])[1] is None


def test_a_cut_prompt_does_not_begin_with_it(model):
    ids, _ = measured(model, [SYSTEM, {"role": "user", "content": "x"}])
    assert model.beginnings.measure(ids[5:], [SYSTEM], None, {}) is None


@pytest.mark.parametrize(
    "template",
    [
        # the system prompt comes last, differs by length, or no message is shown
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[0].content }}",
        "{{ messages | length }}{{ messages[0].content }}{{ messages[-1].content }}",
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_whatever_a_template_does_it_is_a_beginning(tokenizer, template):
    beginnings = Beginnings(ChatTemplate(template), tokenizer)
    messages = [SYSTEM, {"role": "user", "content": "You are brief, too"}, {"role": "assistant", "content": "y"}]
    try:
        text = ChatTemplate(template).render(messages)
    except Exception:
        text = "some other text"
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = beginnings.measure(ids, messages, None, {})
    probe = tokenizer.encode(template_probe(template), add_special_tokens=False)
    assert count is None or ids[:count] == probe[:count]


def template_probe(template):
    try:
        return ChatTemplate(template).render([SYSTEM, {"role": "user", "content": "zzz"}])
    except Exception:
        return ""


def test_one_system_prompt_is_rendered_once(model, monkeypatch):
    beginnings = Beginnings(model.chat_template, model.tokenizer)
    rendered = []
    real = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *a, **k: rendered.append(1) or real(self, *a, **k))
    for system in (SYSTEM, SYSTEM, {"role": "system", "content": "other"}, SYSTEM):
        beginnings.measure([1, 2], [system], None, {})
    assert len(rendered) == 2


def test_values_that_cannot_be_written_are_no_error(model):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert model.beginnings.measure([1], [SYSTEM], None, {"deep": deep}) is None


def test_what_is_kept_is_bounded(model, monkeypatch):
    monkeypatch.setattr("pilotfish.server.text.beginnings.MAX_KEPT", 3)
    beginnings = Beginnings(model.chat_template, model.tokenizer)
    for number in range(9):
        beginnings.measure([1], [{"role": "system", "content": str(number)}], None, {})
    assert len(beginnings._kept) == 3
    assert beginnings._num_tokens == sum(map(len, beginnings._kept.values()))


@pytest.mark.parametrize("shared", [0, 1, 2, 3, 63, 64, 65, 100])
@pytest.mark.parametrize("rest", [0, 1, 50])
def test_common_beginnings(shared, rest):
    one = array("I", [*range(shared), *[7777] * rest])
    other = array("I", [*range(shared), *[8888] * 20])
    assert num_common(one, other) == num_common(other, one) == shared
