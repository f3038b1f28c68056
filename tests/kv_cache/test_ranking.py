"""Ranks say which cached block is evicted first, and no prefix gets a hole."""

import math
import random

import pytest

from aioserve.kv_cache import BlockPool, KVCacheManager
from aioserve.kv_cache.retention import Ranking, Retention
from aioserve.request import Request
from tests.kv_cache.test_manager import compute, make_request


def chain(name: str, length: int) -> list[bytes]:
    """Contents of the blocks of one prefix."""
    return [f"{name}{i}".encode() for i in range(length)]


def cache(pool: BlockPool, *contents: bytes) -> None:
    """Compute these blocks of one prefix and let go of them, the last first."""
    blocks = pool.allocate(len(contents))
    pool.register(blocks, contents)
    pool.free(reversed(blocks))


def ranked(num_blocks: int, **ranks: float) -> tuple[BlockPool, Ranking]:
    """A full pool of prefixes of two blocks, each with its rank."""
    pool = BlockPool(num_blocks)
    ranking = Ranking(pool)
    ranking.begin()
    for name, rank in ranks.items():
        cache(pool, *chain(name, 2))
        ranking.rank(chain(name, 2), rank)
    return pool, ranking


def evicted(pool: BlockPool, *contents: bytes) -> list[bytes]:
    """In the order in which they go, one block after the other."""
    left, gone = list(contents), []
    while left:
        pool.allocate(1)
        lost = [content for content in left if pool.lookup(content) is None]
        gone += lost
        left = [content for content in left if content not in lost]
    return gone


def test_the_smallest_rank_is_evicted_first_and_a_tail_before_its_head() -> None:
    pool, _ = ranked(6, a=2, b=1, c=3)
    assert evicted(pool, *chain("a", 2), *chain("b", 2), *chain("c", 2)) == [
        *(b"b1", b"b0"),
        *(b"a1", b"a0"),
        *(b"c1", b"c0"),
    ]


def test_a_rank_that_is_inherited_counts_for_blocks_that_are_to_be_evicted_already() -> None:
    pool, ranking = ranked(6, b=2, c=3)
    cache(pool, *chain("a", 2))
    pool.allocate(1)  # the pool has arranged what it evicts: `a` without a rank went first
    ranking.inherit(b"a0", 9, None)
    assert evicted(pool, b"a0", *chain("b", 2), *chain("c", 2))[-1] == b"a0"


def test_a_block_that_comes_back_between_two_of_its_prefix_stands_between_them_again() -> None:
    """Of host memory, which loses blocks in the middle of a prefix."""
    pool = BlockPool(3)
    ranking = Ranking(pool)
    ranking.begin()
    cache(pool, b"head", b"tail")
    ranking.rank([b"head", b"tail"], 1)
    cache(pool, b"middle")
    pool.free(pool.allocate(1))  # evicts what has no rank; the others are in the heap now
    cache(pool, b"middle")
    ranking.rank([b"head", b"middle", b"tail"], 1)
    pool.allocate(1)
    pool.allocate(2)  # found the tail behind the head once more, though it had gone
    assert [pool.lookup(c) for c in (b"head", b"middle", b"tail")] == [None] * 3


def test_of_equal_ranks_the_least_recently_freed_is_evicted_first() -> None:
    pool, _ = ranked(6, a=1, b=1, c=1)
    found = [pool.lookup(content) for content in chain("a", 2)]
    blocks = [block for block in found if block is not None]
    pool.touch(blocks)
    pool.free(reversed(blocks))
    assert evicted(pool, *chain("a", 2), *chain("b", 2))[:2] == [b"b1", b"b0"]


def test_what_has_no_rank_is_evicted_before_what_has() -> None:
    pool, ranking = ranked(4, a=-5)
    cache(pool, *chain("b", 2))
    assert ranking.rank_of(b"b0") == -math.inf
    assert evicted(pool, *chain("a", 2), *chain("b", 2))[:2] == [b"b1", b"b0"]


def test_a_shared_head_of_little_worth_outlives_the_tails_behind_it() -> None:
    pool = BlockPool(4)
    ranking = Ranking(pool)
    ranking.begin()
    head, first, second = pool.allocate(3)
    pool.register([head, first, second], [b"head", b"first", b"second"])
    ranking.rank([b"head", b"first"], 5)
    ranking.rank([b"head", b"second"], 1)  # the head has the rank that was stated last
    pool.free([first, second, head])
    cache(pool, b"other")
    ranking.rank([b"other"], 3)
    everything = (b"head", b"first", b"second", b"other")
    assert evicted(pool, *everything) == [b"second", b"other", b"first", b"head"]


def test_another_rank_counts_from_the_next_eviction_on() -> None:
    pool, ranking = ranked(6, a=1, b=2, c=3)
    pool.allocate(1)
    assert pool.lookup(b"a1") is None
    ranking.rank(chain("c", 2), 0)
    ranking.rank(chain("b", 1), 9)
    assert evicted(pool, b"a0", *chain("b", 2), *chain("c", 2)) == [
        *(b"c1", b"c0", b"a0"),
        *(b"b1", b"b0"),
    ]


def test_without_ranks_the_least_recently_freed_goes_first_again() -> None:
    pool, ranking = ranked(6, a=3, b=2, c=1)
    pool.allocate(1)
    assert pool.lookup(b"c1") is None
    ranking.end()
    assert evicted(pool, *chain("a", 2), *chain("b", 2), b"c0") == [
        *(b"a1", b"a0", b"b1", b"b0"),
        b"c0",
    ]


def test_what_is_forgotten_is_handed_out_and_never_twice() -> None:
    pool, ranking = ranked(6, a=3, b=2, c=1)
    (held,) = pool.allocate(1)  # the tail of c
    pool.forget([b"a1", b"c0"])
    assert pool.num_unused_blocks == 2
    assert len({held, *pool.allocate(5)}) == 6
    assert pool.lookup(b"a0") is None
    ranking.end()


def test_clearing_the_index_leaves_nothing_to_evict() -> None:
    pool, _ = ranked(6, a=3, b=2, c=1)
    pool.allocate(1)
    pool.clear_index()
    assert pool.num_unused_blocks == pool.num_free_blocks == 5
    cache(pool, *chain("a", 2))
    assert len(pool.allocate(5)) == 5


def least_worth(free: dict[bytes, int], ranks: dict[bytes, float]) -> bytes:
    """By a plain rule: the first by rank and time among blocks with no free one behind them."""
    leaves = [c for c in free if not any(d != c and d.startswith(c) for d in free)]
    return min(leaves, key=lambda c: (ranks.get(c, -math.inf), free[c]))


@pytest.mark.parametrize("seed", range(8))
def test_random_use_evicts_as_the_plain_rule_says(seed: int) -> None:
    """Prefixes are strings that begin alike; each block is named by all that stands before it."""
    rng = random.Random(seed)
    pool = BlockPool(24)
    ranking = Ranking(pool)
    ranking.begin()
    ranks: dict[bytes, float] = {}
    free: dict[bytes, int] = {}  # since when
    held: list[list[bytes]] = []
    num_evicted = 0
    for now in range(3000):
        if held and (len(held) > 3 or rng.random() < 0.5):
            contents = held.pop(rng.randrange(len(held)))
            pool.free([found for c in reversed(contents) if (found := pool.lookup(c)) is not None])
            still = {c for one in held for c in one}
            for i, content in enumerate(reversed(contents)):
                if content not in still:
                    free[content] = 100 * now + i
            if rng.random() < 0.9:
                rank = rng.randrange(4)
                ranking.rank(contents, rank)
                ranks.update(dict.fromkeys(contents, rank))
        else:
            text = bytes(rng.choice(b"ab") for _ in range(rng.randrange(1, 7)))
            contents = [text[: i + 1] for i in range(len(text))]
            num_found = next((i for i, c in enumerate(contents) if pool.lookup(c) is None), 6)
            found, new = contents[:num_found], contents[num_found:]
            pool.touch([block for c in found if (block := pool.lookup(c)) is not None])
            for content in found:
                free.pop(content, None)
            gone = []
            for _ in range(len(new) - pool.num_unused_blocks):
                gone.append(least_worth(free, ranks))
                del free[gone[-1]]
                ranks.pop(gone[-1], None)
            pool.register(pool.allocate(len(new)), new)
            num_evicted += len(gone)
            assert [c for c in gone if pool.lookup(c) is not None and c not in new] == []
            held.append(contents)
        if rng.random() < 0.2:
            cached = [c for c in (*free, *(c for one in held for c in one)) if pool.lookup(c)]
            if cached:
                again = rng.choice(cached)
                contents = [again[: i + 1] for i in range(len(again))]
                rank = rng.randrange(4)
                ranking.rank(contents, rank)
                ranks.update(dict.fromkeys(contents, rank))
        if rng.random() < 0.02:
            ranking.end()
            ranking.begin()
        assert all(pool.lookup(content) is not None for content in free)
        assert pool.num_free_blocks == len(free) + pool.num_unused_blocks
    assert num_evicted > 300


def test_ranks_of_contents_that_are_lost_do_not_pile_up() -> None:
    pool = BlockPool(4)
    ranking = Ranking(pool)
    ranking.begin()
    for i in range(500):
        blocks = pool.allocate(2)
        pool.register(blocks, chain(f"{i}.", 2))
        ranking.rank(chain(f"{i}.", 2), 1)
        pool.forget(chain(f"{i}.", 2)[1:])
        pool.free(reversed(blocks))
    assert len(ranking._ranks) < 200
    assert len(ranking._before) < 200
    assert len(ranking._heap) < 200


# What requests leave.


def keeping(manager: KVCacheManager, ranks: dict[str, float]) -> Retention:
    retention = Retention(manager.pool, manager.block_size, "test", lambda r: ranks[r.request_id])
    manager.retention = Retention.replace(manager.retention, retention)
    return retention


def serve(manager: KVCacheManager, name: str, first: int, num_tokens: int = 9) -> Request:
    request = make_request(list(range(first, first + num_tokens)), name)
    compute(manager, request)
    manager.free(request)
    return request


def num_cached(manager: KVCacheManager, request: Request) -> int:
    return len(manager.get_computed_blocks(request))


def test_what_a_request_leaves_has_the_rank_that_was_asked_for() -> None:
    manager = KVCacheManager(6, 4, watermark=0)
    retention = keeping(manager, {"dear": 2, "cheap": 1})
    dear = serve(manager, "dear", 0)
    cheap = serve(manager, "cheap", 100)
    retention.settle()
    manager.pool.allocate(4)
    assert (num_cached(manager, dear), num_cached(manager, cheap)) == (2, 0)


def test_a_rank_of_a_part_leaves_the_rest_as_it_is() -> None:
    manager = KVCacheManager(8, 4, watermark=0)
    retention = keeping(manager, {"a": 1, "b": 2})
    a, b = serve(manager, "a", 0, 13), serve(manager, "b", 100, 13)
    retention.settle()
    assert retention.rank(a, 3, 9) == 8
    manager.pool.allocate(5)
    assert (num_cached(manager, a), num_cached(manager, b)) == (2, 1)
    assert retention.rank(a, 0, None) == 8
    assert retention.rank(a, 5, -7) == 0


def test_a_request_that_leaves_nothing_is_not_asked_about() -> None:
    manager = KVCacheManager(8, 4, watermark=0)
    retention = keeping(manager, {})
    serve(manager, "short", 0, 3)
    retention.settle()
    request = make_request(list(range(9)))
    compute(manager, request)
    manager.forget(request)  # its step has failed
    manager.free(request)
    retention.settle()
    assert retention.ranking.rank_of(request.block_hashes[0]) == -math.inf


def test_after_a_policy_has_raised_the_other_ranks_are_asked_for() -> None:
    manager = KVCacheManager(6, 4, watermark=0)
    retention = keeping(manager, {"good": 2})
    bad = serve(manager, "bad", 0)
    good = serve(manager, "good", 100)
    with pytest.raises(KeyError):
        retention.settle()
    retention.settle()
    manager.pool.allocate(4)
    assert (num_cached(manager, bad), num_cached(manager, good)) == (0, 2)
