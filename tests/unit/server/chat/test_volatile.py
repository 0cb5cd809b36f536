"""Lines that only a client's own books need are left out of system prompts, and nothing else is."""

import time

import pytest

from pilotfish.metrics.definitions import VOLATILE_LINES
from pilotfish.server.chat.volatile import LINES, without_volatile

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
COUNTER = "<total_tokens>14999436 tokens left</total_tokens>"
CLAUDE = "You are Claude Code, Anthropic's official CLI for Claude."


def cleaned(text, role="system", others=({"role": "user", "content": "hi"},)):
    """The texts of the first message and the names of what was left out."""
    names = []
    messages = without_volatile([{"role": role, "content": text}, *others], names.append)
    return [message["content"] for message in messages[: len(messages) - len(others)]], names


@pytest.mark.parametrize(
    ("text", "kept", "names"),
    [
        (f"{BILLING}\n{CLAUDE}", [CLAUDE], ["billing_header"]),
        # blocks that a relay joins without a break
        (f"{BILLING}{CLAUDE}", [CLAUDE], ["billing_header"]),
        (f"{BILLING}\n{BILLING}\n{CLAUDE}", [CLAUDE], ["billing_header"] * 2),
        ("x-anthropic-billing-header: account=abc; cch=rotating-hash\nBe brief.", ["Be brief."], ["billing_header"]),
        ("x-anthropic-billing-header: cc_version=9.9.9; cc_entrypoint=cli;", [], ["billing_header"]),
        (f"{CLAUDE}\n\n{COUNTER}\n\n{COUNTER}\n", [CLAUDE], ["token_counter"] * 2),
        (COUNTER, [], ["token_counter"]),
        (f"{BILLING}\n{COUNTER}", [], ["billing_header", "token_counter"]),
    ],
)
def test_a_line_of_the_list_is_left_out(text, kept, names):
    assert cleaned(text) == (kept, names)


@pytest.mark.parametrize(
    "text",
    [
        f"{CLAUDE}\n{BILLING}\nmore",
        f"Explain this: {BILLING}",
        "x-anthropic-billing-header: what is it?",
        "x-anthropic-billing-header:",
        "x-anthropic-version: cch=1;",
        f"{COUNTER}\n{CLAUDE}",
        f"Say {COUNTER}",
        f"{COUNTER} or so",
        "<total_tokens>many tokens left</total_tokens>",
        "<total_tokens>1 tokens left</total_tokens><total_tokens>2 tokens left</total_tokens>",
        f"  {CLAUDE}  \n",
        "",
    ],
)
def test_other_text_stays_to_the_letter(text):
    assert cleaned(text) == ([text], [])


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize("text", [BILLING, COUNTER, f"{BILLING}\n{CLAUDE}\n{COUNTER}"])
def test_what_others_say_is_never_touched(role, text):
    assert cleaned(text, role) == ([text], [])


def test_a_late_counter_goes_with_its_message():
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": COUNTER}, {"role": "user", "content": "b"}]
    assert without_volatile(turns, lambda name: None) == [turns[0], turns[2]]


def test_a_conversation_never_becomes_empty():
    only = [{"role": "system", "content": BILLING}]
    assert without_volatile(only, pytest.fail) == only


def test_metrics_know_the_list():
    assert LINES == VOLATILE_LINES


@pytest.mark.parametrize(
    "line", [BILLING + "\n", "\n" + COUNTER, " " * 80 + "\n", "x-anthropic-billing-header: a=", "a=;"]
)
def test_long_texts_of_nothing_else_take_no_longer(line):
    """A quadratic search would take minutes."""
    text = line * (4_000_000 // len(line))
    began = time.process_time()
    cleaned(text)
    assert time.process_time() - began < 30
