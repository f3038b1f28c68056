"""A runner that gives every request the reply it got when the log was written.

It takes as long as a step-time model says, on the loop's clock. Knows nothing about policies.
"""

import asyncio
from array import array

from aioserve.outputs import ModelRunnerOutput
from aioserve.row_values import ROW_VALUES, invented
from aioserve.runner.info import RunnerInfo
from aioserve.runner.interface import RunnerInterface
from aioserve.runner.profile import StepTimeModel
from aioserve.scheduler.output import SchedulerOutput, step_features


class RepliesRunner(RunnerInterface):
    """Replies as the log has them, after the time that the model says."""

    def __init__(
        self, replies: dict[str, "array[int]"], step_time: StepTimeModel, info: RunnerInfo
    ) -> None:
        self._replies, self._info = replies, info
        self._step_time = step_time
        self._num_known: dict[str, int] = {}  # tokens of each request in the batch
        self._num_prompt: dict[str, int] = {}
        self._filler: dict[str, int] = {}
        self._pooled: set[str] = set()  # they get no token
        self._busy_until = 0.0

    async def load(self) -> RunnerInfo:
        return self._info

    async def close(self) -> None:
        pass

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        self._busy_until = max(loop.time(), self._busy_until)
        if scheduler_output.total_num_scheduled_tokens:
            self._busy_until += self._step_time.seconds(step_features(scheduler_output))
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
