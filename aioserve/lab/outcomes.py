"""What a server that is not ours was measured to do, request by request; and a profile from it.

The columns of the CSV are arrival_s, client, prompt_tokens, output_tokens, ttft_s and latency_s.
Holds for servers that run the prompts of a round as one step of their own, while decodes wait.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.lab.workloads.traces import read_table
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name
from aioserve.runner.step_times import StepTimeModel

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Outcome(msgspec.Struct, frozen=True):
    """One request: when it came, what it was, and when its tokens came, in seconds."""

    arrival_s: Seconds
    client: str
    prompt_tokens: Count
    output_tokens: Count  # of the whole reply
    ttft_s: Seconds  # from the arrival to the first token
    latency_s: Seconds  # from the arrival to the last token

    @property
    def first(self) -> float:
        """The time of the first token, in seconds since the start."""
        return self.arrival_s + self.ttft_s

    @property
    def end(self) -> float:
        """The time of the last token, in seconds since the start."""
        return self.arrival_s + self.latency_s


def read_outcomes(path: str | Path, *, extra_prompt_tokens: int = 0) -> list[Outcome]:
    """Return the requests of a file in order of arrival, their prompts `extra_prompt_tokens` longer
    than the file says (what a server puts around a prompt). A file whose name ends in `.gz` is
    unpacked. Raises `ConfigError` with file and line.
    """
    found = []
    for where, outcome in read_table(Path(path), Outcome, "outcomes"):
        if outcome.latency_s < outcome.ttft_s:
            raise ConfigError(f"{where}: the last token came before the first")
        prompt_tokens = outcome.prompt_tokens + extra_prompt_tokens
        found.append(msgspec.structs.replace(outcome, prompt_tokens=prompt_tokens))
    if not found:
        raise ConfigError(f"outcomes {path} has no requests")
    return sorted(found, key=lambda outcome: outcome.arrival_s)


def as_workload(outcomes: list[Outcome], name: str, seed: int = 0) -> Workload:
    """Return the requests as a workload: what came, without what became of it. Every prompt is a
    text of its own, and every client states the length of the reply as its limit, since the servers
    that such logs are of were told it.
    """
    return Workload(
        name,
        tuple(
            WorkloadRequest(
                outcome.arrival_s,
                (Piece(text_name("outcome", seed, place), outcome.prompt_tokens),),
                outcome.output_tokens,
                user=outcome.client,
                max_tokens=outcome.output_tokens,
            )
            for place, outcome in enumerate(outcomes)
        ),
        seed=seed,
        is_trace=True,
    )


# What a log of outcomes tells about steps: rounds of prompts, and the decodes between them. Holds
# for servers that run the prompts of a round as one step of their own, while decodes wait
# (LightLLM, S-LoRA, vLLM without chunked prefill): the first tokens of a round come at one time,
# and between its first and its last token a request takes part in every decode.


Floats = npt.NDArray[np.float64]

# First (or last) tokens that come so close upon each other are of one step: what a front end takes
# to send them, and less than any step takes.
SAME_STEP_SECONDS = 0.012


class Event(NamedTuple):
    """The first tokens of a round, or the last tokens of requests that end in one step."""

    time: float  # seconds since the start, of the first of them
    is_round: bool
    requests: list[int]  # places in the log


def events(outcomes: Sequence[Outcome]) -> list[Event]:
    """Return the events of a log, in order of time."""
    moments = [(outcome.first, True, i) for i, outcome in enumerate(outcomes)]
    moments += [(outcome.end, False, i) for i, outcome in enumerate(outcomes)]
    moments.sort(key=lambda moment: (moment[0], not moment[1]))
    found: list[Event] = []
    last = 0.0
    for time, is_round, i in moments:
        if found and found[-1].is_round == is_round and time - last < SAME_STEP_SECONDS:
            found[-1].requests.append(i)
        else:
            found.append(Event(time, is_round, [i]))
        last = time
    return found


def rounds_after_ends(outcomes: Sequence[Outcome]) -> tuple[Floats, Floats]:
    """(prompt tokens, seconds) of rounds that came right after the end of some request: where the
    memory was full, no decode lies between the two, and the round took all of the time.
    """
    found = []
    happened = events(outcomes)
    for before, after in pairwise(happened):
        if after.is_round and not before.is_round:
            num_tokens = sum(outcomes[i].prompt_tokens for i in after.requests)
            found.append((num_tokens, after.time - before.time))
    tokens, seconds = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return tokens, seconds


class Spans(NamedTuple):
    """The decodes of each request that is long enough, between its first and its last token."""

    seconds: Floats  # of one decode, mean
    rows: Floats  # [request, knot]: share of the time with so many rows, spread over two knots
    context: Floats  # tokens that one decode reads, mean


def decode_spans(
    outcomes: Sequence[Outcome],
    round_seconds: "tuple[Floats, Floats]",
    knots: Sequence[float],
    min_tokens: int,
) -> Spans:
    """`round_seconds` are (tokens, seconds) of a curve: what rounds take is taken out of the time
    between two tokens, and what is left are decodes, one for each output token after the first.
    """
    happened = events(outcomes)
    num_rows, prompts, decoding = np.zeros((3, len(happened) - 1))
    running = np.zeros(len(outcomes), dtype=bool)
    lengths = np.array([outcome.prompt_tokens for outcome in outcomes], dtype=np.float64)
    for i, (event, after) in enumerate(pairwise(happened)):
        running[event.requests] = event.is_round
        num_rows[i] = running.sum()
        prompts[i] = lengths[running].sum()
        seconds = after.time - event.time
        if after.is_round:
            seconds -= float(np.interp(lengths[after.requests].sum(), *round_seconds))
        decoding[i] = max(seconds, 0.0)
    # Places of the first and the last token of each request in `happened`.
    place_of = {
        (i, event.is_round): place for place, event in enumerate(happened) for i in event.requests
    }
    begins = np.array([place_of[i, True] for i in range(len(outcomes))])
    ends = np.array([place_of[i, False] for i in range(len(outcomes))])
    until = np.concatenate([[0.0], np.cumsum(decoding)])
    context = prompts.copy()
    for outcome, begin, end in zip(outcomes, begins, ends, strict=True):
        total = until[end] - until[begin]
        if total > 0:  # a request has said half of its tokens in half of its decoding time
            middle = (until[begin:end] + until[begin + 1 : end + 1]) / 2 - until[begin]
            context[begin:end] += 1 + middle / total * (outcome.output_tokens - 1)
    shares = np.array([np.interp(num_rows, knots, unit) for unit in np.eye(len(knots))]).T
    rows_until = np.vstack([np.zeros(len(knots)), np.cumsum(shares * decoding[:, None], axis=0)])
    context_until = np.concatenate([[0.0], np.cumsum(context * decoding)])
    total = until[ends] - until[begins]
    num_decodes = np.array([outcome.output_tokens - 1 for outcome in outcomes])
    kept = (num_decodes >= min_tokens) & (total > 0)
    begins, ends, total = begins[kept], ends[kept], total[kept]
    return Spans(
        total / num_decodes[kept],
        (rows_until[ends] - rows_until[begins]) / total[:, None],
        (context_until[ends] - context_until[begins]) / total,
    )


# The fit: from arrivals and times of tokens to what steps take.


# A card multiplies matrices in tiles of 128 rows, so what a round takes jumps from one multiple
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
    """The difference of one log from the others of the same machine."""

    host_factor: float  # of the profile's `base_ms` and `decode_ms`
    cold_ms: float  # more for its first step
    error: float  # median relative error of a request's decodes


def fit_outcomes(
    logs: Sequence[Sequence[Outcome]], source: str
) -> tuple[StepTimeModel, list[Session]]:
    """Return a profile of the machine that served all the logs, and what is each log's own.

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
    """Return the line along the quickest rounds: those with decodes before them lie above it."""
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
    """Return seconds at the first and at the last token of a tile; `places` count from its
    first.
    """
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
    """Return the shares of numbers of rows that were hardly seen, given to the nearest that was."""
    knots, found = np.array(ROW_KNOTS), rows * seen
    for place in np.flatnonzero(~seen):
        nearest = np.flatnonzero(seen)[np.argmin(np.abs(knots[seen] - knots[place]))]
        found[:, nearest] += rows[:, place]
    return found


def _cold_ms(log: Sequence[Outcome], tokens: Floats, seconds: Floats) -> float:
    """Return how much later the first token of the log came than a round of its prompt takes."""
    first = min(log, key=lambda outcome: outcome.arrival_s)
    late = first.ttft_s - float(np.interp(first.prompt_tokens, tokens, seconds))
    return 1e3 * late - IDLE_MS if late > COLD_SECONDS else 0.0
