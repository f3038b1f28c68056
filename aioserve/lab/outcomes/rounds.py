"""What a log of outcomes tells about steps: rounds of prompts, and the decodes between them.

Holds for servers that run the prompts of a round as one step of their own, while decodes wait
(LightLLM, S-LoRA, vLLM without chunked prefill): the first tokens of a round come at one time, and
between its first and its last token a request takes part in every decode.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.lab.outcomes.reader import Outcome

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
    """The events of a log, in order of time."""
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
