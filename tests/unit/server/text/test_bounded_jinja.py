"""Templates that want all time or all memory: each is stopped before it has them."""

import pytest

from pilotfish.server.errors import BadRequest
from pilotfish.server.text import bounded_jinja
from pilotfish.server.text.chat_template import ChatTemplate, TemplateError

USER = [{"role": "user", "content": "hi"}]
LOOPS = "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
DOUBLING = "{%% set ns = namespace(s='x' * 1000) %%}{%% for i in range(60) %%}%s{%% endfor %%}"


def render(source, messages=USER, **values):
    return ChatTemplate(source).render(messages, values=values)


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{% for i in range(9) %}{{ f(30) }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{% for i in range(99999) %}{{ loop([m, m]) }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}",
    ],
)
def test_time_has_an_end(source, monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_SECONDS", 0.3)
    with pytest.raises(BadRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{% set n = 10000000000 %}{{ 'x' * n }}{{ n * 'x' }}",
        "{{ 9 ** 99999 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        DOUBLING % "{% set ns.s = ns.s + ns.s %}",
        DOUBLING % "{% set ns.s = ns.s ~ ns.s %}",
        DOUBLING % "{% set ns.s = [ns.s, ns.s] | join %}",
        DOUBLING % "{% set ns.s = ''.join([ns.s, ns.s]) %}",
        DOUBLING % "{% set ns.s = ns.s.replace('x', 'xx') %}",
        DOUBLING % "{% set ns.s = ns.s | replace('x', 'xx') %}",
        DOUBLING % "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
        DOUBLING % "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{{ ns.s }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}{{ 'x'.zfill(width=10000000000) }}",
        "{{ 'a\nb' | indent(10000000000) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10000000000) }}",
        "{{ '{0:{w}}'.format(1, w=10000000000) }}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_memory_has_an_end(source, monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_TEXT", 1 << 20)
    with pytest.raises((BadRequest, TemplateError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
        "{{ " + "1+" * 20000 + "1 }}",
        "{{ a" + ".a" * 50000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "[" * 5000 + "]" * 5000 + " }}",
        "x" * (bounded_jinja.MAX_SOURCE + 1),
    ],
)
def test_depth_and_size_have_an_end(source):
    with pytest.raises((TemplateError, BadRequest)):
        render(source)


def test_nothing_is_computed_while_a_template_is_compiled():
    ChatTemplate("{{ 'x' * 10000000000 }}{{ 9 ** 9 ** 9 }}{{ 'x' | center(10000000000) }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content.split('%')[0].strip() }}", "1234567890"),
        ("{{ messages[0].content | replace('%', '!') }}", "1234567890 ! {1234567}"),
        ("{{ n }} {{ n | tojson }} {{ '%s' % n }} {{ '%s' | format(n) }} {{ n + 1 }}", "17e8 17e8 17e8 17e8 17f8"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}", "a1None[2]"),
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ 'x' | center(3) }}", "ababab102431 [1, 2] x "),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}", "13"),
        ("{% for a in [] %}{% else %}none{% endfor %}{{ ['a', 'b'] | join(',') }}", "nonea,b"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
    ],
)
def test_what_templates_do_is_what_it_was(source, text):
    text = text.replace("17e8", str(17 * 10**8)).replace("17f8", str(17 * 10**8 + 1)).replace("31 [", "3[")
    messages = [{"role": "user", "content": "1234567890 % {1234567}"}]
    assert render(source, messages, n=17 * 10**8) == text


def test_tick_cannot_be_hidden(monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_SECONDS", 0.2)
    with pytest.raises(BadRequest, match="more than"):
        render("{% set tick = 1 %}{% set environment = 1 %}" + LOOPS, tick=0, environment=0)
