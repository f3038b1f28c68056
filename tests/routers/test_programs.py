"""What a sender knows of programs, requests in line, and the routers that use both."""

from typing import Any

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routers.disaggregated import SplittingRouter
from aioserve.fleet.routing import (
    BaseRouter,
    Dispatcher,
    Hold,
    ReplicaReport,
    RoutedRequest,
    RouterError,
    load_router,
    make_dispatcher,
)
from aioserve.fleet.routing.views import MAX_PROGRAMS, Programs
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, ReplicaGroup
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest


class Front:
    """A sender with replicas r0, r1, ..., each with its seats, and requests that it has sent."""

    def __init__(self, router: str, num_replicas: int, seats: int = 1, **options: Any) -> None:
        self.now = 0.0
        self.dispatcher: Dispatcher = make_dispatcher(router, options, clock=lambda: self.now)
        self.sent: list[str] = []
        self.live: dict[str, Any] = {}
        for i in range(num_replicas):
            self.dispatcher.join(f"r{i}")
            report = ReplicaReport(max_num_seqs=seats)
            self.dispatcher.on_report(f"r{i}", lambda report=report: (report, 0.0))  # type: ignore[misc]

    def ask(self, request: RoutedRequest) -> None:
        answer = self.dispatcher.choose(request)
        if isinstance(answer, Hold):
            self.dispatcher.hold(request, lambda: self.ask(request))
            return
        assert isinstance(answer, str)
        self.sent.append(request.request_id)
        self.live[request.request_id] = self.dispatcher.assign(request, answer)

    def end(self, request_id: str, num_output_tokens: int = 0) -> None:
        self.live.pop(request_id).has_ended(num_output_tokens)
        self.dispatcher.ask_held()


def asking(name: str, program: str = "", tokens: int = 10, at: float = 0.0) -> RoutedRequest:
    hints: dict[str, str] = {"program": program} if program else {}
    return RoutedRequest(request_id=name, num_tokens=tokens, arrival_time=at, hints=hints)


def test_program_las_sends_the_program_first_that_has_had_least() -> None:
    front = Front("program_las", 1, queue=0, credit=0.0)
    front.ask(asking("a1", "a", tokens=1000))
    front.end("a1", 200)
    front.ask(asking("seat"))
    for name in ("a2", "a3", "b1", "c1"):
        front.ask(asking(name, name[0]))
    for ended in ("seat", "b1", "c1", "a2"):
        front.end(ended, 5)
    assert front.sent == ["a1", "seat", "b1", "c1", "a2", "a3"]


def test_program_las_lets_a_program_that_was_idle_or_waits_catch_up() -> None:
    def next_sent(half_life: float = 1e9, credit: float = 0.0, wait: float = 0.0) -> str:
        front = Front("program_las", 1, queue=0, half_life=half_life, credit=credit)
        for name, tokens in (("a1", 1000), ("b1", 100)):
            front.ask(asking(name, name[0], tokens))
            front.end(name)
        front.now = 60.0
        front.ask(asking("seat"))
        front.ask(asking("a2", "a", at=60.0 - wait))
        front.ask(asking("b2", "b", at=60.0))
        front.end("seat")
        return front.sent[-1]

    assert next_sent() == "b2"
    assert next_sent(credit=100.0, wait=10.0) == "a2"
    # After 20 half lives nothing of either is left, and the older request goes first.
    assert next_sent(half_life=3.0, credit=1.0, wait=1.0) == "a2"


def test_a_request_goes_to_the_replica_that_had_its_program_if_it_has_a_place() -> None:
    front = Front("program_las", 3, seats=2, queue=0)
    front.ask(asking("x1", "x"))
    front.ask(asking("y1", "y"))
    home = front.live["y1"].name
    front.end("y1")
    front.ask(asking("y2", "y"))
    assert front.live["y2"].name == home != front.live["x1"].name


def test_the_turn_counts_requests_of_a_program_and_not_those_that_are_sent_again() -> None:
    front = Front("program_las", 2, seats=9)
    for name in ("p1", "p2"):
        front.ask(asking(name, "p"))
    assert [front.live[name].request.turn for name in ("p1", "p2")] == [1, 2]
    front.live.pop("p2").has_ended()
    again = RoutedRequest(request_id="p2", num_tokens=5, hints={"program": "p"}, num_attempts=1)
    front.ask(again)
    front.ask(asking("q1", "q"))
    assert [front.live[name].request.turn for name in ("p2", "q1")] == [2, 1]


def test_programs_know_where_they_are_until_the_replica_is_gone() -> None:
    programs, request = Programs(), asking("a", "p", tokens=30)
    assert programs.of(request) is None
    programs.sent(request, "r0")
    programs.ended(request, 12)
    found = programs.of(request)
    assert found is not None
    assert (found.replica, found.num_running, found.num_tokens) == ("r0", 0, 42)
    assert found.service == 30 + 2 * 12
    assert programs.at("r0") == [found]
    programs.moved(request, "r1")
    assert (programs.at("r0"), len(programs.at("r1"))) == ([], 1)
    programs.forget("r1")
    found = programs.of(request)
    assert found is not None
    assert (found.replica, programs.at("r1")) == ("", [])


def test_programs_without_a_running_request_are_forgotten_and_others_are_not() -> None:
    programs = Programs()
    live = [asking(f"live{i}", f"live{i}") for i in range(40)]
    for request in live:
        programs.sent(request, "r0")
    for i in range(MAX_PROGRAMS + 5):
        request = asking(f"q{i}", f"p{i}")
        programs.sent(request, "r0")
        programs.ended(request, 1)
    assert None not in [programs.of(request) for request in live]
    assert programs.of(asking("q0", "p0")) is None
    assert len(programs.at("r0")) == MAX_PROGRAMS


def test_hold_without_holds_in_the_class_is_refused_by_name() -> None:
    class Mine(BaseRouter):
        def choose(self, request: RoutedRequest, replicas: Any) -> Any:
            return Hold()

    dispatcher = Dispatcher(Mine, clock=lambda: 0.0)
    dispatcher.join("r0")
    with pytest.raises(RouterError, match=r"must return one of the .* Refuse or Wait; got Hold"):
        dispatcher.choose(asking("a"))
    load_router("least_work").check_holds()
    with pytest.raises(ConfigError, match="router ProgramLAS answers Hold: a line of requests"):
        load_router("program_las").check_holds()


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("test", requests)


def test_held_requests_of_a_simulated_fleet_end_and_the_least_served_program_first() -> None:
    """One seat: `a` has had a long request, then two of `a` and one of `b` come together."""
    config = EngineConfig.load(overrides=[("scheduler.max_num_seqs", 1)])
    requests = [
        WorkloadRequest(0.0, (Piece(0, 400),), 40, hints={"program": "a"}),
        WorkloadRequest(50.0, (Piece(1, 50),), 100),
        *(
            WorkloadRequest(50.1 + i / 10, (Piece(2 + i, 50),), 4, hints={"program": name})
            for i, name in enumerate("aab")
        ),
    ]
    loaded = workload(*requests)
    fleet = Fleet(1, "program_las", router_options={"queue": 0, "credit": 0.0})
    outcome = simulate_fleet(simulated(config, loaded.longest), loaded, fleet)
    assert {r.finish_reason for r in outcome.requests} == {"stop"}
    ends = [r.end for r in outcome.requests]
    assert ends[4] < ends[2] < ends[3]


@pytest.mark.parametrize(("delay", "timeout"), [(0.0, 0.5), (0.1, None)])
def test_a_held_request_goes_on_when_a_deadline_or_a_late_report_frees_the_seat(
    delay: float, timeout: float | None
) -> None:
    config = EngineConfig.load(overrides=[("scheduler.max_num_seqs", 1)])
    loaded = workload(
        WorkloadRequest(0.0, (Piece(0, 50),), 400 if timeout else 40, timeout=timeout),
        WorkloadRequest(0.1, (Piece(1, 50),), 4),
    )
    fleet = Fleet(1, "program_las", router_options={"queue": 0}, knowledge_delay=delay)
    outcome = simulate_fleet(simulated(config, loaded.longest), loaded, fleet)
    first, held = outcome.requests
    assert (first.finish_reason, held.finish_reason) == ("timeout" if timeout else "stop", "stop")
    assert first.end < held.end < first.end + 1


@pytest.mark.parametrize(("name", "size"), [("conserve", 1000), ("prefill_decode", 1)])
def test_a_replica_that_comes_back_owes_nothing_of_what_was_on_its_way(
    name: str, size: int
) -> None:
    router = load_router(name)(None, clock=lambda: 0.0)
    assert isinstance(router, SplittingRouter)
    request = asking("a", tokens=1000)
    router.target["a"], router.coming["d0"] = ("d0", size), size
    router.on_leave("d0")
    router.coming["d0"] = 50  # it is back, and has another one on its way
    router.on_end(request, "d1")
    assert router.coming["d0"] == 50


def test_conserve_copies_the_first_turn_and_keeps_the_others_where_it_went() -> None:
    chat = [
        WorkloadRequest(1.0, (Piece(0, 400),), 20, session=1),
        WorkloadRequest(1.0, (Piece(0, 400), Piece(1, 40)), 20, session=1, follows=0),
        WorkloadRequest(1.0, (Piece(0, 400), Piece(2, 40)), 20, session=1, follows=1),
    ]
    loaded = workload(*chat)
    groups = (ReplicaGroup(replicas=1, role="prefill"), ReplicaGroup(replicas=2, role="decode"))
    config = simulated(EngineConfig(), loaded.longest)

    def run(router: str, **options: Any) -> tuple[int, list[int]]:
        fleet = Fleet(3, router, router_options=options, groups=groups, transfer_gb_per_second=10.0)
        outcome = simulate_fleet(config, loaded, fleet)
        assert {r.finish_reason for r in outcome.requests} == {"stop"}
        return outcome.num_moved, list(outcome.replica_of)

    moved, places = run("conserve")
    assert moved == 1
    assert len(set(places[1:])) == 1
    assert run("conserve", most_added=1)[0] == 3  # each turn adds more than a token
