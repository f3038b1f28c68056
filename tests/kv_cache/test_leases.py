"""Leases hold what they pin, within their bound and time, and nothing when they end."""

import random
from collections.abc import Hashable

import pytest

from aioserve.kv_cache import KVCacheManager, LeaseLimits, client_leases
from aioserve.kv_cache.block_pool import Leases
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


def prefix(manager: KVCacheManager, start: int, num_blocks: int) -> list[int]:
    """The blocks of a prefix of its own that a request has computed and left."""
    request = make_request(list(range(1000 * start, 1000 * start + 4 * num_blocks + 1)))
    compute(manager, request)
    manager.free(request)
    return manager.get_computed_blocks(request)


def kept(leases: Leases) -> list[Hashable]:
    return [lease.conversation for lease in leases.held.values()]


def test_a_client_that_keeps_much_ends_its_own_leases_and_none_of_one_that_keeps_less() -> None:
    manager = KVCacheManager(64, 4, watermark=0)
    leases = manager.leases
    leases.limit(LeaseLimits(of_policy=64, of_clients=12))
    assert client_leases.pin(leases, "small", prefix(manager, 0, 2), 50.0, "ben") == 2
    for i in range(6):
        assert client_leases.pin(leases, i, prefix(manager, i + 1, 4), 50.0, "ann") == 4
    assert kept(leases) == ["small", 4, 5]
    assert client_leases.pin(leases, "large", prefix(manager, 20, 9), 50.0, "cid") == 6
    assert kept(leases) == ["small", 5, "large"]  # the one of eight blocks gave four


def test_what_a_client_keeps_takes_nothing_of_the_policys_share_and_gives_way_first() -> None:
    manager = KVCacheManager(16, 4, watermark=0)
    leases = manager.leases
    leases.limit(LeaseLimits(of_policy=4, of_clients=4))
    leases.pin("policy", prefix(manager, 0, 4), 50.0)
    client_leases.pin(leases, "client", prefix(manager, 1, 6), 50.0, "")
    assert leases.num_held_blocks == 8
    leases.pin("another", prefix(manager, 2, 1), 50.0)
    assert kept(leases) == ["client", "another"]
    assert leases.give_way()
    assert kept(leases) == ["another"]
    assert not leases.give_way_of_clients()
    assert leases.give_way()
    assert not leases.give_way()


def test_a_lease_replaces_those_of_its_beginnings_that_end_no_later() -> None:
    manager = KVCacheManager(16, 4, watermark=0)
    blocks = prefix(manager, 0, 6)
    leases = manager.leases
    client_leases.pin(leases, "first turn", blocks[:2], 50.0, "ann")
    client_leases.pin(leases, "for an hour", blocks[:1], 3600.0, "ann")
    client_leases.pin(leases, "of another client", blocks[:2], 50.0, "ben")
    client_leases.pin(leases, "second turn", blocks[:4], 60.0, "ann")
    assert kept(leases) == ["for an hour", "of another client", "second turn"]
    leases.expire(70.0)
    assert kept(leases) == ["for an hour"]


def test_clients_have_a_bounded_number_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_leases, "MAX_LEASES", 3)
    manager = KVCacheManager(16, 4, watermark=0)
    for i in range(5):
        client_leases.pin(manager.leases, i, prefix(manager, i, 1), 50.0, "ann")
    assert kept(manager.leases) == [2, 3, 4]


def test_the_client_with_the_most_leases_gives_way_at_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_leases, "MAX_LEASES", 3)
    manager = KVCacheManager(32, 4, watermark=0)
    leases = manager.leases
    client_leases.pin(leases, "large", prefix(manager, 0, 6), 50.0, "ben")
    for i in range(3):
        client_leases.pin(leases, i, prefix(manager, i + 1, 1), 50.0, "ann")
    assert kept(leases) == ["large", 1, 2]


def test_a_client_that_keeps_nothing_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_leases, "MAX_LEASES", 1)
    manager = KVCacheManager(16, 4, watermark=0)
    leases = manager.leases
    client_leases.pin(leases, "a", prefix(manager, 0, 2), 50.0, "ann")
    assert client_leases.pin(leases, "b", [], 50.0, "ben") == 0
    assert kept(leases) == ["a"]


def test_clients_and_the_policy_keep_the_same_conversation_apart() -> None:
    manager = KVCacheManager(16, 4, watermark=0)
    leases, blocks = manager.leases, prefix(manager, 0, 3)
    leases.pin("s", blocks, 50.0)
    client_leases.pin(leases, "s", blocks, 50.0, "ann")
    client_leases.pin(leases, "s", blocks[:1], 5.0, "ben")
    leases.end("s")
    leases.expire(5.0)
    assert [(lease.client, len(lease.block_ids)) for lease in leases.held.values()] == [("ann", 3)]
    assert manager.pool.num_used_blocks == leases.num_held_blocks == 3


def test_a_lease_whose_blocks_requests_hold_does_not_give_way() -> None:
    manager = KVCacheManager(32, 4, watermark=0)
    leases = manager.leases
    running = make_request(list(range(17)))
    compute(manager, running)
    client_leases.pin(leases, "shared", running.block_ids[:4], 50.0, "ann")
    assert not leases.has_alone(leases.references)
    client_leases.pin(leases, "alone", prefix(manager, 1, 2), 50.0, "ann")
    assert leases.has_alone(leases.references)
    assert leases.give_way_of_clients()
    assert kept(leases) == ["shared"]
    assert not leases.give_way_of_clients()


def test_what_clients_and_a_policy_keep_at_random_stays_within_both_shares() -> None:
    rng = random.Random(2)
    manager = KVCacheManager(40, 2, watermark=0)
    leases = manager.leases
    leases.limit(LeaseLimits(of_policy=8, of_clients=12))
    for now in range(600):
        leases.expire(now)
        start = rng.randrange(8) * 100
        request = make_request(list(range(start, start + rng.randrange(2, 40))))
        found = manager.get_computed_blocks(request)
        if manager.can_admit(found, request.num_tokens, True, None):
            compute(manager, request)
            manager.free(request)
        found, until = manager.get_computed_blocks(request), now + rng.randrange(1, 9)
        key, client = f"k{rng.randrange(9)}", rng.choice("abc")
        if rng.random() < 0.7:
            num = client_leases.pin(leases, key, found, until, client)
            assert num <= min(len(found), 12)
            assert not num or leases.held[client, key].block_ids == found[:num]
        else:
            leases.pin(key, found, until)
        held = [(lease.client, len(lease.block_ids)) for lease in leases.held.values()]
        assert sum(num for of, num in held if of is None) <= 8
        assert sum(num for of, num in held if of is not None) <= 12
        assert manager.pool.num_used_blocks == leases.num_held_blocks
    leases.end_all()
    assert manager.pool.num_used_blocks == 0
