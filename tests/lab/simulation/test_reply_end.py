"""No policy of the lab can tell how long a reply will be: its end comes as a token."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import run_live, simulate
from aioserve.lab.workloads.workload import Piece, ReplyLimit, Workload, WorkloadRequest
from tests.lab.simulation.test_run import EXACT
from tests.slow import mostly_slow

SHORTEST_FIRST = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class ShortestFirst(BaseScheduler):
    """The shortest job first, as far as max_tokens tells how short a job is."""

    def order(self, request):
        return request.sampling_params.max_tokens

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request, whole=True):
                break
        return step.output()
'''


def workload(limit: ReplyLimit) -> Workload:
    """Far more than can run at once, at one time: every fourth reply is long."""
    requests = tuple(
        WorkloadRequest(0.0, (Piece(i, 20),), 200 if i % 4 == 0 else 10) for i in range(40)
    )
    return Workload("w", requests, reply_limit=limit)


@pytest.fixture
def configs(tmp_path: Path) -> tuple[EngineConfig, EngineConfig]:
    file = tmp_path / "shortest_first.py"
    file.write_text(SHORTEST_FIRST)
    made = []
    for policy in ("fcfs", str(file)):
        config = EngineConfig.load(
            None, [("scheduler.policy", policy), ("scheduler.max_num_seqs", 4)]
        )
        made.append(msgspec.structs.replace(config, runner=EXACT))
    return made[0], made[1]


def mean_ttft(outcome: RunOutcome) -> float:
    assert all(r.finish_reason == "stop" for r in outcome.requests)
    return sum(r.ttft for r in outcome.requests) / len(outcome.requests)


def test_a_policy_that_sorts_by_max_tokens_is_shortest_first_only_where_clients_state_lengths(
    configs: tuple[EngineConfig, EngineConfig],
) -> None:
    plain, shortest = configs
    told, untold = workload(ReplyLimit(factor=1.0)), workload(ReplyLimit())
    assert mean_ttft(simulate(shortest, told)) < 0.6 * mean_ttft(simulate(plain, told))
    assert mean_ttft(simulate(shortest, untold)) == mean_ttft(simulate(plain, untold))


def lengths(outcome: RunOutcome) -> list[int]:
    return [request.num_output_tokens for request in outcome.requests]


def test_a_reply_longer_than_its_client_allows_is_cut_there(
    configs: tuple[EngineConfig, EngineConfig],
) -> None:
    outcome = simulate(configs[0], workload(ReplyLimit(tokens=50)))
    assert Counter(r.finish_reason for r in outcome.requests) == {"stop": 30, "length": 10}
    assert lengths(outcome) == [50, 10, 10, 10] * 10


def test_a_fleet_ends_replies_at_the_same_tokens(
    configs: tuple[EngineConfig, EngineConfig],
) -> None:
    fleet = simulate_fleet(configs[0], workload(ReplyLimit()), Fleet(2, "round_robin"))
    assert lengths(fleet) == [200, 10, 10, 10] * 10
    assert all(r.finish_reason == "stop" for r in fleet.requests)


@pytest.mark.parametrize(
    "settings",
    mostly_slow(
        [
            {},
            {"scheduler": {"pipeline_depth": 2}},
            {"scheduler": {"policy": "chunked_prefill", "options": {"chunk_size": 16}}},
            {"runner": {"simulated_draft_tokens": 3}, "scheduler": {"num_lookahead_tokens": 3}},
            {"cache": {"num_kv_blocks": 20}},
        ],
        but=[{"scheduler": {"pipeline_depth": 2}}, {"cache": {"num_kv_blocks": 20}}],
    ),
    ids=str,
)
def test_live_an_end_of_the_models_own_comes_too_early_or_too_late_and_never_shows(
    configs: tuple[EngineConfig, EngineConfig], settings: dict[str, dict[str, Any]]
) -> None:
    """The runner ends replies by itself after 1 to 63 tokens."""
    made = configs[0]
    runner = {"simulated_output_tokens": 32, "step_base_ms": 0.0} | settings.get("runner", {})
    for section, fields in {**settings, "runner": runner}.items():
        changed = msgspec.structs.replace(getattr(made, section), **fields)
        made = msgspec.structs.replace(made, **{section: changed})
    outcome = run_live(made, workload(ReplyLimit()))
    assert lengths(outcome) == [200, 10, 10, 10] * 10
    assert all(r.finish_reason == "stop" for r in outcome.requests)
    assert bool(outcome.num_preemptions) == ("cache" in settings)
    assert bool(outcome.num_right_drafts) == (runner.get("simulated_draft_tokens", 0) > 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [("0", "got '0'"), ("x0.5", "from x1 on"), ("own", "such as x2"), ("-3", "-3")],
)
def test_a_limit_that_makes_no_sense_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ReplyLimit.parse(text)


def test_the_limit_of_clients_who_state_none_is_the_same_for_all_and_above_every_reply() -> None:
    requests = [WorkloadRequest(0.0, (Piece(1, 9),), n) for n in (5, 3000)]
    requests.append(WorkloadRequest(0.0, (Piece(1, 9),), 5, max_tokens=7))
    load = Workload("w", tuple(requests))
    assert load.max_tokens(room=10**6) == [4096, 4096, 7]
    assert load.max_tokens(room=3100) == [3091, 3091, 7]
    assert Workload("w", tuple(requests[:1])).max_tokens(10**6) == [2048]
    half = msgspec.structs.replace(load, reply_limit=ReplyLimit.parse("x1.5"))
    assert half.max_tokens(10**6) == [7, 4500, 7]
