"""What a policy costs: microseconds of CPU per schedule() with 1,000 running and 10,000 waiting.

Every step one in 64 of the running requests ends and as many arrive, so that there is a place to
give in each. Steps take modelled time. Knows policies as the engine makes them; runs no engine.
"""

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.comparison.candidates import options_of
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import PREDICTED_OUTPUT_TOKENS, PROGRAM, SESSION, Request, RequestSpec
from aioserve.scheduler import SchedulerInterface, SchedulerOutput, load_policy

REFERENCE = "chunked_prefill"
RUNNING, WAITING = 1000, 10_000
PROMPT_TOKENS, REPLY_TOKENS, BLOCK_SIZE = 64, 512, 16
LIFE = 64  # steps that a request stays, about
NUM_STEPS = 40
NUM_ROUNDS = 3  # odd
MAX_FILL_SECONDS = 30.0  # of CPU, after which it is measured with as many as run by then
EOS = 1


class Cost(msgspec.Struct, frozen=True):
    """Means over the steps that were measured."""

    us: float  # per schedule(), of CPU
    running: int
    waiting: int
    reference_us: float  # of `chunked_prefill` on the same machine, step by step in turns
    machine: str  # and the day

    @property
    def ratio(self) -> float:
        """Times the cost of `chunked_prefill`, which says more than a time of another machine."""
        return self.us / self.reference_us


def measure_costs(configs: Sequence[EngineConfig], waiting: int = WAITING) -> list[Cost]:
    """Return the cost of each configured policy, in CPU time of this process, on this machine:
    of `NUM_ROUNDS` measurements the one with the median ratio, since where objects happen to lie
    in memory makes a scheduler up to a tenth dearer than its twin.
    """
    return [_measure_cost(config, waiting) for config in configs]


def _measure_cost(config: EngineConfig, waiting: int) -> Cost:
    machine, found = f"{processor()}, {datetime.now(UTC):%Y-%m-%d}", []
    reference = EngineConfig.load(REFERENCE)
    for _ in range(NUM_ROUNDS):
        beside, load = CostLoad(reference, waiting), CostLoad(config, waiting)
        measure_in_turns([beside, load])
        found.append(Cost(load.us, load.running, load.num_waiting, beside.us, machine))
    return sorted(found, key=lambda cost: cost.ratio)[NUM_ROUNDS // 2]


def measure_in_turns(loads: Sequence["CostLoad"]) -> None:
    """Measure `NUM_STEPS` steps of each load. They take turns step by step, in one order and then
    in the other, as the speed of the machine changes meanwhile, and so for all of them alike.
    The garbage of all loads is collected before and not meanwhile: a pass over the heap of all
    would be counted against the load in whose step it falls.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        for step in range(NUM_STEPS):
            for load in loads if step % 2 == 0 else reversed(loads):
                load.measure_step()
    finally:
        if collects:
            gc.enable()


class CostLoad:
    """A scheduler with its requests, seats taken and prompts computed, and a clock on which steps
    take what they might. It keeps what the measured steps took.
    """

    def __init__(
        self,
        config: EngineConfig,
        waiting: int,
        *,
        options: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.thread_time,
        settle: Callable[[SchedulerInterface], None] = lambda scheduler: None,
    ) -> None:
        """`waiting` is the number of requests that wait behind those that run. For a scheduler
        whose policy is in another process, `options` are those of the policy, `clock` returns
        seconds of CPU of that process, and `settle` has it take in what came before the call.
        """
        self._now = 0.0
        self._rng = random.Random(1)
        self._num_made = 0
        self._clock, self._settle = clock, settle
        self._known: dict[str, int] = {}  # tokens of running requests
        self._coming: list[Request] = []
        self._all_decode = False  # in the last step
        self._seconds: list[float] = []  # of measured calls of schedule()
        self._running: list[int] = []  # requests after each of them
        limit = PROMPT_TOKENS + REPLY_TOKENS
        scheduler_config = msgspec.structs.replace(
            config.scheduler,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=RUNNING * PROMPT_TOKENS,
            max_waiting_requests=2 * (RUNNING + waiting),
            options=_wide(config, options),
        )
        blocks = 2 * RUNNING * -(-limit // BLOCK_SIZE)
        make: Callable[..., SchedulerInterface] = load_policy(config.scheduler.policy)
        self._scheduler = make(
            scheduler_config,
            KVCacheManager(blocks, BLOCK_SIZE),
            max_model_len=limit,
            clock=lambda: self._now,
        )
        for _ in range(waiting + RUNNING):
            self._scheduler.add_request(self._make_request())
        self._fill()

    @property
    def us(self) -> float:
        """Microseconds per schedule(), the mean over the measured steps."""
        return round(1e6 * statistics.mean(self._seconds), 1)

    @property
    def running(self) -> int:
        """Number of requests that ran, the mean over the measured steps."""
        return round(statistics.mean(self._running))

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait now, without those that run."""
        return self._scheduler.get_request_counts()[1]

    def measure_step(self) -> None:
        """Add what comes, plan a step in which one request in `LIFE` ends, and keep its seconds."""
        self._come()
        self._settle(self._scheduler)
        self._seconds.append(self._step(max(len(self._known) // LIFE, 1)))
        self._running.append(len(self._known))

    def _make_request(self) -> Request:
        number, rng = self._num_made, self._rng
        self._num_made += 1
        tokens = [2 + number % 5] * 16 + [10 + number % 9973] * (PROMPT_TOKENS - 16 - number % 16)
        hints: dict[str, Any] = {
            PREDICTED_OUTPUT_TOKENS: rng.randrange(1, REPLY_TOKENS),
            SESSION: f"s{number % 2000}",
            PROGRAM: f"p{number % 500}",
            "slo_class": "ab"[number % 2],
            "offline": number % 4 == 0,
        }
        return Request(
            RequestSpec(
                f"request-{number}",
                tokens,
                SamplingParams(max_tokens=REPLY_TOKENS),
                arrival_time=self._now + 1e-6 * number,
                eos_token_ids=(EOS,),
                priority=number % 3,
                user=f"user-{number * 7919 % 100}",
                hints=hints,
            )
        )

    def _fill(self) -> None:
        """Step until all seats are taken and all prompts computed, or it has taken too long."""
        began = self._clock()
        while self._clock() - began < MAX_FILL_SECONDS:
            self._come()
            self._step(leaving=0)
            if len(self._known) >= RUNNING and self._all_decode:
                return

    def _come(self) -> None:
        """Add as many requests as have ended."""
        for request in self._coming:
            self._scheduler.add_request(request)
        self._coming = []

    def _step(self, leaving: int) -> float:
        """Plan a step and take in a result by which the oldest requests end; the seconds of
        schedule().
        """
        began = self._clock()
        output = self._scheduler.schedule()
        seconds = self._clock() - began
        result = self._compute(output, leaving)
        outputs = self._scheduler.update_from_output(output, result) if result.req_ids else {}
        ended = [o for c in outputs.values() for o in c.outputs if o.finish_reason is not None]
        for one in ended:
            self._known.pop(one.request_id, None)
        self._coming = [self._make_request() for _ in ended]
        return seconds

    def _compute(self, output: SchedulerOutput, leaving: int) -> ModelRunnerOutput:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._known.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._known[new.request_id] = len(new.token_ids)
            done[new.request_id] = new.num_computed_tokens
        sampled = {}
        for request_id, count in output.num_scheduled_tokens.items():
            is_last = done[request_id] + count >= self._known[request_id]
            sampled[request_id] = [7] if is_last else []
            self._known[request_id] += is_last
        self._all_decode = bool(sampled) and all(sampled.values())
        decoding = [request_id for request_id in self._known if sampled.get(request_id)]
        for request_id in decoding[:leaving]:
            sampled[request_id] = [EOS]
        num_prefill = output.total_num_scheduled_tokens - len(sampled)
        self._now += 0.011 + 8e-5 * num_prefill + 1e-5 * len(sampled)
        return ModelRunnerOutput(list(sampled), list(sampled.values()))


def _wide(config: EngineConfig, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return the options, with room in a step for all decodes and some prompts. `known` are those
    of the policy, stated or by default; None: they are asked for.
    """
    options = dict(config.scheduler.options)
    if (options_of(config) if known is None else known).get("chunk_size") is not None:
        options["chunk_size"] = 2 * RUNNING
    return options


@cache
def processor() -> str:
    """Return the name of this machine's processor."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return name
