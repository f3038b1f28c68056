"""Invented traffic from a small YAML file: arrivals, lengths, shared prefixes, conversations.

The same seed gives the same requests on every machine. Knows YAML, which numbers one distribution
draws, and where workloads come from; knows nothing about serving.
"""

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate, count, cycle
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, RequestError
from aioserve.lab.slo import Slo
from aioserve.lab.workloads.workload import (
    Incidents,
    Piece,
    Reading,
    ReplyLimit,
    Workload,
    WorkloadRequest,
    text_name,
)
from aioserve.request import PREDICTED_OUTPUT_TOKENS, Hints, check_hints
from aioserve.support.files import find_workload, read_struct

# Predicted lengths of replies, as good or bad as a workload says: what is a predictor worth?


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


# The description: arrivals, lengths, shared prefixes, conversations.


Positive = Annotated[float, Meta(gt=0)]

NonNegative = Annotated[float, Meta(ge=0)]

Count = Annotated[int, Meta(ge=1)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a workload file: unknown names are refused."""


class Poisson(Spec, frozen=True, kw_only=True, tag_field="kind", tag="poisson"):
    """Independent arrivals, `rate` a second on average."""

    rate: Positive

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one arrival to the next, without end."""
        while True:
            yield rng.expovariate(self.rate)


class Gamma(Spec, frozen=True, kw_only=True, tag_field="kind", tag="gamma"):
    """Arrivals whose gaps vary `cv` times as much as their mean: 1 is Poisson, more is bursts."""

    rate: Positive
    cv: Positive = 3.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one arrival to the next, without end."""
        shape = 1 / self.cv**2
        while True:
            yield rng.gammavariate(shape, 1 / (self.rate * shape))


class OnOff(Spec, frozen=True, kw_only=True, tag_field="kind", tag="on_off"):
    """Poisson arrivals at `rate_on` a second for a while, then at `rate_off`, and again."""

    rate_on: Positive
    on_seconds: Positive
    rate_off: NonNegative = 0.0
    off_seconds: NonNegative = 0.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one arrival to the next, without end."""
        # The gaps of a Poisson process of rate 1, each spent at the rate of the phase it is in.
        work, seconds = rng.expovariate(1), 0.0
        phases = ((self.rate_on, self.on_seconds), (self.rate_off, self.off_seconds))
        for rate, left in cycle(phases):
            while rate * left > work:
                left -= work / rate
                yield seconds + work / rate
                work, seconds = rng.expovariate(1), 0.0
            work -= rate * left
            seconds += left


Arrivals = Poisson | Gamma | OnOff


class Constant(Spec, frozen=True, kw_only=True, tag_field="kind", tag="constant"):
    """A distribution that is always `value`."""

    value: NonNegative

    def draw(self, rng: random.Random) -> float:
        """Draw one value of the distribution."""
        return self.value


class Uniform(Spec, frozen=True, kw_only=True, tag_field="kind", tag="uniform"):
    """Evenly from `min` to `max`."""

    min: NonNegative
    max: NonNegative

    def draw(self, rng: random.Random) -> float:
        """Draw one value of the distribution."""
        return rng.uniform(self.min, self.max)


class LogNormal(Spec, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """Log-normal around `median`, cut at `min` and `max`: `sigma` 0.8 is a common spread."""

    median: Positive
    sigma: NonNegative = 0.8
    min: NonNegative = 1.0
    max: Positive = math.inf

    def draw(self, rng: random.Random) -> float:
        """Draw one value of the distribution."""
        value = self.median * math.exp(rng.gauss(0, self.sigma))
        return min(max(value, self.min), self.max)


Distribution = Constant | Uniform | LogNormal


class ClosedLoop(Spec, frozen=True, kw_only=True, tag_field="kind", tag="closed"):
    """A fixed number of clients that wait for a reply, think, and send the next request.

    All begin at once. Requests (or conversations) are dealt out in turn, so each configuration
    gets the same ones from the same clients.
    """

    clients: Count
    think_seconds: Distribution = Constant(value=0)


class Prefixes(Spec, frozen=True, kw_only=True):
    """Prompts that begin alike: `count` system prompts; the k-th is used as 1/k**`zipf`."""

    count: Count
    length: Distribution
    zipf: NonNegative = 1.0


class Images(Spec, frozen=True, kw_only=True):
    """Pictures before the text of a prompt, or of a turn: of that share of them, one."""

    tokens: Distribution  # that a picture stands for
    share: Chance = 1.0
    count: Count | None = None  # of pictures that are sent again and again; None: each is new


class Session(Spec, frozen=True, kw_only=True):
    """Conversations: each turn's prompt is all that was said before, and a new `prompt`."""

    turns: Distribution
    think_seconds: Distribution
    abort: Chance = 0.0  # of each conversation, to end in the middle of a reply


class Stage(Spec, frozen=True, kw_only=True):
    """One step of a program: `width` requests at once, each after all of the stage before."""

    width: Distribution = Constant(value=1)
    pause_seconds: Distribution | None = None  # before each request: a tool runs; none: program's
    prompt: Distribution | None = None  # new tokens; none: as the class says
    output: Distribution | None = None
    max_tokens: Count | None = None  # what the client allows for a reply; none: as the class says


class Program(Spec, frozen=True, kw_only=True):
    """Requests of which some wait for several others: an agent that fans out, joins, calls tools.

    The prompt of a stage holds all that was said before: prompts and replies of stages with one
    request, and the replies alone of stages with several.
    """

    stages: Annotated[list[Stage], Meta(min_length=1)]
    rounds: Distribution = Constant(value=1)  # how often the stages are gone through
    pause_seconds: Distribution = Constant(value=0)  # from the end of a stage to the next
    abort: Chance = 0.0  # of each program, to end in the middle of a reply


class ClientClass(Spec, frozen=True, kw_only=True):
    """A class of clients with the same kind of requests."""

    name: Annotated[str, Meta(min_length=1)]
    prompt: Distribution  # tokens, without prefix and earlier turns
    output: Distribution  # tokens, at which the model ends the reply
    max_tokens: Count | None = None  # what these clients allow for a reply; none: see ReplyLimit
    prediction: Prediction | None = None  # of each reply's length, as a hint for the policy
    hints: Hints = {}  # for the policy, the same for all of this class
    share: Positive = 1.0  # of the arrivals, relative to the other classes
    arrivals: Arrivals | None = None  # of its own, instead of a share
    users: Count = 1  # named after the class; requests (or sessions) are spread evenly
    weight: Positive | None = None  # of each user: what it is due beside others
    priority: int = 0
    timeout: Positive | None = None  # seconds
    draft_acceptance: Chance | None = None  # of a guessed token, if the one before it was right
    prefixes: Prefixes | None = None
    session: Session | None = None
    program: Program | None = None  # instead of a session
    images: Images | None = None
    adapter: str = ""  # name of the LoRA adapter that its requests are for
    slo: Slo | None = None  # what its requests must not exceed to count as good

    def __post_init__(self) -> None:
        try:
            check_hints(self.hints)
        except RequestError as error:
            raise ValueError(str(error)) from error

    @property
    def user_names(self) -> list[str]:
        """Names of the users of this class."""
        return [self.name] if self.users == 1 else [f"{self.name}-{k}" for k in range(self.users)]


class WorkloadSpec(Spec, frozen=True, kw_only=True):
    """The contents of a workload file."""

    classes: Annotated[list[ClientClass], Meta(min_length=1)]
    arrivals: Arrivals | ClosedLoop | None = None
    num_requests: Count | None = None  # turns of conversations count
    duration: Positive | None = None  # seconds in which requests or conversations begin
    incidents: Incidents = Incidents()  # what befalls the fleet that serves them


def read_spec(path: str | Path) -> WorkloadSpec:
    """Raises `ConfigError` that names the file and the field."""
    path = Path(path)
    spec = read_struct(path, "workload", WorkloadSpec)
    if spec.num_requests is None and spec.duration is None:
        raise ConfigError(f"workload {path}: give num_requests, duration or both")
    if spec.arrivals is None and any(c.arrivals is None for c in spec.classes):
        raise ConfigError(f"workload {path}: arrivals are missing, here or in every class")
    if isinstance(spec.arrivals, ClosedLoop):
        if spec.duration is not None:
            raise ConfigError(f"workload {path}: a closed loop has no duration: give num_requests")
        if any(c.arrivals is not None for c in spec.classes):
            raise ConfigError(f"workload {path}: a closed loop leaves no arrivals to a class")
    for c in spec.classes:
        if c.program is not None and (c.session is not None or c.images is not None):
            raise ConfigError(
                f"workload {path}: class {c.name} has a program, and so no session and no images"
            )
    names = [c.name for c in spec.classes]
    if len(set(names)) < len(names):
        raise ConfigError(f"workload {path}: two classes have the same name")
    return spec


# The requests of a description.


def generate(spec: WorkloadSpec, seed: int = 0, name: str = "synthetic") -> Workload:
    """Return requests as `spec` says; conversations stand together, at their first turn's place."""
    makers = {c.name: _Maker(c, seed) for c in spec.classes}
    limit = spec.num_requests or math.inf
    requests: list[WorkloadRequest] = []
    num_clients = spec.arrivals.clients if isinstance(spec.arrivals, ClosedLoop) else 0
    # Of each client in turn: its last requests.
    last: deque[tuple[int, ...]] = deque(maxlen=num_clients)
    for arrival, kind in _arrivals(spec, seed):
        if spec.duration is not None and arrival >= spec.duration:
            break
        before = last[0] if num_clients and len(last) == num_clients else ()
        made = makers[kind].make(arrival, len(requests), before)
        awaited = {place for request in made for place in request.waits_for}
        places = range(len(requests), len(requests) + len(made))
        last.append(tuple(place for place in places if place not in awaited))
        requests += made
        if len(requests) >= limit:
            break
    weights = {u: c.weight for c in spec.classes if c.weight is not None for u in c.user_names}
    kept = tuple(requests[: spec.num_requests])
    classes = {c.name: c.slo for c in spec.classes}
    return Workload(
        name, kept, seed=seed, weights=weights, incidents=spec.incidents, classes=classes
    )


def _arrivals(spec: WorkloadSpec, seed: int) -> Iterator[tuple[float, str]]:
    """(seconds, class name) in order, without end; in a closed loop the pauses before each."""
    if isinstance(spec.arrivals, ClosedLoop):
        return _pauses(spec.arrivals, spec.classes, random.Random(f"{seed} arrivals"))
    sharing = [c for c in spec.classes if c.arrivals is None]
    streams = [
        _stream(c.arrivals, [c], random.Random(f"{seed} arrivals {c.name}"))
        for c in spec.classes
        if c.arrivals is not None
    ]
    if sharing and spec.arrivals is not None:
        streams.append(_stream(spec.arrivals, sharing, random.Random(f"{seed} arrivals")))
    return merge(*streams)


def _stream(
    arrivals: Arrivals, classes: list[ClientClass], rng: random.Random
) -> Iterator[tuple[float, str]]:
    now = 0.0
    names, shares = [c.name for c in classes], [c.share for c in classes]
    for gap in arrivals.gaps(rng):
        now += gap
        yield now, rng.choices(names, shares)[0]


def _pauses(
    closed: ClosedLoop, classes: list[ClientClass], rng: random.Random
) -> Iterator[tuple[float, str]]:
    names, shares = [c.name for c in classes], [c.share for c in classes]
    for number in count():
        pause = closed.think_seconds.draw(rng) if number >= closed.clients else 0.0
        yield pause, rng.choices(names, shares)[0]


class _Maker:
    """A maker of the requests of one class, from random numbers of its own."""

    def __init__(self, kind: ClientClass, seed: int) -> None:
        self._kind = kind
        self._seed = seed
        self._users = kind.user_names
        self._rng = random.Random(f"{seed} requests {kind.name}")
        self._predictor = random.Random(f"{seed} predictions {kind.name}")
        self._num_texts = 0
        self._num_made = 0
        self._prefixes: list[Piece] = []
        self._popularity: list[float] = []  # cumulative
        self._num_images = 0
        self._images: list[Piece] = []
        if kind.images is not None:
            self._images = [self._image(kind.images) for _ in range(kind.images.count or 0)]
        if kind.prefixes is not None:
            self._prefixes = [
                Piece(
                    text_name("prefix", seed, kind.name, k),
                    _tokens(kind.prefixes.length, self._rng),
                )
                for k in range(kind.prefixes.count)
            ]
            weights = (1 / (k + 1) ** kind.prefixes.zipf for k in range(len(self._prefixes)))
            self._popularity = list(accumulate(weights))

    def make(
        self, arrival: float, place: int, before: tuple[int, ...] = ()
    ) -> list[WorkloadRequest]:
        """Return one request, or all of a conversation or program, that begins at `place` in the
        workload.

        In a closed loop it begins `arrival` seconds after the end of the requests `before` it.
        """
        if self._kind.program is not None:
            return self._make_program(self._kind.program, arrival, place, before)
        follows = before[0] if before else -1
        kind, rng = self._kind, self._rng
        user = self._users[self._num_made % kind.users]
        self._num_made += 1
        said = self._prefix()
        num_turns = 1 if kind.session is None else max(1, round(kind.session.turns.draw(rng)))
        requests = []
        for turn in range(num_turns):
            if kind.images is not None and rng.random() < kind.images.share:
                new = not self._images
                said.append(self._image(kind.images) if new else rng.choice(self._images))
            said.append(Piece(self._text(), _tokens(kind.prompt, rng)))
            num_output = _tokens(kind.output, rng)
            requests.append(
                WorkloadRequest(
                    arrival,
                    tuple(said),
                    num_output,
                    priority=kind.priority,
                    user=user,
                    timeout=kind.timeout,
                    follows=place + turn - 1 if turn else follows,
                    kind=kind.name,
                    draft_acceptance=kind.draft_acceptance,
                    session=place if kind.session is not None else -1,
                    max_tokens=kind.max_tokens,
                    hints=self._hints(num_output),
                    adapter=kind.adapter,
                )
            )
            said.append(Piece(self._text(), num_output, reply_of=place + turn))
            if kind.session is not None:
                arrival = kind.session.think_seconds.draw(rng)
        if kind.session is not None and kind.session.abort and rng.random() < kind.session.abort:
            last = rng.randrange(len(requests))
            return [*requests[:last], self._aborted(requests[last])]
        return requests

    def _hints(self, num_output: int) -> Hints:
        if self._kind.prediction is None:
            return self._kind.hints
        predicted = self._kind.prediction.predict(num_output, self._predictor)
        return {**self._kind.hints, PREDICTED_OUTPUT_TOKENS: predicted}

    def _make_program(
        self, program: Program, arrival: float, place: int, before: tuple[int, ...]
    ) -> list[WorkloadRequest]:
        kind, rng, user = self._kind, self._rng, self._users[self._num_made % self._kind.users]
        self._num_made += 1
        said, requests = self._prefix(), list[WorkloadRequest]()
        stage_of: list[int] = []
        stages = program.stages * _tokens(program.rounds, rng)
        for number, stage in enumerate(stages):
            pause = stage.pause_seconds or program.pause_seconds
            width = _tokens(stage.width, rng)
            first = place + len(requests)
            own: list[Piece] = []
            for i in range(width):
                text = Piece(self._text(), _tokens(stage.prompt or kind.prompt, rng))
                num_output = _tokens(stage.output or kind.output, rng)
                requests.append(
                    WorkloadRequest(
                        pause.draw(rng) if number else arrival,
                        (*said, text),
                        num_output,
                        priority=kind.priority,
                        user=user,
                        timeout=kind.timeout,
                        follows=before[0] if before else -1,
                        after=before[1:],
                        kind=kind.name,
                        draft_acceptance=kind.draft_acceptance,
                        session=place,
                        program=place,
                        max_tokens=stage.max_tokens or kind.max_tokens,
                        hints=self._hints(num_output),
                        adapter=kind.adapter,
                    )
                )
                stage_of.append(number)
                own += [text] if width == 1 else []
                own.append(Piece(self._text(), num_output, reply_of=first + i))
            said += own
            before = tuple(range(first, first + width))
        if program.abort and rng.random() < program.abort:
            last = rng.randrange(len(requests))
            requests[last] = self._aborted(requests[last])
            requests = [r for r, s in zip(requests, stage_of, strict=True) if s <= stage_of[last]]
        return requests

    def _aborted(self, request: WorkloadRequest) -> WorkloadRequest:
        """Return the request of a client that leaves somewhere in the reply."""
        num_tokens = self._rng.randint(1, request.output_tokens)
        return msgspec.structs.replace(request, output_tokens=num_tokens, aborts=True)

    def _prefix(self) -> list[Piece]:
        if not self._prefixes:
            return []
        draw = self._rng.random() * self._popularity[-1]
        return [self._prefixes[bisect_left(self._popularity, draw)]]

    def _image(self, images: Images) -> Piece:
        self._num_images += 1
        name = text_name("image", self._seed, self._kind.name, self._num_images)
        return Piece(name, _tokens(images.tokens, self._rng), is_image=True)

    def _text(self) -> int:
        self._num_texts += 1
        return text_name("text", self._seed, self._kind.name, self._num_texts)


def _tokens(distribution: Distribution, rng: random.Random) -> int:
    return max(1, round(distribution.draw(rng)))


# Where workloads come from: a YAML file that describes one, or a trace; and cutting.


TRACE_SUFFIXES = (".csv", ".jsonl", ".json")


class WorkloadSource(msgspec.Struct, frozen=True, kw_only=True):
    """A workload file and what to do with it. Times in seconds."""

    path: str  # or a name in `configs/workloads/`
    time_scale: float = 1.0
    start: float = 0.0
    duration: float | None = None
    limit: int | None = None  # requests
    min_turns: int = 1  # of the conversations that are kept
    copies: int = 1  # crowds of such clients, each with texts of its own
    reply_limit: ReplyLimit = ReplyLimit()  # what clients allow for a reply
    rate: float | None = None  # of the arrivals of a trace that has none, per second
    reading: Reading = Reading()  # what the file does not say of itself
    prediction: AnyPrediction | None = None  # of each reply's length, as a hint

    @property
    def is_trace(self) -> bool:
        """Whether other seeds would only change token ids."""
        return Path(self.path).suffix in TRACE_SUFFIXES and self.rate is None

    def load(self, seed: int) -> Workload:
        """Return the requests for this seed. Raises `ConfigError` that says what is wrong where."""
        path = find_workload(self.path)
        if path.suffix in TRACE_SUFFIXES:
            from aioserve.lab.workloads.traces import read_trace

            workload = read_trace(self.path, seed, self.rate, self.reading)
        elif self.rate is not None:
            raise ConfigError(f"workload {self.path}: --rate is for traces without arrivals")
        elif self.reading != Reading():
            raise ConfigError(
                f"workload {self.path}: --columns, --tokenizer and --think are for .csv, .jsonl "
                "and .json"
            )
        elif path.suffix in (".yaml", ".yml"):
            workload = generate(read_spec(path), seed, path.name)
        else:
            raise ConfigError(
                f"workload {self.path}: expected .yaml (a description), .csv, .jsonl or .json "
                "(traffic of many formats: docs/traffic.md), got "
                f"{path.suffix or 'no suffix'!r}"
            )
        return self.cut(workload)

    def cut(self, workload: Workload) -> Workload:
        """Return the part that is wanted, at the speed that is wanted."""
        if self.start or self.duration is not None or self.limit is not None:
            workload = workload.cut(start=self.start, duration=self.duration, limit=self.limit)
        if self.min_turns > 1:
            workload = workload.conversations(self.min_turns)
        if self.copies > 1:
            workload = workload.times(self.copies)
        if self.reply_limit != workload.reply_limit:
            workload = msgspec.structs.replace(workload, reply_limit=self.reply_limit)
        if self.prediction is not None:
            workload = with_predictions(workload, self.prediction)
        return workload if self.time_scale == 1 else workload.scaled(self.time_scale)
