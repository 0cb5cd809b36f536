import asyncio
import threading

from pilotfish.server.http.status import Shared


def test_all_who_ask_meanwhile_share_one_call_that_began_after_they_asked():
    async def story():
        go, calls = threading.Event(), []

        def scrape():
            calls.append(1)
            go.wait(120)
            return b"%d" % len(calls)

        shared = Shared(scrape)
        first = asyncio.create_task(shared())
        while not calls:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(shared()) for _ in range(20)]
        others[0].cancel()
        await asyncio.sleep(0)
        go.set()
        assert await first == b"1"
        assert await asyncio.gather(*others[1:]) == [b"2"] * 19
        assert await shared() == b"3"

    asyncio.run(story())
