"""What an engine does with a scheduler, step by step: plan, receive, expire, fail, discard.

Knows the step loop and the toy runner. What must be true after each call is in `invariants`.
"""

from collections.abc import Sequence

from aioserve.errors import PolicyError, RequestRejectedError, StalledError
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.request import RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.step_loop import StepInFlight
from aioserve.testing import invariants
from aioserve.testing.bench import Bench
from aioserve.testing.calls import kept
from aioserve.testing.ledger import Life
from aioserve.testing.planned_batch import Row
from aioserve.testing.rejections import MAX_RETRY_SECONDS
from aioserve.testing.replies import Reply
from aioserve.testing.violation import ContractViolation


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
        """What the engine task does: fill the pipeline, then take one result.

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
        """The policy plans a step that the engine cannot use; returns the ids that ended."""
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
