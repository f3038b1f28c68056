"""Predicted lengths of replies, as good or bad as a workload says: what is a predictor worth?

A prediction reaches policies as the hint `predicted_output_tokens`; nothing else does. Each is made
from the true length and an error of its own, so that the worth of a predictor becomes a curve.
"""

import math
import random
from bisect import bisect_left
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.hints import PREDICTED_OUTPUT_TOKENS
from aioserve.lab.workloads.workload import Workload

Spread = Annotated[float, Meta(ge=0)]
Chance = Annotated[float, Meta(ge=0, le=1)]
Bound = Annotated[int, Meta(ge=1)]


class _Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the kinds of predictions: unknown names are refused."""


class Exact(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="exact"):
    """The true length: the bound on what any predictor can bring."""

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """The predicted length in tokens of a reply of `num_tokens`."""
        return num_tokens


class LogNormalError(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """The true length times a factor whose logarithm is normal, with mean 0 and spread `sigma`:
    at 0.5 two of three predictions are within a factor of 1.65.
    """

    sigma: Spread

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """The predicted length in tokens of a reply of `num_tokens`."""
        return max(round(num_tokens * math.exp(rng.gauss(0.0, self.sigma))), 1)


class Classes(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="classes"):
    """One of the classes of lengths that `bounds` divide, the right one with chance `accuracy`,
    else any other. What is predicted is the middle of the class on a logarithmic scale, of the last
    class its bound times the root of 2.
    """

    bounds: Annotated[tuple[Bound, ...], Meta(min_length=1)]  # tokens, rising: the last of a class
    accuracy: Chance = 1.0

    def __post_init__(self) -> None:
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError("the bounds of the classes must rise")

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """The predicted length in tokens of a reply of `num_tokens`."""
        found = bisect_left(self.bounds, num_tokens)
        if rng.random() >= self.accuracy:
            found = rng.choice([i for i in range(len(self.bounds) + 1) if i != found])
        low = self.bounds[found - 1] if found else 1
        high = self.bounds[found] if found < len(self.bounds) else 2 * low
        return max(round(math.sqrt(low * high)), 1)


Prediction = Exact | LogNormalError | Classes


def parse_prediction(text: str) -> Prediction:
    """Read `exact`, `lognormal:0.5` or `classes:64,256:0.8`. Raises `ConfigError`."""
    kind, *rest = text.split(":")
    fields: dict[str, object] = {"kind": kind}
    if kind == "lognormal" and len(rest) == 1:
        fields["sigma"] = rest[0]
    elif kind == "classes" and len(rest) in (1, 2):
        fields["bounds"] = rest[0].split(",")
        fields |= {"accuracy": rest[1]} if len(rest) == 2 else {}
    elif kind != "exact" or rest:
        raise ConfigError(
            "a prediction is exact, lognormal:SIGMA or classes:BOUND,BOUND:ACCURACY, such as "
            f"classes:64,256:0.8; got {text!r}"
        )
    try:
        found: Prediction = msgspec.convert(fields, Prediction, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the prediction {text!r}: {error}") from error
    return found


def with_predictions(workload: Workload, prediction: Prediction) -> Workload:
    """The same requests, each with a predicted length as a hint; the same ones for each seed."""
    rng = random.Random(f"{workload.seed} predictions")
    requests = tuple(
        msgspec.structs.replace(
            request,
            hints={
                **request.hints,
                PREDICTED_OUTPUT_TOKENS: prediction.predict(request.output_tokens, rng),
            },
        )
        for request in workload.requests
    )
    return msgspec.structs.replace(workload, requests=requests)
