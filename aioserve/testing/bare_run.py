"""A scheduler and the least that it needs to go on: no checks, no runner, every token a zero.

For rules that look at the policy's own code or memory. Knows requests and steps.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.errors import EngineOverloadedError
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
SECONDS = 0.01  # that a step takes


class BareRun:
    """One scheduler with blocks and budget for `num_seats` requests at their full length."""

    def __init__(
        self, policy: type[BaseScheduler], options: Mapping[str, Any], num_seats: int
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_seats,
            max_num_batched_tokens=num_seats * MAX_MODEL_LEN,
            max_loras=num_seats,
            options=dict(options),
        )
        self.now = 0.0
        make: Callable[..., BaseScheduler] = policy
        self.kv_cache = KVCacheManager(num_seats * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
        self.scheduler = make(
            config, self.kv_cache, max_model_len=MAX_MODEL_LEN, clock=lambda: self.now
        )

    def add(self, number: int, num_prompt: int, num_output: int, **fields: Any) -> None:
        """Request `r<number>` with a prompt of its own, if the policy takes it."""
        prompt = [number // 50 % 50, number % 50] * num_prompt
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        spec = RequestSpec(
            f"r{number}", prompt[:num_prompt], params, arrival_time=self.now, **fields
        )
        with suppress(EngineOverloadedError):  # a policy may refuse any request
            self.scheduler.add_request(Request(spec))

    def step(self, schedule: Callable[[], SchedulerOutput] | None = None) -> None:
        """Plan one step, by `schedule` if it is given, and bring its result."""
        scheduler = self.scheduler
        output = (schedule or scheduler.schedule)()
        for request_id in scheduler.take_rejections():
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_REJECTED)
        self.now += SECONDS
        if output.num_scheduled_tokens:
            rows = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(rows, [self._sample(name) for name in rows])
            scheduler.update_from_output(output, result)

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.get_request(request_id)
        done = request is not None and request.num_computed_tokens >= request.num_tokens
        return [0] if done else []
