"""Engines behind a router: equal to one engine where there is one, and nothing is ever lost."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.config import CacheConfig, EngineConfig
from aioserve.errors import ConfigError, PolicyError
from aioserve.fleet.routing import available_routers
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import (
    Failure,
    Incidents,
    Piece,
    Straggler,
    Workload,
    WorkloadRequest,
)
from tests.lab.simulation.test_run import config, request, workload
from tests.policy_names import SHIPPED
from tests.slow import mostly_slow


def traffic(num_requests: int = 60, rng: random.Random | None = None, **fields: Any) -> Workload:
    """Bursts, conversations, common beginnings, deadlines, clients and priorities."""
    rng = rng or random.Random(1)
    requests: list[WorkloadRequest] = []
    for i in range(num_requests):
        pieces = (Piece(rng.randrange(3), 40), Piece(100 + i, rng.randrange(1, 150)))
        follows = rng.randrange(i) if i and rng.random() < 0.4 else -1
        if follows >= 0:
            before = requests[follows]
            reply = Piece(200 + i, before.output_tokens, reply_of=follows)
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
                draft_acceptance=i % 4 / 3,
            )
        )
    return Workload("test", tuple(requests), **fields)


def crowded(settings: EngineConfig) -> EngineConfig:
    """For a model whose longest request takes all blocks that there are, in a small pool."""
    model = msgspec.structs.replace(settings.model, max_model_len=961)
    return msgspec.structs.replace(settings, model=model)


def check_equal(settings: EngineConfig, asked: Workload) -> FleetOutcome:
    """Of one replica and of the engine all is the same, to the last bit."""
    alone, fleet = simulate(settings, asked), simulate_fleet(settings, asked, Fleet(1, "prefix"))
    for engine, replica in zip(alone.requests, fleet.requests, strict=True):
        for name in engine.__slots__:
            assert getattr(replica, name) == getattr(engine, name), name
    for name in vars(alone.steps):
        assert getattr(fleet.steps, name) == getattr(alone.steps, name), name
    for name in vars(alone).keys() - {"requests", "steps", "states"}:
        assert getattr(fleet, name) == getattr(alone, name), name
    return fleet


def test_a_replica_serves_programs_as_the_engine_does() -> None:
    """Fan-out and join, with deadlines and a full queue."""
    rng = random.Random(3)
    plain = traffic().requests
    joined = tuple(
        msgspec.structs.replace(r, after=tuple(sorted(rng.sample(range(i), min(i, 3)))))
        if r.follows >= 0
        else r
        for i, r in enumerate(plain)
    )
    settings = crowded(config("chunked_prefill", num_kv_blocks=61, max_num_seqs=8))
    outcome = check_equal(settings, Workload("test", joined))
    for asked, result in zip(joined, outcome.requests, strict=True):
        last = max((outcome.requests[place].end for place in asked.waits_for), default=0.0)
        assert result.arrival == pytest.approx(last + asked.arrival)


#: One that looks at nothing, at loads, at prefixes; one that moves requests.
ROUTERS = ("round_robin", "least_requests", "prefix", "llumnix")


def ends(outcome: FleetOutcome) -> Counter[str]:
    return Counter(r.finish_reason for r in outcome.requests)


@pytest.mark.parametrize(
    "policy", mostly_slow(SHIPPED, but=["chunked_prefill", "deadline", "mlfq"])
)
def test_one_replica_serves_every_request_as_the_engine_does(policy: str) -> None:
    """To the last bit of every time: with preemptions, deadlines and a queue that is full."""
    settings = crowded(config(policy, num_kv_blocks=61, max_num_seqs=8, max_waiting_requests=9))
    fleet = check_equal(settings, traffic())
    reasons = ends(fleet)
    assert reasons["timeout"]
    assert reasons["refused"]
    assert reasons["stop"] > 20
    assert fleet.num_preemptions


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": {"pipeline_depth": 2}},
        {"runner": {"simulated_draft_tokens": 3}, "scheduler": {"num_lookahead_tokens": 3}},
        {"scheduler": {"num_lookahead_tokens": 2}},
        {"scheduler": {"long_prefill_token_threshold": 64, "queue_timeout": 0.1}},
        {"scheduler": {"victim": "most_remaining"}, "cache": {"watermark": 0.2}},
        {"cache": {"enable_prefix_caching": False}},
        {"cache": {"num_state_slots": 12}},
        {"cache": {"num_window_blocks": 90}, "runner": {"simulated_window": 40}},
        {"cache": {"block_size": 8, "num_kv_blocks": 121}},
        {"runner": {"step_context_token_us": 0.07, "step_query_context_ns": 1.3}},
        {"runner": {"profile": "example"}},
    ],
    ids=str,
)
def test_whatever_is_set_a_replica_serves_as_the_engine_does(
    settings: dict[str, dict[str, Any]],
) -> None:
    made = crowded(config("mlfq", num_kv_blocks=61, max_num_seqs=8))
    for section, fields in settings.items():
        changed = msgspec.structs.replace(getattr(made, section), **fields)
        made = msgspec.structs.replace(made, **{section: changed})
    assert check_equal(made, traffic()).num_scheduled_tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", SHIPPED)
@pytest.mark.parametrize("seed", mostly_slow(range(8), but=range(3)))
def test_any_traffic_is_served_by_a_replica_as_by_the_engine(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    settings = crowded(
        config(
            policy,
            num_kv_blocks=rng.choice([61, 80, 300]),
            max_num_seqs=rng.choice([2, 8, 64]),
            max_waiting_requests=rng.choice([3, 1000]),
            num_lookahead_tokens=rng.choice([0, 0, 2]),
            pipeline_depth=rng.choice([None, 1, 2]),
        )
    )
    check_equal(settings, traffic(200, rng))


@pytest.mark.parametrize(
    "policy",
    [
        "from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler\n"
        "class Pauses(ChunkedPrefillScheduler):\n"
        "    def schedule(self):\n"
        "        return super().schedule() if self.num_steps % 5 else self.new_step().output()\n",
        "from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler\n"
        "class Learns(ChunkedPrefillScheduler):\n"
        "    keeps_decoding = uses_step_time = True\n"
        "    def schedule(self):\n"
        "        self.options.chunk_size = 9 + self.step_time.num_steps // 9\n"
        "        return super().schedule()\n",
    ],
    ids=["who plans otherwise than its base", "who learns from every step"],
)
def test_nobody_is_taken_to_keep_decoding_who_need_not(policy: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(policy)
    asked = traffic(30)
    check_equal(config(str(file)), asked)


@pytest.mark.parametrize("router", mostly_slow(available_routers(), but=ROUTERS))
def test_every_request_of_a_fleet_ends_and_the_same_way_again(router: str) -> None:
    asked = traffic()
    first = simulate_fleet(
        config("chunked_prefill"), asked, Fleet(3, router, transfer_gb_per_second=10)
    )
    again = simulate_fleet(
        config("chunked_prefill"), asked, Fleet(3, router, transfer_gb_per_second=10)
    )
    for one, other, wanted in zip(first.requests, again.requests, asked.requests, strict=True):
        assert one.token_times == other.token_times
        assert one.is_finished or one.finish_reason == "timeout"
        assert not one.is_finished or len(one.token_times) == wanted.output_tokens
    if router not in ("polyserve", "scorers"):  # which stay at a replica as long as it has time
        assert set(first.replica_of) == {0, 1, 2}
        assert first.num_steps > len(first.steps.start)
    assert first.busy_seconds[0] == pytest.approx(sum(first.steps.seconds))


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
    assert other.finish_reason == waiting.finish_reason == "stop"
    assert list(outcome.replica_of) == [0, 1, 1]
    assert waiting.arrival == 0.01
    assert waiting.token_times[0] > other.end
    assert outcome.num_resent == 1


@pytest.mark.parametrize("router", mostly_slow(available_routers(), but=ROUTERS))
def test_nothing_is_lost_while_replicas_die_and_come_back(router: str) -> None:
    failures = tuple(
        Failure(replica=i % 3, at=0.05 + 0.1 * i, down=0.15 if i < 6 else None) for i in range(9)
    )
    asked = traffic(incidents=Incidents(failures=failures[:7] + failures[8:]))
    outcome = simulate_fleet(
        config("chunked_prefill", max_num_seqs=4),
        asked,
        Fleet(3, router, transfer_gb_per_second=10),
    )
    assert ends(outcome).total() == len(asked.requests)
    assert set(ends(outcome)) <= {"stop", "timeout", "error"}
    assert outcome.num_resent > 0
    for served, wanted in zip(outcome.requests, asked.requests, strict=True):
        assert list(served.token_times) == sorted(served.token_times)
        assert len(served.token_times) == served.num_output_tokens
        assert not served.is_finished or served.num_output_tokens == wanted.output_tokens


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


def test_a_router_does_not_look_for_prefixes_at_a_replica_that_has_lost_them() -> None:
    """Replica 0 has a little to do when they are asked for again: less than they would save."""
    asked = workload(
        *(request(at, 160, 2, text=7) for at in (0.0, 2.001)), request(2.0, 20, 50, text=8)
    )
    failure = Incidents(failures=(Failure(replica=0, at=1.0, down=0.5),))
    died = simulate_fleet(config(), asked, Fleet(2, "prefix", incidents=failure))
    assert list(died.replica_of) == [0, 1, 0]
    assert list(simulate_fleet(config(), asked, Fleet(2, "prefix")).replica_of) == [0, 0, 0]


def test_a_straggler_that_dies_comes_back_as_one() -> None:
    incidents = Incidents(
        failures=(Failure(replica=0, at=1.0, down=0.5),),
        stragglers=(Straggler(replica=0, slowdown=3.0),),
    )
    fleet = Fleet(1, "session", incidents=incidents)
    (served,) = simulate_fleet(config(), workload(request(2.0, 100, 4)), fleet).requests
    assert served.end - served.arrival == pytest.approx(3 * 0.0213)


def test_a_replica_that_is_back_has_nothing_to_do() -> None:
    """What it had when it died is no work of its any more."""
    asked = workload(request(0.0, 900, 50), request(1.0, 100, 4), request(1.0, 101, 4))
    failure = Incidents(failures=(Failure(replica=0, at=0.1, down=0.1),))
    outcome = simulate_fleet(config(), asked, Fleet(2, "least_work", incidents=failure))
    assert list(outcome.replica_of) == [0, 0, 1]


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


def test_a_straggler_that_is_slow_twice_is_so_until_the_last_end() -> None:
    """Three times as slow throughout, and twice that from second 2 to 4."""
    stragglers = (
        Straggler(replica=0, slowdown=3.0),
        Straggler(replica=0, slowdown=2.0, at=2.0, duration=2.0),
    )
    slow = Incidents(stragglers=stragglers)
    asked = workload(*(request(at, 100, 4) for at in (0.0, 3.0, 5.0)))
    outcome = simulate_fleet(config(), asked, Fleet(1, "prefix", incidents=slow))
    took = [served.end - served.arrival for served in outcome.requests]
    assert took == pytest.approx([3 * 0.0213, 6 * 0.0213, 3 * 0.0213])


def test_a_replica_may_die_again_in_the_moment_in_which_it_is_back() -> None:
    """In whatever order that is written down."""
    failures = (Failure(replica=0, at=2.0), Failure(replica=0, at=1.0, down=1.0))
    asked = workload(request(1.5, 100, 4), request(3.0, 100, 4))
    fleet = Fleet(2, "least_work", incidents=Incidents(failures=failures))
    assert ends(simulate_fleet(config(), asked, fleet)) == {"stop": 2}


def test_deadlines_closer_than_a_timer_can_be_are_met_as_by_the_engine() -> None:
    """The timer for the first of them stands when the second comes."""
    asked = [request(0.0, 900, 4), request(0.0, 100, 4, timeout=0.0005)]
    asked += [request(0.0003, 101, 4, timeout=0.0003), request(0.0004, 102, 4, timeout=0.0102)]
    assert ends(check_equal(config(max_num_seqs=1), workload(*asked)))["timeout"] == 3


def test_what_is_computed_is_no_work_any_more() -> None:
    """Replica 0 holds 900 tokens and has computed them, replica 1 has 600 to compute and hold."""
    asked = workload(request(0.0, 900, 400), request(0.2, 600, 4), request(0.201, 10, 4))
    outcome = simulate_fleet(config(), asked, Fleet(2, "least_work"))
    assert list(outcome.replica_of) == [0, 1, 0]


def test_conversations_of_two_crowds_have_homes_of_their_own() -> None:
    asked = traffic(20).times(2)
    places = simulate_fleet(config(), asked, Fleet(4, "session")).replica_of
    assert list(places[:20]) != list(places[20:])


def test_a_deadline_in_a_run_of_decodes_leaves_what_had_come_by_then() -> None:
    asked = workload(request(0.0, 100, 500, timeout=0.5), request(0.0, 101, 300))
    fleet = check_equal(config(), asked)
    assert ends(fleet) == {"timeout": 1, "stop": 1}
    assert fleet.requests[0].num_output_tokens > 100


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


def test_what_cannot_be_is_refused_at_the_door(refused: Callable[[list[str], str], None]) -> None:
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
        (["--fleet", "2", "--price-per-hour", "nan"], "must be a number of at least 0, got nan"),
        (["--fleet", "2", "--live"], "--fleet is simulated"),
        (["--fleet", "sixten"], "unknown fleet 'sixten' (did you mean 'sixteen'?)"),
        (["--workload", "breakdown"], "has incidents, which befall replicas: give compare --fleet"),
    ):
        refused(["compare", "fcfs", *(mixed if "--workload" not in words else []), *words], said)


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
    overview = printed.split("\n\n")[1].splitlines()
    assert len(overview) == 6
    assert "TTFT p99" in overview[0]
    assert [line.split()[:2] for line in overview[1:5]] == [
        [policy, router]
        for policy in ("fcfs", "chunked_prefill")
        for router in ("round_robin", "session")
    ]
    for other in ("fcfs session", "chunked_prefill round_robin", "chunked_prefill session"):
        assert f"fcfs round_robin  {other}" in printed
    assert "price, 1M output" in printed
    assert "busiest to mean" in printed
