"""Templates as Hugging Face renders them, in a sandbox, errors blamed on the request."""

import pytest

from pilotfish.server.errors import BadRequest
from pilotfish.server.text.chat_template import ChatTemplate, TemplateError, load_chat_template

USER = [{"role": "user", "content": "hi"}]
QWEN_LIKE = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nNone.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.mark.parametrize("values", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers_does(values, generation):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": " a <b> \n"}, {"role": "assistant", "content": "é"}, *USER]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=QWEN_LIKE, add_generation_prompt=generation, **values
    )
    rendered = ChatTemplate(QWEN_LIKE).render(messages, add_generation_prompt=generation, values=values)
    assert rendered == expected


@pytest.mark.parametrize("begun", ["So", "So ", " So\n", "<think>\nHm", ""])
def test_goes_on_with_the_last_message(begun):
    """As transformers does where the template keeps spaces; ours are kept where it strips them, too."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*USER, {"role": "assistant", "content": begun}]
    keeping = QWEN_LIKE.replace(" | trim", "")
    rendered = ChatTemplate(keeping).render(messages, continue_last=True)
    if begun.strip() and begun == begun.rstrip():
        (expected,), _ = render_jinja_template([messages], chat_template=keeping, continue_final_message=True)
        assert rendered == expected
    assert rendered.endswith("<|im_start|>assistant\n" + begun)
    stripping = ChatTemplate(QWEN_LIKE).render(messages, continue_last=True)
    assert stripping.endswith("<|im_start|>assistant\n" + begun.lstrip())


def test_a_template_that_hides_the_last_message_cannot_go_on_with_it():
    with pytest.raises(BadRequest, match="does not show"):
        ChatTemplate("{{ messages[0].content }}").render([*USER, *USER], continue_last=True)


def test_tojson_keeps_text_as_it_is():
    template = ChatTemplate("{{ messages | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=2) }}")
    assert template.render([{"a": "<é>&'"}]) == '[{"a": "<é>&\'"}]{\n  "b": 1,\n  "a": 2\n}'


def test_raise_exception_is_a_400_naming_messages():
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ nothing.field }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_fails_in_a_template_is_a_400(source):
    with pytest.raises(BadRequest):
        ChatTemplate(source).render(USER)


def test_strftime_now_and_special_tokens():
    assert ChatTemplate("{{ bos_token }}{{ strftime_now('%%') }}", {"bos_token": "<s>"}).render(USER) == "<s>%"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "raise_exception", "tools"])
def test_keyword_values_cannot_replace_ours(name):
    with pytest.raises(BadRequest) as caught:
        ChatTemplate("x").render(USER, values={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_variables_are_the_names_a_template_reads():
    assert "reasoning_effort" in ChatTemplate("{{ reasoning_effort }}").variables
    assert "x" not in ChatTemplate("{% set x = 1 %}{{ x }}").variables


def test_a_syntax_error_names_the_line():
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{% if %}")


FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}:{% if m.reasoning_content and (KEPT loop.index0 > ns"
    ".last) %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}\n{% endfor %}"
)
"""Reasoning of turns before the user's last message is dropped, as in Qwen's templates."""


@pytest.mark.parametrize(
    ("kept", "values", "keeps"),
    [
        ("", {}, False),
        ("preserve_thinking is defined and preserve_thinking or", {}, False),
        ("preserve_thinking is defined and preserve_thinking or", {"preserve_thinking": True}, True),
        ("preserve_thinking is not defined or preserve_thinking or", {}, True),
        ("preserve_thinking is not defined or preserve_thinking or", {"preserve_thinking": False}, False),
    ],
)
def test_a_template_that_forgets_is_found(kept, values, keeps):
    assert ChatTemplate(FORGETS.replace("KEPT", kept)).keeps_history(values) is keeps


def test_a_template_without_tools_or_reasoning_is_asked_about_what_it_has():
    assert ChatTemplate(QWEN_LIKE).keeps_history({})
    no_tools = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    assert not ChatTemplate(no_tools + FORGETS.replace("KEPT", "")).keeps_history({})
    assert ChatTemplate("{{ raise_exception('no') }}").keeps_history({})


def test_where_a_template_is_found(tmp_path):
    config = {"chat_template": "from config", "eos_token": {"content": "<e>"}}
    assert load_chat_template(tmp_path, {}, None) is None
    assert load_chat_template(tmp_path, config, None).render(USER) == "from config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}]
    assert load_chat_template(tmp_path, {**config, "chat_template": named}, None).render(USER) == "d<e>"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_chat_template(tmp_path, config, None).render(USER) == "from file"
    (tmp_path / "mine.jinja").write_text("from flag")
    assert load_chat_template(tmp_path, config, tmp_path / "mine.jinja").render(USER) == "from flag"
    with pytest.raises(TemplateError, match="does not exist"):
        load_chat_template(tmp_path, config, tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "a Git LFS pointer"),
        ("<!DOCTYPE html><html>Sign in</html>", "a web page"),
        ("", "empty"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, content, what):
    """As a template it would stand in front of each chat."""
    for file, override in ((tmp_path / "chat_template.jinja", None), (tmp_path / "mine", tmp_path / "mine")):
        file.write_text(content)
        with pytest.raises(TemplateError, match=f"chat template {file} cannot be read: {what}"):
            load_chat_template(tmp_path, {}, override)
