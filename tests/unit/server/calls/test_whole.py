"""Tool calls as wholes."""

from pilotfish.server.calls.parser import CallArguments, CallClosed, CallOpened, Said
from pilotfish.server.calls.whole import Call, WholeCalls


def test_a_call_is_shown_once_it_is_complete():
    calls = WholeCalls()
    assert calls.push([Said("content", "a"), CallOpened(0, "c", "f"), CallArguments(0, "{")]) == [Said("content", "a")]
    assert calls.push([CallArguments(0, "}"), CallClosed(0, True)]) == [Call("c", "f", "{}")]


def test_text_around_a_call_that_broke_off_is_one():
    parts = [Said("content", "a"), CallOpened(0, "c", "f"), CallClosed(0, False), Said("content", "b")]
    assert WholeCalls().push(parts) == [Said("content", "ab")]


def test_reasoning_may_be_left_out():
    parts = [Said("reasoning", "r"), Said("content", "a")]
    assert WholeCalls().push(parts) == parts
    assert WholeCalls(reasoning=False).push(parts) == [Said("content", "a")]
