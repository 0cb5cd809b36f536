import asyncio
import threading

import pytest

from pilotfish.server.lane import WorkLane, run_steps, without_lock


class Held:
    """Work that waits in its thread until it is let go."""

    def __init__(self):
        self.go, self.order = threading.Event(), []

    def __call__(self, name):
        self.go.wait(120)
        self.order.append(name)
        return name


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_work_is_done_in_another_thread_and_errors_come_back():
    async def story():
        lane = WorkLane(1)
        assert await lane.run("a", threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await lane.run("a", lambda: 1 / 0)
        assert await lane.run("a", int, "7") == 7
        lane.close()

    asyncio.run(story())


def test_keys_take_turns_however_much_one_of_them_sends():
    async def story():
        lane, held = WorkLane(1), Held()
        tasks = [asyncio.create_task(lane.run("a", held, f"a{i}")) for i in range(4)]
        await settle()
        tasks += [asyncio.create_task(lane.run(label, held, f"{label}0")) for label in ("b", "c")]
        await settle()
        held.go.set()
        await asyncio.gather(*tasks)
        lane.close()
        return held.order

    assert asyncio.run(story()) == ["a0", "a1", "b0", "c0", "a2", "a3"]


def test_who_leaves_the_queue_is_dropped_and_who_leaves_work_keeps_its_thread_until_it_ends():
    async def story():
        lane, held = WorkLane(1), Held()
        begun, waiting, last = (asyncio.create_task(lane.run("a", held, name)) for name in ("begun", "waiting", "last"))
        await settle()
        waiting.cancel()
        begun.cancel()
        await settle()
        # nothing was handed on: the one thread is still at work
        assert not last.done() and held.order == []
        held.go.set()
        assert await last == "last"
        lane.close()
        return held.order

    assert asyncio.run(story()) == ["begun", "last"]


def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next():
    async def story():
        lane, held = WorkLane(1), Held()
        held.go.set()
        first, second, third = (asyncio.create_task(lane.run("a", held, i)) for i in range(3))
        first.add_done_callback(lambda _: second.cancel())
        assert await third == 2
        assert await lane.run("a", held, 3) == 3
        lane.close()

    asyncio.run(story())


def test_only_one_thread_runs_python_code_and_gives_way_where_no_lock_is_needed():
    async def story():
        lane, held = WorkLane(2), Held()
        inside = []

        def tokenise():
            with without_lock():
                held("tokenised")

        def count():
            inside.append(1)
            assert len(inside) == 1
            inside.clear()

        waiting = asyncio.create_task(lane.run("a", tokenise))
        await asyncio.gather(*(lane.run("b", count) for _ in range(20)))
        assert not waiting.done()
        held.go.set()
        await waiting
        lane.close()

    asyncio.run(story())


def test_others_have_their_turn_between_the_steps_of_one():
    async def story():
        lane, held = WorkLane(1), Held()

        def steps():
            for number in range(3):
                held(f"a{number}")
                yield
            return "done"

        tasks = [asyncio.create_task(lane.run_steps("a", steps())), asyncio.create_task(lane.run("b", held, "b0"))]
        await settle()
        held.go.set()
        assert await tasks[0] == "done"
        await tasks[1]
        lane.close()
        assert run_steps(steps()) == "done"
        return held.order[:4]

    assert asyncio.run(story()) == ["a0", "b0", "a1", "a2"]
