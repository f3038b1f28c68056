"""The scheduler's side of a KV connector, which knows of blocks that are not in the paged cache.

Names are those of vLLM's `KVConnectorBase_V1` where the meaning is the same. Plain data crosses to
the runner: block ids and slots. No tensors; nothing here waits for anything.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from aioserve.kv_cache.block_pool import (
    BLOCKS,
    BlockNotes,
    BlockPool,
    ExternalPrefix,
    OffloadPrice,
)
from aioserve.request import Request

#: (block id, slot) of what leaves a pool, (slot, block id) of what comes.
Copies = tuple[list[tuple[int, int]], list[tuple[int, int]]]


class KVConnectorMetadata(msgspec.Struct, frozen=True, gc=False):
    """The blocks that the runner copies before the forward pass of a step: all saves, then all
    loads.
    """

    saves: list[tuple[int, int]]  # (block id, slot): out of the pool of KV blocks
    loads: list[tuple[int, int]]  # (slot, block id): into it
    others: dict[str, Copies] = {}  # the same of other pools, by their names

    @property
    def by_pool(self) -> dict[str, Copies]:
        """Saves and loads of each pool, by its name."""
        return {BLOCKS: (self.saves, self.loads), **self.others}


class KVConnectorStats(msgspec.Struct):
    """The counts of a connector since the start. Tokens are those of whole blocks."""

    num_queried_tokens: int = 0  # that the prefix cache lacked at admissions
    num_hit_tokens: int = 0  # queried tokens that were loaded
    num_saved_tokens: int = 0  # copied out of the paged cache
    num_unsaved_tokens: int = 0  # that found no room to be copied to
    num_fetched_tokens: int = 0  # read from the directory
    num_passed_tokens: int = 0  # held elsewhere, and cheaper to compute
    num_failures: int = 0  # reads that were damaged, foreign or too slow; writes that failed
    num_bytes_loaded: int = 0
    num_bytes_saved: int = 0
    num_bytes_read: int = 0  # from the directory
    num_bytes_written: int = 0
    load_seconds: float = 0.0  # that steps took to copy blocks into the paged cache
    read_seconds: float = 0.0  # from the first lookup until the blocks are in host memory
    num_host_blocks: int = 0  # in host memory now
    num_host_slots: int = 0
    num_kept_blocks: int = 0  # of those in host memory, kept for requests that were offloaded


class KeptPool(Protocol):
    """A pool of which a connector keeps the contents, by the hash of the block that each belongs
    to: KV blocks, blocks of windows, snapshots of states.
    """

    @property
    def name(self) -> str:
        """The name that the runner has for the pool."""

    def lookup(self, block_hash: bytes) -> int | None:
        """Return where this content is in the pool; None if it is not."""

    def needed(self, num_blocks: int) -> range:
        """Return which of a request's blocks have to be there to begin behind its first
        `num_blocks`.
        """

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Behind how many of the first `num_blocks` blocks the request can begin, at most, by what
        this pool and host memory have. The hashes of the blocks are known.
        """

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Make what these hold unfindable: it was not loaded after all."""


class Outside(ABC):
    """The contents of one pool that a connector has in host memory."""

    notes: BlockNotes

    @abstractmethod
    def has(self, block_hash: bytes) -> bool:
        """Return whether this content can be loaded in the step under construction."""

    @abstractmethod
    def load(self, block_hash: bytes, place: int) -> None:
        """Load this content, which is there, into a place of the pool in this step."""


def reached_blocks(
    hashes: Sequence[bytes],
    num_blocks: int,
    needed: Callable[[int], range],
    is_there: Callable[[bytes], bool],
) -> int:
    """Behind how many of the first `num_blocks` blocks, which have these `hashes`, a text can begin
    at most, if what is `needed` for that must be there. A longer text needs no earlier block.
    """
    index = num_blocks
    while index > needed(num_blocks).start:
        index -= 1
        if not is_there(hashes[index]):
            num_blocks = index
    return num_blocks


class StepTime(Protocol):
    """The step times from which a connector knows the price of computing."""

    @property
    def is_fitted(self) -> bool:
        """Whether the price is known by now."""

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds that one more prompt token costs."""


class KVConnectorBase(ABC):
    """The scheduler's side. Called from one event loop; none but `shutdown` waits."""

    notes: BlockNotes  # of the pool of KV blocks
    #: Called when a request has its blocks: the step loop may be asleep.
    wake: Callable[[], None] = staticmethod(lambda: None)
    #: Of the policy that decides; None: the price of computing is not known.
    step_time: StepTime | None = None

    @property
    def outside(self) -> BlockPool | None:
        """The slots of host memory for KV blocks, of which those are evicted first that the policy
        ranks lowest (`retention`), if it ranks any; None: there are none.
        """
        return None

    def join(self, pool: KeptPool) -> Outside | None:
        """Return a pool whose contents requests need to begin behind a prefix. What is kept of it;
        None: nothing is. By default a connector keeps nothing.
        """
        return None

    @abstractmethod
    def on_new_request(self, request: Request, num_computed_blocks: int) -> bool:
        """Take note of a new request, whose `block_hashes` are known. Return whether blocks behind
        the first `num_computed_blocks` are being looked for: then the request waits until
        `begin_step` returns it.
        """

    @abstractmethod
    def begin_step(self) -> list[Request]:
        """A step is about to be planned. What was stored until now is computed by steps before
        it. Returns the requests that need not wait longer: their blocks are there, or will not
        come.
        """

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many further tokens can be loaded in this very step: whole blocks, and fewer
        than all of its tokens. 0 also if they are cheaper to compute. Changes nothing.
        """

    @abstractmethod
    def get_external_prefix(self, request: Request, num_computed_tokens: int) -> ExternalPrefix:
        """Return the same with its price, also if it is cheaper to compute."""

    def get_offload_price(self, request: Request, num_blocks: int) -> OffloadPrice:
        """Return what it costs to keep the first blocks of a request, whose hashes are known; all
        or nothing. Changes nothing. By default a connector cannot.
        """
        return OffloadPrice(0, 0.0, 0.0, 0.0)

    def keep(self, request: Request, num_blocks: int) -> None:
        """Keep the content of the request's first blocks, which have their price, until it is
        admitted or finished; what is not there is saved in this step. It is loaded in any case.
        """
        raise NotImplementedError

    def keeps(self, request: Request) -> bool:
        """Return whether blocks of the request are kept for it until it is admitted or finished."""
        return False

    @abstractmethod
    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        """The request is admitted, and has blocks for what was matched, at `num_computed_tokens`
        and before: they are loaded in this step.
        """

    @abstractmethod
    def build_connector_meta(self, step_id: int) -> KVConnectorMetadata | None:
        """Return what the runner has to do in the step that was planned; None: nothing."""

    @abstractmethod
    def update_connector_output(self, step_id: int) -> None:
        """A step is back, and so are all before it: what it saved is there."""

    @abstractmethod
    def when_saved(self, callback: Callable[[], None]) -> None:
        """Call back, once, when all that the steps planned until now save is where others find it,
        or will not be; not before this returns. At `shutdown` in any case.
        """

    @abstractmethod
    def discard_steps(self, last_step_id: int) -> None:
        """No step after `last_step_id` goes to the runner: what it loads is forgotten in the
        pools.
        """

    @abstractmethod
    def forget_unsettled(self) -> None:
        """A step failed: nothing counts that a step in flight, or none, has saved or loaded."""

    @abstractmethod
    def request_finished(self, request: Request) -> None:
        """The request needs nothing any more; it may never have run."""

    @abstractmethod
    def make_stats(self) -> KVConnectorStats:
        """Counters of the connector, for metrics."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what is in host memory."""

    async def change_weights(self, path: str) -> None:
        """The weights are those of the model at `path` from now on: nothing counts that was kept or
        is looked for. No step is planned or in flight.
        """
        self.reset()

    @abstractmethod
    async def shutdown(self) -> None:
        """No step comes any more. Give back what is held outside; returns when what was still to be
        written is.
        """
