"""How often the points of /v1/watch are made."""

import asyncio
import time

from pilotfish.server.http import watch


def test_a_point_that_comes_late_has_its_own_time_before_the_next(monkeypatch):
    """A loop that was busy for several intervals makes one point, and none at once behind it."""
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.02)
    began = []

    class History:
        def sample(self):
            began.append(time.monotonic())
            if len(began) == 2:
                time.sleep(0.07)

    async def story():
        task = asyncio.create_task(watch._sample(History()))
        while len(began) < 6:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(story())
    ended = [began[0], began[1] + 0.07, *began[2:]]
    assert all(next_one - end >= 0.0095 for end, next_one in zip(ended, began[1:], strict=False))
