"""A Jinja environment in which a template has a size, and a rendering a time and an amount of text.

The sandbox keeps a template from files and code, not from work: `{{ "x" * 10**10 }}` takes all memory, three loops
take for ever. Templates come with checkpoints, which strangers make, and what they print comes from clients. So every
pass of a loop and every call looks at the clock, every value that is printed is counted, and what can grow in a single
step is held to a size before it does.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox

MAX_SOURCE = 256 << 10
"""Characters of a template; the longest that are known have a tenth of it."""
MAX_SECONDS = 10.0
MAX_TEXT = 128 << 20
"""Characters that are printed, or joined in one step; a body has at most 32 MiB."""
MAX_NUMBER = 1 << 20
"""The largest width, repetition and their like."""
MAX_BITS = 4096
"""Bits of a whole number."""
GROWING = ("center", "format", "indent", "join", "replace", "truncate", "wordwrap", "batch", "slice")
"""Filters that give more than they get."""
LONG_NUMBER = re.compile(r"\d{7}")
WIDTH_AMONG_VALUES = re.compile(r"%[^%]*\*|\{[^{}]*\{")


class TemplateTooExpensive(jinja2.TemplateError):
    """The rendering wants more than the bounds above."""


class _Budget:
    def __init__(self) -> None:
        self.ends, self.left = time.monotonic() + MAX_SECONDS, MAX_TEXT


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar("budget", default=None)


@contextlib.contextmanager
def bounded_rendering() -> Iterator[None]:
    """What is rendered inside has its own time and amount of text."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # nothing is computed while a template is compiled
        super().__init__(optimized=False, finalize=_count, **options)
        self.filters |= {name: bounded_filter(self.filters[name]) for name in GROWING}
        # makes any amount of text of nothing
        self.globals.pop("lipsum")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"want at most {MAX_SOURCE} characters, got {len(source)}", 1)
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(jinja2.nodes.For)):
            loop.body.insert(0, jinja2.nodes.ExprStmt(_call("tick", [], loop.lineno), lineno=loop.lineno))
        return _with_calls_for_concat(template)

    def tick(self) -> str:
        """Raises TemplateTooExpensive when the time is over."""
        budget = _budget.get()
        if budget is not None and time.monotonic() > budget.ends:
            raise TemplateTooExpensive(f"it takes more than {MAX_SECONDS:g} s")
        return ""

    def joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        if isinstance(getattr(obj, "__self__", None), str):
            _check_method(obj.__name__, obj.__self__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What the sandbox puts in the place of a text's `format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,), {})
        elif operator in ("*", "**"):
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _call(name: str, args: list[jinja2.nodes.Expr], lineno: int) -> jinja2.nodes.Call:
    """A call of a method of the environment, which no variable of the template can hide."""
    method = jinja2.nodes.EnvironmentAttribute(name, lineno=lineno)
    return jinja2.nodes.Call(method, args, [], None, None, lineno=lineno)


def _with_calls_for_concat(node: Any) -> Any:
    """`a ~ b` as a call of `joined`: the sandbox does not see it."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_with_calls_for_concat(one) if isinstance(one, jinja2.nodes.Node) else one for one in value]
        elif isinstance(value, jinja2.nodes.Node):
            setattr(node, name, _with_calls_for_concat(value))
    return _call("joined", node.nodes, node.lineno) if isinstance(node, jinja2.nodes.Concat) else node


def _count(value: Any) -> Any:
    """Counts everything that is printed, into variables too."""
    budget = _budget.get()
    if budget is not None and isinstance(value, str):
        budget.left -= len(value)
        if budget.left < 0:
            raise TemplateTooExpensive(f"it prints more than {MAX_TEXT} characters")
    return value


def bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which looks at its arguments before: widths, and what would be put together."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    method = function.__name__.removeprefix("do_")

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *others = args[first:]
        if method == "join":
            value = list(value)
            _check_length(sum(len(one) for one in value if isinstance(one, str)))
        else:
            _check_method(method, value, tuple(others), kwargs)
        return function(*args[:first], value, *others, **kwargs)

    return bounded


def _check_method(name: str, text: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if name in ("format", "format_map"):
        _check_format(str(text), args, kwargs)
        return
    _check_numbers(args, kwargs)
    if name == "replace" and len(args) > 1:
        _check_length(len(text) + (text.count(str(args[0])) + 1) * len(str(args[1])))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_length(sum(len(one) + len(text) for one in args[0] if isinstance(one, str)))


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise TemplateTooExpensive(f"it joins {length} characters or entries")


def _check_numbers(args: tuple, kwargs: dict[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > MAX_NUMBER:
            raise TemplateTooExpensive(f"want numbers of at most {MAX_NUMBER}")


def _check_format(text: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Widths that stand in a format, or among its values."""
    if LONG_NUMBER.search(text) and ("%" in text or "{" in text):
        raise TemplateTooExpensive("want no such width in a format")
    if WIDTH_AMONG_VALUES.search(text):
        _check_numbers(args, kwargs)


def _check_product(operator: str, left: Any, right: Any) -> None:
    for number, other in ((left, right), (right, left)):
        if isinstance(number, int) and hasattr(other, "__len__"):
            _check_length(number * len(other))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateTooExpensive(f"want numbers of at most {MAX_BITS} bits")
