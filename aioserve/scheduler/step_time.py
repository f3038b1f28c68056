"""Learns online what a step costs, from the steps that came back: for policies that need seconds.

A linear model, `base + prefill tokens + decodes + context read`, fitted by recursive least squares
that forgets. Knows counts and clock times; knows nothing about requests. Plain Python: about 15
microseconds a step. Errors are taken relative to the step, so one slow outlier moves it little.
"""

from collections import deque

from aioserve.scheduler.features import count_tokens
from aioserve.scheduler.output import SchedulerOutput

# A step, 1,000 prefill tokens, 100 decodes, 100,000 tokens of context: units in which the four
# coefficients are of one size.
UNITS = (1.0, 1e-3, 1e-2, 1e-5)
# Seconds for each of these until something is known. A guess: a small model on a few cores.
FIRST_GUESS = (0.005, 0.05, 0.01, 0.005)
DOUBT = 10.0  # how wrong the guess may be, as a factor
NOISE = 0.1  # how much equal steps vary, as a share
MEMORY = 0.97  # weight of a step against the one after it: half after 23 steps
LASTING_DOUBT = 0.3  # the most that forgetting brings back, as a share
MAX_ERROR = 5 * NOISE  # beyond it a step counts as an accident, once the first are learned from
NUM_FIRST_STEPS = 32
MIN_PROMPT_STEPS = 8  # with fewer, the price of a prompt token is still the guess

Vector = tuple[float, float, float, float]


class OnlineStepTime:
    """Tell it of each step when it is `planned` and when it has `returned`; ask for `seconds`."""

    def __init__(self) -> None:
        self.num_steps = 0  # steps learned from so far
        self.num_prompt_steps = 0  # of these, with prompt tokens
        self.last_seconds = 0.0  # what the last step took; 0 if its plan was not seen
        self._coefficients = list(FIRST_GUESS)
        self._covariance = [
            [(DOUBT * guess / NOISE) ** 2 if i == j else 0.0 for j in range(4)]
            for i, guess in enumerate(FIRST_GUESS)
        ]
        self._planned: deque[tuple[int, float, Vector]] = deque()  # not back yet
        self._last_returned = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether enough prompts were seen to trust the price of a prompt token."""
        return self.num_prompt_steps >= MIN_PROMPT_STEPS

    @property
    def seconds_per_step(self) -> float:
        """What a step costs before it does anything."""
        return max(self._coefficients[0], 1e-6)

    @property
    def seconds_per_prompt_token(self) -> float:
        """What one more prompt token costs, its reading included."""
        _, prefill, _, context = self._coefficients
        return max(prefill * UNITS[1] + context * UNITS[3], 1e-9)

    def planned(self, output: SchedulerOutput, now: float) -> None:
        """Record the plan of a step, to learn from its time."""
        if output.total_num_scheduled_tokens:
            self._planned.append((output.step_id, now, _features(output)))

    def returned(self, output: SchedulerOutput, now: float) -> None:
        """Learn from a step that is back."""
        while self._planned and self._planned[0][0] < output.step_id:
            self._planned.popleft()  # discarded: it never comes back
        self.last_seconds = 0.0
        if not self._planned:
            return
        _, planned, features = self._planned.popleft()
        # With two steps in flight, this one began when the one before it ended.
        self.last_seconds = now - max(planned, self._last_returned)
        self._last_returned = now
        if self.last_seconds > 0:
            self._learn(features, self.last_seconds)

    def seconds(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        """Predicted time of a step. `num_context_tokens` are all that are read, new ones too."""
        features = _scale(num_prefill_tokens, num_decodes, num_context_tokens)
        return max(_dot(self._coefficients, features), 1e-6)

    def seconds_of(self, output: SchedulerOutput) -> float:
        """Predicted time of a planned step."""
        return max(_dot(self._coefficients, _features(output)), 1e-6)

    def max_prefill_tokens(self, seconds: float, num_decodes: int, num_context_tokens: int) -> int:
        """The most prompt tokens that fit into a step of `seconds` beside `num_decodes` decodes, of
        which the policy says how many tokens they read: `num_context_tokens`, the sum of their
        `num_computed_tokens`. Negative if the decodes alone take longer.
        """
        left = seconds - self.seconds(0, num_decodes, num_context_tokens)
        return int(left / self.seconds_per_prompt_token)

    def _learn(self, features: Vector, seconds: float) -> None:
        """One step of recursive least squares on features / seconds, whose target is 1."""
        self.num_steps += 1
        self.num_prompt_steps += features[1] > 0
        x = [feature / seconds for feature in features]
        covariance = self._covariance
        spread = [_dot(row, x) for row in covariance]
        gain = [s / (1.0 + _dot(spread, x)) for s in spread]
        error = 1.0 - _dot(self._coefficients, x)
        if self.num_steps > NUM_FIRST_STEPS:
            error = min(max(error, -MAX_ERROR), MAX_ERROR)
        self._coefficients = [c + g * error for c, g in zip(self._coefficients, gain, strict=True)]
        # Forget, but only so much: a coefficient that no step tells anything about (prompts, in a
        # long decode) must not become a toy of the noise.
        forget = [
            MEMORY**-0.5 if covariance[i][i] < _most_variance(c, FIRST_GUESS[i]) else 1.0
            for i, c in enumerate(self._coefficients)
        ]
        for i in range(4):
            for j in range(i + 1):  # both halves from one sum, or rounding errors grow apart
                rest = covariance[i][j] - gain[i] * spread[j]
                covariance[i][j] = covariance[j][i] = forget[i] * forget[j] * rest


def _most_variance(coefficient: float, guess: float) -> float:
    return (LASTING_DOUBT * max(abs(coefficient), 0.01 * guess) / NOISE) ** 2


def _features(output: SchedulerOutput) -> Vector:
    return _scale(*count_tokens(output))


def _scale(num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> Vector:
    _, prefill, decode, context = UNITS
    return (1.0, prefill * num_prefill_tokens, decode * num_decodes, context * num_context_tokens)


def _dot(a: list[float], b: list[float] | Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
