"""The trial of one grammar: it is compiled and some texts of it are walked, and what that took is told.

Runs in a process that may be lost (worker.py), which sets limits of CPU time, memory and stack before it calls this.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar.bounds import check
from pilotfish.engine.grammar.form import compile_form, first_words, library_form
from pilotfish.engine.link.messages import Grammar

NUM_WALKS = 2
WALK_TOKENS = 12
WALKS_SECONDS = 0.1
"""CPU time after which no further token is walked."""
STEP_SECONDS = 0.1
"""CPU time that one mask, or one token's step, may take."""
PAGE_BYTES = 4096


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker is asked: to try a grammar, or, without one, to give up the trial of that number, or, where end
    ids are given, to read the tokenizer with them.

    API keys take turns; `key` is the label of one.
    """

    number: int
    grammar: Grammar | None = None
    eos_token_ids: tuple[int, ...] = ()
    key: str = ""


class TrialVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`form` is the grammar in the library's own form, or `error` says why it is refused.

    `seconds` of CPU and `num_bytes` of memory is what compiling took.
    """

    number: int
    form: str = ""
    error: str | None = None
    seconds: float = 0.0
    num_bytes: int = 0


class TooSlow(Exception):
    """A step of a walk took longer than it may."""


def attempt(task: Task, tokenizer: LLTokenizer, vocab_size: int) -> TrialVerdict:
    """Raises nothing that a grammar can cause, but may never return: see the worker's limits."""
    assert task.grammar is not None
    kind = task.grammar.kind
    try:
        check(task.grammar)
        before, began = resident_bytes(), time.thread_time()
        form = library_form(task.grammar)
        matcher = compile_form(form, tokenizer)
        seconds = time.thread_time() - began
        _walk_all(matcher, vocab_size, random.Random(0))
    except RequestError as error:
        return TrialVerdict(number=task.number, error=str(error))
    except MemoryError:
        return TrialVerdict(number=task.number, error=f"{kind}: it needs more memory than a grammar may")
    except BaseException as error:  # the library's converters raise plain Exception, its panics no Exception at all
        return TrialVerdict(number=task.number, error=f"{kind}: {first_words(str(error))}")
    return TrialVerdict(number=task.number, form=form, seconds=seconds, num_bytes=max(0, resident_bytes() - before))


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def _walk_all(matcher: LLMatcher, vocab_size: int, generator: random.Random) -> None:
    """Raises TooSlow, or ValueError where no text can begin."""
    began = time.thread_time()
    words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    for walk in range(NUM_WALKS):
        for place in range(WALK_TOKENS):
            _timed("a mask", fill_next_token_bitmask, matcher, words)
            token = _draw(words[0], generator)
            if walk == place == 0 and (matcher.is_error() or token is None):
                raise ValueError(first_words(matcher.get_error()) or "no text fits it")
            if token is None or matcher.is_stopped():
                break
            _timed("a token", matcher.consume_token, token)
            if time.thread_time() - began > WALKS_SECONDS:
                return
        if matcher.is_error() or not matcher.reset():
            return


def _draw(words: np.ndarray, generator: random.Random) -> int | None:
    """A token whose bit is set, if there is one."""
    places = np.flatnonzero(words)
    if not len(places):
        return None
    place = int(places[generator.randrange(len(places))])
    bits = [bit for bit in range(32) if words[place] >> bit & 1]
    return 32 * place + generator.choice(bits)


def _timed(what: str, step: Callable[..., Any], *arguments: Any) -> Any:
    began = time.thread_time()
    result = step(*arguments)
    took = time.thread_time() - began
    if took > STEP_SECONDS:
        raise TooSlow(f"{what} took {took:.2f} s, at most {STEP_SECONDS:g} s may go into it")
    return result
