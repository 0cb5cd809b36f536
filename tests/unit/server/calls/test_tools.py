"""Tools as clients describe them."""

import pytest

from pilotfish.server.calls.tools import allowed_choice, custom_tool, read_tools
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def custom(name="c", format=None):
    return custom_tool(name, "d", format)


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_tools_are_shown_as_they_came_but_for_promises_about_the_decoder():
    given = [tool(description="d", parameters={"type": "object"}, strict=True), tool("g")]
    tools = read_tools(given, None, FieldNotes())
    assert tools.shown == [tool(description="d", parameters={"type": "object"}), tool("g")]
    assert {name: tool.parameters.schema for name, tool in tools.offered.items()} == {"f": {"type": "object"}, "g": {}}
    assert [tool.strict for tool in tools.offered.values()] == [True, False]
    assert tools.choice.mode == "auto"


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), (None, "none"), ([tool()], "none")])
def test_nothing_may_be_called(tools, choice):
    assert read_tools(tools, choice, FieldNotes()) is None


def test_choices():
    assert read_tools([tool()], "auto", FieldNotes()).choice.mode == "auto"
    assert read_tools([tool()], "required", FieldNotes()).choice.mode == "required"
    assert read_tools([tool(), tool("g")], named("g"), FieldNotes()).choice.named == "g"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([1], None, "tools[0].type"),
        ([{"type": "retrieval"}], None, "tools[0].type"),
        ([{"type": "custom"}], None, "tools[0].custom"),
        ([custom(format={"type": "xml"})], None, "tools[0].custom.format.type"),
        (
            [custom(format={"type": "grammar", "syntax": "gbnf", "definition": "x"})],
            None,
            "tools[0].custom.format.syntax",
        ),
        ([custom(format={"type": "grammar", "syntax": "lark"})], None, "tools[0].custom.format.definition"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "fucntion": {"name": "f"}}], None, "tools[0].fucntion"),
        ([tool(descripton="x")], None, "tools[0].function.descripton"),
        ([tool(), tool("a b")], None, "tools[1].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a>")], None, "tools[0].function.name"),
        ([tool(7)], None, "tools[0].function.name"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(description=1)], None, "tools[0].function.description"),
        ([tool(), tool()], None, "tools[1]"),
        ([tool(str(number)) for number in range(1025)], None, "tools"),
        ([tool()], "always", "tool_choice"),
        ([tool()], 1, "tool_choice"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ([tool()], allowed_choice("none", ["f"]), "tool_choice.allowed_tools"),
        ([tool()], allowed_choice("auto", []), "tool_choice.allowed_tools"),
        ([tool()], allowed_choice("auto", ["g"]), "tool_choice.allowed_tools.tools[0]"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], named("g"), "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        (None, named("f"), "tool_choice.function.name"),
    ],
)
def test_refusals_name_the_field(tools, choice, param):
    with pytest.raises(BadRequest) as caught:
        read_tools(tools, choice, FieldNotes())
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["", "a<b", "x>y", "a\nb", " a", "a ", "\x00", '"a"', "'a'", "a\u2028b", "a" * 257])
def test_names_that_a_call_cannot_carry_are_refused_at_once(name):
    with pytest.raises(BadRequest, match="cannot be written") as caught:
        read_tools([tool(parameters={"properties": {name: {"type": "string"}}})], "auto", FieldNotes())
    assert caught.value.param == "tools[0].function.parameters.properties"


def test_tools_that_run_elsewhere_are_left_out_counted_and_named_once(caplog):
    counted = []
    given = [{"type": "web_search", "search_context_size": "low"}, tool(), {"type": "web_search_preview_2025_03_11"}]
    for _ in range(2):
        tools = read_tools(given, None, FieldNotes(strict=True, on_unused=counted.append))
        assert list(tools.offered) == ["f"]
    assert counted == ["tools.hosted"] * 4
    assert sum("web_search_preview_2025_03_11 " in message for message in caplog.messages) <= 1
    assert read_tools(given[:1], None, FieldNotes()) is None


def test_a_tool_of_one_text_is_shown_as_a_function():
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
    tools = read_tools([custom(format=form), custom("d")], {"type": "custom", "custom": {"name": "c"}}, FieldNotes())
    assert (tools.choice.mode, tools.choice.named, tools.has_grammar) == ("named", "c", True)
    shown = tools.shown[0]["function"]
    assert shown["parameters"]["required"] == ["input"] and "start: /x/" in shown["description"]
    assert tools.offered["d"].custom.syntax == ""


def test_only_what_is_allowed_is_shown():
    tools = read_tools([tool(), tool("g"), tool("h")], allowed_choice("required", ["h", "f"]), FieldNotes())
    assert [entry["function"]["name"] for entry in tools.shown] == ["f", "h"] == list(tools.offered)
    assert tools.choice.mode == "required"
