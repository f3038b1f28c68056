"""An operator changes the policy of an engine, or tries another one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.errors import EngineDeadError, EngineOverloadedError
from aioserve.operations.answers import Done, Report
from aioserve.operations.command import Asking, EngineCommand, Http, OperatorCommand

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class PolicyName(msgspec.Struct):
    """A policy and its options."""

    policy: str
    options: dict[str, Any]


class PolicyChange(PolicyName):
    """Response of /admin/policy: what there is, and what there was."""

    before: PolicyName


class SwitchPolicy(OperatorCommand[PolicyName, PolicyChange], frozen=True):
    """The scheduler policy `"policy"` with its `"options"` plans from the next step on; a bad one
    changes nothing. See [live policies](live-policies.md).
    """

    policy: str
    options: dict[str, Any] | None = None

    http = Http(
        "/admin/policy",
        "Change the policy from the next step on.",
        param="policy",
        schema="PolicyRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> PolicyName:
        """Answered with what there was before."""
        before = engine.config.scheduler
        engine.switch_policy(self.policy, self.options)
        return PolicyName(before.policy, before.options)

    def tell(self, answer: PolicyName) -> PolicyChange:
        return PolicyChange(self.policy, self.options or {}, answer)


class Trial(msgspec.Struct):
    """Response of /admin/try_policy: where the report is, and its table."""

    report: str  # where it can be read, relative to the server's root
    requests: int  # that came while it was recorded, and were given to both policies
    missing: int  # requests more, and every difference would have an interval
    table: str  # the comparison in words


class TryPolicy(OperatorCommand[Report, Trial], frozen=True):
    """Requests are recorded for that number of `"seconds"`, or until that number of `"requests"`
    came, and `"policy"` with its `"options"` is compared with the policy that plans, on them. See
    [live policies](live-policies.md).
    """

    policy: str
    options: dict[str, Any] | None = None
    seconds: float | None = None  # to record; None: until `requests` came, 300 at most
    # After which the recording ends; None: 200 without `seconds`.
    num_requests: int | None = msgspec.field(default=None, name="requests")

    http = Http(
        "/admin/try_policy",
        "Record requests, and compare another policy on them.",
        param="policy",
        raises=(EngineDeadError, EngineOverloadedError),
        schema="TrialRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> Report:
        settings = msgspec.structs.replace(
            engine.config.scheduler, policy=self.policy, options=self.options or {}
        )
        return await engine.trials.try_policy(settings, self.seconds, self.num_requests)

    def tell(self, answer: Report) -> Trial:
        path = f"watch/reports/{answer.report_id}"
        return Trial(path, answer.num_requests, answer.num_missing, answer.words)


class FindReport(EngineCommand[bytes | None], frozen=True):
    """Ask for the page of a trial's report; the answer is None if there is none of that id."""

    report_id: str

    async def run_on(self, engine: "AsyncEngine") -> bytes | None:
        return engine.trials.find(self.report_id)


class SwitchShadow(OperatorCommand[None, Done], frozen=True):
    """The policy `"policy"` with its `"options"` is evaluated on the traffic from now on;
    `"policy": null` has no shadow. A bad one changes nothing. See
    [live policies](live-policies.md).
    """

    policy: str | None
    options: dict[str, Any] | None = None

    http = Http(
        "/admin/shadow",
        "Evaluate another policy on the traffic, or none.",
        param="policy",
        schema="ShadowRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> None:
        engine.switch_shadow(self.policy, self.options)

    def tell(self, answer: None) -> Done:
        return Done()


class PolicyMethods(Asking):
    """Change and try policies from Python, as the commands above do over HTTP."""

    async def switch_policy(
        self, policy: str, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Another scheduler policy from the next step on. Returns the name and the options of the
        one before. Raises `RequestError`, also for a server without admin routes.
        """
        before = (await self.ask(SwitchPolicy(policy, dict(options or {})))).before
        return before.policy, before.options

    async def try_policy(
        self,
        policy: str,
        options: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        num_requests: int | None = None,
    ) -> Trial:
        """Record requests for `seconds`, or until there are `num_requests`, and compare another
        policy with the one that plans, on them.
        """
        return await self.ask(TryPolicy(policy, dict(options or {}), seconds, num_requests))

    async def switch_shadow(
        self, policy: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Have another policy evaluated on the traffic from now on, or none."""
        await self.ask(SwitchShadow(policy, dict(options or {})))
