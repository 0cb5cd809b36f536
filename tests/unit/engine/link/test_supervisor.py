import asyncio
from types import SimpleNamespace

import pytest

from pilotfish.engine.link.client import EngineUnavailable, Failure
from pilotfish.engine.link.supervisor import RestartBudget, Supervisor


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_budget_forgets_restarts_older_than_its_window():
    clock = Clock()
    budget = RestartBudget(2, window=10, clock=clock)
    assert budget.take() and budget.num_taken == 1
    clock.now += 6
    assert budget.take() and not budget.take() and budget.num_taken == 2
    clock.now += 4
    # the first is exactly a window old
    assert budget.take() and not budget.take()


def test_a_budget_of_none_and_of_less():
    assert not RestartBudget(0).take()
    with pytest.raises(ValueError, match="got -1"):
        RestartBudget(-1)


class Client:
    """Each life is "load" (fails to load), "damaged" (the same, for good), "serve" (serves, then fails) or "undead"
    (serves, fails, and its process stays); after the last the engine is closed."""

    def __init__(self, *lives):
        self.lives = list(lives)
        self.state = "loading"
        self.failure = None

    async def wait_ready(self):
        if self.lives[0] in ("load", "damaged"):
            self.state = "failed"
            self.failure = Failure("load", "no such checkpoint", permanent=self.lives[0] == "damaged")
            raise EngineUnavailable("load", "no such checkpoint")
        self.state = "ready"
        return SimpleNamespace()

    async def wait_ended(self):
        self.state = "failed" if self.lives[1:] or self.lives[0] in ("serve", "undead") else "closed"

    async def restart(self):
        if self.lives.pop(0) == "undead":
            raise EngineUnavailable("process", "it does not end")
        self.state = "restarting"


def supervise(limit, *lives):
    """(times ready, times restarted, gave up) of an engine with these lives; "close" is one that is closed."""
    counts = SimpleNamespace(ready=0, restarts=0)

    def on_ready(_):
        counts.ready += 1

    def on_restart():
        counts.restarts += 1

    async def story():
        supervisor = Supervisor(Client(*lives), RestartBudget(limit), on_ready=on_ready, on_restart=on_restart)
        await asyncio.wait_for(supervisor.run(), 120)
        try:
            await asyncio.wait_for(supervisor.wait_gave_up(), 0.01)
        except TimeoutError:
            return counts.ready, counts.restarts, False
        return counts.ready, counts.restarts, True

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("limit", "lives", "expected"),
    [
        (3, ["close"], (1, 0, False)),
        (3, ["load"], (0, 0, True)),
        (0, ["serve"], (1, 0, True)),
        (3, ["serve", "serve", "close"], (3, 2, False)),
        (2, ["serve"] * 3, (3, 2, True)),
        # once it has served, a load that fails is worth another try
        (3, ["serve", "load", "close"], (2, 2, False)),
        (2, ["serve", "load", "load"], (1, 2, True)),
        (3, ["damaged"], (0, 0, True)),
        (3, ["serve", "damaged", "close"], (1, 1, True)),
        # nothing is started beside a process that holds the device
        (3, ["undead", "close"], (1, 1, True)),
    ],
)
def test_restarts_and_gives_up(limit, lives, expected):
    assert supervise(limit, *lives) == expected
