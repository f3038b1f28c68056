"""Every policy of the zoo is found by its name, keeps the contract and says what it is."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.lab.comparison.candidates import load_candidates
from aioserve.lab.zoo.gallery import LABELS, read_card, read_cards
from aioserve.scheduler import BaseScheduler, available_policies, load_policy
from aioserve.scheduler.descriptions import describe_policies
from aioserve.support.files import config_names, find_config
from aioserve.testing import cost
from aioserve.testing.contract import PolicyContract, Subject
from aioserve.testing.cost import check_cost
from tests.policy_names import ZOO
from tests.slow import mostly_slow

ROOT = Path(__file__).parents[3]
FILES = {f"zoo.{path.stem}": path for path in (ROOT / "policies/zoo").glob("[!_]*.py")}
MIN_LINES, MAX_LINES = 20, 120
# Of random traffic, at each pipeline depth: a few in every run, all in `make test-all`.
EXAMPLES, ALL_EXAMPLES = 2, 50
# One that pins, and one that plans for service levels.
IN_EVERY_RUN = ("zoo.continuum", "zoo.slos_serve")


@pytest.mark.parametrize("name", IN_EVERY_RUN)
class TestContract(PolicyContract):
    # `TestContractAtLength` asks it of every one.
    test_memory_does_not_grow_with_requests_that_have_ended = None  # type: ignore[assignment]

    @pytest.fixture
    def subject(self, name: str) -> Subject:
        return Subject(load_policy(name), max_examples=EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
class TestContractAtLength(PolicyContract):
    @pytest.fixture
    def subject(self, name: str) -> Subject:
        return Subject(load_policy(name), max_examples=ALL_EXAMPLES)


@pytest.mark.parametrize("name", mostly_slow(ZOO, but=("zoo.mc_sf", "zoo.peak_memory")))
def test_four_times_the_requests_take_hardly_more_than_four_times_the_lines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract allows 8 times as many; sorting alone, were it written in Python, takes 5.4."""
    monkeypatch.setattr(cost, "MOST_TIMES", 4.5)
    policy = load_policy(name)
    assert issubclass(policy, BaseScheduler)
    check_cost(policy, {})


def test_every_file_is_a_policy_of_its_name() -> None:
    assert sorted(FILES) == ZOO
    assert set(FILES) <= available_policies().keys()
    for name in FILES:
        policy = load_policy(name)
        assert issubclass(policy, BaseScheduler)
        assert policy.__module__ == f"aioserve.policies.{name}"
        assert describe_policies()[name] == (policy.__doc__ or "").splitlines()[0]


def test_a_name_that_is_none_of_the_zoo_is_refused_with_the_nearest() -> None:
    for wrong in ("zoo.orka", "orca"):
        with pytest.raises(UnknownPolicyError, match=r"\(did you mean 'zoo\.orca'\?\)"):
            load_policy(wrong)
    with pytest.raises(ConfigError, match=r"unknown config 'zoo\.orka' \(did you mean 'zoo\.orca'"):
        EngineConfig.load("zoo.orka")


def test_a_file_of_that_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zoo.py").write_text(FILES["zoo.sjf"].read_text())
    Path("zoo.yaml").write_text("scheduler: {policy: zoo.py}\n")
    assert load_policy("zoo.py").__name__ == "SJFScheduler"
    assert EngineConfig.load("zoo.yaml").scheduler.policy == "zoo.py"


@pytest.mark.parametrize("name", ZOO)
def test_a_configuration_of_its_name_states_every_option(name: str) -> None:
    """With its default; of a size that is open by default, what the configuration takes for it."""
    assert name in config_names()
    path = find_config(name)
    assert path == ROOT / f"configs/zoo/{name.removeprefix('zoo.')}.yaml"
    scheduler = EngineConfig.load(name).scheduler
    assert scheduler.policy == name
    policy = load_policy(name)
    assert issubclass(policy, BaseScheduler)
    defaults = msgspec.to_builtins(policy.parse_options({}))
    stated = msgspec.to_builtins(policy.parse_options(scheduler.options))
    assert set(scheduler.options) == set(defaults)
    assert {n: stated[n] for n in stated if defaults[n] is not None} == {
        n: value for n, value in defaults.items() if value is not None
    }
    command = f"compare {name} " if policy.sets_frequency else f"--config {name}\n"
    assert f"# python -m aioserve {command}" in path.read_text()
    [candidate] = load_candidates([name])
    assert (candidate.name, candidate.config.scheduler) == (name, scheduler)


@pytest.mark.parametrize("name", ZOO)
def test_the_docstring_has_the_shape_that_the_gallery_shows(name: str) -> None:
    source = FILES[name].read_text()
    card = read_card(name, source)
    assert len(card.aim) <= 90, "Aim is a cell of a table"
    for option in card.options:
        assert option.note, f"{option.name} has no comment on its line"
    assert MIN_LINES <= source.count("\n") <= MAX_LINES
    [policy] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)][-1:]
    assert policy.name == load_policy(name).__name__, "the policy is the last class of its file"
    used = set(re.findall(r"hinted_\w+\(\s*\w+,\s*\"(\w+)\"", source))
    assert used <= set(re.findall(r"`(\w+)`", card.needs)), "Needs names the hints that are read"


def test_a_docstring_of_another_shape_is_refused_by_name() -> None:
    source = FILES["zoo.orca"].read_text()
    with pytest.raises(ValueError, match=r"zoo.orca must have the paragraphs Paper, Aim, .*; got "):
        read_card("zoo.orca", source.replace("\nNeeds: ", "\nNeeds "))
    with pytest.raises(ValueError, match=r"first sentence of zoo.orca must name a paper and its"):
        read_card("zoo.orca", source.replace("OSDI'22", "a paper"))
    assert [card.name for card in read_cards()] == ZOO
    assert LABELS[-1] == "Needs"


# Requests that compete for seats and blocks, with hints, users, priorities and aborts; prints what
# each step runs and preempts.
TRAFFIC = """
import random, sys
from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness
for name in sys.argv[1:]:
    rng = random.Random(7)
    harness = SchedulerHarness(
        load_policy(name), num_blocks=40, max_num_seqs=4, max_model_len=80, pipeline_depth=2,
        max_num_batched_tokens=80,
    )
    for i in range(60):
        hints = {
            "predicted_output_tokens": rng.randrange(1, 30), "session": f"s{i % 7}",
            "program": f"p{i % 5}", "slo_class": "ab"[i % 2], "slo_ttft": 3 + i % 4,
            "tool": f"t{i % 3}", "offline": i % 4 == 0, "reading_speed": 5,
        }
        harness.add_request(
            f"r{i}", [i % 5] * 8 + [rng.randrange(50) for _ in range(rng.randrange(20))],
            max_tokens=rng.randrange(2, 30), user=f"u{i % 6}", priority=i % 3, hints=hints,
        )
        if i % 9 == 8:
            harness.finish(f"r{i - 4}")
        harness.step()
    harness.run_until_idle()
    for step in harness.steps:
        print(name, step.step_id, step.num_scheduled_tokens, step.preempted_req_ids)
"""


@pytest.mark.slow
def test_the_same_events_have_the_same_decisions_in_every_process() -> None:
    def decisions(seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", TRAFFIC, *ZOO],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    first = decisions("1")
    assert first.count("\n") > 60 * len(ZOO)
    assert first == decisions("2")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("zoo.adaserve", "rate", 1.5),
        ("zoo.greenllm", "calm", 1.5),
        ("zoo.greenllm", "calm", 0.0),
        ("zoo.kvcache_wild", "least", 1.0),
    ],
)
def test_an_option_that_is_a_share_or_a_probability_is_refused_beyond_its_bounds(
    name: str, option: str, value: float
) -> None:
    policy = load_policy(name)
    assert issubclass(policy, BaseScheduler)
    with pytest.raises(ConfigError, match=option):
        policy.parse_options({option: value})
