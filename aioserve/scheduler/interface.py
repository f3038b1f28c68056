"""What the engine needs from a scheduler. The docstrings are the contract.

Recognizable to readers of the vLLM V1 family. Policies do not implement this: they derive
from `BaseScheduler`, which does everything but the decision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from aioserve.errors import ConfigError, PolicyError
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.config import SchedulerConfig
    from aioserve.kv_cache import KVConnectorBase

#: Version of the policy API, which docs/policy-api.md lists. It rises when a policy that keeps to
#: that page may have to change.
POLICY_API = 1

MAX_REASON = 200  # characters of a `Rejection`

CANNOT_BE_SWITCHED = "only policies that derive from BaseScheduler can be switched"


class PolicyOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's nested `Options`: typed, validated, unknown names refused."""


class SchedulerInterface(ABC):
    """The interface of a scheduler, which decides what each step computes and keeps the state of
    all requests.

    Called from one event loop, never from a thread. No method waits.
    """

    @property
    def policy(self) -> type[SchedulerInterface]:
        """The class that decides, for messages; of a wrapper, the class that it wraps."""
        return type(self)

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Accept a request. From here on it ends in exactly one `finish_reason`.

        Raises `RequestError` for what can never run (longer than `max_model_len`, by
        `Request.bound_length`, or than the whole KV pool; an id in use) and
        `EngineOverloadedError` when the waiting queue is full. After a raise nothing remains.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Plan one forward pass; it amounts to `{request_id: num_tokens}`.

        Computed-token counts advance here, not when the result arrives, so that further steps may
        be planned while this one runs. The plan may be empty: because no request waits, because
        a policy holds back, or to tell the runner of `finished_req_ids` only.
        """

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the result of a step, in the order in which the steps were planned.

        Called once for every step that carried tokens, and for no other. Returns
        outputs by client index. Tokens for requests that have ended meanwhile are dropped. Those
        in `sat_out` compute their last known token again.
        """

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        """End requests from outside: a client left, a stop string was found, a step failed.

        `None` means all. Unknown and already ended ids are ignored. Returns the ids that really
        ended by this call. At any moment: while queued, running, or in a step in flight, in which
        case its blocks return when that step is back.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Return requests that are waiting or running."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return number of requests, as `(running, waiting)`."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Return whether any request waits or runs."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Return whether requests have ended that the runner does not know of yet.

        Not the negation of `has_unfinished_requests`: both can be true, and both false.
        """

    def has_requests(self) -> bool:
        """Return whether a call of `schedule` can have anything to say."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. True if no block was held, i.e. the whole cache is empty."""

    def vacate(self) -> SchedulerOutput:
        """Preempt all requests, with no step in flight. Returns a step without tokens, which
        tells the runner. Forgets encoder outputs as well. Raises `ConfigError` if that cannot be.
        """
        raise ConfigError("only policies that derive from BaseScheduler can be made to give way")

    def check_queue(  # noqa: B027 - a default that accepts every request is the point
        self, num_tokens: int, num_arriving: int, arriving_tokens: int
    ) -> None:
        """Raise `EngineOverloadedError` if `add_request` would, for a prompt of `num_tokens`.

        Asked before the work of tokenizing, with a lower bound. `num_arriving` requests, of
        `arriving_tokens` at least, are being tokenized: they wait, but not in this queue yet.
        """

    def take_rejections(self) -> dict[str, Rejection]:
        """By id, the waiting requests that the newest step rejects, told once: the engine then
        ends them, by `finish_requests`, and tells their clients.
        """
        return {}

    def next_wake(self) -> float | None:
        """Return when to call `schedule` again after a plan that served no request; None:
        in 10 ms.
        """
        return None

    def next_expiry(self) -> float | None:
        """Return when the next deadline of a request passes, in seconds of the clock; None: there
        is none.

        Asked after arrivals, before the engine sleeps, and after `expire_requests`, called then.
        """
        return None

    def expire_requests(self) -> list[str]:
        """End requests whose deadline has passed; return their ids. A step may be in flight."""
        return []

    def discard_step(self, last_step_id: int) -> list[str]:
        """`schedule` raised or returned nonsense: undo what it planned after `last_step_id`.

        Ends the requests that it touched with FINISHED_ERROR, and returns their ids. The engine
        asks once more then, and replaces a policy that fails again. By default all requests end.
        """
        return self.finish_requests(None, RequestStatus.FINISHED_ERROR)

    def abandon_step(self, scheduler_output: SchedulerOutput) -> list[str]:
        """`update_from_output` raised over this step's result, which is lost: the step is back.

        Returns the ids of the requests that it carried and that have not ended, which the engine
        ends with FINISHED_ERROR.
        """
        return list(scheduler_output.num_scheduled_tokens)

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        """Let the policy of `settings` decide from the next step on; requests and KV cache stay.

        Returns the scheduler to be asked from then on: another one, or itself if it only watches.
        Raises `ConfigError` or `PolicyError` if that cannot be; nothing has changed then.
        """
        raise ConfigError(CANNOT_BE_SWITCHED)

    def get_wait_reasons(self) -> dict[str, WaitReason]:
        """Return why each waiting request was not served in the last step; costs nothing until
        asked.
        """
        return {}

    def make_stats(self) -> SchedulerStats | None:
        """Return the state after the last call, for metrics; None if the scheduler keeps none."""
        return None

    def get_kv_connector(self) -> KVConnectorBase | None:
        """Return what finds KV blocks outside the cache; None without one. The engine tells it when
        a step is back, by `update_connector_output`, before the result is taken in; and shuts it
        down.
        """
        return None

    def shutdown(self) -> None:  # noqa: B027 - a default that does nothing is the point
        """Give back what the scheduler holds outside itself."""


class Rejection(msgspec.Struct, frozen=True):
    """The message to a client whose waiting request a policy ends before any work on it."""

    reason: str
    retry_after: float  # seconds until it is worth to ask again

    @classmethod
    def of(cls, policy_name: str, reason: str, retry_after: float) -> Rejection:
        """Raises `PolicyError` for a reason that is no text, or a time that is none."""
        if not isinstance(reason, str) or not 0 < len(reason) <= MAX_REASON:
            raise PolicyError(
                f"policy {policy_name}: reject() takes a reason of up to {MAX_REASON} characters, "
                f"got {reason!r:.80}"
            )
        if not isinstance(retry_after, int | float) or not 0 <= retry_after < math.inf:
            raise PolicyError(
                f"policy {policy_name}: reject() takes retry_after in seconds, got "
                f"{retry_after!r:.80}"
            )
        return cls(reason, float(retry_after))
