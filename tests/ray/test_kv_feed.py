import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import zmq

from aioserve.fleet.ray import kv_feed
from aioserve.fleet.ray.kv_feed import KVFeed, Listener, Ticket, follow
from aioserve.fleet.routing import ReplicaReport
from aioserve.kv_cache.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.processes import PATIENCE


def stored(name: str) -> BlockStored:
    return BlockStored(name.encode(), None, [1, 2, 3])


def removed(name: str) -> BlockRemoved:
    return BlockRemoved(name.encode())


class Follower(Listener):
    """What a router knows of one replica."""

    def __init__(self, feed: KVFeed, silence: float = 5.0) -> None:
        self.held: set[str] = set()
        self.num_cleared = 0
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(follow(feed.ticket, self, silence))

    async def expect(self, *names: str) -> None:
        """Returns when these are held, and no others."""
        async with asyncio.timeout(PATIENCE):
            while self.held != set(names):
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def on_event(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            self.num_cleared += 1
        elif isinstance(event, BlockStored):
            self.held.add(event.block_hash.decode())
        else:
            self.held.discard(event.block_hash.decode())
        self._changed.set()


@pytest_asyncio.fixture
async def feed() -> AsyncIterator[KVFeed]:
    feed = KVFeed("127.0.0.1")
    feed.start()
    yield feed
    await feed.close()


async def test_what_is_stored_and_removed_reaches_a_router(feed: KVFeed) -> None:
    follower = Follower(feed)
    feed.note(stored("a"))
    feed.note(stored("b"))
    await follower.expect("a", "b")
    feed.note(removed("a"))
    feed.note(stored("c"))
    await follower.expect("b", "c")
    await follower.stop()


async def test_a_stranger_hears_nothing_and_costs_no_memory(feed: KVFeed) -> None:
    """One that speaks in the clear, one that knows the feed's key, and one with a wrong token."""
    follower = Follower(feed)
    feed.note(stored("a"))
    await follower.expect("a")
    with zmq.Context() as context:
        strangers = [context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.REQ)]
        for stranger in strangers[1:]:
            public, secret = zmq.curve_keypair()
            stranger.setsockopt(zmq.CURVE_SERVERKEY, feed.ticket.server_key)
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
            stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
        for stranger in strangers:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(feed.ticket.address)
            stranger.send_multipart([b"h" + feed.ticket.token[1:], b"follow"])
        second = Follower(feed)  # what came before it was read before it
        await second.expect("a")
        feed.note(stored("b"))
        await follower.expect("a", "b")
        assert not any(stranger.poll(50) for stranger in strangers)
        assert len(feed._numbers) == 2
        for stranger in strangers:
            stranger.close()
    await follower.stop()
    await second.stop()


def test_a_ticket_is_a_text_that_holds_all_that_a_router_needs() -> None:
    ticket = Ticket("tcp://10.0.0.1:5000", b"k" * 40, b"t" * 32)
    assert Ticket.decode(ticket.encode()) == ticket


async def test_a_router_that_comes_late_is_told_all_that_is_held(feed: KVFeed) -> None:
    first = Follower(feed)
    for name in "abc":
        feed.note(stored(name))
    feed.note(removed("b"))
    await first.expect("a", "c")
    second = Follower(feed)
    await second.expect("a", "c")
    feed.note(stored("d"))
    await first.expect("a", "c", "d")
    await second.expect("a", "c", "d")
    await first.stop()
    await second.stop()


async def test_a_cleared_cache_is_forgotten(feed: KVFeed) -> None:
    follower = Follower(feed)
    feed.note(stored("a"))
    await follower.expect("a")
    feed.note(AllBlocksCleared())
    feed.note(stored("b"))
    await follower.expect("b")
    await follower.stop()


async def test_a_block_that_comes_and_goes_between_two_messages_is_not_held(feed: KVFeed) -> None:
    follower = Follower(feed)
    feed.note(stored("a"))
    feed.note(removed("a"))
    feed.note(stored("b"))
    await follower.expect("b")
    await follower.stop()


async def test_a_router_that_missed_messages_asks_for_all_again(feed: KVFeed) -> None:
    follower = Follower(feed)
    feed.note(stored("a"))
    await follower.expect("a")
    # As when its queue was full: one message is not sent.
    (router,) = feed._numbers
    feed._numbers[router] += 1
    feed.note(removed("a"))
    feed.note(stored("b"))
    await follower.expect("b")
    assert follower.num_cleared == 2
    await follower.stop()


async def test_a_router_finds_a_replica_again_that_was_silent(feed: KVFeed) -> None:
    follower = Follower(feed, silence=0.2)
    feed.note(stored("a"))
    await follower.expect("a")
    feed._numbers.clear()  # as when it was taken for gone
    feed.note(stored("b"))
    await follower.expect("a", "b")
    await follower.stop()


async def test_a_router_that_has_gone_is_forgotten(feed: KVFeed) -> None:
    follower = Follower(feed)
    feed.note(stored("a"))
    await follower.expect("a")
    await follower.stop()
    async with asyncio.timeout(PATIENCE):
        while feed._numbers:
            feed.note(stored("b"))
            feed.note(removed("b"))
            await asyncio.sleep(0.01)


async def test_a_router_that_reads_nothing_is_forgotten_and_others_hear_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_feed, "MAX_QUEUED", 4)
    monkeypatch.setattr(kv_feed, "FLUSH_SECONDS", 0.0)
    feed = KVFeed("127.0.0.1")
    feed.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as silent:
        public, secret = zmq.curve_keypair()
        silent.setsockopt(zmq.CURVE_SERVERKEY, feed.ticket.server_key)
        silent.setsockopt(zmq.CURVE_PUBLICKEY, public)
        silent.setsockopt(zmq.CURVE_SECRETKEY, secret)
        silent.setsockopt(zmq.RCVHWM, 1)
        silent.setsockopt(zmq.LINGER, 0)
        silent.connect(feed.ticket.address)
        silent.send_multipart([feed.ticket.token, b"follow"])
        async with asyncio.timeout(PATIENCE):
            while not feed._numbers:
                feed.note(stored("a"))
                await asyncio.sleep(0.01)
            while feed._numbers:  # until its queue and the system's buffers are full
                for i in range(100):
                    feed.note(stored(f"{i}".ljust(20_000)))
                await asyncio.sleep(0.01)
    follower = Follower(feed)
    feed.note(AllBlocksCleared())
    feed.note(stored("b"))
    await follower.expect("b")
    await follower.stop()
    await feed.close()


async def test_reports_reach_a_router_that_comes_early_and_one_that_comes_late() -> None:
    report = ReplicaReport(num_running=3, max_num_seqs=8)
    feed = KVFeed("127.0.0.1", lambda: report)
    feed.start()

    class Heard(Listener):
        def __init__(self) -> None:
            self.reports: asyncio.Queue[ReplicaReport] = asyncio.Queue()

        def on_report(self, report: ReplicaReport) -> None:
            self.reports.put_nowait(report)

    heard = [Heard(), Heard()]
    tasks = []
    try:
        for listener in heard:
            tasks.append(asyncio.create_task(follow(feed.ticket, listener)))
            async with asyncio.timeout(PATIENCE):
                assert await listener.reports.get() == report
        report = ReplicaReport(num_running=4, max_num_seqs=8)
        for listener in heard:
            async with asyncio.timeout(PATIENCE):
                while await listener.reports.get() != report:
                    pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await feed.close()
