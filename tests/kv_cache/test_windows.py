"""WindowBlockPool: what fell out of a window is free, what is in it is there."""

import pytest

from aioserve.errors import InvariantError
from aioserve.features.states.windows import WindowBlockPool
from aioserve.kv_cache import KVCacheManager, WindowBlocks, WindowPool, WindowSpec
from aioserve.request import Request, WaitReason
from tests.kv_cache import test_manager

BLOCK_SIZE = 4
#: A window of 6 tokens: two blocks before one that begins, three if it begins in the middle.
SPEC = WindowSpec(num_tokens=6, num_blocks=8, max_chunk=8, max_drafts=2)


def make_request(token_ids: list[int], request_id: str = "r") -> Request:
    request = test_manager.make_request(token_ids, request_id)
    request.bound_length(100)
    return request


def make_manager(spec: WindowSpec = SPEC) -> tuple[KVCacheManager, WindowPool]:
    manager = KVCacheManager(64, BLOCK_SIZE, resources=[WindowBlockPool(spec, BLOCK_SIZE)])
    assert manager.windows is not None
    return manager, manager.windows


def admit(manager: KVCacheManager, request: Request) -> None:
    assert manager.shortage(request) is None
    manager.admit(request, manager.get_computed_blocks(request), request.num_tokens)


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> WindowBlocks | None:
    """A step of `num_tokens` tokens; one more is known then if all were computed before."""
    assert manager.windows is not None
    if request.num_computed_tokens == request.num_tokens:
        request.token_ids.append(7)
        request.num_tokens += 1
    request.num_computed_tokens += num_tokens
    if request.num_computed_tokens > request.num_slots:
        manager.grow(request, 1)
    manager.cache_full_blocks(request)
    return manager.windows.plan({request: num_tokens}, 1).get(request.request_id)


def run(manager: KVCacheManager, request: Request) -> None:
    """Its whole prompt, in chunks."""
    admit(manager, request)
    while (rest := request.num_tokens - request.num_computed_tokens) > 0:
        compute(manager, request, min(rest, SPEC.max_chunk))


def test_a_request_never_holds_more_than_its_window_and_a_step() -> None:
    manager, windows = make_manager()
    request = make_request(list(range(40)))
    admit(manager, request)
    for begin in range(0, 40, 8):
        compute(manager, request, 8)
        first = max(begin - 5, 0) // BLOCK_SIZE
        assert windows.pool.num_used_blocks == (begin + 8) // BLOCK_SIZE - first
    for end in range(41, 60):
        told = compute(manager, request, 1)
        assert (told is None) == (end % BLOCK_SIZE != 1)
        assert windows.pool.num_used_blocks == 3
    manager.free(request)
    assert (windows.pool.num_used_blocks, windows.num_free_blocks) == (0, 8)


def test_the_runner_is_told_of_every_block_once() -> None:
    manager, _ = make_manager()
    request = make_request(list(range(20)))
    admit(manager, request)
    told = [compute(manager, request, 8), compute(manager, request, 8)]
    assert [(blocks.first, len(blocks.block_ids)) for blocks in told if blocks] == [(0, 2), (2, 2)]
    manager.free(request)
    again = make_request(list(range(20)), "again")
    admit(manager, again)
    assert again.num_computed_tokens == 16
    blocks = compute(manager, again, 4)
    assert blocks is not None
    assert blocks.first == 2
    assert told[1] is not None
    assert blocks.block_ids[:2] == told[1].block_ids  # found again, and one for the last tokens
    assert len(blocks.block_ids) == 3


def test_a_prompt_reserves_for_its_chunks_and_a_reply_for_a_token() -> None:
    manager, windows = make_manager()
    request = make_request(list(range(40)))
    admit(manager, request)
    assert windows.num_free_blocks == 8 - 4  # 5 tokens before a chunk of 8
    for _ in range(5):
        compute(manager, request, 8)
    assert windows.num_free_blocks == 8 - 4
    compute(manager, request, 1)
    assert windows.num_free_blocks == 8 - 3  # 5 tokens before 1 and 2 drafts


def test_who_does_not_fit_waits_and_says_for_what() -> None:
    manager, windows = make_manager()
    requests = [make_request([i] * 40, str(i)) for i in range(3)]
    admit(manager, requests[0])
    admit(manager, requests[1])
    assert manager.shortage(requests[2]) is WaitReason.WINDOWS
    with pytest.raises(InvariantError, match="its window does not fit"):
        manager.admit(requests[2], [], 40)
    assert manager.shortage(make_request([9], "short")) is WaitReason.WINDOWS
    manager.free(requests[1])
    assert manager.shortage(requests[2]) is None
    assert windows.num_free_blocks == 4


def test_a_prefix_counts_as_far_as_its_last_window_is_there() -> None:
    manager, windows = make_manager()
    first = make_request(list(range(40)), "first")
    run(manager, first)
    manager.free(first)
    again = make_request([*range(40), 99], "again")
    # 8 of 10 blocks fit the pool: those of the middle were written over.
    assert len(manager.get_computed_blocks(again)) == 10
    assert manager.estimate_cached_tokens(again) == 40
    other = make_request([*range(8), 99, 98], "other")
    assert manager.get_computed_blocks(other) == []  # keys and values without the window before
    evicts = make_request([5] * 40, "evicts")
    run(manager, evicts)
    manager.free(evicts)
    assert manager.get_computed_blocks(again) == []
    assert windows.pool.num_used_blocks == 0


def test_what_will_be_asked_for_again_goes_last() -> None:
    manager, windows = make_manager(WindowSpec(6, 12, 8, 2))
    for name in ("a", "b"):
        request = make_request([ord(name)] * 8, name)
        run(manager, request)
        manager.free(request)
    kept = make_request([ord("a")] * 9, "a2")
    assert manager.refresh(kept, 8) == 8
    for name in ("c", "d", "e", "f", "g"):  # of 12 blocks all but two are written over
        request = make_request([ord(name)] * 8, name)
        run(manager, request)
        manager.free(request)
    assert len(manager.get_computed_blocks(kept)) == 2
    assert manager.get_computed_blocks(make_request([ord("b")] * 9)) == []
    assert windows.num_free_blocks == 12


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = KVCacheManager(
        64,
        BLOCK_SIZE,
        enable_prefix_caching=False,
        resources=[WindowBlockPool(SPEC, BLOCK_SIZE, keeps_prefixes=False)],
    )
    run(manager, make_request(list(range(40))))
    assert manager.windows is not None
    assert manager.windows.pool.num_unused_blocks == 8 - 4
