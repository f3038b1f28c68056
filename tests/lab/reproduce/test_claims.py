"""Published results, run again: verdicts are a rule, the optimum is one, the page has all."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.lab.reproduce.claims.claim import WORST_FIRST, Finding, verdict_of
from aioserve.lab.reproduce.claims.optimum import Job, latency_of, small_case, total_latency
from aioserve.lab.reproduce.commands import CLAIMS
from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness

WIDE_RANGE = "within the published range, which is wide"
PAGE = Path(__file__).parents[3] / "docs/reproductions.md"


@pytest.mark.parametrize(
    ("published", "runs", "verdict"),
    [
        ((0.5, 0.5), [0.54, 0.46], "reproduced"),
        ((0.5, 0.5), [0.7, 0.9], "direction only"),
        ((0.5, 0.5), [0.7, 1.1], "not reproduced"),
        ((0.5, 0.5), [0.9, 1.0], "not reproduced"),
        ((1.2, 1.7), [1.5], "reproduced"),
        ((1.2, 2.6), [2.8], WIDE_RANGE),
        ((0.0, 0.99), [0.4], WIDE_RANGE),
        ((1.2, 2.6), [4.0], "direction only"),
        ((1.2, 2.6), [0.9], "not reproduced"),
        # Within 10% of a range that ends beside 1, and the wrong way.
        ((0.0, 0.99), [1.05], "not reproduced"),
        ((1.01, 2.6), [0.95], "not reproduced"),
        ((1.01, 2.6), [0.95, 1.2], WIDE_RANGE),
    ],
)
def test_a_verdict_follows_from_the_numbers(
    published: tuple[float, float], runs: list[float], verdict: str
) -> None:
    assert Finding("ratio", published, runs).verdict == verdict


def test_a_number_that_is_no_ratio_has_no_direction_and_the_worst_verdict_counts() -> None:
    number = Finding("preemptions", (100, 100), [50.0], is_ratio=False)
    assert number.verdict == "not reproduced"
    assert verdict_of([Finding("ratio", (0.5, 0.5), [0.5]), number]) == "not reproduced"
    wide = Finding("ratio", (0.0, 0.5), [0.2])
    assert verdict_of([Finding("ratio", (0.5, 0.5), [0.5]), wide]) == WIDE_RANGE


def brute_force(jobs: list[Job], memory: int) -> float:
    """The least total latency over all starts of all requests."""
    horizon = max(j.arrival for j in jobs) + sum(j.output for j in jobs)
    best = float("inf")
    for starts in itertools.product(*(range(j.arrival, horizon) for j in jobs)):
        use = [0] * (2 * horizon)
        for start, job in zip(starts, jobs, strict=True):
            for k in range(job.output):
                use[start + k] += job.prompt + k
        if max(use) <= memory:
            each = zip(starts, jobs, strict=True)
            best = min(best, sum(start + job.output - job.arrival for start, job in each))
    return best


def test_the_optimum_is_that_of_trying_every_start() -> None:
    rng = random.Random(1)
    for _ in range(12):
        memory = rng.randint(6, 10)
        jobs = [Job(rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 3)) for _ in range(3)]
        assert total_latency(jobs, memory) == brute_force(jobs, memory)


def test_the_engine_under_mc_sf_is_never_quicker_than_the_optimum() -> None:
    rng = random.Random(2)
    for at_once in (True, False) * 2:
        memory, jobs = small_case(rng, at_once=at_once)
        ours, optimum = latency_of("zoo.mc_sf", memory, jobs), total_latency(jobs, memory)
        assert optimum <= ours < 2 * optimum


@pytest.mark.parametrize(
    ("rule", "victim"), [("lifo", "c"), ("least_computed", "b"), ("most_computed", "a")]
)
def test_a_rule_names_the_victim(rule: str, victim: str) -> None:
    policy = load_policy("aioserve.lab.reproduce.claims.scheduling:VictimScheduler")
    harness = SchedulerHarness(policy, num_blocks=16, options={"rule": rule}, watermark=0)
    for name, num_tokens in (("a", 30), ("b", 4), ("c", 16)):
        harness.add_request(name, [ord(name) % 50] * num_tokens, max_tokens=20)
    while not any(step.preempted_req_ids for step in harness.steps):
        harness.step()
    assert harness.steps[-1].preempted_req_ids == [victim]


def test_a_claim_is_run_by_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, page = tmp_path / "found.json", tmp_path / "page.md"
    words = ["reproduce", "shortest-prefill", "--seeds", "2"]
    assert main([*words, "--json", str(found), "--markdown", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "vllm#21558" in printed
    assert "direction only" in printed
    [finding] = json.loads(found.read_text())["shortest-prefill"]["findings"]
    assert 0.6 < finding["ours"] < 0.75  # of uniform prompts: two thirds and what a step batches
    assert finding["verdict"] == "direction only"
    assert "## shortest-prefill" in page.read_text()


def test_options_of_the_prediction_are_not_those_of_a_claim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "sarathi", "--svg", "x.svg"])
    assert "--svg" in capsys.readouterr().err


def test_the_page_has_every_claim_with_its_words_and_a_verdict() -> None:
    page = PAGE.read_text()
    for claim in CLAIMS.values():
        assert f"\n## {claim.name}\n" in page
        assert claim.setting in page
        assert claim.here in page
        row = re.search(rf"\(#{claim.name}\) \| .* \| ([a-z, ]+) \|\n", page)
        assert row is not None
        assert row[1] in WORST_FIRST
