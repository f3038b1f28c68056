"""Requests that move between simulated replicas: split in two, migrated, and what befalls them."""

from itertools import pairwise
from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routing import RouterError
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec, ReplicaGroup
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

HEAD = """
from aioserve.fleet.routing import BaseRouter, Migrate, RouterOptions, Split


class Mine(BaseRouter):
    uses_reports = True
    splits = True
    rebalance_seconds = 0.5
    num_asked = 0
    moved = ()

    def on_move(self, request, source, target):
        self.moved += ((request.request_id, source, target),)

    def rebalance(self, replicas):
        return ()

    def choose(self, request, replicas):
        self.num_asked += 1
"""
TOKEN_BYTES = 32_768  # of the settings' default


def written(tmp_path: Path, body: str, rest: str = "") -> str:
    """The path of a router whose `choose` is this; `rest` are further methods."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "\n".join(f"        {line}" for line in body.splitlines()) + rest)
    return str(path)


def asked(*arrivals: float, tokens: int = 320, output: int = 50) -> Workload:
    requests = (WorkloadRequest(at, (Piece(i, tokens),), output) for i, at in enumerate(arrivals))
    return Workload("test", tuple(requests))


def run(workload: Workload, router: str, num_replicas: int = 2, **fields: object) -> FleetOutcome:
    fields = {"transfer_gb_per_second": 1.0} | fields
    fleet = Fleet(num_replicas, router, **fields)  # type: ignore[arg-type]
    return simulate_fleet(simulated(EngineConfig(), workload.longest), workload, fleet)


SPLIT = "return Split(replicas[0], replicas[1])"
HOME = "return replicas[0]"


def test_a_split_request_decodes_elsewhere_after_its_blocks_have_come(tmp_path: Path) -> None:
    plain = run(asked(1.0), "round_robin").requests[0]
    outcome = run(asked(1.0), written(tmp_path, SPLIT))
    (split,) = outcome.requests
    assert split.finish_reason == "stop"
    assert len(split.token_times) == len(plain.token_times) == 50
    assert split.token_times[0] == plain.token_times[0]
    gap = split.token_times[1] - split.token_times[0]
    copied = 321 * TOKEN_BYTES / 1e9
    step = plain.token_times[1] - plain.token_times[0]
    assert copied + step <= gap + 1e-9 <= copied + 3 * step
    assert outcome.num_moved == 1
    assert list(outcome.replica_of) == [1]
    assert split.num_cached_tokens == 0
    assert all(seconds > 0 for seconds in outcome.busy_seconds)


def test_copies_of_one_replica_wait_for_each_other(tmp_path: Path) -> None:
    outcome = run(asked(1.0, 1.0, 1.0), written(tmp_path, SPLIT), transfer_gb_per_second=0.05)
    second = sorted(request.token_times[1] for request in outcome.requests)
    copied = 321 * TOKEN_BYTES / 0.05e9
    assert [b - a for a, b in pairwise(second)] == pytest.approx([copied, copied], abs=0.02)


def test_a_prefill_replica_that_dies_before_the_first_token_loses_nothing(tmp_path: Path) -> None:
    body = "return Split(*replicas[:2]) if len(replicas) > 1 else replicas[0]"
    failures = Incidents(failures=(Failure(replica=0, at=1.001),))
    (request,) = run(asked(1.0), written(tmp_path, body), incidents=failures).requests
    assert (request.finish_reason, len(request.token_times)) == ("stop", 50)


def test_a_decode_replica_that_dies_during_the_copy_leaves_the_request_where_it_was(
    tmp_path: Path,
) -> None:
    failures = Incidents(failures=(Failure(replica=1, at=1.1),))
    router = written(tmp_path, SPLIT)
    outcome = run(asked(1.0), router, incidents=failures, transfer_gb_per_second=0.02)
    (request,) = outcome.requests
    assert (request.finish_reason, len(request.token_times)) == ("stop", 50)
    assert list(outcome.replica_of) == [0]
    assert outcome.num_moved == 0


def test_a_prefill_replica_that_dies_during_the_copy_ends_the_request(tmp_path: Path) -> None:
    failures = Incidents(failures=(Failure(replica=0, at=1.1),))
    router = written(tmp_path, SPLIT)
    outcome = run(asked(1.0), router, incidents=failures, transfer_gb_per_second=0.02)
    (request,) = outcome.requests
    assert (request.finish_reason, len(request.token_times)) == ("error", 1)


def test_a_replica_that_drains_for_a_deploy_waits_for_its_copies(tmp_path: Path) -> None:
    deploys = Incidents(deploys=(Deploy(at=1.1, down=1.0),))
    body = "return Split(*replicas[:2]) if len(replicas) > 1 else replicas[0]"
    router = written(tmp_path, body)
    outcome = run(asked(1.0, 1.2), router, incidents=deploys, transfer_gb_per_second=0.02)
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 2
    assert [len(r.token_times) for r in outcome.requests] == [50] * 2


def test_a_request_goes_on_where_it_was_if_the_other_replica_has_too_many(tmp_path: Path) -> None:
    settings = simulated(EngineConfig.load(None, [("scheduler.max_waiting_requests", 1),
        ("scheduler.max_num_seqs", 1)]), 720)  # fmt: skip
    fleet = Fleet(2, written(tmp_path, SPLIT_FIRST), transfer_gb_per_second=1.0)
    outcome = simulate_fleet(settings, asked(1.0, 0.5, 0.9, output=400), fleet)
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 3
    assert list(outcome.replica_of) == [0, 1, 1]


SPLIT_FIRST = "return Split(*replicas) if request.request_id == '0' else replicas[1]"


MIGRATES = """

    def rebalance(self, replicas):
        return [Migrate("0", replicas[1])] if self.num_asked == 1 and not self.moved else ()
"""


def test_a_migrated_request_goes_on_decoding_while_it_is_copied(tmp_path: Path) -> None:
    plain = run(asked(0.1, output=400), "round_robin").requests[0]
    router = written(tmp_path, HOME, MIGRATES)
    outcome = run(asked(0.1, output=400), router, transfer_gb_per_second=0.1)
    (moved,) = outcome.requests
    assert outcome.num_moved == 1
    assert list(outcome.replica_of) == [1]
    assert (moved.finish_reason, len(moved.token_times)) == ("stop", 400)
    gaps = [b - a for a, b in pairwise(moved.token_times)]
    usual = max(b - a for a, b in pairwise(plain.token_times))
    assert sum(gap > 1.5 * usual for gap in gaps) == 1  # it stood still once,
    assert max(gaps) < 320 * TOKEN_BYTES / 0.1e9  # for less than a whole copy takes


def test_a_request_that_ends_during_its_copy_stays_ended(tmp_path: Path) -> None:
    router = written(tmp_path, HOME, MIGRATES)
    outcome = run(asked(0.1, output=150), router, transfer_gb_per_second=0.001)
    assert [r.finish_reason for r in outcome.requests] == ["stop"]
    assert outcome.num_moved == 0
    assert list(outcome.replica_of) == [0]


def test_a_request_stays_where_it_is_if_the_other_replica_has_no_room(tmp_path: Path) -> None:
    groups = (ReplicaGroup(replicas=1), ReplicaGroup(replicas=1, num_kv_blocks=46))
    body = "return replicas[0] if request.request_id == '0' else replicas[1]"
    rest = """

    def rebalance(self, replicas):
        return [Migrate("0", replicas[1])]
"""
    workload = asked(0.1, 0.1, output=400)
    outcome = run(workload, written(tmp_path, body, rest), groups=groups)
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 2
    assert outcome.replica_of[0] in (0, 1)
    assert [len(r.token_times) for r in outcome.requests] == [400, 400]


def test_what_moves_no_blocks_refuses_such_a_router_at_the_start(tmp_path: Path) -> None:
    router = written(tmp_path, SPLIT)
    with pytest.raises(ConfigError, match=r"Mine answers Split: .*transfer_gb_per_second"):
        run(asked(1.0), router, transfer_gb_per_second=None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return Split(replicas[0], None)", r"choose\(\) must return .*Split"),
        ("self.splits = 1; return Split(replicas[0], replicas[0].__class__('x'))", "must return"),
    ],
)
def test_a_split_to_what_is_no_replica_is_an_error_of_the_router(
    tmp_path: Path, body: str, said: str
) -> None:
    with pytest.raises(RouterError, match=said):
        run(asked(1.0), written(tmp_path, body))


def test_the_routers_that_ship_move_requests_and_lose_none() -> None:
    groups = (ReplicaGroup(replicas=2, role="prefill"), ReplicaGroup(replicas=2, role="decode"))
    arrivals = [0.02 * i for i in range(120)]
    split = run(asked(*arrivals), "prefill_decode", 4, groups=groups)
    assert {r.finish_reason for r in split.requests} == {"stop"}
    assert split.num_moved > 100
    assert set(split.replica_of) == {2, 3}
    groups = (ReplicaGroup(replicas=2, num_kv_blocks=180),)
    absent = Incidents(failures=(Failure(replica=1, at=0.01, down=2.0),))
    workload = asked(*(0.1 + 0.02 * i for i in range(6)), output=600)
    options = {"out_below": 500}
    moved = run(workload, "llumnix", groups=groups, incidents=absent, router_options=options)
    assert {r.finish_reason for r in moved.requests} == {"stop"}
    assert [len(r.token_times) for r in moved.requests] == [600] * 6
    assert moved.num_moved > 0
    assert set(moved.replica_of) == {0, 1}


def test_a_fleet_file_has_groups_and_a_rate_of_copies(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "replicas: 3\ntransfer_gb_per_second: 10\nrouters: [prefill_decode]\n"
        "groups: [{replicas: 1, role: prefill}, {replicas: 2, role: decode, slowdown: 1.5}]\n"
    )
    spec = FleetSpec.load(str(file))
    assert [group.role for group in spec.groups] == ["prefill", "decode"]
    assert spec.behind(spec.choices[0]).transfer_gb_per_second == 10
    for text, said in (
        ("replicas: 3\ngroups: [{replicas: 2}]", "groups have 2 replicas, and the fleet has 3"),
        ("replicas: 1\ngroups: [{replicas: 1, role: decode}]", "none would prefill"),
        ("replicas: 1\ngroups: [{replicas: 1, role: both}]", "role"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            FleetSpec.load(str(file))
