"""Rolling restarts of simulated fleets: no request is refused or lost, and each cache is empty."""

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, ReplicaGroup
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.workload import (
    Deploy,
    Failure,
    Incidents,
    Piece,
    Workload,
    WorkloadRequest,
)


def asked(*arrivals: float, output: int = 20) -> Workload:
    """Requests that all begin alike."""
    requests = (
        WorkloadRequest(at, (Piece(1, 160), Piece(2 + i, 16)), output)
        for i, at in enumerate(arrivals)
    )
    return Workload("test", tuple(requests))


def run(workload: Workload, num_replicas: int, **fields: object) -> FleetOutcome:
    fleet = Fleet(num_replicas, fields.pop("router", "round_robin"), **fields)  # type: ignore[arg-type]
    return simulate_fleet(simulated(EngineConfig(), workload.longest), workload, fleet)


def deploy(**fields: object) -> Incidents:
    return Incidents(deploys=(Deploy(**{"at": 2.0, "down": 1.0} | fields),))  # type: ignore[arg-type]


def test_replicas_restart_one_after_another_and_lose_nothing() -> None:
    arrivals = [0.05 * i for i in range(200)]
    outcome = run(asked(*arrivals), 3, incidents=deploy())
    assert {r.finish_reason for r in outcome.requests} == {"stop"}
    assert outcome.num_resent == 0
    for place, begin in enumerate((2.0, 3.1, 4.2)):  # about: each ends what it has
        down = [r for r, at in zip(outcome.replica_of, arrivals, strict=True)
                if begin + 0.2 < at < begin + 0.9]  # fmt: skip
        assert down
        assert place not in down
    late = [r for r, at in zip(outcome.replica_of, arrivals, strict=True) if at > 6.5]
    assert set(late) == {0, 1, 2}


def test_a_restarted_replica_has_an_empty_cache() -> None:
    outcome = run(asked(1.0, 1.5, 9.0, 9.5, 10.0), 2, incidents=deploy())
    assert [r.num_cached_tokens > 0 for r in outcome.requests] == [False, False, False, False, True]


def test_a_restart_waits_for_a_request_unless_it_has_a_bound() -> None:
    arrivals = (0.1, 0.1)
    patient = run(asked(*arrivals, output=2000), 2, incidents=deploy())
    assert {r.finish_reason for r in patient.requests} == {"stop"}
    hasty = run(asked(*arrivals, output=2000), 2, incidents=deploy(drain=1.0))
    assert {r.finish_reason for r in hasty.requests} == {"error"}


def test_a_replica_that_dies_while_it_drains_lets_the_next_one_restart() -> None:
    arrivals = [0.05 * i for i in range(160)]
    incidents = deploy() + Incidents(failures=(Failure(replica=0, at=2.05, down=1.0),))
    outcome = run(asked(*arrivals, output=200), 3, incidents=incidents)
    failed = sum(r.finish_reason == "error" for r in outcome.requests)
    assert 0 < failed < 40  # those that it had begun to stream
    assert len(outcome.requests) - failed == sum(
        r.finish_reason == "stop" for r in outcome.requests
    )


def test_a_deploy_that_leaves_no_replica_is_refused() -> None:
    with pytest.raises(ConfigError, match="restarts 2 replicas at once, and there are 2"):
        run(asked(0.0), 2, incidents=deploy(at_once=2))


def test_slower_and_smaller_replicas_are_what_their_groups_say() -> None:
    groups = (
        ReplicaGroup(replicas=1),
        ReplicaGroup(replicas=1, slowdown=2.0),
    )
    plain, slow = run(asked(0.0, 0.0), 2, groups=groups).requests
    lengths = [r.token_times[-1] - r.token_times[0] for r in (plain, slow)]
    assert lengths[1] == pytest.approx(2 * lengths[0])
    small = (ReplicaGroup(replicas=1, num_kv_blocks=5),)
    with pytest.raises(ConfigError, match=r"has 5 KV blocks .* longest request"):
        run(asked(0.0), 1, groups=small)
