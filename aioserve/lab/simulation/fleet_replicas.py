"""The replicas of a simulated fleet and their requests, as the fleet's sender knows them.

Plain records: requests for the engine and for the router, a place and the engine that has it, what
the sender hears of replicas and when, and what came of the run.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from aioserve.fleet.routing import Assignment, ReplicaReport, RoutedRequest
from aioserve.lab.simulation.outcome import RunOutcome, extra_stop_ids
from aioserve.lab.simulation.stepped_engine import Blueprint, SteppedEngine
from aioserve.lab.workloads.workload import Workload, build_images, build_prompt
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec


class Sent:
    """A request on its way to a replica."""

    __slots__ = ("avoid", "is_timed", "number", "request", "routed", "waits_since")

    def __init__(self, number: int, request: Request, routed: RoutedRequest) -> None:
        self.number = number  # in the workload
        self.request = request
        self.routed = routed
        self.avoid: set[str] = set()  # names of replicas that have failed it
        self.waits_since: float | None = None  # when the router first let it wait
        self.is_timed = False  # whether the end of its time in line is planned

    def has_failed_at(self, name: str) -> None:
        """The replica of this name was dead, or has died with it."""
        self.avoid.add(name)
        self.routed = msgspec.structs.replace(
            self.routed, num_attempts=self.routed.num_attempts + 1
        )

    def has_expired(self, now: float) -> bool:
        """Return whether its deadline has passed while it waited for the router."""
        deadline = self.routed.deadline
        return self.waits_since is not None and deadline is not None and now >= deadline


class RoutedRequests:
    """The requests of a workload, made as they are sent."""

    def __init__(
        self,
        blueprint: Blueprint,
        workload: Workload,
        max_request_tokens: int,
        *,
        with_hashes: bool,
    ) -> None:
        """`max_request_tokens` are those that prompt and reply may have on every replica."""
        self._workload = workload
        self._info = blueprint.model_info
        self._hasher = blueprint.make_kv_cache()  # an empty one: only hashes are wanted
        self._with_hashes = with_hashes
        self._max_tokens = workload.max_tokens(max_request_tokens)
        self._stop_token_ids = extra_stop_ids(self._info)
        #: Token ids of replies that later prompts hold, by the number of the request.
        self.replies: dict[int, list[int]] = {}

    def make(self, i: int, arrival: float, num_attempts: int = 0) -> Sent:
        """Request number `i`, anew each time; `num_attempts` replicas have lost it."""
        asked = self._workload.requests[i]
        spec = RequestSpec(
            str(i),
            build_prompt(asked, self._info.vocab_size, self.replies),
            SamplingParams(
                max_tokens=self._max_tokens[i],
                stop_token_ids=self._stop_token_ids,
                temperature=0,
                detokenize=False,
            ),
            arrival_time=arrival,
            eos_token_ids=self._info.eos_token_ids,
            priority=asked.priority,
            user=asked.user,
            hints=asked.all_hints,
            encoder_inputs=build_images(asked),
            deadline=None if asked.timeout is None else arrival + asked.timeout,
            adapter_id=asked.adapter,
        )
        request = Request(spec)
        if self._with_hashes:
            self._hasher.estimate_cached_tokens(request)  # which leaves it with its hashes
        routed = RoutedRequest(
            request_id=spec.request_id,
            num_tokens=request.num_tokens,
            max_tokens=self._max_tokens[i],
            arrival_time=arrival,
            deadline=spec.deadline,
            user=spec.user,
            priority=spec.priority,
            session=f"{asked.session} {asked.crowd}" if asked.session >= 0 else "",
            adapter=asked.adapter,
            hints=spec.hints,
            block_hashes=request.block_hashes,
            block_size=self._hasher.block_size,
            num_attempts=num_attempts,
        )
        return Sent(i, request, routed)


# What came of a run: what its clients saw, and where each request was.


class FleetOutcome(RunOutcome):
    """The outcome of a run of a fleet: the steps are those of its first replica."""

    def __init__(self, num_requests: int, num_replicas: int) -> None:
        super().__init__(num_requests)
        self.num_moved = 0  # running requests that went on at another replica
        self.num_resent = 0  # their replica died before it had streamed anything
        self.replica_of = array("l", [-1]) * num_requests  # that had it last; -1: none
        self.busy_seconds = [0.0] * num_replicas
        self.saved_seconds = [0.0] * num_replicas
        self.paid_seconds = [0.0] * num_replicas

    @property
    def replica_seconds(self) -> float:
        """The seconds that are paid for, of all replicas."""
        return sum(self.paid_seconds)


# A place: the engine that has it now, and the requests that it serves.


class Seat:
    """A place in the fleet: the engine that has it now, if it is up, and the requests it serves."""

    def __init__(self, place: int, role: str = "", slowdown: float = 1.0) -> None:
        """`slowdown` is the factor by which its steps are always longer than the model says."""
        self.place = place
        self.name = f"replica-{place}"
        self.role = role
        self.known_at = 0.0  # when the engine last took a request, a step or an expiry
        self.engine: SteppedEngine | None = None
        self.load: tuple[int, int, float] | None = None  # None: the engine has to be asked
        self.slowdowns = [slowdown]  # that last now, each times the others
        self.live: dict[str, tuple[int, Request, Assignment]] = {}  # by request id
        self.num_leaving = 0  # requests whose blocks are on their way to another replica
        self.num_turns = 0  # made or planned: a turn that is planned anew makes the old one void
        self.due = math.inf  # the deadline for which deadlines will be looked at, and when
        self.expiry = math.inf
        self.has_failed = False  # and has not come back
        self.paid_since: float | None = None  # None: it is not paid for

    @property
    def slowdown(self) -> float:
        """The factor by which its steps are longer than the model says."""
        return math.prod(self.slowdowns, start=1.0)

    def reported(self) -> tuple[ReplicaReport, float]:
        """Return what the replica says of itself, and when it was so."""
        engine = self.engine
        return ReplicaReport() if engine is None else engine.report(), self.known_at


# What a sender hears of its replicas, some seconds after it was so.


Notice = Callable[[], None]


class DelayLine:
    """Notices in the order in which they were given, each `delay` seconds later. Without a delay
    each at once.
    """

    def __init__(self, delay: float, clock: Callable[[], float]) -> None:
        self.delay = delay
        self._clock = clock
        self._line: deque[tuple[float, Notice]] = deque()

    def tell(self, notice: Notice) -> None:
        """Give a notice of what is so now."""
        if self.delay:
            self._line.append((self._clock() + self.delay, notice))
        else:
            notice()

    def catch_up(self) -> None:
        """Have all notices heard that are due by now."""
        line, now = self._line, self._clock()
        while line and line[0][0] <= now:
            line.popleft()[1]()
