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
    """Return the cost of each configured policy, in CPU time of this process, on this machine."""
    machine, found = f"{processor()}, {datetime.now(UTC):%Y-%m-%d}", []
    reference = EngineConfig.load(REFERENCE)
    for config in configs:
        works = [_filled(one, waiting) for one in (reference, config)]
        gc.collect()
        times: list[list[float]] = [[], []]
        running = []
        for _ in range(NUM_STEPS):
            for work, mine in zip(works, times, strict=True):  # the machine's speed drifts for both
                mine.append(work.next_step(time.thread_time))
            running.append(len(works[1].known))
        reference_us, us = (round(1e6 * statistics.mean(mine), 1) for mine in times)
        shown = round(statistics.mean(running))
        found.append(Cost(us, shown, works[1].num_waiting, reference_us, machine))
    return found


def measure_cost(
    config: EngineConfig,
    waiting: int,
    *,
    options: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.thread_time,
    settle: Callable[[SchedulerInterface], None] = lambda scheduler: None,
) -> tuple[float, int, int]:
    """Return microseconds per schedule(), and how many ran and waited, on average. For a scheduler
    whose policy is in another process, `options` are those of the policy, `clock` returns seconds
    of CPU of that process, and `settle` has it take in what came before the call.
    """
    work = _filled(config, waiting, options, clock)
    gc.collect()
    times, running = [], []
    for _ in range(NUM_STEPS):
        times.append(work.next_step(clock, settle))
        running.append(len(work.known))
    us = round(1e6 * statistics.mean(times), 1)
    return us, round(statistics.mean(running)), work.num_waiting


def _filled(
    config: EngineConfig,
    waiting: int,
    options: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> "_Work":
    work = _Work(config, waiting, options)
    work.fill(clock)
    return work


class _Work:
    """A scheduler with its requests, and a clock on which steps take what they might."""

    def __init__(
        self, config: EngineConfig, waiting: int, options: dict[str, Any] | None = None
    ) -> None:
        self._now = 0.0
        self._rng = random.Random(1)
        self._num_made = 0
        self.known: dict[str, int] = {}  # tokens of running requests
        self._coming: list[Request] = []
        self._all_decode = False  # in the last step
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
        self.scheduler = make(
            scheduler_config,
            KVCacheManager(blocks, BLOCK_SIZE),
            max_model_len=limit,
            clock=lambda: self._now,
        )
        for _ in range(waiting + RUNNING):
            self.scheduler.add_request(self._make_request())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait now, without those that run."""
        return self.scheduler.get_request_counts()[1]

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

    def fill(self, clock: Callable[[], float]) -> None:
        """Step until all seats are taken and all prompts computed, or it has taken too long."""
        began = clock()
        while clock() - began < MAX_FILL_SECONDS:
            self.come()
            self.step(clock, leaving=0)
            if len(self.known) >= RUNNING and self._all_decode:
                return

    def come(self) -> None:
        """Add as many requests as have ended."""
        for request in self._coming:
            self.scheduler.add_request(request)
        self._coming = []

    def next_step(
        self,
        clock: Callable[[], float],
        settle: Callable[[SchedulerInterface], None] = lambda scheduler: None,
    ) -> float:
        """Add what comes and plan a step in which one in `LIFE` ends; seconds of schedule()."""
        self.come()
        settle(self.scheduler)
        return self.step(clock, leaving=max(len(self.known) // LIFE, 1))

    def step(self, clock: Callable[[], float], leaving: int) -> float:
        """Plan a step and take in a result by which the oldest requests end; the seconds of
        schedule().
        """
        began = clock()
        output = self.scheduler.schedule()
        seconds = clock() - began
        result = self._compute(output, leaving)
        outputs = self.scheduler.update_from_output(output, result) if result.req_ids else {}
        ended = [o for c in outputs.values() for o in c.outputs if o.finish_reason is not None]
        for one in ended:
            self.known.pop(one.request_id, None)
        self._coming = [self._make_request() for _ in ended]
        return seconds

    def _compute(self, output: SchedulerOutput, leaving: int) -> ModelRunnerOutput:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.known.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self.known[new.request_id] = len(new.token_ids)
            done[new.request_id] = new.num_computed_tokens
        sampled = {}
        for request_id, count in output.num_scheduled_tokens.items():
            is_last = done[request_id] + count >= self.known[request_id]
            sampled[request_id] = [7] if is_last else []
            self.known[request_id] += is_last
        self._all_decode = bool(sampled) and all(sampled.values())
        decoding = [request_id for request_id in self.known if sampled.get(request_id)]
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
