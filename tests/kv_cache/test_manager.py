"""KVCacheManager: prefixes are found if and only if all tokens before them are equal."""

from aioserve.kv_cache import KVCacheManager
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec


def make_request(token_ids: list[int], request_id: str = "r", cache_salt: str = "") -> Request:
    return Request(RequestSpec(request_id, token_ids, SamplingParams(), cache_salt=cache_salt))


def compute(manager: KVCacheManager, request: Request) -> None:
    """What admission and one step over all tokens do."""
    manager.admit(request, manager.get_computed_blocks(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.cache_full_blocks(request)


def test_an_equal_prefix_shares_its_full_blocks() -> None:
    manager = KVCacheManager(8, 4)
    first = make_request(list(range(10)))
    compute(manager, first)
    second = make_request([*range(8), 50, 51])
    assert manager.get_computed_blocks(second) == first.block_ids[:2]
    assert manager.get_computed_blocks(make_request([9, *range(1, 8), 9])) == []


def test_an_equal_block_after_a_different_one_is_not_shared() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, make_request([0, 1, 2, 3, 4, 5, 6, 7, 8]))
    assert manager.get_computed_blocks(make_request([9, 9, 9, 9, 4, 5, 6, 7, 8])) == []


def test_a_lookup_leaves_one_token_to_compute() -> None:
    manager = KVCacheManager(8, 4)
    request = make_request(list(range(8)))
    compute(manager, request)
    assert len(manager.get_computed_blocks(make_request(list(range(8))))) == 1
    assert len(manager.get_computed_blocks(make_request(list(range(9))))) == 2


def test_requests_of_different_salts_share_nothing() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, make_request(list(range(9)), cache_salt="tenant a"))
    assert manager.get_computed_blocks(make_request(list(range(9)))) == []
    assert manager.get_computed_blocks(make_request(list(range(9)), cache_salt="tenant b")) == []
    assert len(manager.get_computed_blocks(make_request(list(range(9)), "x", "tenant a"))) == 2


def test_a_freed_prefix_stays_findable_until_it_is_evicted_tail_first() -> None:
    manager = KVCacheManager(4, 2, watermark=0)
    request = make_request(list(range(8)))
    compute(manager, request)
    manager.free(request)
    assert len(manager.get_computed_blocks(make_request(list(range(9))))) == 4
    manager.pool.allocate(1)
    assert len(manager.get_computed_blocks(make_request(list(range(9))))) == 3


def test_admission_counts_cached_blocks_that_are_free_as_taken() -> None:
    manager = KVCacheManager(4, 2, watermark=0)
    request = make_request(list(range(8)))
    compute(manager, request)
    manager.free(request)
    longer = make_request(list(range(10)))
    blocks = manager.get_computed_blocks(longer)
    assert len(blocks) == 4
    assert not manager.can_admit(
        blocks, 10, is_alone=True, gone=None
    )  # five blocks, there are four


def test_the_watermark_is_waived_for_a_request_alone() -> None:
    manager = KVCacheManager(4, 2, watermark=0.25)
    assert not manager.can_admit([], 8, is_alone=False, gone=None)
    assert manager.can_admit([], 8, is_alone=True, gone=None)


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=False)
    compute(manager, make_request(list(range(9))))
    assert manager.get_computed_blocks(make_request(list(range(9)))) == []
