"""What is remembered of answers: bounded, and each key's own."""

import msgspec

from pilotfish.server.responses.answer import Message, OutputText
from pilotfish.server.responses.memory import MAX_ITEM_BYTES, ItemMemory


def message(text):
    return Message(id="m", status="completed", content=[OutputText(text)])


def test_each_key_has_its_own():
    memory = ItemMemory()
    memory.keep("a", "1", message("x"))
    assert msgspec.json.decode(memory.recall("a", "1"))["content"][0]["text"] == "x"
    assert memory.recall("b", "1") is None and memory.recall("a", "2") is None


def test_the_eldest_are_forgotten_and_giants_never_kept():
    memory = ItemMemory(max_bytes=3000)
    for number in range(100):
        memory.keep("a", str(number), message("x" * 500))
        memory.recall("a", "0")
    kept = [number for number in range(100) if memory.recall("a", str(number))]
    # what is asked for stays
    assert kept == [0, *range(100 - len(kept) + 1, 100)] and 3 <= len(kept) <= 5
    memory.keep("a", "giant", message("x" * MAX_ITEM_BYTES))
    assert memory.recall("a", "giant") is None and memory.recall("a", "99")
