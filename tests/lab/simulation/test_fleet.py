"""Engines behind a router: equal to one engine where there is one, and nothing is ever lost."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.cli import main
from aioserve.config import CacheConfig
from aioserve.errors import ConfigError, PolicyError
from aioserve.lab.simulation.fleet import FleetOutcome, simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.incidents import Failure, Incidents, Straggler
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.routing import ROUTERS
from aioserve.scheduler import available_policies
from tests.lab.simulation.test_run import config, request, workload


def traffic(num_requests: int = 60, **fields: Any) -> Workload:
    """Bursts, conversations, common beginnings, deadlines, clients and priorities."""
    rng = random.Random(1)
    requests: list[WorkloadRequest] = []
    for i in range(num_requests):
        pieces = (Piece(rng.randrange(3), 40), Piece(100 + i, rng.randrange(1, 150)))
        follows = rng.randrange(i) if i and rng.random() < 0.4 else -1
        if follows >= 0:
            before = requests[follows]
            reply = Piece(200 + i, before.max_tokens, reply_of=follows)
            pieces = (*before.pieces, reply, Piece(100 + i, rng.randrange(1, 40)))
        requests.append(
            WorkloadRequest(
                rng.random() * (0.5 if follows < 0 else 0.2),
                pieces,
                rng.randrange(1, 60),
                user=f"u{rng.randrange(3)}",
                priority=rng.randrange(3),
                timeout=rng.choice([None, None, None, 0.25]),
                follows=follows,
                session=requests[follows].session if follows >= 0 else i,
            )
        )
    return Workload("test", tuple(requests), **fields)


def ends(outcome: FleetOutcome) -> Counter[str]:
    return Counter(r.finish_reason for r in outcome.requests)


@pytest.mark.parametrize("policy", sorted(available_policies()))
def test_one_replica_serves_every_request_as_the_engine_does(policy: str) -> None:
    """To the last bit of every time: with preemptions, deadlines and a queue that is full."""
    settings = config(policy, num_kv_blocks=61, max_num_seqs=8, max_waiting_requests=9)
    settings = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(settings.model, max_model_len=961)
    )
    asked = traffic()
    alone, fleet = simulate(settings, asked), simulate_fleet(settings, asked, Fleet(1, "prefix"))
    reasons = ends(fleet)
    assert reasons["timeout"]
    assert reasons["refused"]
    assert reasons["length"] > 20
    assert fleet.num_preemptions
    for engine, replica in zip(alone.requests, fleet.requests, strict=True):
        for name in engine.__slots__:
            assert getattr(replica, name) == getattr(engine, name), name
    assert list(fleet.steps.start) == list(alone.steps.start)
    assert list(fleet.steps.seconds) == list(alone.steps.seconds)
    assert fleet.num_preemptions == alone.num_preemptions
    assert fleet.num_scheduled_tokens == alone.num_scheduled_tokens
    assert fleet.end == alone.end


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_of_a_fleet_ends_and_the_same_way_again(router: str) -> None:
    asked = traffic()
    first = simulate_fleet(config("chunked_prefill"), asked, Fleet(3, router))
    again = simulate_fleet(config("chunked_prefill"), asked, Fleet(3, router))
    for one, other, wanted in zip(first.requests, again.requests, asked.requests, strict=True):
        assert one.token_times == other.token_times
        assert one.is_finished or one.finish_reason == "timeout"
        assert not one.is_finished or len(one.token_times) == wanted.max_tokens
    assert set(first.replica_of) == {0, 1, 2}
    assert first.busy_seconds[0] == pytest.approx(sum(first.steps.seconds))
    assert first.num_steps > len(first.steps.start)


def test_when_a_replica_dies_what_had_not_streamed_is_served_elsewhere() -> None:
    """At 0.1 s one of its two requests streams; the other waits for the seat."""
    requests = [request(0.0, 100, 50), request(0.0, 101, 50), request(0.01, 102, 50)]
    dies = Incidents(failures=(Failure(replica=0, at=0.1),))
    asked = msgspec.structs.replace(workload(*requests), incidents=dies)
    outcome = simulate_fleet(config(max_num_seqs=1), asked, Fleet(2, "round_robin"))
    streaming, other, waiting = outcome.requests
    assert (streaming.finish_reason, streaming.end) == ("error", 0.1)
    assert 0 < streaming.num_output_tokens == len(streaming.token_times) < 50
    assert streaming.token_times[-1] <= 0.1
    assert other.finish_reason == waiting.finish_reason == "length"
    assert list(outcome.replica_of) == [0, 1, 1]
    assert waiting.arrival == 0.01
    assert waiting.token_times[0] > other.end
    assert outcome.num_resent == 1


@pytest.mark.parametrize("router", ROUTERS)
def test_nothing_is_lost_while_replicas_die_and_come_back(router: str) -> None:
    failures = tuple(
        Failure(replica=i % 3, at=0.05 + 0.1 * i, down=0.15 if i < 6 else None) for i in range(9)
    )
    asked = traffic(incidents=Incidents(failures=failures[:7] + failures[8:]))
    outcome = simulate_fleet(config("chunked_prefill", max_num_seqs=4), asked, Fleet(3, router))
    assert ends(outcome).total() == len(asked.requests)
    assert set(ends(outcome)) <= {"length", "timeout", "error"}
    assert outcome.num_resent > 0
    for served, wanted in zip(outcome.requests, asked.requests, strict=True):
        assert list(served.token_times) == sorted(served.token_times)
        assert len(served.token_times) == served.num_output_tokens
        assert not served.is_finished or served.num_output_tokens == wanted.max_tokens


def test_requests_wait_for_a_replica_that_will_be_back_and_fail_if_none_will() -> None:
    asked = workload(request(0.5, 100, 4), request(5.0, 100, 4))
    failures = (Failure(replica=0, at=0.1, down=1.0), Failure(replica=0, at=4.0))
    fleet = Fleet(1, "least_work", incidents=Incidents(failures=failures))
    back, lost = simulate_fleet(config(), asked, fleet).requests
    assert back.arrival == 0.5
    assert list(back.token_times) == pytest.approx([1.109, 1.1131, 1.1172, 1.1213])
    assert (lost.finish_reason, lost.end, list(lost.token_times)) == ("error", 5.0, [])


def test_a_replica_that_is_back_has_forgotten_its_prefixes() -> None:
    text = Piece(7, 160)
    asked = Workload("test", tuple(WorkloadRequest(at, (text,), 2) for at in (0.0, 1.0, 3.0)))
    failure = Incidents(failures=(Failure(replica=0, at=2.0, down=0.5),))
    outcome = simulate_fleet(config(), asked, Fleet(1, "prefix", incidents=failure))
    assert [r.num_cached_tokens for r in outcome.requests] == [0, 144, 0]


def test_a_straggler_is_slower_by_its_factor_while_it_is_one_and_gets_less() -> None:
    slow = Incidents(stragglers=(Straggler(replica=0, slowdown=3.0, at=0.0, duration=2.0),))
    asked = workload(request(0.0, 100, 4), request(3.0, 100, 4))
    during, after = simulate_fleet(config(), asked, Fleet(1, "prefix", incidents=slow)).requests
    assert during.end - during.arrival == pytest.approx(3 * 0.0213)
    assert after.end - after.arrival == pytest.approx(0.0213)
    many = workload(*(request(0.01 * i, 100 + i, 20) for i in range(100)))
    forever = Incidents(stragglers=(Straggler(replica=0, slowdown=3.0),))
    routed = simulate_fleet(config(), many, Fleet(2, "least_work", incidents=forever)).replica_of
    assert routed.count(0) < 0.4 * len(routed)


def test_a_conversation_stays_at_one_replica_if_it_is_sticky_and_finds_its_prefix() -> None:
    asked = traffic()
    sticky = simulate_fleet(config(), asked, Fleet(4, "session"))
    homes: dict[int, set[int]] = {}
    for served_by, wanted in zip(sticky.replica_of, asked.requests, strict=True):
        homes.setdefault(wanted.session, set()).add(served_by)
    assert all(len(places) == 1 for places in homes.values())
    assert len(set.union(*homes.values())) == 4
    hits = {
        router: sum(
            r.num_cached_tokens for r in simulate_fleet(config(), asked, Fleet(4, router)).requests
        )
        for router in ("round_robin", "session", "prefix")
    }
    assert hits["round_robin"] < min(hits["session"], hits["prefix"])


def test_a_policy_that_fails_ends_the_run_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from aioserve.scheduler import BaseScheduler\n"
        "class Broken(BaseScheduler):\n"
        "    def schedule(self):\n"
        "        return self.nothing\n"
    )
    with pytest.raises(PolicyError, match=r"AttributeError.* in schedule\(\) \(broken.py:4\)"):
        simulate_fleet(config(str(broken)), workload(request(0.0, 9, 2)), Fleet(2, "session"))


def test_what_cannot_be_is_refused_at_the_door(capsys: pytest.CaptureFixture[str]) -> None:
    asked = workload(request(0.0, 9, 2))
    gone = Incidents(failures=(Failure(replica=2, at=1.0),))
    with pytest.raises(ConfigError, match=r"failure of replica 2, but there are 2.* from 0 to 1"):
        simulate_fleet(config(), asked, Fleet(2, "session", incidents=gone))
    twice = Incidents(failures=(Failure(replica=0, at=1.0, down=3), Failure(replica=0, at=2.0)))
    with pytest.raises(ConfigError, match=r"replica 0 dies at 2 s, but it is down since 1 s"):
        simulate_fleet(config(), asked, Fleet(2, "session", incidents=twice))
    logged = config(decision_log="x.log")
    with pytest.raises(ConfigError, match=r"decision_log is x\.log, which is of one engine"):
        simulate_fleet(logged, asked, Fleet(2, "session"))
    elsewhere = msgspec.structs.replace(config(), cache=CacheConfig(kv_connector="memory"))
    with pytest.raises(ConfigError, match=r"kv_connector is memory, but what is loaded"):
        simulate_fleet(elsewhere, asked, Fleet(2, "session"))
    mixed = ["--workload", "mixed", "--limit", "3"]
    for words, said in (
        (["--fleet", "0"], "at least 1 replica, got 0"),
        (["--fleet", "-3"], "at least 1 replica, got -3"),
        (["--fleet", "2", "--routers", "sesion"], "unknown router 'sesion' (did you mean"),
        (["--fleet", "2", "--routers", "prefix", "prefix"], "a router is named twice"),
        (["--routers", "prefix"], "--routers is for a fleet: give --fleet N"),
        (["--price-per-hour", "3"], "--price-per-hour is for a fleet"),
        (["--fleet", "2", "--live"], "--fleet is simulated"),
        (["--fleet", "sixten"], "unknown fleet 'sixten' (did you mean 'sixteen'?)"),
        (["--workload", "breakdown"], "has incidents, which befall replicas: give compare --fleet"),
    ):
        assert main(["compare", "fcfs", *(mixed if "--workload" not in words else []), *words]) == 2
        assert said in capsys.readouterr().err


def test_the_shipped_fleet_is_a_fleet() -> None:
    spec = FleetSpec.load("sixteen", routers=("session",), price=2.0)
    assert (spec.replicas, spec.routers, spec.price_per_hour) == (16, ("session",), 2.0)
    assert len(FleetSpec.load("sixteen").routers) > 1


def test_configurations_and_routers_are_compared_crosswise_with_prices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--workload", "sessions", "--limit", "12", "--seeds", "1", "--jobs", "1"]
    fleet = ["--fleet", "2", "--routers", "round_robin", "session", "--price-per-hour", "3"]
    assert main(["compare", "fcfs", "chunked_prefill", *words, *fleet]) == 0
    printed = capsys.readouterr().out
    assert " requests in" in printed
    assert " on 2 replicas, in virtual time" in printed
    for other in ("fcfs session", "chunked_prefill round_robin", "chunked_prefill session"):
        assert f"fcfs round_robin  {other}" in printed
    assert "price, 1M output" in printed
    assert "busiest to mean" in printed
