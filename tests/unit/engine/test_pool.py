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


@pytest.mark.parametrize("count", (-1, 4))
def test_more_than_is_free_is_refused(count):
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


def test_a_shared_item_is_free_after_its_last_user():
    pool = Pool("pages", 6)
    first = pool.take("a", 2)
    second = pool.take("b", 1, shared=first)
    pool.check()
    assert second[:2] == first and second[2] not in first
    assert (pool.num_used, pool.num_free) == (3, 2)
    pool.give_back("a")
    assert pool.num_free == 2
    pool.give_back("b")
    pool.check()
    assert pool.num_free == 5


def test_what_is_kept_is_idle_without_a_user_and_free_without_a_keeper():
    pool = Pool("pages", 6)
    items = pool.take("a", 3)
    pool.keep("keeper", items[:2])
    assert (pool.num_used, pool.num_idle, pool.num_free) == (3, 0, 2)
    pool.give_back("a")
    pool.check()
    assert (pool.num_used, pool.num_idle, pool.num_free) == (0, 2, 3)
    assert pool.kept_by("keeper") == items[:2] and pool.kept_by("stranger") == []
    assert pool.take("b", 1, shared=items[:1])[0] == items[0]
    assert (pool.num_used, pool.num_idle, pool.is_idle(items[0]), pool.is_idle(items[1])) == (2, 1, False, True)
    pool.give_up("keeper")
    pool.check()
    assert (pool.num_used, pool.num_idle, pool.num_free) == (2, 0, 3)


def test_a_user_has_more_behind_what_it_had():
    pool = Pool("pages", 6)
    first = pool.take("a", 0, shared=[])
    assert first == [] and pool.num_free == 5
    some = pool.add("a", 2)
    assert pool.add("a", 1)[:2] == some
    pool.check()
    with pytest.raises(AssertionError, match="want 3 free, have 2"):
        pool.add("a", 3)
    pool.give_back("a")
    assert pool.num_free == 5


def test_first_items_are_exchanged_for_shared_ones():
    pool = Pool("pages", 8)
    one, other = pool.take("a", 2), pool.take("b", 3)
    assert pool.exchange("b", one) == [*one, other[2]]
    pool.check()
    assert pool.num_free == 4
    assert pool.exchange("b", one) == [*one, other[2]]
    pool.check()
    few = pool.take("c", 1)
    assert pool.exchange("c", one) == one and few[0] not in one
    pool.check()
    assert pool.num_free == 4


def test_only_what_somebody_holds_can_be_shared_or_kept():
    pool = Pool("pages", 5)
    taken = pool.take("a", 1)
    with pytest.raises(AssertionError, match="is free, nobody can share it"):
        pool.take("b", 1, shared=[taken[0] + 1])
    with pytest.raises(AssertionError, match="has no user, or a keeper"):
        pool.keep("c", [taken[0] + 1])
    pool.keep("c", taken)
    with pytest.raises(AssertionError, match="has no user, or a keeper"):
        pool.keep("d", taken)


def test_a_random_walk_keeps_every_invariant():
    generator = random.Random(0)
    pool = Pool("pages", 20)
    owned: dict[int, list[int]] = {}
    kept: dict[str, list[int]] = {}
    for number in range(2000):
        action = generator.random()
        held = {item for items in (*owned.values(), *kept.values()) for item in items}
        if kept and action < 0.15:
            keeper = generator.choice(sorted(kept))
            pool.give_up(keeper)
            del kept[keeper]
        elif owned and action < 0.3:
            items = generator.choice(list(owned.values()))
            kept[f"keeper {number}"] = [item for item in items if not any(item in other for other in kept.values())]
            pool.keep(f"keeper {number}", kept[f"keeper {number}"])
        elif owned and action < 0.4:
            owner = generator.choice(sorted(owned))
            others = sorted(held.difference(owned[owner]))
            shared = generator.sample(others, min(len(others), len(owned[owner]), 2))
            owned[owner] = pool.exchange(owner, shared)
        elif owned and (pool.num_free == 0 or action < 0.7):
            owner = generator.choice(sorted(owned))
            pool.give_back(owner)
            del owned[owner]
        elif pool.num_free:
            shared = generator.sample(sorted(held), min(len(held), 2))
            owned[number] = pool.take(number, generator.randint(1, pool.num_free), shared)
        pool.check()
        used = {item for items in owned.values() for item in items}
        assert len(used) == pool.num_used and 0 not in used
        assert pool.num_idle == len({item for items in kept.values() for item in items} - used)
