"""What a router is asked, what it sees of the replicas, and what it answers.

The seam between senders of requests, live or simulated, and the choice. A router holds no
connection, waits for nothing and reads no clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from aioserve.kv_cache.events import KVEvent

# A token that is held while a reply is made, beside one that still has to be computed. A guess: by
# the profile h200-llama-8b-roofline, 300 tokens of a reply read a token of context for 9 us, and
# computing one of a prompt takes 18.
HELD_SHARE = 0.5


class RoutedRequest(NamedTuple):
    """What is known of a request before a replica has it."""

    num_tokens: int  # of the prompt
    block_hashes: Sequence[bytes] = ()  # of its full blocks, as the KV caches have them
    block_size: int = 0  # tokens that a hash stands for
    session: str = ""  # the conversation that it goes on with, if the client says so


class Replica:
    """A replica that takes requests. `work` is in tokens, kept by the sender's `Assignment`s."""

    __slots__ = ("name", "work")

    def __init__(self, name: str) -> None:
        self.name = name  # unique in its fleet; one that comes back empty may have it again
        self.work = 0.0  # of all requests that were sent to it and have not ended


class Choice(NamedTuple):
    """The replica that a router chose for a request."""

    place: int  # among the replicas that there were to choose from
    num_cached_tokens: int = 0  # of its prompt that are there, as far as the router knows


class Assignment:
    """A request at a replica, as work: its prompt until the first token, then what it holds."""

    __slots__ = ("_held", "_queued", "replica")

    def __init__(self, replica: Replica, request: RoutedRequest, num_cached_tokens: int) -> None:
        """Send the request to the replica, which finds `num_cached_tokens` of its prompt cached."""
        self.replica = replica
        self._queued = float(request.num_tokens - num_cached_tokens)
        self._held = HELD_SHARE * request.num_tokens
        replica.work += self._queued + self._held

    def has_started(self) -> None:
        """Its first token is here. Told again it changes nothing."""
        self.replica.work -= self._queued
        self._queued = 0.0

    def has_ended(self) -> None:
        """The request has ended, in whatever way: the replica's work is less."""
        self.replica.work -= self._queued + self._held
        self._queued = self._held = 0.0


class Router(ABC):
    """Chooses a replica for each request. Equal calls in equal order give equal answers."""

    #: Whether it wants `RoutedRequest.block_hashes`, and `on_kv_event` called.
    follows_kv_events: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        """`seed` is for those that draw lots."""
        self.seed = seed

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        """One of `replicas`, which are at least one. The tuple stays the same while no replica
        comes or goes: what follows from it may be kept.
        """

    def on_kv_event(self, name: str, event: KVEvent) -> None:  # noqa: B027 - most do not care
        """What the engine of a replica says of its KV cache."""

    def forget(self, name: str) -> None:  # noqa: B027 - most know nothing
        """The replica of this name is gone, and its memory with it."""
