"""What `pilotfish serve` says of the files before it listens."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import msgspec
import pytest

from pilotfish.server.model_files import load_model_files
from pilotfish.server.serve import _stop_on_signals, tell_of_reasoning
from pilotfish.server.text.chat_template import ChatTemplate

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
SWITCHED = "{% if preserve_thinking or messages[-1].role != 'user' %}{{ messages[1].reasoning_content }}{% endif %}"


@pytest.fixture(scope="module")
def demo():
    return load_model_files(DEMO)


def told(files, caplog):
    with caplog.at_level(logging.WARNING, "pilotfish"):
        tell_of_reasoning(files)
    return [record.getMessage() for record in caplog.records]


def test_a_template_that_forgets_is_told_once_with_the_way_out(demo, caplog):
    (line,) = told(demo, caplog)
    assert "drops earlier turns' reasoning" in line and "no switch of it keeps it" in line
    caplog.clear()
    switched = msgspec.structs.replace(demo, chat_template=ChatTemplate(SWITCHED))
    (line,) = told(switched, caplog)
    assert """--default-chat-template-kwargs '{"preserve_thinking": true}' keeps it""" in line


@pytest.mark.parametrize(
    "change",
    [
        {"chat_template": None},
        {"parses_reasoning": False},
        {"chat_template": ChatTemplate("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")},
        {"chat_template": ChatTemplate(SWITCHED), "template_values": {"preserve_thinking": True}},
    ],
)
def test_nothing_is_told_where_nothing_is_lost(demo, caplog, change):
    assert told(msgspec.structs.replace(demo, **change), caplog) == []


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_terminal_that_goes_stops_it_however_often_it_is_said_and_not_under_nohup(before, stops):
    async def hung_up() -> bool:
        stop = asyncio.Event()
        _stop_on_signals(stop)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return stop.is_set()

    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, before)
        assert asyncio.run(hung_up()) is stops
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
