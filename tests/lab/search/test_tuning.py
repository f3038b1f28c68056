"""The best of many is chosen on one part, and what it is worth is said of another."""

import random
from collections.abc import Sequence

import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.measures import NOISE
from aioserve.lab.search import render_tuning
from aioserve.lab.tuning import DEFAULT, RATE, RateScores, Split, Tuning, grid, tune
from aioserve.lab.workloads.workload import Workload

NAMES = [*(f"x={i}" for i in range(20)), DEFAULT]
PARTS = Split([Workload("training", ())], [Workload("later", ())], "two parts")


def tuned(gain: float, noise: float, seed: int = 0) -> Tuning:
    """Twenty candidates of which the first is better by `gain`; seeds differ by `noise`."""
    rng = random.Random(seed)

    def score(candidates: Sequence[Candidate], _: Sequence[Workload]) -> RateScores:
        better = [gain if candidate.name == "x=0" else 0.0 for candidate in candidates]
        return RateScores([[10 + b + rng.gauss(0, noise) for _ in range(5)] for b in better])

    return tune([Candidate(name, EngineConfig()) for name in NAMES], PARTS, score)


def test_a_gain_that_is_chance_is_not_there_on_the_held_out_part() -> None:
    found = [tuned(gain=0.0, noise=1.0, seed=seed) for seed in range(30)]
    in_training = sum(t.gain_in_training.value for t in found) / len(found)
    held_out = sum(t.gain.value for t in found) / len(found)
    assert in_training > 0.5
    assert abs(held_out) < 0.3
    surely_better = [t for t in found if t.gain.verdict == "better"]
    assert len(surely_better) <= 4  # of 30 intervals at 95%, on one side
    doubtful = next(t for t in found if t.gain.verdict == NOISE)
    said = render_tuning(doubtful, RATE)
    assert "is the best of 21 in training" in said
    assert "That is biased in its favour: it was chosen for it." in said
    assert "Whether the gain holds cannot be told from noise." in said


def test_a_true_gain_holds() -> None:
    found = tuned(gain=5.0, noise=0.1)
    assert found.chosen == "x=0"
    assert found.gain.verdict == "better"
    said = render_tuning(found, RATE)
    assert "The gain holds." in said
    assert "% is left." in said


def test_where_the_default_is_the_best_there_is_nothing_to_gain() -> None:
    found = tuned(gain=0.0, noise=0.0)
    assert found.chosen == DEFAULT
    assert "there is nothing to gain" in render_tuning(found, RATE)


def test_all_combinations_of_values_are_tried_and_the_default_last() -> None:
    settings = [
        ("scheduler.options.chunk_size", "64,128"),
        ("scheduler.max_num_seqs", "8, 16"),
        ("cache.block_size", "16"),
    ]
    found = grid("chunked_prefill", settings)
    assert [candidate.name for candidate in found] == [
        "chunk_size=64 max_num_seqs=8",
        "chunk_size=64 max_num_seqs=16",
        "chunk_size=128 max_num_seqs=8",
        "chunk_size=128 max_num_seqs=16",
        DEFAULT,
    ]
    assert found[3].config.scheduler.max_num_seqs == 16
    assert found[3].config.scheduler.options["chunk_size"] == 128
    assert found[4].config.scheduler.options["chunk_size"] == 512  # as its file says
    assert all(candidate.config.cache.block_size == 16 for candidate in found)


def test_a_value_that_the_policy_refuses_is_refused_before_any_run() -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        grid("chunked_prefill", [("scheduler.options.chunk_size", "64,0")])
