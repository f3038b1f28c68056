"""How long a step takes, as a linear model of what is in it: one of the step-time sources.

For the simulated runner and for the code that fits one. Knows nothing about models or machines: a
profile says itself where its numbers come from.
"""

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.runner.step_times import Prefills, SideRates, StepTimeSource, make_step_times
from aioserve.scheduler.output import StepFeatures

Coefficient = Annotated[float, Meta(ge=0)]
#: (x, ms) with rising x: a curve that is straight between its points. Before the first point it has
#: that point's value, behind the last it goes on along the line from the first to the last.
Points = tuple[tuple[Coefficient, Coefficient], ...]


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time: a base, prefill tokens, decodes, context read, attention work, and rows that
    prefill, each at a rate; and two curves, for machines on which a rate cannot say it.
    """

    base_ms: Coefficient
    prefill_token_us: Coefficient
    decode_us: Coefficient
    context_token_us: Coefficient
    query_context_ns: Coefficient = 0.0
    prefill_us: Coefficient = 0.0  # per row with more than one token, whatever its length
    encoder_token_us: Coefficient = 0.0
    idle_ms: Coefficient = 0.0  # more for a step that finds the engine idle: it has to wake up
    kv_load_token_us: Coefficient = 0.0  # per token copied between the KV cache and host memory
    kv_read_token_us: Coefficient = 0.0  # per token read from a directory, beside steps
    prefill_ms: Points = ()  # more for a step with prompts, by the tokens of all of them together
    decode_ms: Points = ()  # more for a step with decodes, by their number
    host_factor: Coefficient = 1.0  # times `base_ms` and `decode_ms`: the speed of a session's host
    cold_ms: Coefficient = 0.0  # more for the first step of a run
    jitter: Coefficient = 0.0  # standard deviation of a step's time, as a share of it
    source: str = ""  # where the numbers come from: measured how and on what, or computed from what
    error: str = ""  # how well they fit, if they were measured
    host_ms: Coefficient = 0.0  # more for each step, whatever the speed of the host

    def __post_init__(self) -> None:
        for name in ("prefill_ms", "decode_ms"):
            places = [x for x, _ in getattr(self, name)]
            if any(a >= b for a, b in pairwise(places)):
                raise ValueError(f"the points of {name} must have rising first numbers")

    def seconds(self, features: StepFeatures) -> float:
        """Return the predicted duration of one step, without that of `SideRates`."""
        num_prefill_tokens, num_decodes, num_context, num_query_context, num_prefills = features
        fixed_ms = self._fixed_ms(num_decodes)
        if num_prefill_tokens and self.prefill_ms:
            fixed_ms += _on_curve(self.prefill_ms, num_prefill_tokens)
        return 1e-3 * fixed_ms + 1e-6 * (
            self.prefill_token_us * num_prefill_tokens
            + self.decode_us * num_decodes
            + self.context_token_us * num_context
            + 1e-3 * self.query_context_ns * num_query_context
            + self.prefill_us * num_prefills
        )

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """To the last bit what `seconds` says of `num_steps` steps in a row, each with one token of
        the same `num_decodes` rows, the first of which reads `num_context_tokens`.
        """
        base, rows = 1e-3 * self._fixed_ms(num_decodes), self.decode_us * num_decodes
        rate, end = self.context_token_us, num_context_tokens + num_steps * num_decodes
        return [
            base + 1e-6 * (rows + rate * context)
            for context in range(num_context_tokens, end, num_decodes)
        ]

    def _fixed_ms(self, num_decodes: int) -> float:
        """Return the milliseconds of the host for a step of this number of decodes, whatever their
        context.
        """
        if num_decodes and self.decode_ms:
            return self.host_factor * (self.base_ms + _on_curve(self.decode_ms, num_decodes))
        return self.host_factor * self.base_ms


def _on_curve(points: Points, x: float) -> float:
    """Return the value of the curve at `x`, in ms."""
    place = bisect_right(points, (x, math.inf))
    if place == 0:
        return points[0][1]
    before, value = points[place - 1]
    if place < len(points):
        after, next_value = points[place]
        return value + (next_value - value) * (x - before) / (after - before)
    first, first_value = points[0]
    slope = (value - first_value) / (before - first) if before > first else 0.0
    return value + slope * (x - before)


class LinearStepTimes(StepTimeSource):
    """The linear model as a step-time source, under the name `linear`."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self.source, self.error = model.source, model.error
        self.rates = SideRates(**{f: getattr(model, f) for f in SideRates.__struct_fields__})

    def seconds(self, features: StepFeatures, prefills: Prefills = ()) -> float:
        """Return the seconds of one step; the rates know sums over rows alone."""
        return self.model.seconds(features)

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """Return what `seconds` says of `num_steps` steps in a row, to the last bit."""
        return self.model.seconds_of_decodes(num_decodes, num_context_tokens, num_steps)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Return the source with these fields of `StepTimeModel`. Raises `ConfigError`."""
        try:
            return cls(msgspec.convert(options, StepTimeModel))
        except msgspec.ValidationError as error:
            from aioserve.support.mistakes import explain

            raise ConfigError(explain(error, StepTimeModel)) from error


def load_profile(name_or_path: str) -> StepTimeModel:
    """Return a linear profile by name, or from a YAML file. Raises `ConfigError` that says what is
    wrong.
    """
    found = make_step_times(name_or_path, {})
    if not isinstance(found, LinearStepTimes):
        raise ConfigError(f"step-time profile {name_or_path} is not one of the linear formula")
    return found.model
