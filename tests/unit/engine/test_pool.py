"""The pool of numbered items: nothing lost, nothing owned twice, item 0 never handed out."""

from __future__ import annotations

import random

import pytest

from pilotfish.engine.cache.pool import Pool


def test_items_are_whole_and_the_null_item_stays():
    pool = Pool("pages", 5)
    taken = pool.take("a", 3) + pool.take("b", 1)
    pool.check()
    assert sorted(taken) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.capacity) == (0, 4, 4)


def test_items_given_back_can_be_taken_again():
    pool = Pool("pages", 4)
    first = pool.take("a", 3)
    pool.give_back("a")
    pool.check()
    assert sorted(pool.take("b", 3)) == sorted(first)


def test_the_caller_s_list_is_its_own():
    pool = Pool("pages", 4)
    pool.take("a", 2).clear()
    pool.check()
    pool.give_back("a")
    pool.check()
    assert pool.num_free == 3


@pytest.mark.parametrize("count", (0, 4))
def test_more_than_is_free_or_nothing_is_refused(count):
    with pytest.raises(AssertionError, match="pages: want"):
        Pool("pages", 4).take("a", count)


def test_an_owner_takes_once():
    pool = Pool("slots", 4)
    pool.take("a", 1)
    with pytest.raises(AssertionError, match="owns items already"):
        pool.take("a", 1)
    pool.check()


def test_a_stranger_gives_nothing_back():
    with pytest.raises(KeyError):
        Pool("slots", 4).give_back("a")


def test_a_pool_needs_an_item_beside_the_null_one():
    with pytest.raises(ValueError, match="want at least 2"):
        Pool("slots", 1)


def test_check_finds_a_lost_and_a_doubled_item():
    for fault in (lambda pool: pool._free.pop(), lambda pool: pool._free.append(1), lambda pool: pool._free.append(0)):
        pool = Pool("slots", 4)
        pool.take("a", 1)
        fault(pool)
        with pytest.raises(AssertionError, match="lost or owned twice"):
            pool.check()


def test_a_random_walk_keeps_every_invariant():
    generator = random.Random(0)
    pool = Pool("pages", 20)
    owned: dict[int, list[int]] = {}
    for number in range(2000):
        if owned and (pool.num_free == 0 or generator.random() < 0.5):
            owner = generator.choice(sorted(owned))
            pool.give_back(owner)
            del owned[owner]
        else:
            owned[number] = pool.take(number, generator.randint(1, pool.num_free))
        pool.check()
        items = [item for items in owned.values() for item in items]
        assert len(set(items)) == len(items) == pool.num_used
        assert 0 not in items
