"""Many engines behind a router in one virtual time: one heap of what happens next.

The engines are stepped by hand, so a thousand cost what they do and not what a thousand tasks
would; of one, each request has the outcome that `simulate` finds. Knows clients, the router and
what befalls replicas. Judges nothing.
"""

import math
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import islice

from aioserve.config import EngineConfig
from aioserve.engine.core import TIMER_SECONDS
from aioserve.errors import EngineOverloadedError
from aioserve.fleet.routing import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    Assignment,
    Hold,
    Refuse,
    Wait,
    make_dispatcher,
)
from aioserve.lab.simulation.fleet_changes import (
    Deploys,
    Handovers,
    Scaling,
    first_of_roles,
    missing_roles,
    spare,
)
from aioserve.lab.simulation.fleet_plan import Fleet, group_of_places
from aioserve.lab.simulation.fleet_replicas import (
    DelayLine,
    FleetOutcome,
    RoutedRequests,
    Seat,
    Sent,
)
from aioserve.lab.simulation.outcome import RunObserver
from aioserve.lab.simulation.run import Progress
from aioserve.lab.simulation.stepped_engine import Blueprint, SteppedEngine
from aioserve.lab.workloads.workload import Workload, followers, replied_to
from aioserve.outputs import FinishReason
from aioserve.request import Request

NUM_STATES = 250  # points of queue and memory that are kept of a run, about

# What happens, in the order in which it does at one time: requests come before a step begins.
INCIDENT, EXPIRY, ARRIVAL, TURN = range(4)
Happening = Callable[[], None]


def simulate_fleet(
    config: EngineConfig,
    workload: Workload,
    fleet: Fleet,
    progress: Progress = lambda count: None,
) -> FleetOutcome:
    """Run in virtual time; byte for byte the same result every time.

    Raises `ConfigError` for a fleet that cannot be, `PolicyError` when the policy fails,
    `RouterError` when the router does.
    """
    fleet.check(config, workload)
    return _Run(config, workload, fleet, progress).run()


class _Clock:
    """The one time of all engines."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Run:
    """One run, from its first second to its last."""

    def __init__(
        self, config: EngineConfig, workload: Workload, fleet: Fleet, progress: Progress
    ) -> None:
        self._blueprint = Blueprint(config)
        self._workload = workload
        self._progress = progress
        self._clock = _Clock()
        self._heap: list[tuple[float, int, int, Happening]] = []
        self._num_events = 0
        self._dispatcher = make_dispatcher(
            fleet.router, fleet.router_options, seed=workload.seed, clock=self._clock
        )
        self._uses_prefixes = self._dispatcher.kind.uses_prefixes
        self._uses_reports = self._dispatcher.kind.uses_reports
        self._knowledge = DelayLine(fleet.knowledge_delay, self._clock)
        self._asks_until = 0.0  # when the last planned question about requests in line comes
        self._outcome = FleetOutcome(len(workload.requests), fleet.num_replicas)
        self._token_times = self._outcome.token_times()
        self._draft_acceptance = workload.draft_acceptance
        self._output_tokens = workload.output_tokens
        self._is_replied_to = replied_to(workload.requests)
        self._followers = followers(workload.requests)
        self._num_missing = [len(request.waits_for) for request in workload.requests]
        groups = group_of_places(fleet.groups, fleet.num_replicas)
        made = [Blueprint(group.config(config)) for group in fleet.groups]
        numbers = [n for n, group in enumerate(fleet.groups) for _ in range(group.replicas)]
        # By place.
        self._blueprints = [made[n] for n in numbers] or [self._blueprint] * fleet.num_replicas
        self._requests = RoutedRequests(
            self._blueprint,
            workload,
            min(blueprint.max_request_tokens for blueprint in made or [self._blueprint]),
            with_hashes=self._uses_prefixes,
        )
        self._seats = [Seat(i, group.role, group.slowdown) for i, group in enumerate(groups)]
        self._named = {seat.name: seat for seat in self._seats}
        self._parked: list[Sent] = []  # no replica is known to be up, and one will be
        self._num_returns = 0  # of replicas, to be heard of
        self._num_left = len(workload.requests)
        self._scaling: Scaling | None = None
        if fleet.autoscaling is not None:
            plan, seed = fleet.autoscaling, workload.seed
            self._scaling = Scaling(plan, fleet.num_replicas, seed=seed, clock=self._clock)
        self._split_to: dict[str, Seat] = {}  # by request id: where the reply is to be made
        token_bytes = config.runner.simulated_kv_token_bytes
        rate = 1e9 * (fleet.transfer_gb_per_second or math.inf)
        self._handovers = Handovers(
            self, self._dispatcher, self._outcome, self._clock, token_seconds=token_bytes / rate
        )
        self._deploys = Deploys(self, self._seats, self._clock)
        self._plan_incidents(fleet)
        self._interval = max(workload.duration, 1.0) / NUM_STATES
        self._next_state = 0.0

    def run(self) -> FleetOutcome:
        """Run until the last request has ended."""
        first = self._seats
        if self._scaling is not None:
            first = first_of_roles(self._seats, missing_roles(self._seats, ()))
            first = first[: self._scaling.plan.min_replicas]
            self._at(self._scaling.plan.interval, INCIDENT, partial(self._scale, self._scaling))
        for seat in first:
            seat.paid_since = 0.0
            self._start(seat)
            self._dispatcher.join(seat.name, seat.place, seat.role)
            self._report(seat)
        if (seconds := self._dispatcher.kind.rebalance_seconds) is not None:
            self._at(seconds, INCIDENT, partial(self._rebalance, seconds))
        clock, heap = self._clock, self._heap
        arrivals = self._arrivals()
        next_arrival = next(arrivals, None)
        while heap or next_arrival is not None:
            if next_arrival is not None and (not heap or (next_arrival[0], ARRIVAL) < heap[0][:2]):
                clock.now, i = next_arrival
                next_arrival = next(arrivals, None)
                self._arrive(i)
                continue
            clock.now, _, _, happens = heappop(heap)
            happens()
        for seat in self._seats:
            if seat.engine is not None:
                self._stop(seat, seat.engine)
            self._stop_paying(seat, self._outcome.end)
        self._outcome.close()
        return self._outcome

    def _arrivals(self) -> Iterator[tuple[float, int]]:
        """(seconds, request) of those that follow no other request, in order."""
        requests = self._workload.requests
        openers = [i for i, request in enumerate(requests) if request.follows < 0]
        openers.sort(key=lambda i: requests[i].arrival)
        return ((requests[i].arrival, i) for i in openers)

    def _at(self, when: float, what: int, happens: Happening) -> None:
        self._num_events += 1
        heappush(self._heap, (when, what, self._num_events, happens))

    # Clients.

    def _arrive(self, i: int) -> None:
        """Send request number `i` to a replica."""
        self._outcome.requests[i].arrival = self._clock.now
        self._send(i)

    def _send(self, i: int) -> None:
        """Send a request to the replica that the router names."""
        sent = self._requests.make(i, self._outcome.requests[i].arrival)
        if self._scaling is not None:
            self._scaling.has_arrived(sent.routed)
        self._route(sent)

    def _send_again(self, i: int, lost: Assignment) -> None:
        """Send a request that a replica has lost to another."""
        self._split_to.pop(str(i), None)
        self._outcome.num_resent += 1
        arrival, num_attempts = self._outcome.requests[i].arrival, lost.request.num_attempts
        sent = self._requests.make(i, arrival, num_attempts)
        sent.has_failed_at(lost.name)
        self._route(sent)

    def _route(self, sent: Sent) -> None:
        """Ask the router, and do what it answers."""
        if sent.has_expired(self._clock.now):
            self._end(sent.number, FinishReason.TIMEOUT)
            return
        self._knowledge.catch_up()
        answer = self._choose(sent)
        if isinstance(answer, Seat):
            self._split_to.pop(sent.routed.request_id, None)
            self._hand_over(sent, answer)
        elif isinstance(answer, tuple):
            self._split_to[sent.routed.request_id] = answer[1]
            self._hand_over(sent, answer[0])
        elif isinstance(answer, Wait):
            self._let_wait(sent, answer.seconds)
        elif isinstance(answer, Hold):
            self._hold(sent)
        elif isinstance(answer, Refuse):
            self._end(sent.number, "refused")
        elif self._may_come():
            self._parked.append(sent)
        else:
            self._end(sent.number, FinishReason.ERROR)

    def _may_come(self) -> bool:
        """Return whether a replica will be there that is not there now."""
        scaling = self._scaling
        if self._num_returns or scaling is None:
            return self._num_returns > 0
        return bool(scaling.starting) or any(self._is_free(seat, scaling) for seat in self._seats)

    def _choose(self, sent: Sent) -> "Seat | tuple[Seat, Seat] | Refuse | Wait | Hold | None":
        """Return the answer of the router; a replica that it does not know to be dead fails at
        once.
        """
        while True:
            answer, decode = self._dispatcher.choose_both(sent.routed, sent.avoid)
            if not isinstance(answer, str):
                return answer
            seat = self._named[answer]
            if seat.engine is not None:
                return seat if decode is None else (seat, self._named[decode])
            self._outcome.num_resent += 1
            sent.has_failed_at(answer)

    def _let_wait(self, sent: Sent, seconds: float) -> None:
        """Ask again later, in all no longer than a request may wait."""
        now = self._clock.now
        if sent.waits_since is None:
            sent.waits_since = now
        left = sent.waits_since + MAX_WAIT_SECONDS - now
        if left <= 0:
            self._end(sent.number, "refused")
            return
        sent.avoid.clear()
        when = now + min(max(seconds, MIN_WAIT_SECONDS), left)
        deadline = sent.routed.deadline
        when = when if deadline is None else min(when, deadline)
        self._at(when, ARRIVAL, partial(self._route, sent))

    def _hold(self, sent: Sent) -> None:
        """Ask again when something has changed at a replica, in the order of the router, and at the
        end of the time that a request may wait.
        """
        now = self._clock.now
        if sent.waits_since is None:
            sent.waits_since = now
        last = sent.waits_since + MAX_WAIT_SECONDS
        if now >= last:
            self._end(sent.number, "refused")
            return
        sent.avoid.clear()
        self._dispatcher.hold(sent.routed, partial(self._route, sent))
        if not sent.is_timed:
            sent.is_timed = True
            deadline = sent.routed.deadline
            when = last if deadline is None else min(last, max(deadline, now))
            self._at(when, ARRIVAL, partial(self._stop_holding, sent))

    def _stop_holding(self, sent: Sent) -> None:
        if self._dispatcher.drop(sent.routed.request_id):
            self._route(sent)

    def _ask_held(self) -> None:
        """Ask about requests in line, as a request has begun or ended at a replica or a replica has
        come: now, and again when the router is told of all that has changed in this moment.
        """
        self._ask_by_what_is_known()
        told = self._clock.now + self._knowledge.delay
        if self._knowledge.delay and self._dispatcher.is_holding and told > self._asks_until:
            self._asks_until = told
            self._at(told, INCIDENT, self._ask_by_what_is_known)

    def _ask_by_what_is_known(self) -> None:
        self._knowledge.catch_up()
        self._dispatcher.ask_held()

    def _hand_over(self, sent: Sent, seat: Seat) -> None:
        i, request, engine = sent.number, sent.request, seat.engine
        assert engine is not None
        self._catch_up(seat, engine)
        try:
            engine.add_request(request)
        except EngineOverloadedError:
            self._end(i, "refused")
            return
        self._outcome.replica_of[i] = seat.place
        assignment = self._dispatcher.assign(sent.routed, seat.name)
        seat.live[request.request_id] = i, request, assignment
        self._report(seat)
        if engine.is_idle:
            self._plan_turn(seat, self._clock.now)
        self._watch_expiry(seat)

    def _end(self, i: int, reason: str, request: Request | None = None) -> None:
        """End a request, of which its client is told."""
        now, outcome = self._clock.now, self._outcome.requests[i]
        outcome.end = self._outcome.end = now
        outcome.finish_reason = reason
        self._split_to.pop(str(i), None)
        if request is not None:
            cached = request.num_cached_tokens
            outcome.num_cached_tokens = self._handovers.num_cached.get(i, cached)
            outcome.num_output_tokens = request.num_output_tokens
            if i in self._is_replied_to:
                self._requests.replies[i] = request.output_token_ids
        self._progress(1)
        self._num_left -= 1
        for follower in self._followers.get(i, ()):
            self._num_missing[follower] -= 1
            if self._num_missing[follower]:
                continue
            self._at(
                now + self._workload.requests[follower].arrival,
                ARRIVAL,
                partial(self._arrive, follower),
            )

    # Engines.

    def _plan_turn(self, seat: Seat, when: float) -> None:
        seat.num_turns += 1
        self._at(when, TURN, partial(self._turn, seat, seat.num_turns))

    def _catch_up(self, seat: Seat, engine: SteppedEngine) -> None:
        """Account for steps that were booked in one go, before their results are read."""
        seat.load = None
        next_turn = engine.catch_up()
        if next_turn is not None:
            self._plan_turn(seat, next_turn)

    def _turn(self, seat: Seat, number: int) -> None:
        """The engine takes a step back and hands the next over; readers hear of it."""
        engine = seat.engine
        if engine is None or number != seat.num_turns:
            return  # it has died since, or the turn was planned anew
        if self._clock.now >= self._next_state:
            self._note_state()
        outputs, next_turn = engine.turn()
        seat.load = None
        has_changed = bool(engine.rejected)
        split: list[str] = []  # whose replies are to be made elsewhere
        for output in outputs:
            i, request, assignment = seat.live[output.request_id]
            if self._scaling is not None and not assignment.is_started:
                self._scaling.has_started(assignment.request, self._clock.now)
            has_changed |= not assignment.is_started or output.finish_reason is not None
            assignment.has_started(self._clock.now)
            if output.finish_reason is not None:
                del seat.live[output.request_id]
                assignment.has_ended(request.num_output_tokens)
                self._end(i, output.finish_reason, request)
            elif output.request_id in self._split_to:
                split.append(output.request_id)
        while engine.rejected:
            i, request, assignment = seat.live.pop(engine.rejected.pop(0))
            assignment.has_ended()
            self._end(i, "refused", request)
        if self._uses_prefixes:
            for event in engine.take_events():
                on_event = self._dispatcher.on_kv_event
                self._knowledge.tell(partial(on_event, seat.name, event))
        self._report(seat)
        if next_turn is not None:
            self._plan_turn(seat, next_turn)
        for request_id in split:
            self._handovers.hand_over(seat, request_id, self._split_to.pop(request_id))
        self._stop_if_drained(seat)
        if has_changed:
            self._ask_held()

    def _rebalance(self, seconds: float) -> None:
        """Ask the router which running requests are to move, and have them moved."""
        if not self._num_left:
            return
        self._knowledge.catch_up()
        if self._dispatcher.names:
            by_id = {name: seat for seat in self._seats for name in seat.live}
            for answer in self._dispatcher.rebalance():
                source = by_id.get(answer.request_id)
                if source is not None and source.live[answer.request_id][2].is_started:
                    target = self._named[answer.to.name]
                    self._handovers.migrate(source, answer.request_id, target)
        self._at(self._clock.now + seconds, INCIDENT, partial(self._rebalance, seconds))

    # What handovers ask of a run.

    def at(self, when: float, happens: Happening) -> None:
        """Have a copy end at a time."""
        self._at(when, INCIDENT, happens)

    def catch_up(self, seat: Seat, engine: SteppedEngine) -> None:
        """Account for steps that have been booked ahead."""
        self._catch_up(seat, engine)

    def has_changed(self, seat: Seat) -> None:
        """A request has come to the replica, or has left it."""
        engine = seat.engine
        if engine is None:
            return
        self._report(seat)
        if engine.is_idle:
            self._plan_turn(seat, self._clock.now)
        self._watch_expiry(seat)
        self._stop_if_drained(seat)
        self._ask_held()

    def end_lost(self, number: int, request: Request) -> None:
        """The replica that had the request's blocks has died while they were on the way."""
        self._end(number, FinishReason.ERROR, request)

    def _report(self, seat: Seat) -> None:
        """The router hears of a replica's state, if it listens."""
        if not self._uses_reports:
            return
        seat.known_at = self._clock.now
        if (
            not self._knowledge.delay
        ):  # as it is when the router is asked: nothing changes till then
            self._dispatcher.on_report(seat.name, seat.reported)
            return
        reported = seat.reported()
        on_report = self._dispatcher.on_report
        self._knowledge.tell(lambda: on_report(seat.name, lambda: reported))

    def _watch_expiry(self, seat: Seat) -> None:
        """Have deadlines looked at when the next one is due."""
        assert seat.engine is not None
        due, now = seat.engine.next_expiry(), self._clock.now
        if due is not None and due < seat.due:
            seat.due, seat.expiry = due, now + max(due - now, TIMER_SECONDS)
            self._at(seat.expiry, EXPIRY, partial(self._expire, seat))

    def _expire(self, seat: Seat) -> None:
        if seat.engine is None or self._clock.now != seat.expiry:
            return  # it has died since, or an earlier deadline came
        seat.due = seat.expiry = math.inf
        self._catch_up(seat, seat.engine)
        expired = seat.engine.expire()
        for request_id in expired:
            i, request, assignment = seat.live.pop(request_id)
            assignment.has_ended()
            self._end(i, FinishReason.TIMEOUT, request)
        self._report(seat)
        if seat.engine.is_idle:
            self._plan_turn(seat, self._clock.now)
        self._watch_expiry(seat)
        self._stop_if_drained(seat)
        if expired:
            self._ask_held()

    def _note_state(self) -> None:
        """Queue and memory of the whole fleet, thinned to a grid of times."""
        for seat in self._seats:
            if seat.load is None and seat.engine is not None:
                seat.load = seat.engine.load
        if loads := [seat.load for seat in self._seats if seat.load is not None]:
            running, waiting, usages = zip(*loads, strict=True)
            states = self._outcome.states
            states.time.append(self._clock.now)
            states.num_running.append(sum(running))
            states.num_waiting.append(sum(waiting))
            states.kv_usage.append(sum(usages) / len(usages))
        self._next_state = self._clock.now + self._interval

    # Replicas that fail and come back.

    def _plan_incidents(self, fleet: Fleet) -> None:
        incidents = self._workload.incidents + fleet.incidents
        # In order: a replica that fails in the moment in which it is back comes back first.
        for failure in sorted(incidents.failures, key=lambda failure: failure.at):
            seat = self._seats[failure.replica]
            self._at(failure.at, INCIDENT, partial(self._fail, seat))
            if failure.down is not None:
                self._num_returns += 1
                self._at(failure.at + failure.down, INCIDENT, partial(self._return, seat))
        for straggler in incidents.stragglers:
            seat, at = self._seats[straggler.replica], straggler.at
            slowdowns, slowdown = seat.slowdowns, straggler.slowdown
            self._at(at, INCIDENT, partial(self._slow, seat, slowdowns.append, slowdown))
            if straggler.duration is not None:
                end = at + straggler.duration
                self._at(end, INCIDENT, partial(self._slow, seat, slowdowns.remove, slowdown))

        self._deploys.plan(incidents.deploys)

    def _slow(self, seat: Seat, change: Callable[[float], None], slowdown: float) -> None:
        """A slowdown begins to last, or ends."""
        if seat.engine is not None:
            self._catch_up(seat, seat.engine)
        change(slowdown)
        if seat.engine is not None:
            seat.engine.runner.slowdown = seat.slowdown

    def _start(self, seat: Seat) -> None:
        observer = RunObserver(
            self._outcome,
            start=0.0,
            interval=math.inf,
            get_stats=lambda: None,
            notes_tokens=True,
            token_times=self._token_times,
            notes_steps=seat.place == 0,
        )
        seat.engine = SteppedEngine(
            self._blueprints[seat.place],
            observer,
            self._clock,
            record_events=self._uses_prefixes,
        )
        seat.engine.runner.slowdown = seat.slowdown
        seat.engine.runner.draft_acceptance = self._draft_acceptance
        seat.engine.runner.output_tokens = self._output_tokens

    def _stop(self, seat: Seat, engine: SteppedEngine) -> None:
        seat.load = None
        engine.observer.end_series()
        self._outcome.busy_seconds[seat.place] += engine.busy_seconds
        self._outcome.saved_seconds[seat.place] += engine.runner.saved_seconds
        seat.engine = None

    def _fail(self, seat: Seat) -> None:
        """Fail a replica: send elsewhere what it had not streamed, and tell the rest an error."""
        engine = seat.engine
        if engine is None:
            return  # it was not there: the fleet is scaled
        seat.has_failed = True
        self._notice(partial(self._dispatcher.leave, seat.name))
        self._lose_live(seat, engine)
        if self._deploys.is_draining(seat):
            self._deploys.has_died(seat)
        self._stop_if_drained(seat)

    def _lose_live(self, seat: Seat, engine: SteppedEngine) -> None:
        """The replica ends now: what it had streamed is an error, and the rest is sent again."""
        now = self._clock.now
        engine.catch_up()
        self._stop(seat, engine)
        seat.due = seat.expiry = math.inf
        live, seat.live = seat.live, {}
        for request_id, (i, request, assignment) in live.items():
            assignment.has_ended()
            times: array[float] = self._outcome.requests[i].token_times
            while times and times[-1] > now:  # of the step that never came back
                times.pop()
            if request_id in engine.unstarted:
                self._send_again(i, assignment)
            else:
                self._end(i, FinishReason.ERROR, request)

    # What deploys ask of a run.

    def drain(self, seat: Seat) -> None:
        """The replica gets no new requests, and restarts when it has none."""
        self._notice(partial(self._dispatcher.leave, seat.name))
        self._stop_if_drained(seat)

    def kill(self, seat: Seat) -> None:
        """Restart the replica although it has requests."""
        if seat.engine is not None:
            self._lose_live(seat, seat.engine)
            self._restart(seat)

    def come_back(self, seat: Seat) -> None:
        """Let a restarted replica serve again."""
        seat.has_failed = False
        self._start(seat)
        self._notice(partial(self._has_returned, seat))

    def _restart(self, seat: Seat) -> None:
        """Take the replica down for the time that its deploy states."""
        if seat.engine is not None:
            self._stop(seat, seat.engine)
        seat.due = seat.expiry = math.inf
        seat.has_failed = True  # an autoscaler does not start it meanwhile
        if self._scaling is not None:
            self._scaling.draining.discard(seat.place)
        self._num_returns += 1
        self._deploys.has_drained(seat)

    def _return(self, seat: Seat) -> None:
        if not seat.has_failed:
            self._num_returns -= 1
            return
        seat.has_failed = False
        if seat.paid_since is None:
            seat.paid_since = self._clock.now
        self._start(seat)
        self._notice(partial(self._has_returned, seat))

    def _has_returned(self, seat: Seat) -> None:
        """The router knows of a replica that had died."""
        self._num_returns -= 1
        self._take_in(seat)

    def _take_in(self, seat: Seat) -> None:
        """The router knows of the replica from now on; what waited for one is sent."""
        self._dispatcher.join(seat.name, seat.place, seat.role)
        self._report(seat)
        parked, self._parked = self._parked, []
        for sent in parked:
            sent.avoid.clear()
            self._route(sent)
        self._ask_held()

    def _notice(self, notice: Callable[[], None]) -> None:
        """A replica came or went, and the router hears of it."""
        self._knowledge.tell(notice)
        if self._knowledge.delay:
            when = self._clock.now + self._knowledge.delay
            self._at(when, INCIDENT, self._knowledge.catch_up)

    # Replicas that an autoscaler starts and stops.

    def _scale(self, scaling: Scaling) -> None:
        """Ask the autoscaler, do what it says, and plan to ask again while requests are left."""
        if not self._num_left:
            return
        serving = [self._named[name] for name in self._dispatcher.names]
        views = [self._dispatcher.view_with(seat.name, seat.reported()) for seat in serving]
        missing = scaling.num_wanted(tuple(views)) - len(serving) - len(scaling.starting)
        free = [seat for seat in self._seats if self._is_free(seat, scaling)]
        starting = [self._seats[place] for place in scaling.starting]
        lacking = missing_roles(free, [*serving, *starting])
        for seat in first_of_roles(free, lacking)[: max(missing, len(lacking))]:
            seat.paid_since = self._clock.now
            scaling.starting.add(seat.place)
            when = self._clock.now + scaling.plan.startup_seconds
            self._at(when, INCIDENT, partial(self._has_started_up, seat, scaling))
        by_work = sorted(serving, key=lambda seat: self._dispatcher.work_of(seat.name))
        for seat in islice(spare(by_work), max(-missing, 0)):
            scaling.draining.add(seat.place)
            self._dispatcher.leave(seat.name)
            self._stop_if_drained(seat)
        self._at(self._clock.now + scaling.plan.interval, INCIDENT, partial(self._scale, scaling))

    def _is_free(self, seat: Seat, scaling: Scaling) -> bool:
        return seat.engine is None and not seat.has_failed and seat.place not in scaling.starting

    def _has_started_up(self, seat: Seat, scaling: Scaling) -> None:
        scaling.starting.discard(seat.place)
        self._start(seat)
        self._take_in(seat)

    def _stop_if_drained(self, seat: Seat) -> None:
        """Stop a replica that is to go, once the last of its requests has ended."""
        if seat.live or seat.num_leaving:
            return
        if self._deploys.is_draining(seat):
            self._restart(seat)
            return
        scaling = self._scaling
        if scaling is None or seat.place not in scaling.draining:
            return
        scaling.draining.discard(seat.place)
        if seat.engine is not None:
            self._stop(seat, seat.engine)
            seat.due = seat.expiry = math.inf
        self._stop_paying(seat, self._clock.now)

    def _stop_paying(self, seat: Seat, when: float) -> None:
        if seat.paid_since is not None:
            self._outcome.paid_seconds[seat.place] += max(when - seat.paid_since, 0.0)
            seat.paid_since = None
