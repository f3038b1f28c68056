"""Parts of a policy: an order, a budget, an admission and a choice of victims, each by itself.

A part answers one question and knows nothing of the other parts. `aioserve.policies.composed` asks
those that a configuration names; a policy of one file may use a part as well.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

from aioserve.request import Request
from aioserve.scheduler.base import BaseScheduler
from aioserve.scheduler.options import PolicyOptions
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.queue import order_key
from aioserve.scheduler.step import Step

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
    """Which prompt goes first. By itself: order of arrival."""

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
        """The requests to be served in this step after the decodes, in order: `prompts`, which run
        and are half-way in their prompts, and waiting ones. Asked for the next request when the one
        before was served, or was not. The step has `num_tokens` for prompts, or what is left of it.
        """
        yield from sorted(prompts, key=order_key)
        yield from self.policy.waiting

    def served(self, request: Request, num_tokens: int) -> None:
        """Called for each request of `line` that got prompt tokens."""


class BudgetPart(Part):
    """How much a step may carry. By itself: as much as the settings allow."""

    kind = "budget"

    def num_tokens(self) -> int | None:
        """Most tokens of the next step, decodes included; None: as the settings say."""
        return None

    def max_requests(self) -> int | None:
        """Most requests of the next step, decodes included; None: as many as run."""
        return None

    def for_prompts(self, step: Step, prompts: list[Request]) -> int | None:
        """Most prompt tokens of this step, in which the decodes have run already and `prompts` have
        not; None: what is left of the step.
        """
        return None

    def returned(self, output: SchedulerOutput) -> None:
        """Called with each plan when its result is there."""


class AdmissionPart(Part):
    """Which waiting requests may be admitted. By itself: all of them."""

    kind = "admission"

    def begin(self, step: Step, num_tokens: int | None) -> None:
        """Called in every step before requests are admitted, with the tokens that it has for
        prompts; None: what is left of the step.
        """

    def ask(self, request: Request, step: Step) -> Verdict:
        """What is done with the waiting request that is next: "admit", "last" (after all others, in
        this step) or "hold" (it waits on). May say why by `step.hold`, or end it by `step.reject`.
        """
        return "admit"


class VictimPart(Part):
    """Which running request gives way. By itself: the last in the policy's order."""

    kind = "victim"

    def victim(self) -> Request | None:
        """The request to preempt when KV blocks run out, as `BaseScheduler.victim` returns it."""
        return max(self.policy.running, key=order_key, default=None)

    def displaceable(self, request: Request) -> Iterable[Request]:
        """Running requests that may lose their places to this waiting one, the first ones first, as
        `Step.admit` takes them by `displacing`.
        """
        return ()
