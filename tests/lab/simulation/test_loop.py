"""The virtual clock: hours pass in milliseconds and timers fire in their order."""

import asyncio
import time

from aioserve.lab import VirtualClockEventLoop


def test_an_hour_of_timers_takes_no_time_and_keeps_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, fired = asyncio.get_running_loop(), []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 3600), sleeper("early", 0.5), sleeper("mid", 60))
        return fired

    started = time.perf_counter()
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        fired = runner.run(main())
    assert [name for name, _ in fired] == ["early", "mid", "late"]
    assert [round(when, 6) for _, when in fired] == [0.5, 60, 3600]
    assert time.perf_counter() - started < 1800  # half of what it would be


def test_a_timeout_fires_on_the_virtual_clock() -> None:
    async def main() -> bool:
        try:
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        except TimeoutError:
            return asyncio.get_running_loop().time() >= 1000
        return False

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        assert runner.run(main())


def test_a_thread_can_still_wake_the_loop() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        assert runner.run(main()) == 7


def test_the_clock_jumps_only_where_nothing_would_happen_on_the_way() -> None:
    async def main() -> list[tuple[bool, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockEventLoop)
        tried = [(loop.jump_to(3.0), loop.time())]
        timer = loop.call_at(5.0, lambda: None)
        tried.append((loop.jump_to(5.0), loop.time()))  # what is due then comes first
        tried.append((loop.jump_to(4.0), loop.time()))
        timer.cancel()
        loop.call_soon(lambda: None)
        tried.append((loop.jump_to(4.5), loop.time()))
        return tried

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        tried = runner.run(main())
    assert tried == [(True, 3.0), (False, 3.0), (True, 4.0), (False, 4.0)]
