"""tool_choice required or a function, on the demo model: the call comes, fits its schema, and k changes nothing."""

import json

import pytest

PARAMETERS = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "unit": {"type": "string", "enum": ["kilogram", "piece"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
        "gift": {"type": "boolean"},
    },
    "required": ["count", "unit", "sizes", "gift"],
}
TOOLS = [
    {"type": "function", "function": {"name": "order_fish", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "close_shop"}},
]
NAMED = {"type": "function", "function": {"name": "order_fish"}}


def ask(client, **fields):
    answer = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "I want twelve fish."}],
        tools=TOOLS,
        max_tokens=200,
        seed=1,
        **fields,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not answer.choices[0].message.content
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]


def fits(values):
    assert list(values) == ["count", "unit", "sizes", "gift"]
    assert 1 <= values["count"] <= 20 and values["unit"] in ("kilogram", "piece") and isinstance(values["gift"], bool)
    assert 1 <= len(values["sizes"]) <= 2 and all(isinstance(size, int | float) for size in values["sizes"])


@pytest.mark.parametrize("temperature", (0, 1.2))
def test_a_named_function_is_called_with_fitting_arguments(demo_client, written, temperature):
    calls = ask(demo_client, tool_choice=NAMED, temperature=temperature)
    assert [name for name, _ in calls] == ["order_fish"]
    fits(calls[0][1])
    assert written.setdefault(("named", temperature), calls) == calls


@pytest.mark.parametrize("temperature", (0, 1.2))
def test_required_is_a_call_of_one_of_the_functions(demo_client, written, temperature):
    calls = ask(demo_client, tool_choice="required", parallel_tool_calls=False, temperature=temperature)
    assert len(calls) == 1
    name, values = calls[0]
    if name == "order_fish":
        fits(values)
    else:
        assert (name, values) == ("close_shop", {})
    assert written.setdefault(("required", temperature), calls) == calls


def test_a_stream_has_the_same_call(demo_client):
    stream = demo_client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "I want twelve fish."}],
        tools=TOOLS,
        tool_choice=NAMED,
        max_tokens=200,
        temperature=0,
        stream=True,
    )
    pieces = [call.function.arguments or "" for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [("order_fish", json.loads("".join(pieces)))] == ask(demo_client, tool_choice=NAMED, temperature=0)


def test_min_tokens_give_way_to_the_end_of_a_demanded_call(demo_client):
    named = ask(demo_client, tool_choice=NAMED, temperature=0)
    assert ask(demo_client, tool_choice=NAMED, temperature=0, extra_body={"min_tokens": 150}) == named
