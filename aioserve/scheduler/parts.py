"""Parts of a policy: an order, a budget, an admission and a choice of victims, each by itself.

A part answers one question and knows nothing of the other parts. `aioserve.policies.composed` asks
those that a configuration names, by the name of a policy that has one, by file, or by entry point;
a policy of one file may use a part as well.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

from aioserve.errors import ConfigError, UnknownPolicyError, did_you_mean
from aioserve.request import Request, order_key
from aioserve.scheduler.base import BaseScheduler
from aioserve.scheduler.interface import PolicyOptions
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.registry import available_policies, make_options
from aioserve.scheduler.step import Step
from aioserve.support.plugins import import_named, installed_entry_points, is_zoo_name

#: What an admission says of a waiting request: it may be admitted, after all others, or not now.
Verdict = Literal["admit", "last", "hold"]


class Part:
    """A part of a policy, with options of its own. `policy` is the policy that it is a part of."""

    #: What the part is called in messages.
    kind: ClassVar[str] = "part"
    is_part_of_policy: ClassVar[bool] = True  # so that messages name its line as the policy's
    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    #: True if the part asks `self.policy.step_time`: it then learns from every step.
    uses_step_time: ClassVar[bool] = False

    def __init__(self, policy: BaseScheduler, options: Any) -> None:
        self.policy = policy  # the queue, the clock, the KV cache are its own
        self.options = options  # of the part's class `Options`

    def gauges(self) -> dict[str, float]:
        """Numbers to show on `/metrics` and on the page, as `BaseScheduler.gauges` says."""
        return {}

    def on_finish(self, request: Request, reason: str) -> None:
        """Called before the next step for each request that has ended. The reason is "stop",
        "length", "abort", "timeout", "error" or "rejected".
        """


class OrderPart(Part):
    """The order in which prompts go. By itself: order of arrival."""

    kind = "order"
    #: The promise that a policy with this order can make, if every request may be admitted.
    admits_in_order: ClassVar[Literal["all", "user", "group"] | None] = "all"
    #: As `BaseScheduler.reorder_every`.
    reorder_every: float | None = None

    def key(self, request: Request) -> Any:
        """Sort key of a waiting request, as `BaseScheduler.order` returns it."""
        return request.arrival_time

    def group(self, request: Request) -> str:
        """Group of a waiting request, as `BaseScheduler.group_by` returns it."""
        return request.user

    def begin(self) -> None:
        """Called once in every step, before requests run."""

    def decoded(self, requests: list[Request]) -> None:
        """Called in every step with the requests that decode in it."""

    def line(self, step: Step, prompts: list[Request], num_tokens: int | None) -> Iterator[Request]:
        """Yield the requests to be served in this step after the decodes, in order: `prompts`,
        which run and are half-way in their prompts, and waiting ones. Asked for the next request
        when the one before was served, or was not. The step has `num_tokens` for prompts, or what
        is left of it.
        """
        yield from sorted(prompts, key=order_key)
        yield from self.policy.waiting

    def served(self, request: Request, num_tokens: int) -> None:
        """Called for each request of `line` that got prompt tokens."""


class BudgetPart(Part):
    """The budget of a step. By itself: as much as the settings allow."""

    kind = "budget"

    def num_tokens(self) -> int | None:
        """Return most tokens of the next step, decodes included; None: as the settings say."""
        return None

    def max_requests(self) -> int | None:
        """Return most requests of the next step, decodes included; None: as many as run."""
        return None

    def for_prompts(self, step: Step, prompts: list[Request]) -> int | None:
        """Return most prompt tokens of this step, in which the decodes have run already and
        `prompts` have not; None: what is left of the step.
        """
        return None

    def returned(self, output: SchedulerOutput) -> None:
        """Called with each plan when its result is there."""


class AdmissionPart(Part):
    """The choice of waiting requests that may be admitted. By itself: all of them."""

    kind = "admission"

    def begin(self, step: Step, num_tokens: int | None) -> None:
        """Called in every step before requests are admitted, with the tokens that it has for
        prompts; None: what is left of the step.
        """

    def ask(self, request: Request, step: Step) -> Verdict:
        """Return what is done with the waiting request that is next: "admit", "last" (after all
        others, in this step) or "hold" (it waits on). May say why by `step.hold`, or end it by
        `step.reject`.
        """
        return "admit"


class VictimPart(Part):
    """The choice of the request that gives way. By itself: the last in the policy's order."""

    kind = "victim"

    def victim(self) -> Request | None:
        """Return the request to preempt when KV blocks run out, as `BaseScheduler.victim` returns
        it.
        """
        return max(self.policy.running, key=order_key, default=None)

    def displaceable(self, request: Request) -> Iterable[Request]:
        """Running requests that may lose their places to this waiting one, the first ones first, as
        `Step.admit` takes them by `displacing`.
        """
        return ()


GROUP = "aioserve.parts"  # of entry points, by which other packages register parts
#: Parts that stand in no policy's file.
STANDARD = {
    "arrival": "aioserve.policies.composed.parts:ArrivalOrder",
    "chunk": "aioserve.policies.composed.parts:ChunkBudget",
    "seats": "aioserve.policies.composed.parts:SeatsAdmission",
}

P = TypeVar("P", bound=Part)


def read_part(spec: Any, kind: type[P], where: str) -> tuple[type[P], PolicyOptions]:
    """Return the class and the options of a part, from its name or from a mapping of `part`, its
    name, and its options. `where` is the place in the configuration. Raises `ConfigError` that
    names both.
    """
    given = {"part": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("part", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} must name a part, as in {{part: fair}}; got {spec!r:.100}")
    try:
        part = load_part(name, kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return part, make_options(given, part.Options, f"{where}, part {name!r}")


def load_part(spec: str, kind: type[P]) -> type[P]:
    """Return the part of this kind that `spec` names: `file.py`, `package.module`, either with
    `:Class`, an entry point of the group `aioserve.parts`, or a policy in whose file the part
    stands. Without a class: the only one. Raises `ConfigError` that lists what there is.
    """
    value = spec
    if ":" not in spec and ("." not in spec or is_zoo_name(spec)):
        value = _value(spec, kind)
    path, _, name = value.rpartition(":") if ":" in value else (value, "", "")
    module = import_named(path, "policy", UnknownPolicyError)
    found = getattr(module, name, None) if name else _only_part(module, kind, spec)
    if not (isinstance(found, type) and issubclass(found, kind)):
        known = [part.__name__ for part in _parts_in(module, kind)]
        raise ConfigError(
            f"{spec!r} is no part for {kind.kind}: expected a class that derives from "
            f"{kind.__name__}, got {found!r:.80}; {path} has {', '.join(known) or 'none'}"
        )
    return found


def _parts_in(module: ModuleType, kind: type[P]) -> list[type[P]]:
    """Return those of this kind that the module defines itself."""
    return [
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, kind)
        if found.__module__ == module.__name__
    ]


def _only_part(module: ModuleType, kind: type[P], spec: str) -> type[P]:
    found = _parts_in(module, kind)
    if len(found) != 1:
        names = ", ".join(part.__name__ for part in found) or "none"
        raise ConfigError(
            f"{spec!r} must have one part for {kind.kind}, a class that derives from "
            f"{kind.__name__}; it has {names}" + ("; say which, by :Class" if found else "")
        )
    return found[0]


def _value(name: str, kind: type[Part]) -> str:
    """Return where the part of that name stands: a module, maybe with `:Class`."""
    policies = {n: entry.value.partition(":")[0] for n, entry in available_policies().items()}
    named = policies | STANDARD | {e.name: e.value for e in installed_entry_points(GROUP)}
    if name not in named:
        known = sorted(n for n, value in named.items() if _offers(value, kind))
        raise ConfigError(
            f"unknown part {name!r}{did_you_mean(name, known)}; parts for {kind.kind}: "
            f"{', '.join(known) or 'none'}; or give package.module:Class or path/to/file.py"
        )
    return named[name]


def _offers(value: str, kind: type[Part]) -> bool:
    """Return whether a part of this kind is there; what cannot be imported has none."""
    path, _, name = value.partition(":")
    try:
        module = import_named(path, "policy", UnknownPolicyError)
    except ConfigError:
        return False
    parts = _parts_in(module, kind)
    return name in {part.__name__ for part in parts} if name else bool(parts)
