"""Predicted lengths of replies, as good or bad as a workload says: what is a predictor worth?

A prediction reaches policies as the hint `predicted_output_tokens`; nothing else does. Each is made
from the true length and an error of its own, so that the worth of a predictor becomes a curve. The
draws do not depend on the size of the error: a greater error is more of the same one.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.lab.workloads.workload import Workload
from aioserve.request import PREDICTED_OUTPUT_TOKENS

Spread = Annotated[float, Meta(ge=0)]
Chance = Annotated[float, Meta(ge=0, le=1)]
Bound = Annotated[int, Meta(ge=1)]


class _Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the kinds of predictions: unknown names are refused."""


class _Predictor(Protocol):
    """A kind that predicts a reply from its own length alone."""

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """Return the predicted length in tokens of a reply of `num_tokens`."""


class _OneByOne(_Kind, frozen=True, kw_only=True):
    """Base of the kinds that predict each reply from its own length alone, by their `predict`."""

    def predict_all(self: _Predictor, lengths: Sequence[int], rng: random.Random) -> list[int]:
        """Return the predicted lengths of replies that have these lengths, in tokens."""
        return [self.predict(num_tokens, rng) for num_tokens in lengths]


class Exact(_OneByOne, frozen=True, kw_only=True, tag_field="kind", tag="exact"):
    """The true length: the bound on what any predictor can bring."""

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """Return the predicted length in tokens of a reply of `num_tokens`."""
        return num_tokens


class LogNormalError(_OneByOne, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """The true length times a factor whose logarithm is normal, with mean 0 and spread `sigma`:
    at 0.5 two of three predictions are within a factor of 1.65. Too long by a factor is as probable
    as too short by it. The error of Dell'Amico et al., "PSBS: Practical Size-Based Scheduling",
    IEEE Transactions on Computers, 2016, arXiv 1410.6122.
    """

    sigma: Spread

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """Return the predicted length in tokens of a reply of `num_tokens`."""
        return max(round(num_tokens * math.exp(rng.gauss(0.0, self.sigma))), 1)


class Classes(_OneByOne, frozen=True, kw_only=True, tag_field="kind", tag="classes"):
    """One of the classes of lengths that `bounds` divide, the right one with chance `accuracy`,
    else any other. What is predicted is the middle of the class on a logarithmic scale, of the last
    class its bound times the root of 2. S3 predicts classes of lengths (Jin et al., NeurIPS 2023,
    arXiv 2306.06000).
    """

    bounds: Annotated[tuple[Bound, ...], Meta(min_length=1)]  # tokens, rising: the last of a class
    accuracy: Chance = 1.0

    def __post_init__(self) -> None:
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError("the bounds of the classes must rise")

    def predict(self, num_tokens: int, rng: random.Random) -> int:
        """Return the predicted length in tokens of a reply of `num_tokens`."""
        found = bisect_left(self.bounds, num_tokens)
        if rng.random() >= self.accuracy:
            found = rng.choice([i for i in range(len(self.bounds) + 1) if i != found])
        low = self.bounds[found - 1] if found else 1
        high = self.bounds[found] if found < len(self.bounds) else 2 * low
        return max(round(math.sqrt(low * high)), 1)


class Ranks(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="ranks"):
    """The order of lengths is right as far as Kendall's rank correlation `tau` says, by which LTR
    measures predictors (Fu et al., NeurIPS 2024, arXiv 2408.15792): 1 is the true order, 0 one at
    random. What is predicted is the length that has such a place among all of the workload, so that
    predictions taken together have the lengths that replies have.

    True and predicted places are those of two normal variables of correlation r, of which tau is
    2 / pi * arcsin(r) (Kruskal, "Ordinal Measures of Association", JASA, 1958). Not for a class of
    a workload file, whose requests are drawn one by one.
    """

    tau: Chance

    def predict_all(self, lengths: Sequence[int], rng: random.Random) -> list[int]:
        """Return the predicted lengths of replies that have these lengths, in tokens."""
        correlation, size = math.sin(math.pi * self.tau / 2), len(lengths)
        noise, normal = math.sqrt(1 - correlation**2), NormalDist()
        by_length = sorted(range(size), key=lambda i: lengths[i])
        guessed = [0.0] * size
        for place, i in enumerate(by_length):
            guessed[i] = correlation * normal.inv_cdf((place + 0.5) / size)
        guessed = [guess + noise * rng.gauss(0.0, 1.0) for guess in guessed]
        found = [0] * size
        for i, source in zip(sorted(range(size), key=lambda i: guessed[i]), by_length, strict=True):
            found[i] = lengths[source]
        return found


Prediction = Exact | LogNormalError | Classes  # what a class of a workload file may state
AnyPrediction = Prediction | Ranks


def parse_prediction(text: str) -> AnyPrediction:
    """Read `exact`, `lognormal:0.5`, `ranks:0.6` or `classes:64,256:0.8`. Raises `ConfigError`."""
    kind, *rest = text.split(":")
    fields: dict[str, object] = {"kind": kind}
    if kind == "lognormal" and len(rest) == 1:
        fields["sigma"] = rest[0]
    elif kind == "ranks" and len(rest) == 1:
        fields["tau"] = rest[0]
    elif kind == "classes" and len(rest) in (1, 2):
        fields["bounds"] = rest[0].split(",")
        fields |= {"accuracy": rest[1]} if len(rest) == 2 else {}
    elif kind != "exact" or rest:
        raise ConfigError(
            "a prediction is exact, lognormal:SIGMA, ranks:TAU or classes:BOUND,BOUND:ACCURACY, "
            f"such as classes:64,256:0.8; got {text!r}"
        )
    try:
        found: AnyPrediction = msgspec.convert(fields, AnyPrediction, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the prediction {text!r}: {error}") from error
    return found


def with_predictions(workload: Workload, prediction: AnyPrediction) -> Workload:
    """Return the same requests, each with a predicted length as a hint; the same ones for each
    seed.
    """
    rng = random.Random(f"{workload.seed} predictions")
    lengths = [request.output_tokens for request in workload.requests]
    predicted = prediction.predict_all(lengths, rng)
    requests = tuple(
        msgspec.structs.replace(
            request, hints={**request.hints, PREDICTED_OUTPUT_TOKENS: num_tokens}
        )
        for request, num_tokens in zip(workload.requests, predicted, strict=True)
    )
    return msgspec.structs.replace(workload, requests=requests)


def without_predictions(workload: Workload) -> Workload:
    """Return a workload of the same requests, of which none has a predicted length."""
    requests = tuple(
        msgspec.structs.replace(
            request,
            hints={n: v for n, v in request.hints.items() if n != PREDICTED_OUTPUT_TOKENS},
        )
        for request in workload.requests
    )
    return msgspec.structs.replace(workload, requests=requests)


# How many tokens a simulated client allows for a reply, apart from how many the reply has. No
# server knows how long a reply will be: the model ends it. What a server is told is `max_tokens`,
# the client's limit, and a lab that sent the length as the limit would tell every policy the
# future.
