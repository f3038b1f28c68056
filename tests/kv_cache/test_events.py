"""An observer hears of every content that can be found, and of every one that no longer can."""

from aioserve.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheManager
from aioserve.params import SamplingParams
from aioserve.request import EncoderInput, Request, RequestSpec


def make_request(token_ids: list[int], **fields: object) -> Request:
    return Request(RequestSpec("r", token_ids, SamplingParams(), **fields))  # type: ignore[arg-type]


def compute(manager: KVCacheManager, request: Request) -> None:
    manager.admit(request, manager.get_computed_blocks(request), request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.cache_full_blocks(request)


def test_stored_removed_and_cleared_are_told_in_order() -> None:
    manager = KVCacheManager(2, 4, record_events=True)
    first = make_request([1, 2, 3, 4, 5, 6, 7, 8])
    compute(manager, first)
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert stored[0].parent_hash is None
    assert stored[1].parent_hash == stored[0].block_hash
    manager.free(first)
    compute(manager, make_request([9, 9, 9]))  # evicts the tail
    assert manager.take_events() == [BlockRemoved(stored[1].block_hash)]
    manager.pool.clear_index()
    assert manager.take_events() == [AllBlocksCleared()]
    assert manager.take_events() == []


def test_a_copy_of_content_that_is_there_is_no_event() -> None:
    manager = KVCacheManager(8, 4, record_events=True)
    compute(manager, make_request([1] * 8))
    assert len(manager.take_events()) == 2
    compute(manager, make_request([1] * 8))
    assert manager.take_events() == []


def test_adapters_share_nothing() -> None:
    manager = KVCacheManager(8, 4)
    compute(manager, make_request([1] * 9, adapter_id="lora-a"))
    assert len(manager.get_computed_blocks(make_request([1] * 9, adapter_id="lora-a"))) == 2
    assert manager.get_computed_blocks(make_request([1] * 9, adapter_id="lora-b")) == []
    assert manager.get_computed_blocks(make_request([1] * 9)) == []
    assert manager.get_computed_blocks(make_request([1] * 9, cache_salt="lora-a")) == []


def test_equal_tokens_of_different_images_share_only_what_comes_before() -> None:
    def with_image(content_hash: str, position: int = 5) -> Request:
        image = EncoderInput(position, 4, content_hash)
        return make_request([1] * 17, encoder_inputs=[image])

    manager = KVCacheManager(16, 4)
    compute(manager, with_image("cat"))
    assert len(manager.get_computed_blocks(with_image("cat"))) == 4
    assert len(manager.get_computed_blocks(with_image("dog"))) == 1
    assert len(manager.get_computed_blocks(with_image("cat", position=6))) == 1
    assert len(manager.get_computed_blocks(make_request([1] * 17))) == 1


def test_the_estimate_of_cached_tokens_equals_the_lookup() -> None:
    manager = KVCacheManager(16, 4)
    compute(manager, make_request(list(range(20))))
    for shared in range(0, 20, 3):
        request = make_request([*range(shared), *[99] * (21 - shared)])
        expected = 4 * len(manager.get_computed_blocks(request))
        assert manager.estimate_cached_tokens(request) == expected
