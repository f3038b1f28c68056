"""Drives a scheduler step by step and checks the contract of `SchedulerInterface` after each.

No asyncio, no threads, no wall clock: time is a counter, results come back when the test says so.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import (
    AioserveError,
    EngineOverloadedError,
    PolicyError,
    RequestError,
    RequestRejectedError,
    StalledError,
)
from aioserve.kv_cache import (
    AllBlocksCleared,
    BlockStored,
    KVCacheManager,
    WindowSpec,
    make_resources,
)
from aioserve.kv_connector import OffloadingConnector
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import (
    BaseScheduler,
    SchedulerInterface,
    SchedulerOutput,
    make_successor,
)
from aioserve.scheduler.blame import blamed, place
from aioserve.scheduler.multi_step_decode import MultiStepDecode
from aioserve.step_loop import StepInFlight, StepLoop, StepObserver
from aioserve.testing.calls import Call, kept, make_calls, with_other_ends
from aioserve.testing.decoding_promise import check_keeps_decoding
from aioserve.testing.ledger import STATED, Ledger, Life, stated
from aioserve.testing.planned_batch import PlannedBatch, Row
from aioserve.testing.replies import Drafter, Masked, Reply
from aioserve.testing.successors import FAILURES
from aioserve.testing.time_limit import CALL_SECONDS, OutOfTime, begin_call, end_call
from aioserve.testing.toy_connector import ToyStore, ToyWorker
from aioserve.testing.toy_runner import ToyRunner
from aioserve.testing.violation import ContractViolation, NoReturn, Starvation

__all__ = ["ContractViolation", "SchedulerHarness"]

MIN_REJECTED = 5  # requests of a run that are all rejected: fewer may have been too many at once


class _Ends(StepObserver):
    """Which requests the step loop has ended by itself, and why."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, FinishReason]] = []

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        self._ended += [(request_id, reason) for request_id in request_ids]

    def take(self, reason: FinishReason) -> list[str]:
        """The requests that have ended since the last call, those for this reason."""
        ended, self._ended = self._ended, []
        return [request_id for request_id, why in ended if why is reason]


class SchedulerHarness:
    """One scheduler, its requests, and a `ToyRunner` that executes its steps.

    Every call checks what must be true then, and raises `ContractViolation`. `now` is its clock, in
    seconds: steps advance it, and `wait`.
    """

    def __init__(
        self,
        policy: type[SchedulerInterface],
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int | None = 64,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        step_seconds: float = 1.0,
        drafter: Drafter | None = None,
        tolerates_errors: bool = False,
        kv_connector: str = "none",
        num_host_slots: int = 8,
        num_state_slots: int | None = None,
        window: int | None = None,
        num_spare_window_blocks: int = 0,
        call_seconds: float = CALL_SECONDS,
        **settings: Any,
    ) -> None:
        """`settings` are those of `SchedulerConfig`; a step takes `step_seconds` of its clock. A
        call of the policy that has not come back after `call_seconds` of real time is ended, and
        breaks the contract; under a debugger none is.

        `kv_connector` is as in `CacheConfig`, with `num_host_slots` blocks in host memory. Given
        `num_state_slots`, it is a model with states, which takes no drafts. Given `window`, it has
        layers that see that many tokens, with blocks for one request and `num_spare_window_blocks`.

        `drafter` proposes draft tokens. With `tolerates_errors`, a policy may raise in `schedule`:
        as in the engine, the requests of that step end with an error; `errors` keeps what was
        raised. Raises `ConfigError` if the settings cannot work.
        """
        self.setup = _without_defaults(locals())  # what it takes to make another one like it
        self.policy = policy
        self.calls: list[Call] = []  # from outside, in order
        self.is_in_call = False
        self.tolerates_errors = tolerates_errors
        self.errors: list[Exception] = []
        self.now = 0.0
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **settings
        )
        self.max_model_len = max_model_len
        self._call_seconds = call_seconds
        self.findable: set[bytes] = set()  # block hashes, as KV events tell
        worker = ToyWorker(num_host_slots)
        self.store = ToyStore(worker)
        self.connector: OffloadingConnector | None = None
        if kv_connector != "none":
            store = self.store if kv_connector == "disk" else None
            self.connector = OffloadingConnector(worker, block_size, store=store)
        windows = None
        if window is not None:
            windows = WindowSpec(window, 1, self.config.max_chunk(max_model_len), max_drafts=2)
            longest = max_model_len - 1
            least = windows.num_request_blocks(longest, longest, block_size)
            windows = msgspec.structs.replace(windows, num_blocks=least + num_spare_window_blocks)
        self.kv_cache = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
            record_events=True,
            connector=self.connector,
            resources=make_resources(
                num_state_slots, windows, block_size, keeps_prefixes=enable_prefix_caching
            ),
        )
        make_scheduler: Callable[..., SchedulerInterface] = policy
        self.steps: list[SchedulerOutput] = []
        with self._timed(policy, "__init__"), blamed(policy, "__init__()"):
            scheduler = make_scheduler(
                self.config, self.kv_cache, max_model_len=max_model_len, clock=lambda: self.now
            )
        #: The engine's own; the handle of a step is the rows that it runs.
        self.loop: StepLoop[list[Row]] = StepLoop(
            scheduler,
            depth=self.config.depth,
            clock=lambda: self.now,
            stall_timeout=self.config.stall_timeout,
            raises=not tolerates_errors,
        )
        self._ends = _Ends()
        self.loop.observers.subscribe(self._ends)
        self.runner = ToyRunner(
            num_blocks,
            block_size,
            max_num_seqs=max_num_seqs,
            max_encoder_tokens=self.config.max_encoder_tokens,
            encoder_cache_tokens=self.config.encoder_cache_tokens,
            drafter=drafter,
            kv_worker=worker,
            num_state_slots=num_state_slots,
            windows=windows,
        )
        self.ledger = Ledger()
        budget = self.config.step_budget(max_model_len)
        self.planned = PlannedBatch(self.config, self.ledger, num_blocks, block_size, budget)
        self.requests: dict[str, Request] = {}  # the latest of each name
        self.num_tokens_planned = 0
        self._step_seconds = step_seconds
        self._recomputed: set[Life] = set()  # what steps in flight bring for them is dropped

    @property
    def scheduler(self) -> SchedulerInterface:
        """The scheduler that plans now; a test may put another one in its place."""
        return self.loop.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: SchedulerInterface) -> None:
        self.loop.scheduler = scheduler

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Tokens received so far, by request id."""
        return {name: life.tokens for name, life in self.ledger.lives.items()}

    @property
    def finished(self) -> dict[str, FinishReason]:
        """Why each ended, of those that have."""
        lives = self.ledger.lives.items()
        return {name: life.finish_reason for name, life in lives if life.finish_reason is not None}

    @property
    def num_in_flight(self) -> int:
        """Steps that are planned and not received."""
        return len(self.loop.in_flight)

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
        request = Request(RequestSpec(request_id, prompt_token_ids, params, **of_request))
        try:
            with self._blame("add_request"):
                self.loop.add_request(request)
        except (EngineOverloadedError, PolicyError, RequestError):
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
        with self._blame("finish_requests"):
            ended = self.scheduler.finish_requests(request_ids, status)
        self._end(request_ids, ended, status)
        self.check()
        return ended

    @kept
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns what the scheduler does."""
        with self._blame("reset_prefix_cache"):
            is_empty = self.scheduler.reset_prefix_cache()
        if is_empty != (self.kv_cache.pool.num_used_blocks == 0):
            raise ContractViolation(
                f"{self._where}: reset_prefix_cache returned {is_empty}, "
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
        before = self._standing()
        config = msgspec.structs.replace(self.config, options=dict(options or {}))
        try:
            with self._timed(policy, "take_over"):
                self.scheduler = make_successor(self.scheduler, policy, config)
        except AioserveError:
            self._check_standing(before)
            raise
        self.config = config
        self.check()

    @kept
    def fail_switch(self, where: str) -> None:
        """A policy that raises `where` ("__init__", "take_over" or "order") is to take over."""
        before, config = self._standing(), msgspec.structs.replace(self.config, options={})
        try:
            make_successor(self.scheduler, FAILURES[where], config)
        except PolicyError:
            self._check_standing(before)
        else:
            raise ContractViolation(f"{self._where}: a policy took over that raised in {where}")
        self.check()

    # What the engine does.

    @kept
    def schedule(self) -> SchedulerOutput:
        """Plan one step. If it carries anything it is in flight until `receive`."""
        output = self._plan()
        assert output is not None, "what the policy raises is raised, or `plan` is to be called"
        return output

    def _plan(self) -> SchedulerOutput | None:
        self.now += self._step_seconds
        in_flight = self._rows_in_flight()
        self._ends.take(FinishReason.ERROR)
        with self._blame("schedule"):
            step = self.loop.plan()
        self._note_rejected()
        if self.loop.failed:
            self._give_up()
        if step is None:
            return None
        output = step.output
        self.steps.append(output)
        self.ledger.num_steps = len(self.steps)
        step.handle = self.planned.apply(output, in_flight)
        self.num_tokens_planned += output.total_num_scheduled_tokens
        if self.loop.is_stalled:
            self.now += 1.0  # the engine sleeps before it asks again
        elif not self.loop.in_flight and (wake := self.scheduler.next_wake()) is not None:
            self.now = max(self.now, wake)
        self._check_line(output)
        self.check()
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
                    raise ContractViolation(f"{self._where}: {name} was rejected after it had run")
            self._end(ended, ended or [], RequestStatus.FINISHED_REJECTED)

    def _give_up(self) -> None:
        """The policy raised: the requests of that step have ended, the others go on."""
        [(_, error)] = self.loop.failed
        self.loop.failed.clear()
        if isinstance(error, StalledError):
            raise self._starvation()
        cause = error.__cause__
        self.errors.append(cause if isinstance(cause, Exception) else PolicyError(str(error)))
        self.planned.give_up()
        ended = self._ends.take(FinishReason.ERROR)
        self._end(ended, ended, RequestStatus.FINISHED_ERROR)
        self.check()

    @kept
    def receive(self, failed: Sequence[str] = ()) -> None:
        """Bring back the oldest step in flight, in which these of its requests `failed` alone."""
        step = self.loop.in_flight[0]
        failed = [name for name in failed if name in step.output.num_scheduled_tokens]
        namespaces, replies = self._namespaces(step), self._replies(step)
        result = self.runner.execute(step.output, namespaces, replies, failed)
        self._ends.take(FinishReason.ERROR)
        with self._blame("update_from_output"):
            outputs = self.loop.take(result)
        self._end(failed, self._ends.take(FinishReason.ERROR), RequestStatus.FINISHED_ERROR)
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
        due = self._due()
        with self._blame("expire_requests"):
            expired = self.loop.expire_requests()
        if due - set(expired):
            raise ContractViolation(
                f"{self._where}: the time of {sorted(due - set(expired))} is up, but "
                f"expire_requests returned {expired}"
            )
        chooses = type(self.scheduler).expire_requests is not BaseScheduler.expire_requests
        if set(expired) - due and not chooses:  # a policy may give up the hopeless earlier
            raise ContractViolation(
                f"{self._where}: {sorted(set(expired) - due)} timed out before their time"
            )
        self._end(expired, expired, RequestStatus.FINISHED_TIMEOUT)
        return expired

    @kept
    def fail_steps(self) -> None:
        """The oldest step in flight fails in the runner; as in the engine, all in flight do."""
        steps = list(self.loop.in_flight)
        for step in steps:
            self.runner.fail(step.output, self._namespaces(step), self._replies(step))
        self._ends.take(FinishReason.ERROR)
        with self._blame("finish_requests"):
            results = self.loop.fail(RuntimeError("as asked"))
        self._check_failed(1)
        asked = [name for step in steps for name in step.output.num_scheduled_tokens]
        self._end(asked, self._ends.take(FinishReason.ERROR), RequestStatus.FINISHED_ERROR)
        for step, result, outputs in results:
            if step.output.total_num_scheduled_tokens:
                self._deliver(step, result, outputs)
        self.check()

    @kept
    def discard_step(self) -> list[str]:
        """The policy plans a step that the engine cannot use; returns the ids that ended."""
        self.now += self._step_seconds
        self.expire()
        last_step_id = self.steps[-1].step_id if self.steps else 0
        with self._blame("schedule"):
            output = self.scheduler.schedule()
        self.num_tokens_planned += output.total_num_scheduled_tokens
        with self._blame("discard_step"):
            ended = self.scheduler.discard_step(last_step_id)
        self._end(ended, ended, RequestStatus.FINISHED_ERROR)
        self.planned.discard(output)
        self.check()
        return ended

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
                f"{self._where}: not finished after {max_steps} steps without arrivals: {waiting}; "
                "a request is never served, or preempted again and again"
            )
        self.check_idle()

    @kept
    def abort_everything(self) -> None:
        """Every client leaves at once; then nothing may remain."""
        self.finish(None)
        self.run_until_idle()

    @kept
    def check_repeatable(self) -> None:
        """Nothing but the calls may matter: no clock, no hash order, no global dice."""
        again = SchedulerHarness(self.policy, **self.setup)
        try:
            make_calls(again, [c for c in self.calls if not c.method.startswith("check_")])
        finally:  # an error that did not come the first time is a difference, too
            for planned, expected in zip(again.steps, self.steps, strict=False):
                if planned != expected:
                    raise ContractViolation(
                        f"step {expected.step_id}: the same events gave another plan the second "
                        f"time: {planned.num_scheduled_tokens} instead of "
                        f"{expected.num_scheduled_tokens}"
                    )

    @kept
    def check_foresees_no_end(self) -> None:
        """The same calls, with the lengths of the given replies dealt out in reverse, give the same
        plans until the first request has ended: a policy cannot know how long a reply will be.
        """
        self.check_repeatable()  # dice would look like foresight
        calls = [call for call in self.calls if not call.method.startswith("check_")]
        again = SchedulerHarness(self.policy, **self.setup)
        make_calls(again, with_other_ends(calls))
        num_alike = min(self.num_steps_before_ends, again.num_steps_before_ends)
        for planned, expected in zip(again.steps[:num_alike], self.steps, strict=False):
            if planned != expected:
                raise ContractViolation(
                    f"step {expected.step_id}: no reply has ended, but the plan tells how long "
                    f"they will be: {expected.num_scheduled_tokens}, and with the lengths dealt "
                    f"out in reverse {planned.num_scheduled_tokens}"
                )

    @property
    def num_steps_before_ends(self) -> int:
        """Steps that were planned before the first request ended."""
        first = self.ledger.first_end
        return len(self.steps) if first is None else first

    @kept
    def check_keeps_decoding(self) -> None:
        """What the policy promises with `keeps_decoding`, on requests of the kit's own, with the
        limits of this harness. Does nothing without the promise, or where nothing relies on it.
        """
        if not MultiStepDecode.is_promised_by(self.policy):
            return
        if self.config.depth > 1 or self.config.num_lookahead_tokens:
            return
        num_blocks, size = self.kv_cache.pool.num_blocks, self.kv_cache.block_size

        def make(clock: Callable[[], float]) -> BaseScheduler:
            made: Callable[..., Any] = self.policy
            cache = KVCacheManager(num_blocks, size)
            found = made(self.config, cache, max_model_len=self.max_model_len, clock=clock)
            assert isinstance(found, BaseScheduler), "it is promised by no other"
            return found

        with self._blame("schedule"):
            check_keeps_decoding(make, self.max_model_len, self.kv_cache.num_slots)

    @kept
    def check_idle(self) -> None:
        """Nothing remains: no request, no row in the runner's batch, no block."""
        if lost := list(self.ledger.alive):
            raise ContractViolation(f"{self._where}: requests were lost: {lost}")
        ends = [life.finish_reason for life in self.ledger.lives.values()]
        if len(ends) >= MIN_REJECTED and set(ends) == {FinishReason.REJECTED}:
            raise ContractViolation(f"{self._where}: all {len(ends)} requests were rejected")
        rows = sorted({*self.runner.request_ids, *self.planned.rows})
        if rows and not self.errors:  # it could not be told by a policy that raises
            raise ContractViolation(
                f"{self._where}: the runner was never told of the end of {rows}"
            )
        pool = self.kv_cache.pool
        if leaked := pool.num_used_blocks - self.kv_cache.leases.num_held_blocks:
            raise ContractViolation(f"{self._where}: {leaked} blocks leaked")
        for resource in self.kv_cache.resources:
            if what := resource.held():
                raise ContractViolation(f"{self._where}: {what} leaked")
        while self.store:
            self.store.answer()
        if self.connector is not None and self.connector.slots.num_used_blocks:
            raise ContractViolation(
                f"{self._where}: {self.connector.slots.num_used_blocks} slots of host memory leaked"
            )
        lost_hashes = [h for h in self.findable if pool.lookup(h) is None]
        if lost_hashes:
            raise ContractViolation(
                f"{self._where}: {len(lost_hashes)} blocks left the prefix index without an event"
            )
        self._check_stats()

    # What must be true after every call.

    def check(self) -> None:
        """Check that counts agree, each request has one place and block references are exact."""
        self._check_counts()
        self._take_events()
        if isinstance(self.scheduler, BaseScheduler):
            self._check_places(self.scheduler)
            self._check_blocks()

    def _check_counts(self) -> None:
        scheduler, where = self.scheduler, self._where
        alive = self.ledger.alive
        num_unfinished = scheduler.get_num_unfinished_requests()
        if num_unfinished != len(alive):
            raise ContractViolation(
                f"{where}: {num_unfinished} requests are unfinished, should be {len(alive)}: "
                f"{list(alive)}"
            )
        counts = scheduler.get_request_counts()
        if sum(counts) != len(alive) or scheduler.has_unfinished_requests() != bool(alive):
            raise ContractViolation(
                f"{where}: get_request_counts returns {counts}, has_unfinished_requests "
                f"{scheduler.has_unfinished_requests()}, with {len(alive)} requests"
            )
        if counts[0] > self.config.max_num_seqs:
            raise ContractViolation(
                f"{where}: {counts[0]} requests run, max_num_seqs is {self.config.max_num_seqs}"
            )
        has_finished, must_tell = scheduler.has_finished_requests(), self.planned.must_tell()
        if has_finished and not self.ledger.untold:
            raise ContractViolation(f"{where}: has_finished_requests, but the runner knows of all")
        if must_tell and not has_finished:
            raise ContractViolation(
                f"{where}: has_finished_requests is false, but the runner was not told of the end "
                f"of {must_tell}"
            )

    def _check_places(self, scheduler: BaseScheduler) -> None:
        """Check that each unfinished request runs or waits, as its status says."""
        running, loading = set(scheduler.running), scheduler.book.aside
        for life in self.ledger.alive.values():
            request = life.request
            for name, was, now in zip(STATED, life.stated, stated(request), strict=True):
                if was != now:
                    raise ContractViolation(
                        f"{self._where}: the policy has changed {name} of {life.request_id} from "
                        f"{was!r} to {now!r}"
                    )
            if _has_nan(request.order_key):
                raise ContractViolation(
                    f"{self._where}: order() returned {request.order_key[0]!r} for "
                    f"{life.request_id}: NaN has no place in line"
                )
            runs = request in running
            waits = (request in scheduler.waiting) != (request in loading)
            if runs == waits or runs != (request.status is RequestStatus.RUNNING):
                places = [w for w, there in (("running", runs), ("waiting", waits)) if there]
                raise ContractViolation(
                    f"{self._where}: {life.request_id} has status {request.status.name} and is in "
                    f"{' and '.join(places) or 'neither running nor waiting'}"
                )

    def _check_blocks(self) -> None:
        pool = self.kv_cache.pool
        holders = Counter(
            block_id
            for row in self.planned.holders(self._rows_in_flight())
            for block_id in row.block_ids
        )
        holders += self.kv_cache.leases.references
        expected = [holders.get(block_id, 0) for block_id in range(pool.num_blocks)]
        if pool.ref_counts != expected:
            wrong = [b for b in range(pool.num_blocks) if pool.ref_counts[b] != expected[b]]
            names = {
                name: row.block_ids
                for name, row in self.planned.rows.items()
                if set(row.block_ids) & set(wrong)
            }
            raise ContractViolation(
                f"{self._where}: reference counts of blocks {wrong} are "
                f"{[pool.ref_counts[b] for b in wrong]}, should be {[expected[b] for b in wrong]}; "
                f"in the tables of {names or 'no request'}"
            )
        if pool.num_used_blocks != len(holders):
            raise ContractViolation(
                f"{self._where}: {pool.num_used_blocks - len(holders)} blocks are lost"
            )

    def _check_line(self, output: SchedulerOutput) -> None:
        """Check the promise `admits_in_order`: no request was admitted before its predecessor."""
        scheduler = self.scheduler
        if not isinstance(scheduler, BaseScheduler) or scheduler.admits_in_order is None:
            return
        requests = [life.request for life in self.ledger.alive.values()]
        waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        waiting = [r for r in requests if r.status in waits and r not in self._loading]
        for data in output.scheduled_new_reqs:
            admitted = self.requests[data.request_id]
            for request in waiting:
                is_one_line = scheduler.admits_in_order == "all" or request.user == admitted.user
                if is_one_line and request.order_key < admitted.order_key:
                    raise ContractViolation(
                        f"step {output.step_id}: {admitted.request_id} is admitted, but "
                        f"{request.request_id} stands before it and waits"
                    )

    def _standing(self) -> list[Any]:
        """State that a failed switch must not change: keys, the queue, running requests."""
        if not isinstance(self.scheduler, BaseScheduler):
            return []
        scheduler = self.scheduler
        keys = [(request, request.order_key) for request in scheduler.get_requests()]
        return [scheduler, keys, list(scheduler.waiting), list(scheduler.running)]

    def _check_standing(self, before: list[Any]) -> None:
        if self._standing() != before:
            raise ContractViolation(f"{self._where}: a switch that failed has changed the line")
        self.check()

    def _check_stats(self) -> None:
        stats = self.scheduler.make_stats()
        if stats is None or self.errors:
            return
        counted = stats.num_prefill_tokens + stats.num_decode_tokens
        if counted != self.num_tokens_planned:
            raise ContractViolation(
                f"{self._where}: make_stats counts {counted} tokens, but "
                f"{self.num_tokens_planned} were scheduled"
            )

    def _due(self) -> set[str]:
        """Whose deadline or queue timeout has passed."""
        timeout = self.config.queue_timeout
        return {
            life.request_id
            for life in self.ledger.alive.values()
            if (life.request.deadline is not None and life.request.deadline <= self.now)
            or (
                timeout is not None
                and not life.was_scheduled
                and life.request.arrival_time + timeout <= self.now
            )
        }

    # Bookkeeping.

    @property
    def _loading(self) -> set[Request]:
        """Requests that wait for KV blocks to load; they delay no other request."""
        scheduler = self.scheduler
        return scheduler.book.aside if isinstance(scheduler, BaseScheduler) else set()

    @property
    def _where(self) -> str:
        return f"after step {self.steps[-1].step_id}" if self.steps else "before the first step"

    @contextmanager
    def _blame(self, method: str) -> Iterator[None]:
        """An exception that is no message of ours is the scheduler's fault."""
        try:
            with self._timed(type(self.scheduler), method):
                yield
        except StalledError:
            raise self._starvation() from None
        except (AioserveError, ContractViolation) as error:
            cause = error.__cause__
            is_door = method == "add_request"
            if is_door or not isinstance(error, PolicyError) or cause is None:
                raise
            if isinstance(cause, AioserveError):  # it says itself what is wrong
                raise cause from cause.__cause__
            name = type(self.scheduler).__name__
            raise ContractViolation(
                f"{self._where}: {name} raised {cause!r} in {method}()"
            ) from cause
        except Exception as error:
            name = type(self.scheduler).__name__
            raise ContractViolation(
                f"{self._where}: {name} raised {error!r} in {method}()"
            ) from error

    def _starvation(self) -> Starvation:
        return Starvation(
            f"{self._where}: no request was scheduled for {self.config.stall_timeout:g} s although "
            f"{list(self.ledger.alive)} wait"
        )

    @contextmanager
    def _timed(self, policy: type, method: str) -> Iterator[None]:
        """What the policy is asked in the block has so long, and then breaks the contract."""
        call = begin_call(self._call_seconds)
        ended_by: BaseException | None = None
        try:
            yield
        except (OutOfTime, KeyboardInterrupt) as error:
            if not call.was_ended:
                raise
            ended_by = error
        finally:
            end_call(call)
        if call.was_ended:  # also one that swallowed what ended it
            where = "" if ended_by is None else place(ended_by, policy)
            raise NoReturn(
                f"{self._where}: {policy.__name__} did not come back from {method}() in "
                f"{self._call_seconds:g} s{where}"
            ) from ended_by

    def _rows_in_flight(self) -> set[Row]:
        return {row for step in self.loop.in_flight for row in step.handle}

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
            raise ContractViolation(f"{self._where}: {error}") from error.__cause__

    def _deliver(
        self,
        step: StepInFlight[list[Row]],
        result: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
    ) -> None:
        where = f"result of step {step.output.step_id}"
        if result.failed:
            self._recomputed |= self.planned.lose()
        lives = _lives(step)
        dropped = {name for name, life in lives.items() if life in self._recomputed}
        self._recomputed &= {row.life for row in self._rows_in_flight()}
        self.ledger.receive(lives, result, outputs, where, dropped | self.runner.spoilt)

    def _end(
        self, request_ids: str | list[str] | None, ended: list[str], status: RequestStatus
    ) -> None:
        asked = [request_ids] if isinstance(request_ids, str) else request_ids
        reason = status.finish_reason
        assert reason is not None
        self.ledger.end(asked, ended, reason, self._where)
        for request_id in ended:
            actual = self.requests[request_id].status
            if isinstance(self.scheduler, BaseScheduler) and actual is not status:
                raise ContractViolation(
                    f"{self._where}: {request_id} has status {actual.name}, should be {status.name}"
                )

    def _take_events(self) -> None:
        for event in self.kv_cache.take_events():
            if isinstance(event, AllBlocksCleared):
                self.findable.clear()
            elif isinstance(event, BlockStored):
                self.findable.add(event.block_hash)
            else:
                self.findable.discard(event.block_hash)


def _lives(step: StepInFlight[list[Row]]) -> dict[str, Life]:
    return {row.life.request_id: row.life for row in step.handle}


def _without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a harness, besides the policy, that say something."""
    defaults = {
        **{field.name: field.default for field in msgspec.structs.fields(SchedulerConfig)},
        **(SchedulerHarness.__init__.__kwdefaults__ or {}),
    }
    given = {**arguments, **arguments["settings"]}
    for name in ("self", "policy", "settings"):
        del given[name]
    return {n: v for n, v in given.items() if n not in defaults or defaults[n] != v}


def _has_nan(key: object) -> bool:
    """Whether it is NaN, or a tuple that has one."""
    return any(map(_has_nan, key)) if isinstance(key, tuple) else bool(key != key)
