"""Leases hold what they pin, within their bound and time, and nothing when they end."""

import random

from aioserve.kv_cache import KVCacheManager
from tests.kv_cache.test_manager import compute, make_request


def pinned(num_blocks: int = 16) -> KVCacheManager:
    """A pool where the prefix of a request that has gone is pinned for ten seconds: 4 blocks."""
    manager = KVCacheManager(num_blocks, 4, watermark=0)
    request = make_request(list(range(17)))
    compute(manager, request)
    manager.free(request)
    manager.leases.pin("a", manager.get_computed_blocks(request), 10.0)
    return manager


def test_pinned_blocks_are_held_by_the_lease_alone_until_its_time() -> None:
    manager = pinned()
    assert manager.pool.num_used_blocks == manager.leases.num_held_blocks == 4
    manager.leases.expire(9.9)
    assert len(manager.leases) == 1
    manager.leases.expire(10.0)
    assert not manager.leases
    assert manager.pool.num_used_blocks == 0
    assert len(manager.get_computed_blocks(make_request(list(range(17))))) == 4


def test_what_a_request_shares_is_held_by_both() -> None:
    manager = pinned()
    request = make_request([*range(17), 50])
    compute(manager, request)
    assert manager.leases.num_held_blocks == 0
    manager.leases.end("a")
    assert manager.pool.num_used_blocks == len(request.block_ids)
    manager.free(request)
    assert manager.pool.num_used_blocks == 0


def test_the_oldest_make_room_and_the_head_of_a_long_prefix_stays() -> None:
    manager = pinned()
    manager.leases.max_blocks = 6
    request = make_request(list(range(100, 133)))
    compute(manager, request)
    manager.free(request)
    found = manager.get_computed_blocks(request)
    assert len(found) == 8
    assert manager.leases.pin("b", found, 5.0) == 6
    assert len(manager.leases) == 1
    assert manager.leases.num_held_blocks == 6
    assert manager.leases.pin("b", found[:2], 7.0) == 2  # in the place of what it had
    assert manager.leases.num_held_blocks == 2
    manager.leases.expire(6.0)
    assert len(manager.leases) == 1


def test_nothing_that_is_pinned_at_random_is_ever_lost_or_kept_too_long() -> None:
    rng = random.Random(1)
    manager = KVCacheManager(32, 2, watermark=0)
    manager.leases.max_blocks = 20
    held: dict[str, float] = {}
    for now in range(600):
        manager.leases.expire(now)
        held = {key: until for key, until in held.items() if until > now}
        start = rng.randrange(8) * 100
        request = make_request(list(range(start, start + rng.randrange(2, 12))))
        found = manager.get_computed_blocks(request)
        if manager.can_admit(found, request.num_tokens, True, None):
            compute(manager, request)
            manager.free(request)
        key, until = f"k{rng.randrange(5)}", now + rng.randrange(1, 9)
        num = manager.leases.pin(key, manager.get_computed_blocks(request), until)
        held.pop(key, None)
        if num:
            held[key] = until
        assert len(manager.leases) <= len(held)
        assert manager.pool.num_used_blocks == manager.leases.num_held_blocks <= 20
    manager.leases.end_all()
    assert manager.pool.num_used_blocks == 0
    manager.clear_index()
    assert manager.pool.num_unused_blocks == 32


def test_a_cache_that_is_cleared_has_no_leases() -> None:
    manager = pinned()
    manager.clear_index()
    assert not manager.leases
    assert manager.pool.num_unused_blocks == 16
