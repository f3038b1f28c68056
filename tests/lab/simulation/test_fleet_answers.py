"""Routers by file in a simulated fleet: refusals, waits, stale knowledge and replicas that died."""

from collections import Counter
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routing import RouterError
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import Failure, Incidents, Piece, Workload, WorkloadRequest

HEAD = """
from aioserve.fleet.routing import BaseRouter, Hold, Refuse, RouterOptions, Wait


class Mine(BaseRouter):
    class Options(RouterOptions):
        number: int = 0

    uses_reports = True
    num_asked = 0

    def choose(self, request, replicas):
        self.num_asked += 1
"""


def written(tmp_path: Path, body: str) -> str:
    """The path of a router whose `choose` is this."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "\n".join(f"        {line}" for line in body.strip().splitlines()))
    return str(path)


def asked(*arrivals: float, tokens: int = 100, **others: object) -> Workload:
    """A request of its own text at each time, with a reply of four tokens."""
    return Workload(
        "test",
        tuple(
            WorkloadRequest(at, (Piece(i, tokens),), 4, **others)  # type: ignore[arg-type]
            for i, at in enumerate(arrivals)
        ),
    )


def run(workload: Workload, fleet: Fleet) -> FleetOutcome:
    return simulate_fleet(simulated(EngineConfig(), workload.longest), workload, fleet)


def test_a_refused_request_ends_at_once_and_reaches_no_replica(tmp_path: Path) -> None:
    router = written(tmp_path, "return Refuse('odd') if self.num_asked % 2 else replicas[0]")
    outcome = run(asked(1.0, 2.0, 3.0), Fleet(2, router))
    assert [r.finish_reason for r in outcome.requests] == ["refused", "stop", "refused"]
    assert list(outcome.replica_of) == [-1, 0, -1]
    assert outcome.requests[2].end == 3.0


def test_a_request_that_waits_is_sent_when_the_router_says_so(tmp_path: Path) -> None:
    router = written(tmp_path, "return Wait(0.25) if self.num_asked < 4 else replicas[1]")
    (served,) = run(asked(1.0), Fleet(2, router)).requests
    assert served.arrival == 1.0
    assert served.admitted == pytest.approx(1.75)


def test_a_request_waits_for_its_router_a_minute_at_most(tmp_path: Path) -> None:
    outcome = run(asked(1.0), Fleet(1, written(tmp_path, "return Wait(7)")))
    (refused,) = outcome.requests
    assert (refused.finish_reason, refused.end) == ("refused", 61.0)


def test_a_deadline_ends_a_request_that_waits_for_its_router(tmp_path: Path) -> None:
    outcome = run(asked(1.0, timeout=2.5), Fleet(1, written(tmp_path, "return Wait(60)")))
    (late,) = outcome.requests
    assert (late.finish_reason, late.end, len(late.token_times)) == ("timeout", 3.5, 0)


def test_a_router_sees_the_request_and_what_replicas_say_of_themselves(tmp_path: Path) -> None:
    body = """
assert request.user == "u" and request.priority == 3 and request.deadline == self.clock() + 9
assert request.hints["session"] == "0.5" and request.max_tokens and request.num_tokens == 900
running = sum(replica.num_running + replica.num_waiting for replica in replicas)
assert running == min(self.num_asked - 1, 2), running
assert all(replica.known_at <= self.clock() for replica in replicas)
busy = [replica for replica in replicas if replica.num_running]
assert all(r.step_seconds > 0 and r.num_free_kv_tokens < r.num_kv_tokens for r in busy)
return replicas[self.num_asked % 2]
"""
    workload = asked(
        1.0, 1.01, 1.02, tokens=900, user="u", priority=3, timeout=9.0, session=5, hints={}
    )
    outcome = run(workload, Fleet(2, written(tmp_path, body)))
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 3


def test_what_a_router_knows_is_as_old_as_the_fleet_says(tmp_path: Path) -> None:
    """Each request goes to the replica with the fewest running; the first runs for long."""
    body = "return min(replicas, key=lambda r: (r.num_running + r.num_waiting, r.name))"
    router = written(tmp_path, body)
    workload = asked(1.0, 1.01, 1.02, tokens=900)
    assert list(run(workload, Fleet(3, router)).replica_of) == [0, 1, 2]
    assert list(run(workload, Fleet(3, router, knowledge_delay=5.0)).replica_of) == [0, 0, 0]
    assert list(run(workload, Fleet(3, router, knowledge_delay=0.015)).replica_of) == [0, 0, 1]


def test_a_held_request_is_asked_about_once_for_what_has_changed_in_a_moment(
    tmp_path: Path,
) -> None:
    """Two replicas start a reply each in the same moment, of which the router is told later."""
    times = tmp_path / "times"
    body = f"""
if self.num_asked < 3:
    return replicas[self.num_asked - 1]
with open({str(times)!r}, "a") as file:
    print(self.clock(), file=file)
return Hold() if self.clock() < 1.53 else replicas[0]
"""
    router = Path(written(tmp_path, body))
    router.write_text(router.read_text().replace("uses_reports", "holds"))
    fleet = Fleet(2, str(router), knowledge_delay=0.5)
    even = EngineConfig.load(overrides=[("runner.profile", "zoo-1")])  # steps without jitter
    workload = asked(1.0, 1.0, 1.001)
    outcome = simulate_fleet(simulated(even, workload.longest), workload, fleet)
    first, second, held = outcome.requests
    assert first.token_times[0] == second.token_times[0]
    told = Counter(map(float, times.read_text().split()))
    assert told[first.token_times[0] + 0.5] == 1
    assert held.end > first.end + 0.5


def test_blocks_are_found_by_a_router_after_the_delay(tmp_path: Path) -> None:
    one = WorkloadRequest(0.0, (Piece(7, 800),), 4)
    other = WorkloadRequest(0.0, (Piece(8, 800),), 400)
    again = [WorkloadRequest(at, (Piece(7, 800),), 4) for at in (1.0, 3.0)]
    workload = Workload("test", (one, other, *again))
    places = [
        list(run(workload, Fleet(2, "prefix", knowledge_delay=delay)).replica_of)
        for delay in (0.0, 2.0)
    ]
    assert places[0] == [0, 1, 0, 0]
    assert places[1][:2] == [0, 1]
    assert places[1][3] == 0


def test_a_replica_that_died_unnoticed_fails_what_it_is_sent_and_another_serves_it(
    tmp_path: Path,
) -> None:
    body = """
if self.num_asked == 1:
    assert [r.name for r in replicas] == ["replica-0", "replica-1"] and not request.num_attempts
if self.num_asked == 2:
    assert [r.name for r in replicas] == ["replica-1"] and request.num_attempts == 1
return replicas[0]
"""
    died = Incidents(failures=(Failure(replica=0, at=1.0),))
    fleet = Fleet(2, written(tmp_path, body), incidents=died, knowledge_delay=2.0)
    outcome = run(asked(1.5, 4.0), fleet)
    assert list(outcome.replica_of) == [1, 1]
    assert outcome.num_resent == 1
    assert [r.finish_reason for r in outcome.requests] == ["stop", "stop"]


@pytest.mark.parametrize("delay", [0.0, 0.3, 2.0])
def test_nothing_is_lost_when_all_replicas_die_and_come_back(tmp_path: Path, delay: float) -> None:
    failures = tuple(Failure(replica=i, at=1.0 + 0.1 * i, down=1.0) for i in range(3))
    arrivals = [0.9 + 0.05 * i for i in range(60)]
    fleet = Fleet(
        3, "session", incidents=Incidents(failures=failures), knowledge_delay=delay
    )  # by the least work, since no request has a session
    outcome = run(asked(*arrivals, tokens=400), fleet)
    reasons = Counter(r.finish_reason for r in outcome.requests)
    assert reasons["stop"] + reasons["error"] == 60
    streamed = [r for r in outcome.requests if r.finish_reason == "error"]
    assert all(r.token_times for r in streamed)  # what had begun, and nothing else


def test_requests_fail_when_the_last_replica_is_gone_for_good(tmp_path: Path) -> None:
    gone = Incidents(failures=(Failure(replica=0, at=1.0),))
    outcome = run(asked(2.0), Fleet(1, "least_work", incidents=gone, knowledge_delay=3.0))
    assert [r.finish_reason for r in outcome.requests] == ["error"]


def test_a_router_that_raises_ends_the_run_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RouterError, match=r"Mine raised .* in choose\(\) \(mine.py:14\)"):
        run(asked(1.0), Fleet(2, written(tmp_path, "return self.nothing")))


def test_a_fleet_file_gives_routers_options_names_and_paths_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "return replicas[self.options.number]")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "replicas: 3\nknowledge_delay: 0.05\nrouters:\n- mine.py:Mine\n"
        "- {router: mine.py, options: {number: 2}, name: last}\n- least_work\n"
    )
    spec = FleetSpec.load(str(file))
    assert [choice.shown for choice in spec.choices] == ["Mine", "last", "least_work"]
    places = [set(run(asked(1.0, 1.1), spec.behind(c)).replica_of) for c in spec.choices]
    assert places == [{0}, {2}, {0, 1}] or places == [{0}, {2}, {0}]
    words = ["compare", "fcfs", "--workload", "sessions", "--limit", "6", "--seeds", "1"]
    assert main([*words, "--jobs", "1", "--fleet", str(file)]) == 0
    assert "last" in capsys.readouterr().out


def test_routers_of_a_fleet_file_are_refused_at_the_door(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for routers, said in (
        ("[{router: least_work, options: {weight: 2}}]", "unknown field `weight`"),
        ("[{router: prefix}, prefix]", "a router is named twice: prefix, prefix"),
        ("[mine.py]", "no file mine.py"),
        ("[{options: {}}]", "router"),
    ):
        file.write_text(f"replicas: 2\nrouters: {routers}\n")
        with pytest.raises(ConfigError, match=said):
            FleetSpec.load(str(file))
    file.write_text("replicas: 2\nknowledge_delay: -1\n")
    with pytest.raises(ConfigError, match="knowledge_delay"):
        FleetSpec.load(str(file))


def test_a_replica_reports_its_adapters_its_step_times_and_what_it_could_evict(
    tmp_path: Path,
) -> None:
    body = """
if self.num_asked == 4:
    first, second = replicas
    assert first.adapters == ("a",) and second.adapters == (), replicas
    assert 0 < first.step_base_seconds <= first.step_seconds_with(4) < 1, first
    assert first.num_evictable_kv_tokens == 0 and second.num_evictable_kv_tokens == 0, replicas
    assert 0.0 <= first.age(self.clock()) < 0.2 and first.role == ""
if self.num_asked == 5:
    assert replicas[0].num_evictable_kv_tokens >= 300, replicas
return replicas[0]
"""
    requests = tuple(
        WorkloadRequest(at, (Piece(i, 100),), 400 if i < 4 else 4, adapter="a")
        for i, at in enumerate((1.0, 1.2, 1.3, 1.4, 90.0))
    )
    outcome = run(Workload("test", requests), Fleet(2, written(tmp_path, body)))
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 5
