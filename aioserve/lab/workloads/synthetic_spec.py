"""The contents of a workload file: arrivals, lengths, prefixes, sessions and programs, by class.

Knows YAML, and which numbers one distribution draws. `synthetic` makes requests of it.
"""

import math
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, RequestError
from aioserve.hints import Hints, check_hints
from aioserve.lab.slo import Slo
from aioserve.lab.workloads.incidents import Incidents
from aioserve.lab.workloads.predictions import Prediction
from aioserve.yaml_file import read_struct

Positive = Annotated[float, Meta(gt=0)]

NonNegative = Annotated[float, Meta(ge=0)]

Count = Annotated[int, Meta(ge=1)]

Chance = Annotated[float, Meta(ge=0, le=1)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a workload file: unknown names are refused."""


class Poisson(Spec, frozen=True, kw_only=True, tag_field="kind", tag="poisson"):
    """Independent arrivals, `rate` a second on average."""

    rate: Positive

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Seconds from one arrival to the next, without end."""
        while True:
            yield rng.expovariate(self.rate)


class Gamma(Spec, frozen=True, kw_only=True, tag_field="kind", tag="gamma"):
    """Arrivals whose gaps vary `cv` times as much as their mean: 1 is Poisson, more is bursts."""

    rate: Positive
    cv: Positive = 3.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Seconds from one arrival to the next, without end."""
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
        """Seconds from one arrival to the next, without end."""
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
