"""Drives a scheduler step by step and checks the contract of `SchedulerInterface` after each.

No asyncio, no threads, no wall clock: time is a counter, results come back when the test says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.errors import AioserveError, EngineOverloadedError, PolicyError, RequestError
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, make_successor
from aioserve.testing import comparisons, invariants
from aioserve.testing.calls import kept
from aioserve.testing.cost import check_cost
from aioserve.testing.engine_calls import EngineCalls
from aioserve.testing.growth import check_memory
from aioserve.testing.hash_order import check_hash_order
from aioserve.testing.rejections import ask_again
from aioserve.testing.replies import Masked, Reply
from aioserve.testing.successors import FAILURES
from aioserve.testing.violation import ContractViolation, Starvation

__all__ = ["ContractViolation", "SchedulerHarness"]


class SchedulerHarness(EngineCalls):
    """One scheduler, its requests, and a `ToyRunner` that executes its steps.

    Every call checks what must be true then, and raises `ContractViolation`. `now` is its clock, in
    seconds: the result of a step comes `step_seconds` after the last one, or after the plan if
    nothing was in flight, and `wait` advances it.
    """

    # What a client does.

    @kept
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        reply: Reply = (),
        **fields: Any,
    ) -> Request:
        """Add a request; `fields` are those of `RequestSpec` and of `SamplingParams`.

        It arrives now unless `arrival_time` says otherwise.

        `reply` are the tokens that it is to get, EOS among them if you like; those of a list in it
        come at once, as draft tokens that turn out right, if the scheduler grants them. After its
        end, and without it, tokens are made up; with `structured_outputs`, which toys know by
        `choice` alone, they fit the mask. Raises what the scheduler raises at its door.
        """
        names = RequestSpec.__struct_fields__
        of_request = {name: fields.pop(name) for name in names if name in fields}
        of_request.setdefault("arrival_time", self.now)
        params = SamplingParams(**fields)
        if params.structured_outputs is not None:
            reply = Masked.by(params.structured_outputs, of_request.get("eos_token_ids", ()))
        request = self.writes.request_type(
            RequestSpec(request_id, prompt_token_ids, params, **of_request)
        )
        try:
            with self.blame("add_request"):
                self.loop.add_request(request)
        except (EngineOverloadedError, PolicyError, RequestError) as error:
            if isinstance(error, EngineOverloadedError):
                self.num_refused += 1
                self.turned_away.append((request, error.retry_after))
            self.check()  # after a refusal nothing remains
            raise
        self.requests[request_id] = request
        self.ledger.open(request, self.max_model_len, reply)
        self.check()
        return request

    @kept
    def finish(
        self,
        request_ids: str | list[str] | None,
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> list[str]:
        """End requests from outside, as when a client leaves; returns the ids that ended."""
        with self.blame("finish_requests"):
            ended = self.scheduler.finish_requests(request_ids, status)
        self._end(request_ids, ended, status)
        self.check()
        return ended

    @kept
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns what the scheduler does."""
        with self.blame("reset_prefix_cache"):
            is_empty = self.scheduler.reset_prefix_cache()
        if is_empty != (self.kv_cache.pool.num_used_blocks == 0):
            raise ContractViolation(
                f"{self.where}: reset_prefix_cache returned {is_empty}, "
                f"{self.kv_cache.pool.num_used_blocks} blocks are held"
            )
        self.check()
        return is_empty

    @kept
    def wait(self, seconds: float) -> None:
        """Time passes without a step."""
        self.now += seconds

    # What an operator does.

    @kept
    def switch_policy(
        self, policy: type[SchedulerInterface], options: Mapping[str, Any] | None = None
    ) -> None:
        """Let another policy take over, between two steps.

        Raises `ConfigError` or `PolicyError` if it cannot; then nothing has changed.
        """
        before = invariants.standing(self)
        config = msgspec.structs.replace(self.config, options=dict(options or {}))
        try:
            with self.guard.timed(policy, "take_over"):
                self.scheduler = make_successor(self.scheduler, policy, config)
        except AioserveError:
            invariants.check_standing(self, before)
            raise
        self.config = config
        self.check()

    @kept
    def fail_switch(self, where: str) -> None:
        """A policy that raises `where` ("__init__", "take_over" or "order") is to take over."""
        before, config = invariants.standing(self), msgspec.structs.replace(self.config, options={})
        try:
            make_successor(self.scheduler, FAILURES[where], config)
        except PolicyError:
            invariants.check_standing(self, before)
        else:
            raise ContractViolation(f"{self.where}: a policy took over that raised in {where}")
        self.check()

    # Endings.

    @kept
    def run_until_idle(self, max_steps: int | None = None) -> None:
        """Step until every request has ended and check what must be true then.

        `max_steps` is by default many times what the requests need one after the other.
        """
        if max_steps is None:
            num_tokens = sum(life.max_total_tokens for life in self.ledger.alive.values())
            max_steps = 500 + 10 * num_tokens
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.loop.in_flight:
                break
            num_errors = len(self.errors)
            self.step()
            if len(self.errors) > num_errors and not (self.ledger.alive or self.loop.in_flight):
                break  # it raises with no request left: the engine asks it when one comes
        else:
            waiting = {
                life.request_id: f"{len(life.tokens)} tokens" for life in self.ledger.alive.values()
            }
            raise Starvation(
                f"{self.where}: not finished after {max_steps} steps without arrivals: {waiting}; "
                "a request is never served, or preempted again and again"
            )
        self.check_idle()

    @kept
    def ask_again(self) -> None:
        """The clients of requests that were turned away ask again, one after the other, each with a
        token of prompt, until they are served. Nothing else may be left.
        """
        ask_again(self)

    @kept
    def abort_everything(self) -> None:
        """Every client leaves at once; then nothing may remain."""
        self.finish(None)
        self.run_until_idle()

    @kept
    def check_repeatable(self) -> None:
        """Nothing but the calls may matter: no clock, no hash order, no global dice."""
        comparisons.check_repeatable(self)

    @kept
    def check_foresees_no_end(self) -> None:
        """The same calls, with the lengths of the given replies dealt out in reverse, give the same
        plans until the first request has ended: a policy cannot know how long a reply will be.
        """
        comparisons.check_foresees_no_end(self)

    @kept
    def check_keeps_decoding(self) -> None:
        """What the policy promises with `keeps_decoding`, on requests of the kit's own, with the
        limits of this harness. Does nothing without the promise, or where nothing relies on it.
        """
        comparisons.check_keeps_decoding(self)

    @kept
    def check_hash_order(self) -> None:
        """The calls so far give the same plans in processes where strings have other hashes."""
        check_hash_order(self)

    @kept
    def check_own_time(self) -> None:
        """The calls so far, made again: the policy calls no clock, dice or sleep of the process."""
        comparisons.check_own_time(self)

    @kept
    def check_cost(self) -> None:
        """`schedule` does work in proportion to the requests, on requests of the kit's own."""
        if issubclass(self.policy, BaseScheduler):
            check_cost(self.policy, self.config.options)

    @kept
    def check_memory(self) -> None:
        """The policy keeps nothing of requests that have ended, on requests of the kit's own."""
        if issubclass(self.policy, BaseScheduler):
            check_memory(self.policy, self.config.options)

    @kept
    def check_idle(self) -> None:
        """Nothing remains: no request, no row in the runner's batch, no block."""
        invariants.check_idle(self)
