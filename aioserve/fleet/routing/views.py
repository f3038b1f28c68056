"""What a router sees: the request, and each replica as far as the sender knows it.

The views are frozen data. Beside them: which replica can find which blocks, from what the engines'
KV caches say of themselves (it may be older than what is: KV caches tell of a block after it has
come or gone), how much of a prompt each holds, what the sender knows of programs of many requests,
and how long steps take, learned from steps.
"""

import math
from collections.abc import Callable, Sequence
from itertools import compress

import msgspec

from aioserve.kv_cache.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from aioserve.request import (
    PREDICTED_OUTPUT_TOKENS,
    PROGRAM,
    SLO_CLASS,
    SLO_TPOT,
    SLO_TTFT,
    Hints,
)


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request before a replica has it. Times are seconds of the router's clock."""

    num_tokens: int  # of the prompt
    request_id: str = ""
    max_tokens: int | None = None  # most tokens of the reply that the client allows; None: no limit
    arrival_time: float = 0.0
    deadline: float | None = None  # time at which it ends with a timeout
    user: str = ""  # the client's name, as the request states it; empty: none
    priority: int = 0  # smaller is more urgent
    session: str = ""  # the conversation that it goes on with; empty: none
    adapter: str = ""  # name of its LoRA adapter; empty: none
    hints: Hints = {}  # what the client tells about it, by name
    block_hashes: Sequence[bytes] = ()  # of its full blocks, where the router `uses_prefixes`
    block_size: int = 0  # tokens that a hash stands for
    num_attempts: int = 0  # replicas that had it before, and have died
    turn: int = 0  # of its program, from 1 on, as counted by a sender whose router `uses_programs`

    @property
    def program(self) -> str:
        """The agent's program that the request belongs to, by the hint `program`; without one the
        conversation; empty: none.
        """
        value = self.hints.get(PROGRAM)
        return value if isinstance(value, str) and value else self.session

    @property
    def predicted_tokens(self) -> float | None:
        """Tokens of the reply, as the client predicts it by a hint; None without one."""
        return self._number(PREDICTED_OUTPUT_TOKENS)

    @property
    def slo_class(self) -> str:
        """The class of service levels that the client names by a hint; empty: none."""
        value = self.hints.get(SLO_CLASS)
        return value if isinstance(value, str) else ""

    @property
    def slo_ttft(self) -> float | None:
        """Seconds within which the first token is wanted, by a hint; None: not stated."""
        return self._number(SLO_TTFT)

    @property
    def slo_tpot(self) -> float | None:
        """Seconds within which each further token is wanted, by a hint; None: not stated."""
        return self._number(SLO_TPOT)

    def _number(self, name: str) -> float | None:
        value = self.hints.get(name)
        if isinstance(value, bool | str) or value is None or value <= 0:
            return None
        return value


class ReplicaReport(msgspec.Struct, frozen=True, gc=False):
    """The report of a replica on itself. Counts are of requests, unless they name tokens."""

    num_running: int = 0  # the batch: requests that have a seat
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # of those that wait: what is to be computed, unless it is cached
    max_num_seqs: int = 0  # seats: the largest batch
    num_kv_tokens: int = 0  # tokens that its KV cache can hold
    num_free_kv_tokens: int = 0  # held by no request: may be cached prefixes
    step_seconds: float = 0.0  # mean of the newest steps, the last ten about; 0: no step yet
    step_base_seconds: float = 0.0  # of a step by the learned line over the batch, without requests
    step_request_seconds: float = 0.0  # that each request of the batch adds, by that line
    num_evictable_kv_tokens: int | None = None  # of the free ones, cached prefixes; None: not known
    adapters: tuple[str, ...] | None = None  # names of those that are loaded; None: not known
    num_leased_kv_tokens: int = 0  # of prefixes that its policy keeps for next turns (`pin`)


#: What a replica of a fleet does; empty: all.
ROLES = ("", "prefill", "decode")


class SentLoad(msgspec.Struct, frozen=True, gc=False):
    """The load that one sender, or several together, has sent to a replica and not ended."""

    work: float = 0.0  # tokens, as `ReplicaView` counts them
    num_requests: int = 0
    num_unstarted_tokens: int = 0  # of prompts without a first token; cached ones left out


class ReplicaView(msgspec.Struct, frozen=True, gc=False):
    """A replica, as far as this sender knows it when the router is asked.

    `work`, `num_sent` and `num_unstarted_tokens` are the sender's own account, which is always
    right, and what other senders have told of theirs, which is as old as their messages. All fields
    after `known_at` are what the replica said then, and are 0 before it has said anything, or if
    the router does not state `uses_reports`.
    """

    name: str  # unique in its fleet; a replica that comes back empty may have it again
    work: float = 0.0  # tokens, of all that was sent and has not ended: prompts until their first
    # token, and half of what is held while a reply is made
    num_sent: int = 0  # requests that were sent and have not ended
    num_unstarted_tokens: int = 0  # of prompts that were sent and have no first token; none cached
    known_at: float = -math.inf  # time at which the rest was true; -inf: nothing is known
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    max_num_seqs: int = 0
    num_kv_tokens: int = 0
    num_free_kv_tokens: int = 0
    step_seconds: float = 0.0
    step_base_seconds: float = 0.0
    step_request_seconds: float = 0.0
    num_evictable_kv_tokens: int | None = None
    adapters: tuple[str, ...] | None = None
    num_leased_kv_tokens: int = 0
    role: str = ""  # one of `ROLES`, by the fleet's settings; always known

    def age(self, now: float) -> float:
        """Return seconds since what is reported was so; infinite before the replica has said
        anything.
        """
        return now - self.known_at

    def step_seconds_with(self, batch: int) -> float:
        """Return seconds that a step of `batch` requests takes by the learned line; the mean of the
        newest steps where the replica reports none; 0 before any step.
        """
        line = self.step_base_seconds + self.step_request_seconds * batch
        return line or self.step_seconds

    @property
    def num_requests(self) -> int:
        """Requests that are there: as the replica reported, and at least those that were sent and
        have not ended.
        """
        return max(self.num_sent, self.num_running + self.num_waiting)


#: Names of the fields of `ReplicaView` that a replica has to report.
REPORTED = frozenset(ReplicaReport.__struct_fields__) | {"known_at"}


# A replica with more blocks than this is known by its newest: some 100 bytes each.
MAX_BLOCKS = 1_000_000


class PrefixIndex:
    """An index that has, by block hash, a set of replicas as the bits of a number: a thousand of
    them are 125 bytes, and what two blocks have in common is one operation.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks` is the most that is kept of one replica; the oldest is forgotten first."""
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._places: dict[str, int] = {}  # of a replica's bit
        self._names: list[str] = []  # by place; "" is free
        self._blocks: list[dict[bytes, None]] = []  # by place, oldest first

    def __len__(self) -> int:
        """Return blocks that are known, counted at every replica that has them."""
        return sum(map(len, self._blocks))

    def apply(self, name: str, event: KVEvent) -> None:
        """Take in what the KV cache of a replica has said."""
        if isinstance(event, BlockStored):
            self.add(name, event.block_hash)
        elif isinstance(event, BlockRemoved):
            self.remove(name, event.block_hash)
        elif isinstance(event, AllBlocksCleared):
            self.forget(name)

    def add(self, name: str, block_hash: bytes) -> None:
        """Note that the replica has this block in its cache."""
        place = self._places.get(name)
        if place is None:
            place = self._enter(name)
        blocks = self._blocks[place]
        if block_hash not in blocks:
            if len(blocks) >= self._max_blocks:
                self.remove(name, next(iter(blocks)))
            blocks[block_hash] = None
            self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << place

    def remove(self, name: str, block_hash: bytes) -> None:
        """The replica cannot find it any more; if it never could, nothing changes."""
        place = self._places.get(name)
        if place is not None and block_hash in self._blocks[place]:
            del self._blocks[place][block_hash]
            self._clear_bit(block_hash, place)

    def forget(self, name: str) -> None:
        """The replica can find nothing any more."""
        place = self._places.pop(name, None)
        if place is not None:
            for block_hash in self._blocks[place]:
                self._clear_bit(block_hash, place)
            self._blocks[place] = {}
            self._names[place] = ""

    def longest(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return how many of these blocks, from the first on, some replica can find without a gap;
        and the names of those that can find as many. `(0, [])` if none has the first.
        """
        holders = self._holders
        count, mask = 0, -1
        for block_hash in block_hashes:
            common = mask & holders.get(block_hash, 0)
            if not common:
                break
            mask = common
            count += 1
        return (count, self._names_of(mask)) if count else (0, [])

    def num_blocks_by_name(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many of these blocks, from the first on, each replica can find; without those
        that cannot find the first.
        """
        holders, found = self._holders, dict[str, int]()
        if not block_hashes:
            return found
        mask = holders.get(block_hashes[0], 0)
        for count, block_hash in enumerate(block_hashes):
            common = mask & holders.get(block_hash, 0)
            if common != mask:  # some can find `count` blocks and no more
                found.update(dict.fromkeys(self._names_of(mask ^ common), count))
                mask = common
            if not mask:
                return found
        found.update(dict.fromkeys(self._names_of(mask), len(block_hashes)))
        return found

    def _names_of(self, mask: int) -> list[str]:
        bits = bin(mask)[:1:-1]  # the first is that of place 0
        return list(compress(self._names, map("1".__eq__, bits)))

    def num_blocks(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, this replica can find."""
        place = self._places.get(name)
        if place is None:
            return 0
        blocks, count = self._blocks[place], 0
        for block_hash in block_hashes:
            if block_hash not in blocks:
                break
            count += 1
        return count

    def _enter(self, name: str) -> int:
        """Return the lowest free place, so that numbers stay as short as the fleet."""
        if "" in self._names:
            place = self._names.index("")
            self._names[place] = name
        else:
            place = len(self._names)
            self._names.append(name)
            self._blocks.append({})
        self._places[name] = place
        return place

    def _clear_bit(self, block_hash: bytes, place: int) -> None:
        mask = self._holders[block_hash] & ~(1 << place)
        if mask:
            self._holders[block_hash] = mask
        else:
            del self._holders[block_hash]


class Prefixes:
    """Cached tokens of prompts, by replica. All is 0 unless the router `uses_prefixes`."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self._index = PrefixIndex() if index is None else index  # an empty one is false

    def cached_tokens(self, request: RoutedRequest, name: str) -> int:
        """Return tokens of the prompt, from its first on, that the replica of this name holds.
        Costs O(blocks that it holds).
        """
        return self._index.num_blocks(name, request.block_hashes) * request.block_size

    def longest(self, request: RoutedRequest) -> tuple[int, list[str]]:
        """Return tokens of the longest prefix that any replica holds, and the names of those that
        hold as much: `(0, [])` if none holds any. Costs O(blocks + replicas).
        """
        count, names = self._index.longest(request.block_hashes)
        return count * request.block_size, names

    def by_name(self, request: RoutedRequest) -> dict[str, int]:
        """Return tokens of the prompt that each replica holds, of those that hold any. Costs
        O(blocks + replicas).
        """
        size = request.block_size
        found = self._index.num_blocks_by_name(request.block_hashes)
        return {name: count * size for name, count in found.items()}


MAX_PROGRAMS = 10_000  # without a running request, of which a sender knows; the newest
#: Tokens of a prompt that a token of a reply counts as, in the service that a program has had.
REPLY_WEIGHT = 2.0


class Program(msgspec.Struct, frozen=True, gc=False):
    """A program of many requests, as an agent's: what one sender has sent of it, and where."""

    name: str  # the hint `program` of its requests, else their session
    num_turns: int = 0  # requests that were sent
    num_running: int = 0  # of these, the ones that have not ended
    num_tokens: int = 0  # of its longest request, prompt and reply: what a cache should hold of it
    service: float = 0.0  # tokens of its ended requests; those of replies count twice
    since: float = 0.0  # time at which its newest request was sent, or ended
    replica: str = ""  # that had its newest request; empty: that is gone


class Programs:
    """Programs that a sender knows, by client and name. Empty unless the router `uses_programs`."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], Program] = {}
        self._at: dict[str, dict[tuple[str, str], None]] = {}  # by replica
        # Those without a running request, the longest untouched first.
        self._idle: dict[tuple[str, str], None] = {}

    def of(self, request: RoutedRequest) -> Program | None:
        """Return the program that the request belongs to; None if nothing of it was sent, or it
        states no program.
        """
        return self._known.get((request.user, request.program))

    def at(self, name: str) -> list[Program]:
        """Return programs of which a replica had the newest request. Costs O(their number)."""
        return [self._known[key] for key in self._at.get(name, ())]

    # What the sender tells.

    def sent(self, request: RoutedRequest, name: str) -> None:
        """A request was sent to the replica of this name, or has moved there."""
        if request.program:
            old = self.of(request) or Program(request.program)
            self._keep(
                (request.user, request.program),
                old,
                num_turns=max(old.num_turns, request.turn),
                num_running=old.num_running + 1,
                num_tokens=max(old.num_tokens, request.num_tokens),
                replica=name,
            )

    def moved(self, request: RoutedRequest, name: str) -> None:
        """A running request goes on at the replica of this name."""
        if (old := self.of(request)) is not None:
            self._keep((request.user, request.program), old, replica=name)

    def ended(self, request: RoutedRequest, num_output_tokens: int) -> None:
        """A request has ended, in whatever way."""
        if (old := self.of(request)) is not None:
            self._keep(
                (request.user, request.program),
                old,
                num_running=max(old.num_running - 1, 0),
                num_tokens=max(old.num_tokens, request.num_tokens + num_output_tokens),
                service=old.service + request.num_tokens + REPLY_WEIGHT * num_output_tokens,
            )

    def forget(self, name: str) -> None:
        """Forget the replica, which is gone, and its blocks."""
        for key in self._at.pop(name, ()):
            self._known[key] = msgspec.structs.replace(self._known[key], replica="")

    def _keep(self, key: tuple[str, str], old: Program, **changes: object) -> None:
        new = msgspec.structs.replace(old, since=self._clock(), **changes)
        if new.replica != old.replica or key not in self._known:
            self._at.get(old.replica, {}).pop(key, None)
            self._at.setdefault(new.replica, {})[key] = None
        self._known[key] = new
        self._idle.pop(key, None)
        if not new.num_running:
            self._idle[key] = None
        if len(self._known) > MAX_PROGRAMS and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            gone = self._known.pop(oldest)
            self._at.get(gone.replica, {}).pop(oldest, None)


KEPT = 0.99  # weight of what is known beside a new step


class StepTimes:
    """The line of least squares through the newest steps, some hundred of them."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # of 1, x, y, x * x, x * y: batch and seconds

    def learn(self, batch: int, seconds: float, count: int = 1) -> None:
        """`count` steps of `batch` requests, each of which took `seconds`."""
        kept = KEPT**count
        new = 1.0 - kept
        n, x, y, xx, xy = self._sums
        self._sums = (
            kept * n + new,
            kept * x + new * batch,
            kept * y + new * seconds,
            kept * xx + new * batch * batch,
            kept * xy + new * batch * seconds,
        )

    def line(self) -> tuple[float, float]:
        """Return seconds of a step, and seconds that each request adds; zeros before any step."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        slope = max((n * xy - x * y) / spread, 0.0) if spread > 1e-9 else 0.0
        base = (y - slope * x) / n
        if base < 0:  # a line that begins at 0
            return 0.0, y / x
        return base, slope
