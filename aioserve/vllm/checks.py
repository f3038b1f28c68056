"""The rules of the scheduler contract, looked at after every call inside vLLM: `"check": true`.

The same `invariants`, `PlannedBatch` and `Ledger` that the test kit runs a policy under, on vLLM's
requests and results. Which token a model says next, they do not know. A violation ends the looking,
not the serving: it is logged, and kept for whoever asks.
"""

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, cast

from aioserve.config import SchedulerConfig
from aioserve.engine.step_loop import StepLoop
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.delegate import innermost
from aioserve.testing import invariants
from aioserve.testing.bench import Bench, Prefixes
from aioserve.testing.ledger import Ledger, Life
from aioserve.testing.planned_batch import PlannedBatch, Row

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Ends: TypeAlias = list[tuple[str, FinishReason]]  # requests that have ended, and why

#: Requests whose tokens need not be delivered after one has failed: those that rested on its work,
#: and, where `update_from_output()` itself has failed, all of its step.
NOT_DELIVERED = (RequestStatus.PREEMPTED, RequestStatus.FINISHED_ERROR)

#: Requests that have ended and are remembered for messages.
MAX_REMEMBERED = 4096


class Checks:
    """The checks of one scheduler. Its attributes are those of a `Bench` that the rules read."""

    reads_gauges = True

    def __init__(
        self,
        loop: StepLoop[Any],
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """`kv_cache` records events, which nothing else takes; `clock` returns seconds."""
        self.violation: Exception | None = None  # what ended the looking; None: there was nothing
        self.config, self.kv_cache = config, kv_cache
        self.ledger = Ledger(foretells=False)
        self.prefixes = Prefixes(kv_cache.pool)
        budget = config.step_budget(max_model_len)
        pool = kv_cache.pool
        self.planned = PlannedBatch(
            config, self.ledger, pool.num_blocks, kv_cache.block_size, budget
        )
        self.requests: dict[str, Request] = {}
        self._loop, self._max_model_len, self._clock = loop, max_model_len, clock
        self._rows: dict[int, list[Row]] = {}  # by step id, of steps in flight
        self._last_step_id = 0

    # What the rules read.

    @property
    def scheduler(self) -> SchedulerInterface:
        """The policy that plans now."""
        return innermost(self._loop.scheduler)

    @property
    def now(self) -> float:
        """The time of the scheduler's clock, in seconds."""
        return self._clock()

    @property
    def where(self) -> str:
        """The newest step, as messages begin."""
        return f"after step {self._last_step_id}"

    @property
    def rows_in_flight(self) -> set[Row]:
        """Rows of all steps that are not back."""
        return {row for rows in self._rows.values() for row in rows}

    @property
    def loading(self) -> set[Request]:
        """Requests that wait for KV blocks to load."""
        scheduler = self.scheduler
        return scheduler.book.aside if isinstance(scheduler, BaseScheduler) else set()

    # What is told.

    def look(self, rule: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Look at one call, and at what must be true then. After a violation, at nothing."""
        if self.violation is not None:
            return
        try:
            rule(*args, **kwargs)
            invariants.check(cast(Bench, self))
        except Exception as error:  # of a check that fails itself as well
            logger.error("the rules of the contract are broken: %s", error, exc_info=error)
            self.violation = error

    def added(self, request: Request) -> None:
        """The scheduler has accepted a request."""
        self.ledger.open(request, self._max_model_len)
        self.requests[request.request_id] = request
        if len(self.ledger.lives) > MAX_REMEMBERED + len(self.ledger.alive):
            self._forget()

    def planned_step(self, output: SchedulerOutput | None, ends: Ends) -> None:
        """A step goes to vLLM's runner, or a plan without tokens that tells it which requests have
        left; None: the policy has failed, and the step that it was at is not sent.
        """
        self.ended(ends)
        if output is None:
            self.planned.give_up()
            return
        self._last_step_id = output.step_id
        rows = self.planned.apply(output, self.rows_in_flight)
        if output.total_num_scheduled_tokens:
            self._rows[output.step_id] = rows
        invariants.check_line(cast(Bench, self), output)

    def received(
        self,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        ends: Ends,
    ) -> None:
        """A step is back, and the scheduler has made `outputs` of it; `ends` are all since."""
        lives = {row.life.request_id: row.life for row in self._rows.pop(output.step_id, ())}
        dropped: set[Life] = set()
        if any(life.request.status is RequestStatus.FINISHED_ERROR for life in lives.values()):
            dropped = self.planned.lose()
            dropped |= {life for life in lives.values() if life.request.status in NOT_DELIVERED}
        names = {life.request_id for life in dropped}
        where = f"result of step {output.step_id}"
        if output.total_num_scheduled_tokens:
            self.ledger.receive(lives, result, outputs, where, names)
        self.ended(ends)

    def ended(self, ends: Ends) -> None:
        """These requests have ended, some of them by the results that were told before."""
        for name, reason in ends:
            life = self.ledger.alive.get(name)
            if life is not None and life.request.status.is_finished:
                self.ledger.end([name], [name], reason, self.where)

    def _forget(self) -> None:
        """Of the requests that have ended, keep those of which the runner was not told."""
        lives, untold = self.ledger.lives, self.ledger.untold
        for name in [n for n, life in lives.items() if not life.is_alive and n not in untold]:
            del lives[name]
            self.requests.pop(name, None)
