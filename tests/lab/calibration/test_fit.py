"""A step-time model is found again from steps that it made, through noise and accidents."""

import random

import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.calibration import fit_step_time, non_negative_least_squares
from aioserve.runner.step_times import StepTimeModel
from aioserve.scheduler.output import StepFeatures

TRUE = StepTimeModel(
    base_ms=3.0,
    prefill_token_us=40.0,
    decode_us=90.0,
    context_token_us=0.2,
    query_context_ns=8.0,
    prefill_us=700.0,
)


def make_steps(rng: random.Random, count: int) -> list[StepFeatures]:
    steps = []
    for _ in range(count):
        prefill, decodes = rng.choice([0, rng.randrange(2, 2000)]), rng.randrange(1, 64)
        context = rng.randrange(1000, 100_000)
        attention, prefills = prefill * rng.randrange(1, 4000), rng.randrange(1, 8)
        steps.append(StepFeatures(prefill, decodes, context, attention, prefills if prefill else 0))
    return steps


def coefficients(model: StepTimeModel) -> list[float]:
    return [
        model.base_ms,
        model.prefill_token_us,
        model.decode_us,
        model.context_token_us,
        model.query_context_ns,
        model.prefill_us,
    ]


def test_exact_steps_give_the_exact_model() -> None:
    steps = make_steps(random.Random(0), 50)
    model = fit_step_time(steps, [TRUE.seconds(step) for step in steps], "a test")
    assert coefficients(model) == pytest.approx(coefficients(TRUE), rel=1e-6)
    assert model.error.startswith("relative error median 0.0%, p90 0.0% over 50 steps")
    assert model.source == "a test"


def test_noise_and_accidents_move_it_little() -> None:
    rng = random.Random(1)
    steps = make_steps(rng, 800)
    seconds = [TRUE.seconds(s) * rng.lognormvariate(0, 0.1) for s in steps]
    for i in rng.sample(range(800), 20):
        seconds[i] *= 50  # something else had the machine
    model = fit_step_time(steps, seconds, "a test")
    clean = [model.seconds(step) / TRUE.seconds(step) for step in steps]
    assert max(clean) < 1.2
    assert min(clean) > 0.85
    assert sum(clean) / len(clean) == pytest.approx(1.0, abs=0.04)  # noise makes it no faster


def test_a_kind_of_step_counts_however_seldom_it_is() -> None:
    # A token of a long prompt takes longer than one of a short one: no line fits all of these. By
    # the number of steps alone, the longest would be predicted at 0.63 of what it takes.
    steps, seconds = [], []
    for num_tokens, count in ((100, 900), (300, 500), (1000, 100), (4000, 10)):
        steps += [StepFeatures(num_tokens, 0, 0, 0)] * count
        seconds += [1e-5 * num_tokens**1.15] * count
    model = fit_step_time(steps, seconds, "a test")
    assert model.seconds(steps[-1]) / seconds[-1] > 0.72
    assert model.seconds(steps[0]) / seconds[0] < 1.4


def test_no_coefficient_is_negative_and_what_never_occurred_costs_nothing() -> None:
    rng = random.Random(2)
    steps = [StepFeatures(0, rng.randrange(1, 9), 10, 0) for _ in range(100)]
    seconds = [0.02 - 0.001 * step.num_decodes for step in steps]  # faster with more
    model = fit_step_time(steps, seconds, "a test")
    assert model.decode_us == model.prefill_token_us == model.query_context_ns == 0
    assert min(coefficients(model)) >= 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot fit step times to 3 steps"):
        fit_step_time([StepFeatures(0, 1, 1, 0)] * 5, [1.0, 1.0, 1.0, 0.0, 0.0], "a test")


def test_the_best_non_negative_solution_is_found() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
        x = non_negative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ x - target)
        assert (x >= 0).all()  # and the conditions of Karush, Kuhn and Tucker:
        assert (gradient > -1e-9).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9
