"""What vLLM caches besides keys and values, under aioserve: images, and events of KV blocks."""

import random
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import msgspec
import torch
import zmq
from vllm import LLM, SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.multimodal.inputs import PlaceholderRange

from aioserve.errors import ConfigError, RequestError
from aioserve.params import SamplingParams as OurParams
from aioserve.request import EncoderInput, Request, RequestSpec
from aioserve.vllm import Scheduler
from aioserve.vllm.caches import EncoderItems, encoder_inputs
from aioserve.vllm.settings import read_settings
from tests.seeing_models import PLACEHOLDERS, make_seeing_model, picture
from tests.vllm.inside import (
    BLOCK_SIZE,
    TIGHT,
    check_over,
    core_of,
    exchange,
    give_back,
    make_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

KIND = "idefics3"  # of those that vLLM loads without torchvision


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """vLLM on a tiny random model of images, in a pool in which requests are preempted."""
    path = tmp_path_factory.mktemp("model")
    make_seeing_model(KIND, path, head_dim=32, eos_token_id=1)  # the least that vLLM takes
    few = {"model": str(path), "num_gpu_blocks_override": 18, "limit_mm_per_prompt": {"image": 3}}
    llm = make_engine(**TIGHT | few)
    yield llm
    core_of(llm).shutdown()


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    llm = make_engine(**TIGHT)
    yield llm
    core_of(llm).shutdown()


# Images.


def illustrated(count: int) -> list[dict[str, Any]]:
    """Prompts with one to three of five pictures, some of them twice in one prompt."""
    dice = random.Random(0)
    prompts: list[dict[str, Any]] = []
    for _ in range(count):
        pictures = [picture(dice.randrange(5), 40, 32) for _ in range(dice.randrange(1, 4))]
        text = "The duke " * dice.randrange(1, 12)
        text += f"{PLACEHOLDERS[KIND]} and all of his men " * len(pictures)
        prompts.append({"prompt": text, "multi_modal_data": {"image": pictures}})
    return prompts


def replies(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_replies_to_images_are_those_of_vllms_own_scheduler(seeing: LLM) -> None:
    give_back(seeing)
    theirs = replies(seeing, illustrated(24))
    scheduler = exchange(seeing, policy="chunked_prefill", check=True)
    assert replies(seeing, illustrated(24)) == theirs
    assert len({str(reply) for reply in theirs}) > 20
    check_over(scheduler)
    stats = scheduler.policy.make_stats()
    assert stats.num_encoder_inputs > 0


def test_an_image_of_a_running_request_may_be_forgotten(seeing: LLM) -> None:
    scheduler = exchange(seeing, check=True)
    [prompt] = illustrated(1)
    expected = replies(seeing, [prompt])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    seeing.llm_engine.add_request("a", prompt, params)
    seeing.llm_engine.step()
    core_of(seeing).reset_encoder_cache()
    assert scheduler.reset_prefix_cache()
    ended = []
    while seeing.llm_engine.has_unfinished_requests():
        ended += [o for o in seeing.llm_engine.step() if o.finished]
    assert [list(output.outputs[0].token_ids) for output in ended] == expected
    check_over(scheduler)


def test_the_largest_image_runs_in_a_budget_of_its_vectors(seeing: LLM) -> None:
    """Marks between its rows count neither at vLLM nor here."""
    prompt = {
        "prompt": f"The duke {PLACEHOLDERS[KIND]} and all of his men",
        "multi_modal_data": {"image": [picture(1, 64, 64)]},
    }
    give_back(seeing)
    expected = replies(seeing, [prompt])
    theirs = seeing.llm_engine.vllm_config.scheduler_config
    before = theirs.max_num_encoder_input_tokens, theirs.encoder_cache_size
    theirs.max_num_encoder_input_tokens = theirs.encoder_cache_size = 1  # the largest image counts
    try:
        scheduler = exchange(seeing, check=True)
    finally:
        theirs.max_num_encoder_input_tokens, theirs.encoder_cache_size = before
    limits = scheduler.settings.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    seeing.llm_engine.add_request("a", prompt, params)
    seeing.llm_engine.step()
    [request] = scheduler.policy.get_requests()
    [image] = request.encoder_inputs
    assert limits.max_encoder_tokens == limits.encoder_cache_tokens == image.size
    assert image.size < image.num_tokens
    ended = []
    while seeing.llm_engine.has_unfinished_requests():
        ended += [o for o in seeing.llm_engine.step() if o.finished]
    assert [list(output.outputs[0].token_ids) for output in ended] == expected
    check_over(scheduler)


def request_with(*inputs: tuple[int, int, str]) -> Request:
    items = [EncoderInput(*each) for each in inputs]
    name = "-".join(item.content_hash for item in items)
    return Request(RequestSpec(name, [0] * 64, OurParams(), encoder_inputs=items))


def test_one_identifier_for_two_images_is_refused_while_it_is_in_use() -> None:
    items, small = EncoderItems(), request_with((0, 4, "x"), (9, 4, "x"))
    items.enter(small)
    with pytest.raises(RequestError, match="'x' of an image or sound stands for 5 tokens"):
        items.enter(request_with((0, 5, "x")))
    items.plan({small.request_id: [0]}, [], {small.request_id: small})
    items.leave(small)
    with pytest.raises(RequestError, match="for 4 in another place"):  # the runner has its output
        items.enter(request_with((0, 5, "x")))
    items.plan({}, ["x"], {})
    items.enter(request_with((0, 5, "x")))
    with pytest.raises(RequestError, match="'y'"):
        items.enter(request_with((0, 5, "y"), (9, 6, "y")))


def test_an_image_takes_the_room_of_its_vectors_as_under_vllms_own_scheduler() -> None:
    """Marks between its rows are tokens without one."""
    rows = PlaceholderRange(3, 6, torch.tensor([True, True, False, True, True, False]))
    features: Any = [SimpleNamespace(identifier="a", mm_position=rows)]
    [item] = encoder_inputs(features, whole=False)
    assert (item.end, item.size) == (9, 4)


def test_images_that_share_a_place_are_refused() -> None:
    features: Any = [
        SimpleNamespace(identifier=name, mm_position=PlaceholderRange(offset=offset, length=8))
        for name, offset in (("a", 3), ("b", 10))
    ]
    with pytest.raises(RequestError, match="ends at token 11 of the prompt, and the next begins"):
        encoder_inputs(features, whole=False)


# Events of KV blocks.


class Index:
    """What a router knows of a server from its events: which tokens stand behind which block."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.num_removed = 0

    def take(self, event: Any) -> None:
        if isinstance(event, BlockStored):
            assert event.block_size == BLOCK_SIZE
            parent, tokens = event.parent_block_hash, event.token_ids
            for i, block in enumerate(event.block_hashes):
                assert parent is None or parent in self.blocks
                assert block not in self.blocks
                held = tuple(tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
                self.blocks[block] = parent, held
                parent = block
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                del self.blocks[block]
                self.num_removed += 1
        else:
            assert isinstance(event, AllBlocksCleared)
            self.blocks.clear()

    def num_cached_tokens(self, token_ids: list[int]) -> int:
        """Tokens that the server need not compute of such a prompt, without the last one."""
        parent, count = None, 0
        known = {where: block for block, where in self.blocks.items()}
        for start in range(0, len(token_ids) - BLOCK_SIZE, BLOCK_SIZE):
            block = known.get((parent, tuple(token_ids[start : start + BLOCK_SIZE])))
            if block is None:
                break
            parent, count = block, count + BLOCK_SIZE
        return count


def learned(endpoint: str, scheduler: Scheduler) -> Index:
    """What a subscriber that comes late knows once all events are published, which a thread does
    some moments after they are given: of every block that can be found, and of no other.
    """
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    findable = set(scheduler.policy.kv_cache.pool.contents) - {None}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 30_000
        socket.connect(endpoint)
        for _ in range(300):
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            index = Index()
            while (message := socket.recv_multipart())[-1]:
                for event in decoder.decode(message[-1]).events:
                    index.take(event)
            if index.blocks.keys() == findable:
                return index
            time.sleep(0.1)
    raise AssertionError(f"{len(index.blocks)} blocks are known, {len(findable)} can be found")


def test_events_of_kv_blocks_say_which_prefixes_are_cached(plain: LLM) -> None:
    dice = random.Random(0)
    prompts = [[dice.randrange(5, 2000) for _ in range(100)] for _ in range(12)]
    config = plain.llm_engine.vllm_config
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/replay"
        config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"ipc://{folder}/e", replay_endpoint=endpoint
        )
        try:
            scheduler = exchange(plain)
        finally:
            config.kv_events_config = None
        told = scheduler.get_kv_event_publisher_config()
        assert told is not None
        assert told.replay_endpoint == endpoint

        def cached(asked: list[list[int]]) -> list[int]:
            params = SamplingParams(temperature=0.0, max_tokens=4)
            given: list[Any] = [{"prompt_token_ids": each} for each in asked]
            outputs = plain.generate(given, [params] * len(asked), use_tqdm=False)
            return [output.num_cached_tokens or 0 for output in outputs]

        assert cached(prompts) == [0] * 12  # more than the cache holds
        index = learned(endpoint, scheduler)
        assert index.num_removed > 0
        kept = [prompt for prompt in prompts if index.num_cached_tokens(prompt)][-2:]
        assert cached(kept) == [index.num_cached_tokens(prompt) for prompt in kept]
        assert cached(kept) == [96, 96]
        assert scheduler.reset_prefix_cache()
        assert cached(prompts[:1]) == [0]
        index = learned(endpoint, scheduler)
        scheduler.shutdown()
    assert [index.num_cached_tokens(prompt) for prompt in prompts] == [96] + [0] * 11


def test_events_of_kv_blocks_are_refused_beside_the_checks(plain: LLM) -> None:
    config = plain.llm_engine.vllm_config
    exchange(plain, check=True)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
    try:
        with pytest.raises(ConfigError, match=r"aioserve\.check takes the events of KV blocks"):
            read_settings(config, plain.kv_cache_config, BLOCK_SIZE)
    finally:
        config.kv_events_config = None
