"""StateSlotPool: a slot for each that runs, and snapshots where they can be found again."""

import pytest

from aioserve.errors import InvariantError
from aioserve.features.states.slots import StateSlotPool
from aioserve.kv_cache import KVCacheManager, StatePool, StateSlots
from aioserve.request import Request
from tests.kv_cache.test_manager import make_request

BLOCK_SIZE = 4


def make_manager(num_state_slots: int) -> tuple[KVCacheManager, StatePool]:
    manager = KVCacheManager(32, BLOCK_SIZE, resources=[StateSlotPool(num_state_slots, BLOCK_SIZE)])
    assert manager.states is not None
    return manager, manager.states


def compute(manager: KVCacheManager, request: Request) -> StateSlots:
    """What admission and one step over all known tokens do; what the runner is told."""
    assert manager.states is not None
    manager.admit(request, manager.get_computed_blocks(request), request.num_tokens)
    num_tokens = request.num_tokens - request.num_computed_tokens
    request.num_computed_tokens = request.num_tokens
    manager.cache_full_blocks(request)
    return manager.states.plan({request: num_tokens}, 1)[request.request_id]


def decode(manager: KVCacheManager, request: Request) -> StateSlots | None:
    """One token that came, and the step that computes it."""
    assert manager.states is not None
    request.token_ids.append(7)
    request.num_tokens = request.num_computed_tokens = request.num_computed_tokens + 1
    if request.num_computed_tokens > request.num_slots:
        manager.grow(request, 1)
    manager.cache_full_blocks(request)
    return manager.states.plan({request: 1}, 1).get(request.request_id)


def test_the_same_prompt_begins_behind_its_last_whole_block() -> None:
    manager, _ = make_manager(4)
    told = compute(manager, make_request(list(range(10)), "first"))
    assert told.source == -1
    assert [position for position, _ in told.snapshots] == [8]
    again = make_request(list(range(10)), "again")
    assert len(manager.get_computed_blocks(again)) == 2
    assert manager.estimate_cached_tokens(again) == 8
    assert compute(manager, again).source == told.snapshots[0][1]


def test_what_a_request_would_lose_is_what_it_computed_behind_its_newest_state() -> None:
    manager, states = make_manager(4)
    request = make_request(list(range(10)), "r")
    compute(manager, request)
    assert manager.estimate_lost_tokens(request) == 2
    for _ in range(5):
        decode(manager, request)  # to 15 tokens: a state behind 12 is kept
    assert manager.estimate_lost_tokens(request) == 3
    states.clear()
    assert manager.estimate_lost_tokens(request) == 15


def test_keys_and_values_without_a_state_are_computed_again() -> None:
    manager, _ = make_manager(4)
    compute(manager, make_request(list(range(10)), "first"))
    other = make_request([0, 1, 2, 3, 50, 51], "other")  # leaves in the middle of what is known
    assert manager.get_computed_blocks(other) == []
    assert manager.estimate_cached_tokens(other) == 0


def test_a_prefix_is_kept_where_a_second_text_leaves_it() -> None:
    manager, _ = make_manager(8)
    compute(manager, make_request(list(range(20)), "first"))
    second = compute(manager, make_request([*range(8), *range(50, 60)], "second"))
    assert [position for position, _ in second.snapshots] == [8, 16]
    third = make_request([*range(8), *range(70, 80)], "third")
    assert len(manager.get_computed_blocks(third)) == 2


def test_a_reply_leaves_the_newest_of_its_states() -> None:
    manager, states = make_manager(4)
    request = make_request(list(range(6)), "r")
    compute(manager, request)
    told = [decode(manager, request) for _ in range(7)]  # to 13 tokens
    positions = [position for moves in told if moves for position, _ in moves.snapshots]
    assert positions == [8, 12]
    assert states.num_snapshots == 2  # behind 4, of the prompt, and behind 12
    manager.free(request)
    longer = make_request([*request.token_ids, 9, 9], "next turn")
    assert len(manager.get_computed_blocks(longer)) == 3


def test_requests_get_slots_in_exchange_for_the_oldest_snapshots() -> None:
    manager, states = make_manager(3)
    first = make_request([1] * 5, "first")
    compute(manager, first)
    manager.free(first)
    second = make_request([2] * 5, "second")
    compute(manager, second)  # its snapshot takes the last slot
    assert (states.num_snapshots, states.num_free_slots) == (2, 2)
    compute(manager, make_request([3] * 5, "third"))
    assert manager.get_computed_blocks(make_request([1] * 6)) == []
    assert states.num_free_slots == 1


def test_the_last_slot_goes_on_from_the_state_in_it() -> None:
    manager, states = make_manager(2)
    first = make_request(list(range(6)), "first")
    snapshot = compute(manager, first).snapshots[0][1]
    again = compute(manager, make_request(list(range(6)), "again"))
    assert (again.slot, again.source) == (snapshot, snapshot)
    assert states.num_free_slots == 0
    with pytest.raises(InvariantError, match="no slot for its state is free"):
        manager.admit(make_request([5] * 3, "third"), [], 3)


def test_a_state_that_a_step_begins_with_is_not_given_away_in_it() -> None:
    manager, states = make_manager(3)
    first = make_request(list(range(6)), "first")
    snapshot = compute(manager, first).snapshots[0][1]
    manager.free(first)
    again = make_request(list(range(6)), "again")
    manager.admit(again, manager.get_computed_blocks(again), 6)
    other = make_request([5] * 3, "other")
    assert states.num_free_slots == 1
    manager.admit(other, [], 3)
    again.num_computed_tokens, other.num_computed_tokens = 6, 3
    told = states.plan({again: 2, other: 3}, 1)
    assert told["again"].source == snapshot
    assert snapshot not in (told["again"].slot, told["other"].slot)


def test_what_was_forgotten_is_free() -> None:
    manager, states = make_manager(4)
    request = make_request(list(range(6)), "r")
    compute(manager, request)
    manager.clear_index()
    assert (states.num_snapshots, states.num_free_slots) == (0, 3)
    manager.free(request)
    assert states.num_free_slots == 4


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = KVCacheManager(
        8,
        BLOCK_SIZE,
        enable_prefix_caching=False,
        resources=[StateSlotPool(2, BLOCK_SIZE, keeps_snapshots=False)],
    )
    assert compute(manager, make_request(list(range(10)))).snapshots == []
