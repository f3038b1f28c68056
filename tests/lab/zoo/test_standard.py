"""The standard workloads of the zoo are frozen, and say what policies and goodput need."""

import inspect
from pathlib import Path

import msgspec
import pytest

from aioserve.lab.workloads.synthetic import read_spec
from aioserve.lab.zoo import standing
from aioserve.lab.zoo.standing import (
    BUDGET,
    DIGEST,
    FURTHER_DIGEST,
    FURTHER_SEEDS,
    SEEDS,
    SETTINGS,
    VERSION,
    WORKLOADS,
    load_policies,
    load_workload,
    policy_names,
    prepared,
    run_standard,
    standard_digest,
)
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.support.files import find_workload, workload_names
from tests.policy_names import SHIPPED, ZOO

STEP_TOKENS = int(dict(SETTINGS)[BUDGET])


def test_the_standard_is_that_of_its_digest() -> None:
    """If this fails, numbers that were published as zoo-1 mean something else: make it zoo-2."""
    assert standard_digest() == DIGEST
    assert standard_digest(FURTHER_SEEDS) == FURTHER_DIGEST


def test_a_workload_of_another_seed_or_rate_has_another_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = standard_digest([1])
    for other in (
        lambda name, seed: load_workload(name, seed + 1),
        lambda name, seed: load_workload(name, seed, 0.99),
    ):
        monkeypatch.setattr(standing, "load_workload", other)
        assert standard_digest([1]) != own
    monkeypatch.setattr(standing, "load_workload", load_workload)
    assert standard_digest([1]) == own


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_class_states_limits_and_hints_and_what_its_clients_allow(name: str) -> None:
    spec = read_spec(find_workload(f"{VERSION}-{name}"))
    for kind in spec.classes:
        assert kind.slo is not None
        assert kind.prediction is not None
        assert kind.max_tokens is not None
        assert kind.hints["slo_class"] == kind.name
        for limit in ("ttft", "tpot"):
            if (stated := getattr(kind.slo, limit)) is not None:
                assert kind.hints[f"slo_{limit}"] == stated
    assert {f"{VERSION}-{name}" for name in WORKLOADS} <= workload_names()


def test_every_policy_takes_part_on_the_same_machine() -> None:
    assert policy_names() == sorted([*SHIPPED, *ZOO])
    workload = load_workload("documents", SEEDS[0])
    for candidate in load_policies(policy_names()):
        config = prepared(candidate, workload).config
        assert config.runner.profile == VERSION
        assert config.cache.num_kv_blocks == 3000
        assert config.model.max_model_len == workload.longest
        policy = load_policy(config.scheduler.policy)
        assert issubclass(policy, BaseScheduler)
        budget = config.scheduler.step_budget(workload.longest)
        assert budget == (workload.longest if policy.runs_whole_prompts else STEP_TOKENS)


@pytest.mark.parametrize("name", [*SHIPPED, *ZOO])
def test_a_policy_by_file_runs_with_the_options_that_it_has_by_name(name: str) -> None:
    """What its configuration states are its defaults, and the chunk is the budget of all."""
    by_name, by_file = (load_policies([path])[0].config.scheduler for path in (name, file_of(name)))
    policy = load_policy(name)
    assert issubclass(policy, BaseScheduler)
    found, expected = (
        msgspec.to_builtins(policy.parse_options(scheduler.options))
        for scheduler in (by_file, by_name)
    )
    for options in (found, expected):
        if "chunk_size" in options:
            options["chunk_size"] = options["chunk_size"] or STEP_TOKENS
    assert found == expected
    assert by_file.max_num_batched_tokens == by_name.max_num_batched_tokens


def file_of(name: str) -> str:
    """The policy as `path/to/file.py:Class`."""
    policy = load_policy(name)
    return f"{inspect.getfile(policy)}:{policy.__name__}"


REJECTS_ALL = """
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class RejectAll(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in list(self.waiting):
            step.reject(request, "no")
        return step.output()
"""


def test_a_policy_that_rejects_every_request_has_nothing_in_time(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REJECTS_ALL)
    [scores] = run_standard(
        load_policies([f"{tmp_path}/mine.py:RejectAll"]), SEEDS[:1], workloads=["agents"]
    )
    assert scores["agents"]["in_time"] == [0.0]
    assert scores["agents"]["unfinished"] == [1000.0]
