"""Fits a step-time model to measured steps: non-negative, relative, robust least squares.

Knows features and seconds. Does not know where they were measured.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError
from aioserve.runner.profile import StepTimeModel
from aioserve.scheduler.output import StepFeatures

Array = npt.NDArray[np.float64]

MIN_STEPS = 8  # for six coefficients; with fewer the error would say nothing
NUM_ROUNDS = 20
# Errors beyond this multiple of the median one count linearly, not squared: a step that waited for
# something else must not set the price of tokens. Wide, because steps that take a little long are
# part of what steps take: without them every simulation would be too fast.
HUBER = 6.0
# Kinds of steps count alike, however many steps there were of each: a whole prompt is one step in a
# thousand, and the one that all requests wait for. A kind with fewer steps than this counts by its
# steps: a guess that keeps one odd step from setting a price.
MIN_STEPS_OF_A_KIND = 5


def fit_step_time(
    features: Sequence[StepFeatures], seconds: Sequence[float], source: str
) -> StepTimeModel:
    """The model whose relative errors over these steps, kind by kind, are least; `error` says how
    large they are, step by step.

    Coefficients of features that no step has are 0. Raises `ConfigError` if there are fewer than
    `MIN_STEPS` steps that took any time.
    """
    taken = np.asarray(seconds, dtype=np.float64)
    columns = np.column_stack([np.ones(len(taken)), np.asarray(features, dtype=np.float64)])
    columns, taken = columns[taken > 0], taken[taken > 0]
    if len(taken) < MIN_STEPS:
        raise ConfigError(
            f"cannot fit step times to {len(taken)} steps: at least {MIN_STEPS} are needed"
        )
    coefficients = _fit_robustly(columns, taken, _importance(columns))
    predicted = columns @ coefficients
    errors = np.abs(predicted / taken - 1)
    base, prefill, decode, context, attention, row = map(float, coefficients)
    return StepTimeModel(
        base_ms=1e3 * base,
        prefill_token_us=1e6 * prefill,
        decode_us=1e6 * decode,
        context_token_us=1e6 * context,
        query_context_ns=1e9 * attention,
        prefill_us=1e6 * row,
        source=source,
        error=(
            f"relative error median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%} "
            f"over {len(taken)} steps, {predicted.sum() / taken.sum() - 1:+.1%} over their sum"
        ),
    )


def _importance(columns: Array) -> Array:
    """The weight of each step: kinds are prefill tokens and decodes to the next power of two."""
    kinds = np.ceil(np.log2(columns[:, 1:3] + 1))
    _, kind, counts = np.unique(kinds, axis=0, return_inverse=True, return_counts=True)
    weights: Array = 1.0 / np.maximum(counts, MIN_STEPS_OF_A_KIND)[kind.ravel()]
    return weights


def _fit_robustly(columns: Array, taken: Array, importance: Array) -> Array:
    """Least squares of errors relative to the prediction, reweighted until outliers have little
    to say. Relative to what was measured, noise would make every prediction too small.
    """
    scale = taken
    weights = np.ones(len(taken))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        before = coefficients
        factor = weights * np.sqrt(importance) / scale
        coefficients = non_negative_least_squares(columns * factor[:, None], taken * factor)
        predicted = columns @ coefficients
        scale = np.maximum(predicted, 1e-3 * taken)  # it may be 0 where nothing costs anything
        errors = np.abs(predicted - taken) / scale
        limit = max(HUBER * float(np.median(errors)), 1e-9)
        # The root, because it multiplies a row before that is squared.
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
        if np.allclose(coefficients, before, rtol=1e-6, atol=0):
            break
    return coefficients


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 that minimizes |matrix x - target|, exactly, for a handful of columns.

    The best is an unconstrained solution over some of the columns, so all choices are tried; a
    factorization makes each of them a problem of that handful of rows.
    """
    scale = np.linalg.norm(matrix, axis=0)
    used = np.flatnonzero(scale)
    q, r = np.linalg.qr(matrix[:, used] / scale[used])
    projected = q.T @ target
    best, best_error = np.zeros(matrix.shape[1]), float(projected @ projected)
    for size in range(1, len(used) + 1):
        for chosen in map(list, combinations(range(len(used)), size)):
            x = np.linalg.lstsq(r[:, chosen], projected, rcond=1e-10)[0]
            residual = r[:, chosen] @ x - projected
            error = float(residual @ residual)
            if (x >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(matrix.shape[1]), error
                best[used[chosen]] = x / scale[used[chosen]]
    return best
