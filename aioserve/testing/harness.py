"""Drives a scheduler step by step and checks the contract of `SchedulerInterface` after each.

No asyncio, no threads, no wall clock: time is a counter, results come back when the test says so.
`EngineCalls` is what an engine does with a scheduler; `SchedulerHarness` checks what must be true
after each call.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from aioserve.engine.step_loop import StepInFlight
from aioserve.errors import (
    AioserveError,
    EngineOverloadedError,
    PolicyError,
    RequestError,
    RequestRejectedError,
    StalledError,
)
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import (
    BaseScheduler,
    SchedulerInterface,
    SchedulerOutput,
    load_policy,
    make_successor,
)
from aioserve.testing import comparisons, invariants
from aioserve.testing.bench import Bench
from aioserve.testing.calls import kept
from aioserve.testing.cost import (
    check_cost,
    check_forgets_ids,
    check_memory,
    check_shares_nothing,
)
from aioserve.testing.invariants import MAX_RETRY_SECONDS, ask_again
from aioserve.testing.ledger import Life, Masked, Reply
from aioserve.testing.planned_batch import Row
from aioserve.testing.violation import ContractViolation, Starvation

NAMES = (
    *("chunked_prefill", "deadline", "fair", "fcfs", "hrrn"),
    *("latency_budget", "mlfq", "prefix_aged", "priority"),
)


@cache
def sound_policies() -> tuple[type[BaseScheduler], ...]:
    """Return the policies that come with aioserve."""
    policies = [load_policy(name) for name in NAMES]
    return tuple(policy for policy in policies if issubclass(policy, BaseScheduler))


class PausesAll(BaseScheduler):
    """Order of arrival; every third step, each request that runs is offloaded, else paused."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        if step.step_id % 3 == 0:
            for request in self.running:
                if not step.offload(request):
                    step.pause(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class _Fails(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        raise AssertionError("it never took over")


class FailsToBegin(_Fails):
    """A policy that raises in `__init__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise ValueError("planted in __init__")


class FailsToTakeOver(_Fails):
    """Raises in `take_over`, when all has been handed over and stands in another order."""

    def order(self, request: Request) -> float:
        return -request.arrival_time

    def take_over(self, other: BaseScheduler) -> None:
        super().take_over(other)
        raise ValueError("planted in take_over")


class FailsToOrder(_Fails):
    """Raises in `order` for the last request, when all before it have got other keys."""

    def take_over(self, other: BaseScheduler) -> None:
        self.num_left = len(other.get_requests())
        super().take_over(other)
        raise ValueError("there was no request to order")

    def order(self, request: Request) -> float:
        self.num_left -= 1
        if not self.num_left:
            raise ValueError("planted in order")
        return -request.arrival_time


FAILURES: dict[str, type[BaseScheduler]] = {
    "__init__": FailsToBegin,
    "take_over": FailsToTakeOver,
    "order": FailsToOrder,
}


# What an engine does with a scheduler, step by step: plan, receive, expire, fail, discard. Knows
# the step loop and the toy runner. What must be true after each call is in `invariants`.


class EngineCalls(Bench):
    """The calls of an engine; each checks what must be true then."""

    # What the engine does.

    @kept
    def schedule(self) -> SchedulerOutput:
        """Plan one step. If it carries anything it is in flight until `receive`."""
        output = self._plan()
        assert output is not None, "what the policy raises is raised, or `plan` is to be called"
        return output

    def _plan(self) -> SchedulerOutput | None:
        in_flight = self.rows_in_flight
        self.ends.take(FinishReason.ERROR)
        with self.blame("schedule"):
            step = self.loop.plan()
        self._note_rejected()
        if self.loop.failed:
            self._give_up()
        if step is None:
            self.now += self.step_seconds
            return None
        output = step.output
        self.steps.append(output)
        self.ledger.num_steps = len(self.steps)
        step.handle = self.planned.apply(output, in_flight)
        if self.waste is not None and isinstance(self.scheduler, BaseScheduler):
            self.waste.check(self.scheduler, output, self.requests)
        self.num_tokens_planned += output.total_num_scheduled_tokens
        if self.loop.is_stalled:
            self.now += 1.0  # the engine sleeps before it asks again
        elif not self.loop.in_flight and (wake := self.scheduler.next_wake()) is not None:
            self.now = max(self.now, wake)
        invariants.check_line(self, output)
        self.check()
        if self.kv_cache.retention is not None:
            self.prefixes.check_holes(self.where, self.kv_cache.retention)
        return output

    def _note_rejected(self) -> None:
        """The step has rejected requests, which must not have run."""
        failed, self.loop.failed = self.loop.failed, []
        for ended, error in failed:
            if not isinstance(error, RequestRejectedError):
                self.loop.failed.append((ended, error))
                continue
            for name in ended or ():
                if self.ledger.lives[name].was_scheduled:
                    raise ContractViolation(f"{self.where}: {name} was rejected after it had run")
                if error.retry_after > MAX_RETRY_SECONDS:
                    raise ContractViolation(
                        f"{self.where}: {name} was rejected with retry_after={error.retry_after:g}"
                        ": a client that is to ask again in more than a day never does"
                    )
                self.turned_away.append((self.requests[name], error.retry_after))
            self._end(ended, ended or [], RequestStatus.FINISHED_REJECTED)

    def _give_up(self) -> None:
        """The policy raised: the requests of that step have ended, the others go on."""
        [(_, error)] = self.loop.failed
        self.loop.failed.clear()
        if isinstance(error, StalledError):
            raise self.starvation()
        cause = error.__cause__
        self.errors.append(cause if isinstance(cause, Exception) else PolicyError(str(error)))
        self.planned.give_up()
        ended = self.ends.take(FinishReason.ERROR)
        self._end(ended, ended, RequestStatus.FINISHED_ERROR)
        self.check()

    @kept
    def receive(self, failed: Sequence[str] = ()) -> None:
        """Bring back the oldest step in flight, in which these of its requests `failed` alone."""
        step = self.loop.in_flight[0]
        failed = [name for name in failed if name in step.output.num_scheduled_tokens]
        namespaces, replies = self._namespaces(step), self._replies(step)
        result = self.runner.execute(step.output, namespaces, replies, failed)
        self.now += self.step_seconds
        self.ends.take(FinishReason.ERROR)
        with self.blame("update_from_output"):
            outputs = self.loop.take(result)
        self._end(failed, self.ends.take(FinishReason.ERROR), RequestStatus.FINISHED_ERROR)
        self._check_failed(len(failed))
        if step.output.total_num_scheduled_tokens:
            self._deliver(step, result, outputs)
        self.check()

    @kept
    def plan(self) -> SchedulerOutput | None:
        """End requests whose time is up, then `schedule` if any request is left to plan for."""
        self.expire()
        if not self.scheduler.has_requests():
            return None
        return self._plan()

    @kept
    def blocks_come(self, fails: bool = False) -> None:
        """The store of the connector does what it was asked first, or fails to."""
        self.store.answer(fails)
        self.check()

    @kept
    def step(self) -> list[SchedulerOutput]:
        """Do what the engine task does: fill the pipeline, then take one result.

        Returns the steps that it planned, in order: at pipeline depth 2 the first call plans two.
        """
        outputs = []
        self.store.answer()
        while len(self.loop.in_flight) < self.config.depth:
            output = self.plan()
            if output is not None:
                outputs.append(output)
            if output is None or output.total_num_scheduled_tokens == 0:
                break
        if self.loop.in_flight:
            self.receive()
        return outputs

    @kept
    def expire(self) -> list[str]:
        """End requests whose time is up; returns their ids."""
        due = invariants.due(self)
        with self.blame("expire_requests"):
            expired = self.loop.expire_requests()
        if due - set(expired):
            raise ContractViolation(
                f"{self.where}: the time of {sorted(due - set(expired))} is up, but "
                f"expire_requests returned {expired}"
            )
        chooses = type(self.scheduler).expire_requests is not BaseScheduler.expire_requests
        if set(expired) - due and not chooses:  # a policy may give up the hopeless earlier
            raise ContractViolation(
                f"{self.where}: {sorted(set(expired) - due)} timed out before their time"
            )
        self._end(expired, expired, RequestStatus.FINISHED_TIMEOUT)
        return expired

    @kept
    def fail_steps(self) -> None:
        """The oldest step in flight fails in the runner; as in the engine, all in flight do."""
        steps = list(self.loop.in_flight)
        for step in steps:
            self.runner.fail(step.output, self._namespaces(step), self._replies(step))
        self.now += self.step_seconds
        self.ends.take(FinishReason.ERROR)
        with self.blame("finish_requests"):
            results = self.loop.fail(RuntimeError("as asked"))
        self._check_failed(1)
        asked = [name for step in steps for name in step.output.num_scheduled_tokens]
        self._end(asked, self.ends.take(FinishReason.ERROR), RequestStatus.FINISHED_ERROR)
        for step, result, outputs in results:
            if step.output.total_num_scheduled_tokens:
                self._deliver(step, result, outputs)
        self.check()

    @kept
    def discard_step(self) -> list[str]:
        """Let the policy plan a step that the engine cannot use; return the ids that ended."""
        self.now += self.step_seconds
        self.expire()
        last_step_id = self.steps[-1].step_id if self.steps else 0
        with self.blame("schedule"):
            output = self.scheduler.schedule()
        self.num_tokens_planned += output.total_num_scheduled_tokens
        with self.blame("discard_step"):
            ended = self.scheduler.discard_step(last_step_id)
        self._end(ended, ended, RequestStatus.FINISHED_ERROR)
        self.planned.discard(output)
        self.check()
        return ended

    # What must be true then.

    def check(self) -> None:
        """Check that counts agree, each request has one place and block references are exact."""
        invariants.check(self)

    def _namespaces(self, step: StepInFlight[list[Row]]) -> dict[str, tuple[str, str]]:
        return {
            request_id: (life.request.cache_salt, life.request.adapter_id)
            for request_id, life in _lives(step).items()
        }

    def _replies(self, step: StepInFlight[list[Row]]) -> dict[str, Reply]:
        return {request_id: life.reply for request_id, life in _lives(step).items() if life.reply}

    def _check_failed(self, expected: int) -> None:
        """A policy that raises in `update_from_output` breaks the contract in any case."""
        failed = self.loop.failed[expected:]
        self.loop.failed.clear()
        for _, error in failed:
            raise ContractViolation(f"{self.where}: {error}") from error.__cause__

    def _deliver(
        self,
        step: StepInFlight[list[Row]],
        result: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
    ) -> None:
        where = f"result of step {step.output.step_id}"
        lives = _lives(step)
        statuses = {life: life.request.status for life in lives.values()}
        # A request of the step failed in it, or has been ended by an error since.
        if result.failed or RequestStatus.FINISHED_ERROR in statuses.values():
            preempted = {one for one, is_ in statuses.items() if is_ is RequestStatus.PREEMPTED}
            self.recomputed |= self.planned.lose() | preempted
        dropped = {name for name, life in lives.items() if life in self.recomputed}
        self.recomputed &= {row.life for row in self.rows_in_flight}
        self.ledger.receive(lives, result, outputs, where, dropped | self.runner.spoilt)

    def _end(
        self, request_ids: str | list[str] | None, ended: list[str], status: RequestStatus
    ) -> None:
        asked = [request_ids] if isinstance(request_ids, str) else request_ids
        reason = status.finish_reason
        assert reason is not None
        self.ledger.end(asked, ended, reason, self.where)
        for request_id in ended:
            actual = self.requests[request_id].status
            if isinstance(self.scheduler, BaseScheduler) and actual is not status:
                raise ContractViolation(
                    f"{self.where}: {request_id} has status {actual.name}, should be {status.name}"
                )


def _lives(step: StepInFlight[list[Row]]) -> dict[str, Life]:
    return {row.life.request_id: row.life for row in step.handle}


# Drives a scheduler step by step and checks the contract of `SchedulerInterface` after each. No
# asyncio, no threads, no wall clock: time is a counter, results come back when the test says so.


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
        """Let time pass without a step."""
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
        comparisons.check_hash_order(self)

    @kept
    def check_own_time(self) -> None:
        """The calls so far, made again: the policy calls no clock, dice or sleep of the process."""
        comparisons.check_own_time(self)

    @kept
    def check_walks_nowhere(self) -> None:
        """The calls so far, made again: the policy walks through no objects, frames or tasks."""
        comparisons.check_walks_nowhere(self)

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
    def check_forgets_ids(self) -> None:
        """The policy keeps nothing by the id of a request that has ended, which may come again, on
        requests of the kit's own.
        """
        if issubclass(self.policy, BaseScheduler):
            check_forgets_ids(self.policy, self.config.options)

    @kept
    def check_shares_nothing(self) -> None:
        """The policy keeps nothing where all engines of a process see it, on requests of the kit's
        own.
        """
        if issubclass(self.policy, BaseScheduler):
            check_shares_nothing(self.policy, self.config.options)

    @kept
    def check_idle(self) -> None:
        """Nothing remains: no request, no row in the runner's batch, no block."""
        invariants.check_idle(self)
