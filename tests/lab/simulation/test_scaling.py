"""Fleets whose autoscaler is asked how many replicas there should be, and what that costs."""

from pathlib import Path

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routing import (
    FleetView,
    ReplicaView,
    RoutedRequest,
    RouterError,
    available_autoscalers,
    load_autoscaler,
)
from aioserve.lab.comparison.measures import fleet_totals
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_changes import AutoscalerChoice, Autoscaling
from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec, ReplicaGroup
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import Failure, Incidents, Piece, Workload, WorkloadRequest

HEAD = """
from aioserve.fleet.routing import AutoscalerInterface, AutoscalerOptions


class Mine(AutoscalerInterface):
    class Options(AutoscalerOptions):
        number: int = 2

    num_asked = 0

    def decide(self, fleet):
        self.num_asked += 1
"""


def fleet(
    tmp_path: Path, body: str, num_replicas: int = 4, *, min_replicas: int = 1, **fields: object
) -> Fleet:
    """A fleet whose autoscaler has this `decide`, asked each second; a start takes 2 s."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "\n".join(f"        {line}" for line in body.strip().splitlines()))
    scaling = Autoscaling(
        autoscalers=(AutoscalerChoice(autoscaler=str(path)),),
        min_replicas=min_replicas,
        startup_seconds=2.0,
        interval=1.0,
    )
    return Fleet(num_replicas, "round_robin", autoscaling=scaling, **fields)  # type: ignore[arg-type]


def asked(*arrivals: float, tokens: int = 100, output: int = 4) -> Workload:
    return Workload(
        "test",
        tuple(WorkloadRequest(at, (Piece(i, tokens),), output) for i, at in enumerate(arrivals)),
    )


def run(workload: Workload, plan: Fleet) -> FleetOutcome:
    return simulate_fleet(simulated(EngineConfig(), workload.longest), workload, plan)


def test_a_replica_serves_after_its_start_and_is_paid_for_from_the_answer_on(
    tmp_path: Path,
) -> None:
    arrivals = [0.5 * i for i in range(21)]
    outcome = run(asked(*arrivals), fleet(tmp_path, "return 2"))
    places = dict(zip(arrivals, outcome.replica_of, strict=True))
    assert {place for at, place in places.items() if at < 3.0} == {0}
    assert {place for at, place in places.items() if at >= 3.0} == {0, 1}
    assert outcome.replica_seconds == pytest.approx(outcome.end + outcome.end - 1.0)


def test_a_replica_that_is_to_go_gets_nothing_new_and_finishes_what_it_has(tmp_path: Path) -> None:
    body = "return 1 if self.clock() >= 5 else 2"
    arrivals = [0.0, 4.9, 4.95, *(6.0 + i for i in range(6))]
    workload = asked(*arrivals, output=600)
    outcome = run(workload, fleet(tmp_path, body, min_replicas=1))
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 9
    assert sorted(outcome.replica_of[1:3]) == [0, 1]
    assert len(set(outcome.replica_of[3:])) == 1
    (gone,) = {0, 1} - set(outcome.replica_of[3:])
    ends = [
        r.end
        for r, place in zip(outcome.requests, outcome.replica_of, strict=True)
        if place == gone
    ]
    assert max(ends) > 5.0  # it was paid for until its last request had ended
    begins = {0: 0.0, 1: 1.0}
    stays = outcome.end - begins[1 - gone]
    assert outcome.replica_seconds == pytest.approx(stays + max(ends) - begins[gone])


def test_an_autoscaler_sees_the_fleet_and_hears_of_first_tokens(tmp_path: Path) -> None:
    body = """
assert (fleet.min_replicas, fleet.max_replicas) == (1, 4)
assert (fleet.startup_seconds, fleet.interval) == (2, 1)
assert fleet.num_replicas == len(fleet.replicas) + fleet.num_starting
if self.num_asked == 1:
    assert (fleet.num_arrived, fleet.num_arrived_tokens) == (2, 200), fleet
    assert len(fleet.replicas) == 1 and fleet.replicas[0].max_num_seqs > 0
    assert len(self.heard) == 1, self.heard
if self.num_asked == 2:
    assert (len(fleet.replicas), fleet.num_starting) == (1, 3)
return 99
"""
    plan = fleet(tmp_path, body)
    path = tmp_path / "mine.py"
    text = "    heard = []\n    def on_first_token(self, request, seconds):\n"
    path.write_text(path.read_text() + "\n" + text + "        self.heard.append(seconds)\n")
    outcome = run(asked(0.5, 0.999, 7.0), plan)
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 3


def test_nothing_is_lost_where_replicas_die_and_the_fleet_is_scaled(tmp_path: Path) -> None:
    failures = (
        Failure(replica=0, at=1.5),
        Failure(replica=1, at=4.2, down=1.0),
        Failure(replica=3, at=0.5, down=1.0),  # which is not there
    )
    body = "return [2, 4, 1, 3][self.num_asked % 4]"
    plan = fleet(tmp_path, body, incidents=Incidents(failures=failures))
    arrivals = [0.05 * i for i in range(200)]
    outcome = run(asked(*arrivals, tokens=300, output=30), plan)
    reasons = {r.finish_reason for r in outcome.requests}
    assert reasons <= {"stop", "error"}
    errors = [r for r in outcome.requests if r.finish_reason == "error"]
    assert all(r.token_times for r in errors)  # what had begun, and nothing else
    again = run(asked(*arrivals, tokens=300, output=30), plan)
    assert list(again.replica_of) == list(outcome.replica_of)


def test_requests_fail_when_no_replica_can_come_any_more(tmp_path: Path) -> None:
    plan = fleet(
        tmp_path, "return 1", 1, incidents=Incidents(failures=(Failure(replica=0, at=1.0),))
    )
    outcome = run(asked(2.0, 3.0), plan)
    assert [r.finish_reason for r in outcome.requests] == ["error", "error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [("return 'many'", "whole number of replicas, got 'many'"), ("return fleet.no", "raised Attr")],
)
def test_an_autoscaler_that_answers_nothing_ends_the_run_by_its_name(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(RouterError, match=f"Mine.*{said}"):
        run(asked(2.0), fleet(tmp_path, body))


def test_the_price_is_of_replicas_that_were_there(tmp_path: Path) -> None:
    plan = fleet(tmp_path, "return 2", price_per_hour=3600.0)
    outcome = run(asked(*(0.5 * i for i in range(21))), plan)
    totals = {"output_tokens_per_second": 8.4, "total_tokens_per_second": 1.0}
    found = fleet_totals(outcome, plan, totals)
    assert found["replicas"] == pytest.approx(outcome.replica_seconds / outcome.end)
    assert found["price_per_million_output"] == pytest.approx(1e6 * found["replicas"] / 8.4)
    assert 0 < found["busy_share"] < 1


def view(number: int, **fields: object) -> ReplicaView:
    return ReplicaView(f"r{number}", known_at=0.0, max_num_seqs=10, **fields)  # type: ignore[arg-type]


def fleet_view(*replicas: ReplicaView, starting: int = 0) -> FleetView:
    return FleetView(
        replicas=replicas,
        num_starting=starting,
        min_replicas=1,
        max_replicas=99,
        startup_seconds=10.0,
        interval=5.0,
        num_arrived=0,
        num_arrived_tokens=0,
    )


def test_utilization_is_kept_at_its_target_and_falls_after_a_while() -> None:
    now = [0.0]
    scaler = load_autoscaler("target_utilization")({"target": 0.5}, clock=lambda: now[0])
    full = fleet_view(*(view(i, num_running=9) for i in range(4)))
    assert scaler.decide(full) == 8  # 36 of 40 seats
    assert scaler.decide(fleet_view(*full.replicas, starting=4)) == 8  # within the tolerance
    idle = fleet_view(*(view(i, num_running=1) for i in range(8)))
    assert scaler.decide(idle) == 8
    now[0] = 61.0
    assert scaler.decide(idle) == 2


def test_queued_tokens_and_kv_cache_are_kept_below_their_targets() -> None:
    now = [0.0]
    scaler = load_autoscaler("queue_tokens")({"queued_tokens": 1000}, clock=lambda: now[0])
    assert scaler.decide(fleet_view(view(0, num_unstarted_tokens=4500))) == 5
    used = [view(i, num_kv_tokens=100, num_free_kv_tokens=4) for i in range(5)]
    assert scaler.decide(fleet_view(*used)) == 6
    now[0] = 61.0
    idle = [view(i, num_kv_tokens=100, num_free_kv_tokens=100) for i in range(6)]
    assert scaler.decide(fleet_view(*idle)) == 0
    assert scaler.decide(fleet_view(*idle, view(6))) == 7  # which has said nothing


def test_levels_are_predicted_from_what_first_tokens_used_of_them() -> None:
    now = [0.0]
    scaler = load_autoscaler("slo_attainment")({"ttft": 2.0}, clock=lambda: now[0])

    def heard(count: int, seconds: float, at: float, **hints: float) -> None:
        request = RoutedRequest(num_tokens=1, arrival_time=at, hints=hints)
        for _ in range(count):
            scaler.on_first_token(request, seconds)

    four = fleet_view(*(view(i, num_sent=1) for i in range(4)))
    assert scaler.decide(four) == 4  # nothing is known yet
    heard(80, 0.1, at=1.0)
    heard(20, 3.0, at=1.0)
    assert scaler.decide(four) == 6  # one in five takes one and a half of its time
    assert scaler.decide(msgspec.structs.replace(four, num_starting=2)) == 6  # not a third more
    heard(500, 0.01, at=2.0, slo_ttft=0.2)
    assert scaler.decide(four) == 4
    now[0] = 71.0
    heard(1, 0.01, at=70.0)
    assert scaler.decide(four) == 3  # one at a time
    eight = fleet_view(*(view(i, num_sent=1) for i in range(8)))
    heard(100, 9.0, at=70.0)
    assert scaler.decide(eight) == 8  # those came before the newest replica served


def test_an_idle_fleet_comes_down_after_an_overload() -> None:
    now = [100.0]
    scaler = load_autoscaler("slo_attainment")(clock=lambda: now[0])
    scaler.on_first_token(RoutedRequest(num_tokens=1, arrival_time=100.0), 50.0)
    four = fleet_view(*(view(i) for i in range(4)))
    assert scaler.decide(four) == 8
    now[0] = 200.0
    assert scaler.decide(four) == 3


def test_autoscalers_of_a_fleet_file_are_compared_crosswise_with_routers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scaled.yaml"
    fleet(tmp_path, "return self.options.number")
    file.write_text(
        "replicas: 4\nprice_per_hour: 3\nrouters: [round_robin, lmetric]\nautoscaling:\n"
        "  autoscalers:\n  - queue_tokens\n"
        "  - {autoscaler: mine.py:Mine, options: {number: 3}, name: three}\n"
        "  min_replicas: 2\n"
    )
    spec = FleetSpec.load(str(file))
    assert [scaler.shown for scaler in spec.scalers if scaler] == ["queue_tokens", "three"]
    words = ["compare", "fcfs", "--workload", "sessions", "--limit", "12", "--seeds", "1"]
    assert main([*words, "--jobs", "1", "--fleet", str(file)]) == 0
    printed = capsys.readouterr().out
    assert " on 2 to 4 replicas, in virtual time" in printed
    assert "round_robin queue_tokens  lmetric three" in printed
    assert "replicas" in printed.split("\n\n")[1]
    for text, said in (
        ("autoscalers: [queue_tokens]\n  min_replicas: 5", "min_replicas is 5, above the 4"),
        ("autoscalers: [queue_token]", r"unknown autoscaler 'queue_token' \(did you mean"),
        ("autoscalers: [queue_tokens, queue_tokens]", "an autoscaler is named twice"),
        ("autoscalers: [{autoscaler: queue_tokens, options: {x: 1}}]", "unknown field `x`"),
    ):
        file.write_text(f"replicas: 4\nautoscaling:\n  {text}\n")
        with pytest.raises(ConfigError, match=said):
            FleetSpec.load(str(file))


def test_the_autoscalers_that_ship_are_the_files_of_their_package() -> None:
    assert set(available_autoscalers()) == {"queue_tokens", "slo_attainment", "target_utilization"}


@pytest.mark.parametrize("body", ["return 0", "return 2 if self.clock() < 4 else 3", "return 3"])
def test_each_role_keeps_one_replica_at_least(tmp_path: Path, body: str) -> None:
    """Also where decode replicas have the least work, or one of a role has died."""
    groups = (ReplicaGroup(replicas=3, role="prefill"), ReplicaGroup(replicas=3, role="decode"))
    plan = fleet(tmp_path, body, 6, min_replicas=2)
    failures = Incidents(failures=(Failure(replica=0, at=8.0, down=60.0),))
    path = tmp_path / "router.py"
    path.write_text(
        "from aioserve.fleet.routing import BaseRouter, Split\n"
        "class Mine(BaseRouter):\n"
        "    splits = True\n"
        "    def choose(self, request, replicas):\n"
        "        roles = {replica.role: replica for replica in replicas}\n"
        "        if len(roles) < 2 and not 8 <= self.clock() < 12:\n"
        "            raise ValueError(sorted(roles))\n"
        "        if len(roles) < 2:\n"
        "            return replicas[0]\n"
        "        return Split(roles['prefill'], roles['decode'])\n"
    )
    plan = Fleet(
        *(6, str(path)),
        autoscaling=plan.autoscaling,
        groups=groups,
        incidents=failures,
        transfer_gb_per_second=10.0,
    )
    outcome = run(asked(*(0.5 * i for i in range(60))), plan)
    assert {r.finish_reason for r in outcome.requests} == {"stop"}
    assert outcome.num_moved > 40


def test_fewer_replicas_than_roles_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "replicas: 2\ngroups: [{replicas: 1, role: prefill}, {replicas: 1, role: decode}]\n"
        "autoscaling: {autoscalers: [queue_tokens], min_replicas: 1}\n"
    )
    with pytest.raises(ConfigError, match=r"min_replicas is 1, but the groups have 2 roles"):
        FleetSpec.load(str(file))
