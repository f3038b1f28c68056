"""What another policy would have done with the traffic of a decision log, in virtual time.

Its requests go through the engine task again, with their own tokens: they come, leave and end as
they did, and get the replies that they got. Knows no HTTP, no text and no workload but the log.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.builder import make_kv_cache
from aioserve.engine.core import EngineCore, EngineLoop
from aioserve.engine.step_loop import StepLoop
from aioserve.errors import AioserveError, ConfigError, RequestRejectedError
from aioserve.kv_cache import WindowSpec
from aioserve.lab.calibration import fit_step_time
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog, Life
from aioserve.lab.decision_log.recorder import RecordingScheduler, RecordSink
from aioserve.lab.decision_log.records import Header, Record, Reset
from aioserve.lab.simulation.run import VirtualClockEventLoop, raised_not_logged
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name
from aioserve.outputs import EngineCoreOutput, ModelRunnerOutput
from aioserve.request import ROW_VALUES, Request, RequestStatus, invented
from aioserve.runner.interface import RunnerInfo, RunnerInterface
from aioserve.runner.simulated import IDLE_SECONDS
from aioserve.runner.step_times import LinearStepTimes, StepTimeModel, StepTimeSource
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.scheduler.output import SchedulerOutput, StepFeatures, step_content
from aioserve.scheduler.registry import FOREIGN

BLOCK = 16  # tokens: what prompts share is found in multiples of this


class Traffic(NamedTuple):
    """The requests of a log, and the machine that served them."""

    header: Header
    chronicle: Chronicle  # fed with the whole log
    resets: list[float]  # of the prefix cache, seconds since the log began
    step_time: StepTimeModel

    @property
    def lives(self) -> list[Life]:
        """The lives of all requests that were accepted while the log was written, with their
        prompts.
        """
        return self.chronicle.lives[self.header.num_there :]


def read_traffic(log: DecisionLog) -> Traffic:
    """Return requests, and the step-time model that fits the steps. Raises `ConfigError`."""
    chronicle = Chronicle(log.header, keep_prompts=True)
    features: list[StepFeatures] = []
    seconds: list[float] = []
    resets = []
    for record in log:
        step = chronicle.feed(record)
        if step is not None:
            features.append(step.features)
            seconds.append(step.seconds)
        if isinstance(record, Reset):
            resets.append(chronicle.now)
    source = f"fitted to the {len(features)} steps of decision log {log.path.name}"
    return Traffic(log.header, chronicle, resets, fit_step_time(features, seconds, source))


def make_workload(traffic: Traffic, path: str, seed: int = 0) -> Workload:
    """Return the requests of a log: when they came, what their prompts share, how long the replies
    were.

    Raises `ConfigError` if it has none, or if they have images.
    """
    if any(life.spec.encoder_inputs for life in traffic.lives):
        raise ConfigError(
            f"decision log {path} has requests with images, whose time in a step it does not tell: "
            "`replay` decides on it anew"
        )
    chains = [_chain(life) for life in traffic.lives]
    num_holders = Counter(name for chain in chains for name in chain)
    lives = sorted(zip(traffic.lives, chains, strict=True), key=lambda pair: pair[0].arrival)
    if not lives:
        raise ConfigError(f"decision log {path} has no requests that were served")
    first, has_drafts = lives[0][0].arrival, bool(traffic.chronicle.longest_draft)
    return Workload(
        Path(path).name,
        tuple(
            WorkloadRequest(
                life.arrival - first,
                _pieces(life, chain, num_holders, seed),
                max(len(life.tokens), 1),
                priority=life.spec.priority,
                user=life.spec.user,
                timeout=_timeout(life),
                draft_acceptance=_draft_acceptance(life) if has_drafts else None,
                max_tokens=life.spec.sampling_params.max_tokens,
                hints=life.spec.hints,
            )
            for life, chain in lives
        ),
        seed=seed,
        is_trace=True,
    )


def make_settings(traffic: Traffic) -> list[tuple[str, Any]]:
    """Step times as fitted to the log, the memory of the server that wrote it, and its drafts."""
    header, step_time = traffic.header, traffic.step_time
    longest_draft = traffic.chronicle.longest_draft
    return [
        *([("runner.simulated_draft_tokens", longest_draft)] if longest_draft else []),
        ("model.max_model_len", header.max_model_len),
        *_cache_settings(header),
        *_window_settings(header),
        ("runner.step_base_ms", step_time.base_ms),
        ("runner.step_prefill_token_us", step_time.prefill_token_us),
        ("runner.step_decode_us", step_time.decode_us),
        ("runner.step_context_token_us", step_time.context_token_us),
        ("runner.step_query_context_ns", step_time.query_context_ns),
        ("runner.step_prefill_us", step_time.prefill_us),
        ("runner.step_idle_ms", step_time.idle_ms),
    ]


def make_limits(traffic: Traffic) -> list[tuple[str, Any]]:
    """Return the scheduler's settings of the server that wrote the log, besides its policy and what
    it noted: seats, budgets, limits of the queue, victims.
    """
    return [
        (f"scheduler.{name}", value)
        for name, value in traffic.header.scheduler.items()
        if name not in ("policy", "options", "decision_log", "request_log")
    ]


def _cache_settings(header: Header) -> list[tuple[str, Any]]:
    return [
        ("cache.num_kv_blocks", header.num_kv_blocks),
        ("cache.block_size", header.block_size),
        ("cache.enable_prefix_caching", header.enable_prefix_caching),
        ("cache.watermark", header.watermark),
        ("cache.num_state_slots", header.num_state_slots),
    ]


def _window_settings(header: Header) -> list[tuple[str, Any]]:
    if (windows := header.windows) is None:
        return []
    return [
        ("runner.simulated_window", windows.num_tokens),
        ("cache.num_window_blocks", windows.num_blocks),
    ]


def _chain(life: Life) -> list[int]:
    """Return a name for every beginning of the prompt that is whole blocks long."""
    assert life.prompt is not None
    blocks = [life.prompt[i : i + BLOCK] for i in range(0, len(life.prompt) - BLOCK + 1, BLOCK)]
    root = text_name("logged", life.spec.cache_salt, life.spec.adapter_id)
    return list(accumulate(blocks, _extend, initial=root))[1:]


def _extend(name: int, block: "array[int]") -> int:
    return text_name(name, block.tobytes().hex())


def _pieces(
    life: Life, chain: list[int], num_holders: Counter[int], seed: int
) -> tuple[Piece, ...]:
    """Return the prompt cut where others leave it: what shares a block of a piece shares
    all of it.
    """
    pieces, begin = [], 0
    for end in range(1, len(chain) + 1):
        if end == len(chain) or num_holders[chain[end]] != num_holders[chain[end - 1]]:
            name = text_name("piece", seed, chain[end - 1])
            pieces.append(Piece(name, (end - begin) * BLOCK))
            begin = end
    if rest := life.num_prompt_tokens - len(chain) * BLOCK:
        pieces.append(Piece(text_name("rest", seed, str(life.arrival), life.request_id), rest))
    return tuple(pieces)


def _draft_acceptance(life: Life) -> float:
    """Return the share of right guesses among those whose predecessors were right, or among the
    steps, if these are more: n-grams are found in few, and are simulated in all.
    """
    num_steps = len(life.tokens) - 1 - life.num_right_drafts
    return life.num_right_drafts / max(life.num_tried_drafts, num_steps, 1)


def _timeout(life: Life) -> float | None:
    deadline = life.spec.deadline
    return None if deadline is None else max(deadline - life.spec.arrival_time, 1e-3)


class RepliesRunner(RunnerInterface):
    """Replies as the log has them, after the time that the model says."""

    def __init__(
        self, replies: dict[str, "array[int]"], step_time: StepTimeSource, info: RunnerInfo
    ) -> None:
        self._replies, self._info = replies, info
        self._step_time = step_time
        self._num_known: dict[str, int] = {}  # tokens of each request in the batch
        self._num_prompt: dict[str, int] = {}
        self._filler: dict[str, int] = {}
        self._pooled: set[str] = set()  # they get no token
        self._busy_until = 0.0
        self._is_cold = True  # no step has run yet

    async def load(self) -> RunnerInfo:
        return self._info

    async def close(self) -> None:
        pass

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        rates, now = self._step_time.rates, loop.time()
        if now - self._busy_until > IDLE_SECONDS:
            self._busy_until = now + 1e-3 * rates.idle_ms
        self._busy_until = max(now, self._busy_until)
        if scheduler_output.total_num_scheduled_tokens:
            self._busy_until += self._step_time.seconds(*step_content(scheduler_output))
            self._busy_until += 1e-3 * (rates.host_ms + self._is_cold * rates.cold_ms)
            self._is_cold = False
        loop.call_at(self._busy_until, future.set_result, self._compute(scheduler_output))
        return future

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.request_id] = new.num_computed_tokens
            self._num_known[new.request_id] = len(new.token_ids)
            if new.pooling_params is not None:
                self._pooled.add(new.request_id)
            self._num_prompt[new.request_id] = new.num_prompt_tokens
            self._filler[new.request_id] = next(
                i for i in range(len(new.stop_token_ids) + 1) if i not in new.stop_token_ids
            )
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            [self._next_token(request_id)]
            if computed[request_id] + num_tokens >= self._num_known[request_id]
            and request_id not in self._pooled
            else []
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        values = {
            request_id: invented(names, request_id, self._num_known[request_id])
            for request_id, names in output.parts.get(ROW_VALUES, {}).items()
        }
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled, row_values=values)

    def _next_token(self, request_id: str) -> int:
        position = self._num_known[request_id] - self._num_prompt[request_id]
        self._num_known[request_id] += 1
        reply = self._replies[request_id]
        return reply[position] if position < len(reply) else self._filler[request_id]


# The simulation of another policy.


POLL_SECONDS = 0.1  # virtual; no result depends on how exactly the end of a run is noticed
# A client that leaves does so on reading a token. In a log of virtual time that is the instant in
# which the token came, and rounding must not put it before.
MOMENT = 1e-6

Measures = dict[str, float]


class Plan(NamedTuple):
    """The settings of a simulation, and with which the scheduler goes on from when, in seconds."""

    config: EngineConfig
    switches: list[tuple[float, SchedulerConfig]]
    step_time: StepTimeSource | None = None  # of another machine; None: as fitted to the log


class WhatIf(NamedTuple):
    """Measures of reality, of the recorded policies simulated, and of the other one simulated."""

    policies: str  # the recorded ones, in words
    recorded: Measures
    same: Measures | None  # None: the recorded scheduler is another engine's, which is not here
    other: Measures
    step_time: StepTimeModel
    num_refused: int


def what_if(
    log: DecisionLog,
    policy: str | None,
    settings: list[tuple[str, str]],
    machine: StepTimeSource | None = None,
) -> WhatIf:
    """Simulate `policy`, and `settings` (dotted name, value), beside what was recorded; with a
    `machine`, on that one, whose KV cache is what it holds unless a setting says it.

    Call it outside of a loop. Raises `ConfigError` for settings that cannot work, a damaged log, or
    one with too few steps to learn from.
    """
    log.header.check_is_whole()
    make_config(log.header, policy, settings)  # before the file is read: it may not make sense
    traffic = read_traffic(log)
    same: Plan | None = None
    try:
        same = make_plan(traffic, None, [])
    except ConfigError:
        if log.config.policy not in FOREIGN:
            raise
    if machine is not None:
        settings = [*_memory_of(machine, log.header, policy, settings), *settings]
    other = make_plan(traffic, policy, settings)._replace(step_time=machine)
    return WhatIf(
        traffic.chronicle.policies,
        measure(traffic.chronicle, traffic.lives),
        None if same is None else rerun(traffic, same, is_recorded=True),
        rerun(traffic, other),
        traffic.step_time,
        traffic.chronicle.num_refused,
    )


def _memory_of(
    machine: StepTimeSource, header: Header, policy: str | None, settings: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the KV blocks that the machine holds, as a setting; none where it does not know."""
    config = make_config(header, policy, settings)
    budget = config.scheduler.step_budget(header.max_model_len)
    held = machine.num_kv_tokens(budget, config.scheduler.max_num_seqs)
    if held is None:
        return []
    return [("cache.num_kv_blocks", str(held // config.cache.block_size))]


def make_plan(traffic: Traffic, policy: str | None, settings: list[tuple[str, str]]) -> Plan:
    """Return the plan of a rerun: what was recorded, switches included, with `settings` laid over
    all of it; or another policy, from the beginning to the end. Raises `ConfigError`.
    """
    header = traffic.header
    switches = []
    for time, scheduler in traffic.chronicle.switches if policy is None else ():
        after = msgspec.structs.replace(header, scheduler=scheduler)
        switches.append((time, make_config(after, None, settings).scheduler))
    return Plan(make_config(header, policy, settings), switches)


def make_config(
    header: Header, policy: str | None, settings: list[tuple[str, str]]
) -> EngineConfig:
    """Return the settings of `header`, with others laid over them. Raises `ConfigError`."""
    for name, _ in settings:
        if not name.startswith(("scheduler.", "cache.")):
            raise ConfigError(f"{name} plays no part in a replay; scheduler.* and cache.* do")
    scheduler = dict(header.scheduler)
    if policy is not None and policy != scheduler["policy"]:
        scheduler |= {"policy": policy, "options": {}}  # the options of another policy
    recorded: list[tuple[str, Any]] = [(f"scheduler.{k}", v) for k, v in scheduler.items()]
    config = EngineConfig.load(None, [*recorded, *_cache_settings(header), *settings])
    loaded = load_policy(config.scheduler.policy)
    if issubclass(loaded, BaseScheduler):
        loaded.parse_options(config.scheduler.options)
        loaded.check_limits(config.scheduler, header.max_model_len)
    return config


def rerun(traffic: Traffic, plan: Plan, *, is_recorded: bool = False) -> Measures:
    """Run the same traffic under `plan`, which may be the recorded one, and return what `measure`
    says of it. Raises what `simulate` raises.
    """
    return measure(simulate(traffic, plan, is_recorded=is_recorded), traffic.lives)


def simulate(traffic: Traffic, plan: Plan, *, is_recorded: bool = False) -> Chronicle:
    """Run the same traffic under `plan`, and return what became of each request. Raises
    `PolicyError` if a policy cannot take over, or if it fails and is another one than was recorded.
    """
    with (
        raised_not_logged(),
        asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner,
    ):
        return runner.run(_Rerun(traffic, plan, is_recorded=is_recorded).run())


class _Recording(RecordSink):
    """The records of a run, as the story that they tell of its requests."""

    def __init__(self) -> None:
        self.chronicle: Chronicle | None = None  # once the header is there

    def write(self, record: Record) -> None:
        if self.chronicle is None:
            assert isinstance(record, Header)
            self.chronicle = Chronicle(record)
        else:
            self.chronicle.feed(record)


class _Rerun:
    """One run. Its recording is the result: measured as the real one is."""

    def __init__(self, traffic: Traffic, plan: Plan, *, is_recorded: bool) -> None:
        self._traffic = traffic
        self._is_recorded = is_recorded
        self._error: BaseException | None = None  # the first of the policy
        self._config, self._switches, machine = plan
        self._step_time = machine or LinearStepTimes(traffic.step_time)
        self._recording = _Recording()
        self._num_left: dict[str, int] = {}  # tokens until the reply is complete
        self._replies: dict[str, array[int]] = {}

    async def run(self) -> Chronicle:
        loop = asyncio.get_running_loop()
        core = self._core = self._make_core(loop.time)
        last = 0.0
        for number, life in enumerate(self._traffic.lives):
            when = max(life.added_at, 0.0)
            loop.call_at(when, self._add, number, life)
            if life.finish_reason == "abort" and not life.was_cut:
                assert life.end is not None
                loop.call_at(life.end + MOMENT, self._abort, _unique_id(number, life))
            last = max(last, when, life.end or 0.0)
        for when in self._traffic.resets:
            loop.call_at(when + MOMENT, core.loop.scheduler.reset_prefix_cache)
        task = asyncio.create_task(core.run())
        switching = asyncio.create_task(self._switch(loop.time))
        await asyncio.sleep(last + POLL_SECONDS)
        await switching
        while core.loop.scheduler.has_requests() and not task.done():
            if self._error is not None:
                break
            await asyncio.sleep(POLL_SECONDS)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error
        if self._error is not None:
            raise self._error
        assert self._recording.chronicle is not None
        return self._recording.chronicle

    async def _switch(self, clock: Callable[[], float]) -> None:
        for when, scheduler in self._switches:
            await asyncio.sleep(when - clock())
            self._recorder.switch(scheduler)

    def _windows(self) -> WindowSpec | None:
        """Return the windows of the model, in steps of this plan."""
        header = self._traffic.header
        if header.windows is None:
            return None
        max_chunk = self._config.scheduler.max_chunk(header.max_model_len)
        num_blocks = self._config.cache.num_window_blocks
        if num_blocks == 0:
            return None
        if num_blocks is None:
            num_blocks = header.windows.num_blocks
        return msgspec.structs.replace(header.windows, max_chunk=max_chunk, num_blocks=num_blocks)

    def _make_core(self, clock: Callable[[], float]) -> EngineCore:
        cache, scheduler = self._config.cache, self._config.scheduler
        assert cache.num_kv_blocks is not None
        info = RunnerInfo(
            num_kv_blocks=cache.num_kv_blocks,
            num_state_slots=cache.num_state_slots,
            windows=self._windows(),
        )
        self._recorder = RecordingScheduler(
            load_policy(scheduler.policy),
            scheduler,
            make_kv_cache(cache, info),
            max_model_len=self._traffic.header.max_model_len,
            clock=clock,
            sink=self._recording,
        )
        loop: EngineLoop = StepLoop(
            self._recorder,
            depth=scheduler.depth,
            clock=clock,
            stall_timeout=scheduler.stall_timeout,
        )
        runner = RepliesRunner(self._replies, self._step_time, info)
        return EngineCore(loop, runner, self, clock=clock)

    def _add(self, number: int, life: Life) -> None:
        request = _make_request(number, life, self._traffic.header.time)
        self._replies[request.request_id] = life.tokens
        if life.finish_reason not in ("abort", "timeout") or life.was_cut:
            self._num_left[request.request_id] = max(len(life.tokens), 1)
        with suppress(AioserveError):  # refused, as a client would be: the chronicle counts it
            self._core.add_request(request)

    def expire(self, request_ids: list[str]) -> None:
        """The recorder has noted the end of these requests."""

    def fail(self, request_ids: list[str] | None, error: BaseException) -> None:
        """Pass over an error that was recorded as well; another policy has to work."""
        is_failure = not isinstance(error, RequestRejectedError)
        if is_failure and not self._is_recorded and self._error is None:
            self._error = error

    def _abort(self, request_id: str) -> None:
        self._core.loop.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def deliver(self, client_index: int, outputs: list[EngineCoreOutput]) -> list[str]:
        """Say what a stop string ended, as the output processor did."""
        stopped = []
        for output in outputs:
            left = self._num_left.get(output.request_id)
            if left is not None:
                self._num_left[output.request_id] = left = left - len(output.new_token_ids)
                if left <= 0 and output.finish_reason is None:
                    stopped.append(output.request_id)
        return stopped


def _unique_id(number: int, life: Life) -> str:
    """Clients may have used an id again; here the one before may still run."""
    return f"{number}:{life.request_id}"


def _make_request(number: int, life: Life, began: float) -> Request:
    """Return the recorded request; its own limit on length stays, since a policy may go by it."""
    assert life.prompt is not None
    spec = msgspec.structs.replace(
        life.spec,
        request_id=_unique_id(number, life),
        prompt_token_ids=life.prompt.tolist(),
        arrival_time=life.arrival,
        deadline=None if life.spec.deadline is None else life.spec.deadline - began,
    )
    return Request(spec)


def measure(chronicle: Chronicle, reference: list[Life]) -> Measures:
    """Milliseconds and counts. End-to-end times are of those that ended by themselves in
    `reference`: the lengths of others are unknown.
    """
    lives = chronicle.lives
    first = [1e3 * (life.token_times[0] - life.arrival) for life in lives if life.token_times]
    gaps = [1e3 * (b - a) for life in lives for a, b in pairwise(life.token_times)]
    by_itself = {n for n, life in enumerate(reference) if life.finish_reason in ("stop", "length")}
    whole = [
        1e3 * (life.end - life.arrival)
        for number, life in enumerate(lives)
        if life.end is not None and _number(number, life) in by_itself
    ]
    ends = [life.token_times[-1] for life in lives if life.token_times]
    seconds = max(ends, default=0.0) - min((life.arrival for life in lives), default=0.0)
    num_tokens = sum(len(life.tokens) for life in lives)
    return {
        "requests served": len(ends),
        "refused": chronicle.num_refused,
        "timeouts": sum(life.finish_reason == "timeout" for life in lives),
        "TTFT mean ms": sum(first) / max(len(first), 1),
        "TTFT p50 ms": percentile(first, 0.5),
        "TTFT p99 ms": percentile(first, 0.99),
        "gap p50 ms": percentile(gaps, 0.5),
        "gap p99 ms": percentile(gaps, 0.99),
        "gap max ms": max(gaps, default=0.0),
        "e2e mean ms": sum(whole) / max(len(whole), 1),
        "e2e p50 ms": percentile(whole, 0.5),
        "e2e p99 ms": percentile(whole, 0.99),
        "tokens/s": num_tokens / seconds if seconds > 0 else 0.0,
        "preemptions": sum(life.num_preemptions for life in lives),
        "cached prompt tokens": sum(life.num_cached_tokens for life in lives),
        "steps": chronicle.num_steps,
    }


def _number(number: int, life: Life) -> int:
    """Return which request of the log it is: simulated ones have the number in their id."""
    head, colon, _ = life.request_id.partition(":")
    return int(head) if colon and head.isdigit() else number


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(-int(-share * len(ordered) // 1) - 1, 0)] if ordered else 0.0
