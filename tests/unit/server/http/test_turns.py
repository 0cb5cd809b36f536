import asyncio

from pilotfish.server.http.pace import REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, Pace
from pilotfish.server.http.turns import BEGUN_IN_A_PASS, Turns

MANY = 32


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


def begin_all(turns, label, count, begun):
    async def one(number):
        await turns.take(label)
        begun.append((label, number))

    return [asyncio.create_task(one(number)) for number in range(count)]


def test_few_begin_in_a_pass_each_in_its_order():
    async def story():
        turns, begun = Turns(), []
        begin_all(turns, "alice", MANY, begun)
        known = 0
        for _ in range(2 * MANY // BEGUN_IN_A_PASS):
            await passes(1)
            assert len(begun) - known <= BEGUN_IN_A_PASS
            known = len(begun)
        assert begun == [("alice", number) for number in range(MANY)]
        assert not turns._waiting

    asyncio.run(story())


def test_keys_take_turns():
    async def story():
        turns, begun = Turns(), []
        begin_all(turns, "alice", 10 * MANY, begun)
        await passes(2)
        begin_all(turns, "bob", 2, begun)
        await passes(4)
        assert [one for one in begun if one[0] == "bob"] == [("bob", 0), ("bob", 1)]
        assert len(begun) < MANY

    asyncio.run(story())


def test_who_leaves_while_he_waits_takes_no_turn():
    async def story():
        turns, begun = Turns(), []
        tasks = begin_all(turns, "alice", MANY, begun)
        await passes(2)
        for task in tasks[BEGUN_IN_A_PASS:-1]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # four that were told to begin in the pass in which they left, at most
        assert ("alice", MANY - 1) in begun
        assert not turns._waiting

    asyncio.run(story())


def test_a_key_that_leaves_much_begins_nothing_until_its_turn_and_others_do():
    async def story():
        clock = Clock()
        turns, begun = Turns(Pace(clock)), []
        for _ in range(REFUSALS_AT_ONCE + 2):
            turns.left.count("alice")
        (task,) = begin_all(turns, "alice", 1, begun)
        for other in ("bob", "alice, looking"):
            async with asyncio.timeout(60):
                await turns.take(other)
        await asyncio.sleep(5 / REFUSALS_PER_SECOND)
        assert not begun
        clock.now += 2.5 / REFUSALS_PER_SECOND
        async with asyncio.timeout(60):
            await task

    asyncio.run(story())
