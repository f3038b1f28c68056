"""What vLLM caches besides keys and values: states of draft heads, images; and events of KV blocks.

`Scheduler` asks these of each request and tells them of each step. They keep sizes, hashes and
events, and no tensors, which are with vLLM's runner.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec

from aioserve.errors import RequestError
from aioserve.kv_cache import AllBlocksCleared as OurBlocksCleared
from aioserve.kv_cache import BlockPool, KVCacheManager
from aioserve.kv_cache import BlockStored as OurBlockStored
from aioserve.kv_cache.block_pool import KVEvent
from aioserve.kv_cache.resource import Resource
from aioserve.request import EncoderInput, Request

# Drafts.


class DraftHeadPrefixes(Resource):
    """Cached prefixes of a model whose draft head (EAGLE, MTP) reads each token beside the hidden
    state of the one before it.

    What the head keeps of a block's last token depends on the first token of the next block, of
    which the block's hash knows nothing. So a request begins behind a block only if its next block
    is cached as well, as under vLLM's own scheduler, and computes that one anew.
    """

    name = "draft head"

    def __init__(self) -> None:
        self.pool: BlockPool | None = None  # in which cached blocks are looked up
        self.block_size = 1  # tokens

    def watch(self, kv_cache: KVCacheManager) -> None:
        """Look cached blocks up in this cache from now on."""
        self.pool, self.block_size = kv_cache.pool, kv_cache.block_size

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Return the number of blocks whose next block is cached too, at most `num_blocks`."""
        assert self.pool is not None, "watch() comes first"
        num_findable = (request.num_tokens - 1) // self.block_size
        hashes = request.block_hashes
        while num_blocks and not (
            num_blocks < num_findable and self.pool.lookup(hashes[num_blocks]) is not None
        ):
            num_blocks -= 1
        return num_blocks


# Images and sounds.


def encoder_inputs(
    features: Sequence[MultiModalFeatureSpec], *, whole: bool
) -> tuple[EncoderInput, ...]:
    """Return the images and sounds of a request as aioserve knows them, at the same indices;
    `whole`: each runs in one step. Raises `RequestError` if two of them share a place.
    """
    if not features:
        return ()
    inputs = tuple(
        EncoderInput(
            position=feature.mm_position.offset,
            num_tokens=feature.mm_position.length,
            content_hash=feature.identifier,
            whole=whole,
            num_embeds=feature.mm_position.get_num_embeds(),
        )
        for feature in features
    )
    for before, item in pairwise(inputs):
        if item.position < before.end:
            raise RequestError(
                f"the images or sounds of a request must not overlap: one ends at token "
                f"{before.end} of the prompt, and the next begins at {item.position}"
            )
    return inputs


class EncoderItems:
    """The sizes of the images and sounds of requests, and of those that vLLM's runner keeps outputs
    of, by identifier. A client may choose identifiers (`multi_modal_uuids`): one that names two
    images of different sizes would end vLLM's engine core, since outputs are found by it alone.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # vectors of the encoder
        self._users: Counter[str] = Counter()  # requests, once for each place in their prompts
        self._kept: set[str] = set()  # the runner has an output, or a step is to bring it

    @property
    def are_known(self) -> bool:
        """Whether any request has inputs for an encoder."""
        return bool(self._sizes)

    def enter(self, request: Request) -> None:
        """Take in the inputs of a request. Raises `RequestError` if one of its identifiers is known
        with another size; the request is not known then.
        """
        sizes = {item.content_hash: item.size for item in request.encoder_inputs}
        for item in request.encoder_inputs:
            for known in (self._sizes.get(item.content_hash), sizes[item.content_hash]):
                if known not in (None, item.size):
                    raise RequestError(
                        f"the identifier {item.content_hash!r:.80} of an image or sound stands for "
                        f"{item.size} tokens in this request, and for {known} in another "
                        "place: one identifier must mean one content"
                    )
        self._sizes.update(sizes)
        self._users.update(item.content_hash for item in request.encoder_inputs)

    def leave(self, request: Request) -> None:
        """A request that has entered ends."""
        for item in request.encoder_inputs:
            self._users[item.content_hash] -= 1
            self._forget(item.content_hash)

    def plan(
        self,
        scheduled: Mapping[str, Sequence[int]],
        freed: Iterable[str],
        requests: Mapping[str, Request],
    ) -> None:
        """A step drops the outputs `freed` and computes those `scheduled`, by request."""
        for identifier in freed:
            self._kept.discard(identifier)
            self._forget(identifier)
        for name, indices in scheduled.items():
            items = requests[name].encoder_inputs
            self._kept.update(items[index].content_hash for index in indices)

    def _forget(self, identifier: str) -> None:
        if self._users[identifier] <= 0:
            del self._users[identifier]
            if identifier not in self._kept:
                self._sizes.pop(identifier, None)


# Events of KV blocks.


class BlockEvents:
    """Events of what becomes findable in the KV cache and what is lost, published as vLLM's own
    scheduler does it (`--kv-events-config`): for routers that know which server has which prefix.
    """

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        """Make the publisher that vLLM's settings ask for; `block_size` is in tokens."""
        self._publisher = EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
        )
        self._block_size = block_size
        self.config = self._publisher.get_publisher_config()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish one batch of these, in their order; nothing if there are none."""
        if events:
            batch = KVEventBatch(ts=time.time(), events=self._translate(events))
            self._publisher.publish(batch)

    def shutdown(self) -> None:
        """Send what is not sent yet, and close the publisher's socket."""
        self._publisher.shutdown()

    def _translate(self, events: Sequence[KVEvent]) -> list[KVCacheEvent]:
        """Return the events in vLLM's words; blocks that follow each other are one event."""
        made: list[KVCacheEvent] = []
        for event in events:
            last = made[-1] if made else None
            if isinstance(event, OurBlockStored):
                if isinstance(last, BlockStored) and last.block_hashes[-1] == event.parent_hash:
                    last.block_hashes.append(event.block_hash)
                    last.token_ids.extend(event.token_ids)
                else:
                    made.append(self._stored(event))
            elif isinstance(event, OurBlocksCleared):
                made.append(AllBlocksCleared())
            elif isinstance(last, BlockRemoved):
                last.block_hashes.append(event.block_hash)
            else:
                made.append(BlockRemoved([event.block_hash], medium=MEDIUM_GPU, group_idx=0))
        return made

    def _stored(self, event: OurBlockStored) -> BlockStored:
        return BlockStored(
            block_hashes=[event.block_hash],
            parent_block_hash=event.parent_hash,
            token_ids=list(event.token_ids),
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=None,
            group_idx=0,
        )
