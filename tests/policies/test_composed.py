"""composed: parts decide as the policies that they come from; what is wrong with one is named."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from aioserve import EngineConfig
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError, PolicyError
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract, Subject
from aioserve.testing.violation import ContractViolation
from policies.composed import ComposedScheduler
from tests.slow import examples, mostly_slow

ROOT = Path(__file__).parents[2]
COMPOSED = "aioserve.policies.composed:ComposedScheduler"
PAGE = (ROOT / "docs/composing-policies.md").read_text()
(LONGEST_FIRST,) = re.findall(r"`mine.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)

EXAMPLE: dict[str, Any] = {
    "order": {"part": "fair", "weights": {"a": 2.0}},
    "budget": {"part": "latency_budget", "target_itl": 2.0},
    "admission": [{"part": "deadline", "ttft": 20.0}],
}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "nothing named": {},
    "fair order, latency budget, deadlines at the door": EXAMPLE,
    "late requests turned away": EXAMPLE
    | {"admission": [{"part": "deadline", "ttft": 20.0, "late": "reject"}]},
    "urgent ones displace, two seats each": {
        "order": "priority",
        "budget": {"part": "chunk", "chunk_size": 7, "max_requests": 3},
        "admission": [{"part": "seats", "seats": 2}],
        "victim": "priority",
    },
    "response ratio within a latency budget": {"order": "hrrn", "budget": "latency_budget"},
    "fair programs, seats for each": {
        "order": {"part": "fair", "by": "program", "quantum": 20.0},
        "admission": [{"part": "seats", "seats": 1}, "deadline"],
    },
}


USUAL = "urgent ones displace, two seats each"  # parts of every kind


@pytest.mark.parametrize("name", mostly_slow(COMPOSITIONS, but=[USUAL]))
class TestContract(PolicyContract):
    @pytest.fixture
    def subject(self, name: str) -> Subject:
        return Subject(ComposedScheduler, COMPOSITIONS[name], max_examples=6)


def plans(policy: str, options: dict[str, Any], seed: int, num_blocks: int) -> list[Any]:
    """What a policy decides on random traffic."""
    rng = random.Random(seed)
    harness = SchedulerHarness(
        load_policy(policy),
        options=options,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=40,
    )
    for i in range(60):
        prompt = [i % 5] * rng.randint(1, 16)
        harness.add_request(f"r{i}", prompt, max_tokens=rng.randint(2, 20), user="abc"[i % 3])
        if rng.random() < 0.4:
            harness.step()
    harness.run_until_idle()
    return [(step.num_scheduled_tokens, step.preempted_req_ids) for step in harness.steps]


CHUNK = {"part": "chunk", "chunk_size": 16}
DUE = {"ttft": 3.0, "tpot": 0.5}


@pytest.mark.parametrize("num_blocks", mostly_slow([40, 14], but=[14]))
@pytest.mark.parametrize(
    ("policy", "options", "parts"),
    [
        ("fcfs", {}, {}),
        ("chunked_prefill", {"chunk_size": 16}, {"budget": CHUNK}),
        (
            "fair",
            {"chunk_size": 16, "weights": {"a": 3.0}},
            {"order": {"part": "fair", "weights": {"a": 3.0}}, "budget": CHUNK},
        ),
        (
            "latency_budget",
            {"target_itl": 2.0},
            {"budget": {"part": "latency_budget", "target_itl": 2.0}},
        ),
        ("hrrn", {"window": 5}, {"order": {"part": "hrrn", "window": 5}}),
        ("prefix_aged", {"ageing": 3.0}, {"order": {"part": "prefix_aged", "ageing": 3.0}}),
        (
            "deadline",
            {**DUE, "window": 3},
            {
                "order": {"part": "deadline", **DUE, "window": 3},
                "budget": {"part": "deadline", **DUE},
            },
        ),
    ],
)
def test_composed_of_the_parts_of_a_policy_it_decides_as_that_policy(
    policy: str, options: dict[str, Any], parts: dict[str, Any], num_blocks: int
) -> None:
    for seed in range(examples(1, slow=2)):
        expected = plans(policy, options, seed, num_blocks)
        assert plans(COMPOSED, parts, seed, num_blocks) == expected
    assert any(preempted for _, preempted in expected) == (num_blocks == 14)


def order_of_service(harness: SchedulerHarness) -> list[str]:
    return list(dict.fromkeys(name for step in harness.steps for name in step.num_scheduled_tokens))


def test_urgent_requests_take_the_places_of_others() -> None:
    options = {"order": "priority", "victim": "priority"}
    harness = SchedulerHarness(ComposedScheduler, options=options, max_num_seqs=1)
    harness.add_request("calm", [1] * 4, max_tokens=9, priority=1)
    harness.step()
    harness.add_request("urgent", [2] * 4, max_tokens=2)
    harness.step()
    assert list(harness.steps[-1].num_scheduled_tokens) == ["urgent"]
    harness.run_until_idle()


def test_no_group_has_more_seats_than_its_share_and_the_next_group_is_served() -> None:
    options = {"order": "fair", "admission": [{"part": "seats", "seats": 2}]}
    harness = SchedulerHarness(ComposedScheduler, options=options, max_num_seqs=4)
    for i in range(4):
        harness.add_request(f"a{i}", [i] * 4, max_tokens=6, user="a")
    harness.add_request("b", [9] * 4, max_tokens=6, user="b")
    harness.step()
    assert sorted(harness.steps[-1].num_scheduled_tokens) == ["a0", "a1", "b"]
    harness.run_until_idle()


def test_late_requests_come_after_those_that_can_be_in_time() -> None:
    options = {"admission": [{"part": "deadline", "ttft": 5.0}]}
    harness = SchedulerHarness(ComposedScheduler, options=options, max_num_seqs=1)
    harness.add_request("running", [1] * 4, max_tokens=3)
    harness.step()
    harness.add_request("late", [2] * 4, max_tokens=2)
    harness.wait(9)
    harness.add_request("in time", [3] * 4, max_tokens=2)
    harness.run_until_idle()
    assert order_of_service(harness) == ["running", "in time", "late"]


def test_requests_that_are_late_at_the_door_are_turned_away_and_a_log_replays_it(
    tmp_path: Path,
) -> None:
    rng, log = random.Random(1), tmp_path / "log"
    options = {"admission": [{"part": "deadline", "ttft": 0.5, "late": "reject"}]}
    settings = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(
            policy=COMPOSED, options=options, max_num_seqs=4, decision_log=str(log)
        ),
    )
    requests = tuple(
        WorkloadRequest(0.03 * i, (Piece(i, rng.randint(20, 900)),), rng.randint(3, 60))
        for i in range(150)
    )
    outcome = simulate(settings, Workload("w", requests))
    ends = [r.finish_reason for r in outcome.requests]
    assert ends.count("refused") > 20
    assert ends.count("stop") > 20
    assert max(r.ttft for r in outcome.requests if r.finish_reason == "stop") < 1.0
    assert replay(DecisionLog(str(log))).divergence is None


def test_the_shipped_composition_serves_a_simulated_day() -> None:
    settings = EngineConfig.load(ROOT / "configs/composed.yaml")
    requests = tuple(WorkloadRequest(0.02 * i, (Piece(i, 50),), 20) for i in range(40))
    outcome = simulate(settings, Workload("w", requests))
    assert [r.finish_reason for r in outcome.requests] == ["stop"] * 40


def test_a_part_of_ones_own_is_found_by_its_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LONGEST_FIRST)
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"scheduler:\n  policy: {COMPOSED}\n  max_num_seqs: 1\n"
        "  options:\n    order: {part: 'mine.py:LongestFirst', limit: 9}\n"
    )
    options = EngineConfig.load(config).scheduler.options
    harness = SchedulerHarness(ComposedScheduler, options=options, max_num_seqs=1)
    for name, length in (("short", 3), ("longest", 30), ("long", 9)):
        harness.add_request(name, [1] * length, max_tokens=2)
    harness.run_until_idle()
    assert order_of_service(harness) == ["longest", "long", "short"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"order": "fiar"},
            r"options\.order: unknown part 'fiar' \(did you mean 'fair'\?\); parts for order: arri",
        ),
        ({"order": "latency_budget"}, "'latency_budget' must have one part for order"),
        ({"budget": {"chunk_size": 3}}, r"options\.budget must name a part, as in {part: fair}"),
        (
            {"order": {"part": "fair", "wieghts": {}}},
            r"options\.order, part 'fair': .*wieghts.*weights",
        ),
        (
            {"admission": ["seats", {"part": "deadline", "late": "never"}]},
            r"options\.admission\[1\], part 'deadline': .*'never'",
        ),
        ({"victim": {"part": "priority", "x": 1}}, r"options\.victim, part 'priority'"),
        ({"victim": "nowhere.py"}, r"options\.victim: no file nowhere\.py"),
        ({"order": "aioserve.policies.fair:FairScheduler"}, "is no part for order"),
        ({"ordre": "fair"}, r"options of policy ComposedScheduler: .*ordre.*order"),
    ],
)
def test_an_error_names_the_part_what_came_and_where(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ComposedScheduler.parse_options(options)


def test_what_a_part_raises_is_told_with_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "raising.py"
    file.write_text(LONGEST_FIRST.replace("return -min(", "return 1 / 0\n        return -min("))
    harness = SchedulerHarness(ComposedScheduler, options={"order": str(file)})
    with pytest.raises(PolicyError, match=r"ZeroDivisionError.* in order\(\) \(raising\.py:11\)"):
        harness.add_request("a", [1])


def test_gauges_of_parts_have_their_kind_before_their_names() -> None:
    harness = SchedulerHarness(ComposedScheduler, options=EXAMPLE)
    scheduler = harness.scheduler
    assert isinstance(scheduler, ComposedScheduler)
    assert set(scheduler.read_gauges()) == {
        *("order_floor", "order_clients", "order_clients_waiting"),
        *("budget_trial_budget", "budget_is_fitted"),
    }


FORGETS = """
from aioserve.scheduler import AdmissionPart, BudgetPart, OrderPart


class Forgets(OrderPart):
    def line(self, step, prompts, num_tokens):
        yield from prompts


class NeverAgrees(AdmissionPart):
    def ask(self, request, step):
        return "hold"


class Mumbles(AdmissionPart):
    def ask(self, request, step):
        return "perhaps"


class OrdersByNothing(OrderPart):
    def key(self, request):
        return float("nan")


class GivesNothing(BudgetPart):
    def for_prompts(self, step, prompts):
        return 0


class LetsThePromisePass(OrderPart):
    def line(self, step, prompts, num_tokens):
        yield from prompts
        yield from reversed(list(self.policy.waiting))
"""


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("order", "Forgets", "no request was scheduled for 30 s"),
        ("admission", "NeverAgrees", "no request was scheduled for 30 s"),
        (
            "admission",
            "Mumbles",
            r"Mumbles.ask\(\) must return 'admit', 'last' or 'hold', got '",
        ),
        ("order", "OrdersByNothing", r"order\(\) returned nan for \w+: NaN has no place in line"),
        ("budget", "GivesNothing", "no request was scheduled for 30 s"),
        ("order", "LetsThePromisePass", r"\w+ is admitted, but \w+ stands before it and waits"),
    ],
)
def test_the_contract_catches_a_part_that_is_wrong(
    kind: str, part: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(FORGETS)
    named = f"{tmp_path / 'wrong.py'}:{part}"
    options = {kind: [named] if kind == "admission" else named}
    subject = Subject(ComposedScheduler, options, shrink=False)
    with pytest.raises((ContractViolation, PolicyError), match=message):
        PolicyContract().test_admission_respects_declared_order(subject, 1)
