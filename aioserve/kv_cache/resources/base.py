"""What requests hold besides blocks of the main pool: the seam for another kind of cache.

A kind of cache is one class derived from `Resource`, made where the KV cache is
(`make_resources`), and a part of the runner that reads what its plan says. The book and the step
know no kind by name; the manager names those of today, for policies that look at them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aioserve.request import Request, WaitReason


class Resource(ABC):
    """Places of which a running request needs some. The manager asks and tells all of its own, in
    their order, wherever it handles blocks.
    """

    #: What `SchedulerOutput.parts` calls the plan of this resource.
    name: ClassVar[str]
    #: Whether steps of nothing but decodes have something to tell the runner.
    plans_decodes: ClassVar[bool] = False
    #: Most draft tokens of a request in one step; None: any number.
    max_drafts: int | None = None

    @abstractmethod
    def shortage(self, request: Request) -> WaitReason | None:
        """Why the request cannot be admitted now; None if there is room. Changes nothing."""

    @abstractmethod
    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        """Give an admitted request its place. The request begins behind its first `num_blocks`
        blocks, which are reached, and `num_shared_tokens` of its tokens are in cached blocks.
        Raises `InvariantError` if there is no room.
        """

    @abstractmethod
    def give_back(self, request: Request) -> None:
        """Take the place of a request that was preempted, or has ended and is in no step any more.
        Does nothing for a request that holds none.
        """

    @abstractmethod
    def held(self) -> str:
        """What requests hold now, as a number and a noun; empty if they hold nothing."""

    def check_alone(self, request: Request) -> None:  # noqa: B027 - most have room for any
        """Raise `RequestError` if the request could not even run alone."""

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """How many of the request's first `num_blocks` blocks, which are cached, it can begin
        behind at most. Their hashes are known. Changes nothing.
        """
        return num_blocks

    def touch(self, request: Request, num_blocks: int) -> None:  # noqa: B027 - nothing to find
        """Make what a request needs to begin behind `num_blocks` blocks the last to be evicted."""

    def leave(self, request: Request) -> None:  # noqa: B027 - most wait for `give_back`
        """The request has ended; a step in flight may still write what it holds."""

    def cache(self, request: Request, num_tokens: int) -> None:  # noqa: B027 - as above
        """Make what belongs to the first `num_tokens` tokens, known and computed, findable."""

    def forget(self, block_hashes: Sequence[bytes]) -> None:  # noqa: B027 - as above
        """Make what belongs to these blocks unfindable: the step to write it has failed."""

    def clear(self) -> None:  # noqa: B027 - as above
        """Make unfindable all that requests have left behind."""

    def plan(self, tokens: dict[Request, int]) -> Mapping[str, Any]:
        """What the runner must be told of a step that computes these numbers of tokens, by request
        id. Called once for each step, when it is certain which requests run.
        """
        return {}
