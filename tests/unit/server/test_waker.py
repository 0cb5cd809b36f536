"""All who have news are woken, once each, in their order, and others have their turn in between."""

import asyncio
from functools import partial

from pilotfish.server.waker import AT_ONCE, Waker


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


def test_all_are_woken_once_in_their_order_however_often_they_are_added():
    async def story():
        waker, woken = Waker(), []
        wakes = [partial(woken.append, number) for number in range(3 * AT_ONCE + 1)]
        for wake in wakes + wakes:
            waker.add(wake)
        assert not woken
        await turns(4)
        return woken

    assert asyncio.run(story()) == list(range(3 * AT_ONCE + 1))


def test_others_have_their_turn_between_two_groups():
    async def story():
        waker, woken = Waker(), []
        for number in range(2 * AT_ONCE):
            waker.add(partial(woken.append, number))
        for _ in range(2):
            await turns(1)
            woken.append("others")
        return woken

    first, second = list(range(AT_ONCE)), list(range(AT_ONCE, 2 * AT_ONCE))
    assert asyncio.run(story()) == [*first, "others", *second, "others"]


def test_one_that_has_news_again_while_it_is_woken_is_woken_again_behind_the_others():
    async def story():
        waker, woken = Waker(), []

        def again():
            woken.append("again")
            if len(woken) == 1:
                waker.add(again)

        waker.add(again)
        waker.add(partial(woken.append, "other"))
        await turns(2)
        return woken

    assert asyncio.run(story()) == ["again", "other", "again"]
