"""What requests hold besides blocks of the main pool: the seam for another kind of cache.

A kind of cache is one class derived from `Resource`, brought by a part and made by `make_resources`
if the model decides on it, by `make_limits` if settings do; and a part of the runner's batch that
reads what its plan says. The scheduler knows no kind by name; the manager names two of today, for
policies that look at them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aioserve.kv_cache.block_pool import BlockPool
from aioserve.request import EncoderInput, Request, WaitReason

if TYPE_CHECKING:
    from aioserve.kv_cache.connector import KVConnectorBase


class Resource:
    """Something of which a running request needs some. The manager asks and tells all of its own,
    in their order. A method that a kind does not implement is never called.
    """

    #: What `SchedulerOutput.parts` calls the plan of this resource.
    name: ClassVar[str]
    #: Most draft tokens of a request in one step; None: any number.
    max_drafts: int | None = None
    #: Why a request waits of which `fit` lets no token run.
    unfit: ClassVar[WaitReason] = WaitReason.BUDGET

    # At the door.

    def check_alone(self, request: Request) -> None:
        """Raise `RequestError` if the request could not even run alone."""

    def holds_back(self, request: Request, num_cached_blocks: int) -> bool:
        """Return whether a new request, whose first blocks are cached, has to stay out of the line.
        It is in `aside` then, until `ready` names it.
        """
        return False

    @property
    def aside(self) -> Collection[Request]:
        """The requests that are held back, whose reason to wait is `REMOTE_KVS`."""
        return ()

    def ready(self) -> list[Request]:
        """Before each step: the requests that are held back no longer, again until `let_go`."""
        return []

    def let_go(self, request: Request) -> None:
        """The request that was ready is in line now."""

    def join(self, connector: "KVConnectorBase") -> None:
        """Let a connector keep what this resource has in a pool. By default it has none."""

    def learn_prices(self, step_time: Any) -> None:
        """Take note of what steps cost, as the policy in charge has learned it."""

    # Admission.

    def shortage(self, request: Request, gone: Collection[Request]) -> WaitReason | None:
        """Return why the request cannot be admitted now; None if there is room, or would be if the
        running requests `gone` lost their places. Changes nothing.
        """
        return None

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Return how many of the request's first `num_blocks` blocks, which are cached, it can
        begin behind at most. Their hashes are known. Changes nothing.
        """
        return num_blocks

    def num_loadable_tokens(self, request: Request, num_cached_tokens: int) -> int:
        """Return how many tokens behind the cached ones need not be computed. Changes nothing."""
        return 0

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        """Give an admitted request its place. The request begins behind its first `num_blocks`
        blocks, which are reached, and what can be loaded behind these; `num_shared_tokens` of its
        tokens are in cached blocks. Raises `InvariantError` if there is no room.
        """

    def pause(self, request: Request) -> None:
        """The request steps aside: give back what it does not need until `resume`."""

    def resume(self, request: Request) -> None:
        """The request that stepped aside runs again. There is no `shortage`."""

    # In steps.

    def fit(self, request: Request, num_tokens: int, start: int, most: int) -> int:
        """Return how many of `num_tokens` tokens from position `start` on may run in this step, at
        most `most`. Asked as long as `start` is before the request's `plain_from`.
        """
        return num_tokens

    def serve(self, request: Request, start: int, num_tokens: int) -> Iterable[Request]:
        """Take note that these tokens, which `fit`, run in this step. Return the other requests of
        the step that compute something for them.
        """
        return ()

    def refund(self, request: Request) -> None:
        """The request does not run in this step after all, and loses its place."""

    def plan(self, tokens: dict[Request, int], step_id: int) -> Mapping[str, Any]:
        """Return what the runner must be told of a step that computes these numbers of tokens.
        Called once for each step, when it is certain which requests run.
        """
        return {}

    @property
    def plans_decodes(self) -> bool:
        """Whether steps of nothing but decodes have something to tell the runner now."""
        return False

    def skip(self) -> None:
        """The step that was planned is empty, and is not sent."""

    def discard_steps(self, last_step_id: int) -> None:
        """No step after that one goes to the runner, be it planned or half planned."""

    # The end.

    def leave(self, request: Request) -> None:
        """The request has ended; a step in flight may still write what it holds."""

    def give_back(self, request: Request) -> None:
        """Take the place of a request that was preempted, or has ended and is in no step any more.
        Does nothing for a request that holds none.
        """

    def held(self) -> str:
        """Return what requests hold now, as a number and a noun; empty if they hold nothing."""
        return ""

    # What requests leave behind.

    def touch(self, request: Request, num_blocks: int) -> None:
        """Make what a request needs to begin behind `num_blocks` blocks the last to be evicted."""

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make what belongs to the first `num_tokens` tokens, known and computed, findable."""

    def forget(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """Make unfindable what steps of the request were to leave, with these blocks: a step has
        failed.
        """

    def clear(self) -> None:
        """Make unfindable all that belongs to blocks."""

    def vacate(self) -> None:
        """Every request was preempted, and the runner gives back its memory."""

    # For others.

    def stats(self) -> dict[str, int]:
        """Return values for fields of `SchedulerStats`, by name."""
        return {}

    def follow(self, other: Any) -> None:
        """Take over the limits of another of this class, whose policy is in charge from now on."""


# What the kinds of cache are told of the model and of settings, and what policies read of them:
# here, so that no kind is loaded that is not used.


class WindowSpec(msgspec.Struct, frozen=True, gc=False):
    """Sizes of the sliding-window layers and of their block pool."""

    num_tokens: int  # w: a token sees itself and the w - 1 before it; the most of all layers
    num_blocks: int  # blocks in their pool
    max_chunk: int  # most tokens of a request in one step
    max_drafts: int  # most draft tokens of a request in one step

    def num_decode_blocks(self, block_size: int) -> int:
        """Return most blocks that a request holds behind its prompt."""
        return self._num_blocks_for(1 + self.max_drafts, block_size)

    def num_request_blocks(self, num_tokens: int, longest: int, block_size: int) -> int:
        """Return most blocks that a request ever holds which is admitted with `num_tokens` known
        tokens and of which `longest` may be computed.
        """
        chunk = self._num_blocks_for(min(self.max_chunk, num_tokens), block_size)
        return min(max(chunk, self.num_decode_blocks(block_size)), -(-longest // block_size))

    def _num_blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Return most blocks touched by steps that compute `num_tokens` tokens of a request."""
        return -(-(self.num_tokens + num_tokens - 2) // block_size) + 1


class WindowPool(Resource, ABC):
    """The KV blocks of sliding-window layers, as policies read them."""

    name = "windows"
    spec: WindowSpec  # sizes of the layers and of the pool

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks in the sliding-window pool."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Sliding-window blocks that running requests have not reserved."""

    @abstractmethod
    def num_needed_blocks(self, request: Request) -> int:
        """Sliding-window blocks that the request reserves if it is admitted now."""


class StatePool(Resource, ABC):
    """The slots for states of layers that have some, as policies read them."""

    name = "states"

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots  # state slots in all: of running requests and of snapshots

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """State slots that requests can get, unused or taken from snapshots."""

    @property
    @abstractmethod
    def num_snapshots(self) -> int:
        """Number of cached state snapshots."""


# What plans of the kinds of cache tell the runner.


class StateSlots(msgspec.Struct, frozen=True, gc=False):
    """The slots in which a request's state is read and written in a step."""

    slot: int  # its own, in this step and all later ones
    source: int  # what the step begins with: a slot, or -1 for nothing
    snapshots: list[tuple[int, int]]  # (tokens computed, slot), ascending: written as well


class WindowBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks that a request has from a step on, where its table has had none."""

    first: int  # the place of the first of them
    block_ids: list[int]


class Ahead(msgspec.Struct, frozen=True, gc=False):
    """An order to the runner to encode a part of an input in a step in which the request that needs
    it has no tokens; perhaps the request is not even in the batch.
    """

    item: EncoderInput
    token_ids: Sequence[int]  # those that the input stands for
    num_before: int  # of the item's tokens: how much of the work earlier steps were told to do
    done: int  # how much is done with this step; all of them: the output is there

    @classmethod
    def of(cls, parts: Mapping[str, Mapping[str, Any]]) -> "Ahead | None":
        """Return what the `parts` of a step say; None if it encodes nothing ahead."""
        found: Ahead | None = parts.get("encoder", {}).get("ahead")
        return found

    @property
    def num_tokens(self) -> int:
        """How many tokens of the work are done in this step."""
        return self.done - self.num_before

    @property
    def is_last(self) -> bool:
        """Whether this step completes the output."""
        return self.done == self.item.size


class EncoderLimits(msgspec.Struct, frozen=True):
    """Limits in tokens: of the cache for encoder outputs, and of what steps may do."""

    num_slots: int  # room for outputs
    step_tokens: int  # most that the encoder computes in one step
    max_whole: int  # most of an input that runs whole: what a full house leaves of a step
    runs_whole_prompts: bool  # then all inputs of a prompt run in one step
    chunk: int = 0  # most that it computes beside other requests; 0: no limit


class LimitOf:
    """A limit of the scheduler's settings, which becomes a `Resource` with the first request that
    it concerns: no kind of cache is loaded before.
    """

    def __init__(self, concerns: Callable[[Request], Any], make: Callable[[], Resource]) -> None:
        """`concerns` returns something true of a request that it concerns."""
        self.concerns, self._make = concerns, make
        self._made: Resource | None = None

    @property
    def resource(self) -> Resource:
        """The resource, made when it is first asked for."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def check_alone(self, request: Request) -> None:
        """Raise `RequestError` if the request could not even run alone."""
        if self.concerns(request):
            self.resource.check_alone(request)

    def follow(self, other: "LimitOf") -> None:
        """Take over the limits of another of its kind, whose policy is in charge from now on."""
        if self._made is None:
            self._make = other._make
        else:
            self._made.follow(other.resource)


def make_resources(
    num_state_slots: int | None,
    windows: WindowSpec | None,
    block_size: int,
    *,
    keeps_prefixes: bool = True,
) -> list[Resource]:
    """Return what a model needs of which each argument is not None: slots for states, window
    blocks. `block_size` is in tokens; with `keeps_prefixes`, what requests leave behind can be
    found.
    """
    resources: list[Resource] = []
    if num_state_slots is not None:
        pool = _make("states", num_state_slots, block_size, keeps_snapshots=keeps_prefixes)
        resources.append(pool)
    if windows is not None:
        resources.append(_make("windows", windows, block_size, keeps_prefixes=keeps_prefixes))
    return resources


def make_limits(max_loras: int, encoder: EncoderLimits, pool: BlockPool) -> list[LimitOf]:
    """Return what settings of the scheduler limit, whatever the model: these come and go with
    policies.
    """

    def make_encoder() -> Resource:
        return _make("encoder", encoder, pool)

    return [
        LimitOf(attrgetter("adapter_id"), lambda: _make("adapters", max_loras)),
        LimitOf(attrgetter("encoder_inputs"), make_encoder),
    ]


def _make(name: str, *sizes: Any, **options: Any) -> Resource:
    """Return a kind of cache that a part brings under the name of its plan."""
    from aioserve.support.parts import load

    made: Resource = load("caches", name)(*sizes, **options)
    return made
