"""Fits a step-time profile to outcomes: from arrivals and times of tokens to what steps take.

Knows rounds and decodes as `rounds` finds them. For any log of a server that is not ours, as long
as that runs prompts in rounds of their own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError
from aioserve.lab.outcomes.reader import Outcome
from aioserve.lab.outcomes.rounds import decode_spans, rounds_after_ends
from aioserve.runner.profile import StepTimeModel

Floats = npt.NDArray[np.float64]

# A card multiplies matrices in tiles of so many rows, so what a round takes jumps from one multiple
# to the next. Measured on the A10G of the VTC artifact; a table of finer steps had too few rounds.
TILE_TOKENS = 128
# Seconds by which a round may differ from the straight line through all rounds: one that took more
# had a decode before it. Less than a decode took in any log seen.
ROUND_TOLERANCE = 0.045
# Rounds of one length differ by no more, unless a decode lies before some of them.
TILE_TOLERANCE = 0.004
# A length of which all rounds had a decode before them lies above its tile by more than this.
DECODE_SECONDS = 0.02
ROW_KNOTS = (1.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 40.0, 48.0, 64.0, 96.0, 128.0)
MIN_DECODES = 31  # of a request whose decodes count: below, one step more or less is a large error
NUM_PASSES = 30
MIN_SEEN = 10.0  # requests whose whole time a number of rows must have been seen for, to be told
IDLE_MS = 11.0  # half of a poll of 10 ms and the way of a request to the server; a guess
COLD_SECONDS = 0.1  # a first token that is later than predicted by more found a cold server


class Session(NamedTuple):
    """How one log differs from the others of the same machine."""

    host_factor: float  # of the profile's `base_ms` and `decode_ms`
    cold_ms: float  # more for its first step
    error: float  # median relative error of a request's decodes


def fit_outcomes(
    logs: Sequence[Sequence[Outcome]], source: str
) -> tuple[StepTimeModel, list[Session]]:
    """A profile of the machine that served all the logs, and what is each log's own.

    Raises `ConfigError` where the logs have too few rounds after full memory, or too few decodes.
    """
    curve = _fit_rounds(logs)
    tokens, seconds = np.array(curve).T
    knots, decode_ms, context_us, factors, errors = _fit_decodes(logs, (tokens, seconds))
    model = StepTimeModel(
        base_ms=0.0,
        prefill_token_us=0.0,
        decode_us=0.0,
        context_token_us=context_us,
        idle_ms=IDLE_MS,
        prefill_ms=tuple((float(x), 1e3 * float(y)) for x, y in curve),
        decode_ms=tuple(zip(knots, decode_ms, strict=True)),
        source=source,
        error=f"decodes of requests: median error {np.median(errors):.2%}, by log "
        f"{', '.join(f'{error:.2%}' for error in errors)}",
    )
    sessions = [
        Session(factor, _cold_ms(log, tokens, seconds), error)
        for log, factor, error in zip(logs, factors, errors, strict=True)
    ]
    return model, sessions


def _fit_rounds(logs: Sequence[Sequence[Outcome]]) -> list[tuple[float, float]]:
    """(tokens, seconds): two points for each tile that rounds were seen in."""
    found = [rounds_after_ends(log) for log in logs]
    tokens = np.concatenate([t for t, _ in found])
    seconds = np.concatenate([s for _, s in found])
    if len(tokens) < 2 * MIN_DECODES:
        raise ConfigError(
            f"{len(tokens)} rounds of prompts came right after the end of a request: too few to "
            "tell what a round takes (the server must have been short of memory or seats)"
        )
    line = _lower_line(tokens, seconds)
    near = np.abs(seconds - np.polyval(line, tokens)) < ROUND_TOLERANCE
    tokens, seconds = tokens[near], seconds[near]
    curve = []
    for tile in range(int(tokens.max() - 1) // TILE_TOKENS + 1):
        first, last = TILE_TOKENS * tile + 1, TILE_TOKENS * (tile + 1)
        inside = (tokens >= first) & (tokens <= last)
        if inside.any():
            begin, end = _fit_tile(tokens[inside] - first, seconds[inside])
            curve += [(float(first), begin), (float(last), end)]
    return curve


def _lower_line(tokens: Floats, seconds: Floats) -> Floats:
    """The line along the quickest rounds: those with decodes before them lie above it."""
    places = np.quantile(tokens, np.linspace(0, 1, 25))
    low = []
    for begin, end in pairwise(places):
        inside = (tokens >= begin) & (tokens <= end)
        low.append((tokens[inside].mean(), np.quantile(seconds[inside], 0.2)))
    x, y = np.array(low).T
    fitted: Floats = np.polyfit(x, y, 1)
    for _ in range(NUM_PASSES):
        residuals = y - np.polyval(fitted, x)
        weights = 1.0 / np.maximum(np.abs(residuals), TILE_TOLERANCE)  # least absolute errors
        fitted = np.polyfit(x, y, 1, w=np.sqrt(weights))
    return fitted


def _fit_tile(places: Floats, seconds: Floats) -> tuple[float, float]:
    """Seconds at the first and at the last token of a tile; `places` count from its first."""
    lengths = np.unique(places)
    quick = np.array([np.quantile(seconds[places == length], 0.25) for length in lengths])
    alone = quick < np.quantile(quick, 0.25) + DECODE_SECONDS
    lengths, quick = lengths[alone], quick[alone]
    middle = float(np.median(quick))
    if len(lengths) < 3:
        return middle, middle
    slope, begin = np.polyfit(lengths, quick, 1)
    if slope < 0:
        return middle, middle
    return float(begin), float(begin + slope * (TILE_TOKENS - 1))


def _fit_decodes(
    logs: Sequence[Sequence[Outcome]], round_seconds: tuple[Floats, Floats]
) -> tuple[list[float], list[float], float, list[float], list[float]]:
    """Knots of rows, ms at each, us per context token, and of each log its factor and error."""
    spans = [decode_spans(log, round_seconds, ROW_KNOTS, MIN_DECODES) for log in logs]
    if not all(len(of_log.seconds) for of_log in spans):
        raise ConfigError(f"a log has no request of more than {MIN_DECODES} output tokens")
    seen = np.concatenate([of_log.rows for of_log in spans]).sum(axis=0) > MIN_SEEN
    spans = [of_log._replace(rows=_folded(of_log.rows, seen)) for of_log in spans]
    # Each log counts by the root of its requests, lest the longest decide alone.
    weights = [np.full(len(s.seconds), len(s.seconds) ** -0.5) for s in spans]
    weight, seconds = np.concatenate(weights), np.concatenate([s.seconds for s in spans])
    factors = np.ones(len(logs))
    for _ in range(NUM_PASSES):
        rows = [f * s.rows[:, seen] for f, s in zip(factors, spans, strict=True)]
        context = np.concatenate([1e-6 * s.context for s in spans])
        columns = np.column_stack([np.concatenate(rows), context])
        fitted = np.linalg.lstsq(columns * weight[:, None], seconds * weight, rcond=None)[0]
        fitted = np.maximum(fitted, 0.0)
        for i, s in enumerate(spans):
            rest = s.seconds - 1e-6 * fitted[-1] * s.context
            factors[i] = np.median(rest / np.maximum(s.rows[:, seen] @ fitted[:-1], 1e-9))
        factors /= np.exp(np.mean(np.log(factors)))
    errors = []
    for factor, s in zip(factors, spans, strict=True):
        predicted = factor * s.rows[:, seen] @ fitted[:-1] + 1e-6 * fitted[-1] * s.context
        errors.append(float(np.median(np.abs(predicted / s.seconds - 1))))
    knots = [knot for knot, is_seen in zip(ROW_KNOTS, seen, strict=True) if is_seen]
    return (
        knots,
        [1e3 * float(value) for value in fitted[:-1]],
        float(fitted[-1]),
        [float(factor) for factor in factors],
        errors,
    )


def _folded(rows: Floats, seen: npt.NDArray[np.bool_]) -> Floats:
    """The shares of numbers of rows that were hardly seen, given to the nearest that was."""
    knots, found = np.array(ROW_KNOTS), rows * seen
    for place in np.flatnonzero(~seen):
        nearest = np.flatnonzero(seen)[np.argmin(np.abs(knots[seen] - knots[place]))]
        found[:, nearest] += rows[:, place]
    return found


def _cold_ms(log: Sequence[Outcome], tokens: Floats, seconds: Floats) -> float:
    """How much later the first token of the log came than a round of its prompt takes."""
    first = min(log, key=lambda outcome: outcome.arrival_s)
    late = first.ttft_s - float(np.interp(first.prompt_tokens, tokens, seconds))
    return 1e3 * late - IDLE_MS if late > COLD_SECONDS else 0.0
