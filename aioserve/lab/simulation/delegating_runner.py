"""A runner that passes everything on to another: the base of those that look at steps.

Knows the interface. Notes nothing.
"""

import asyncio

from aioserve.kv_cache import WindowSpec
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler.output import SchedulerOutput


class DelegatingRunner(RunnerInterface):
    """To the engine it is the runner behind it, pipeline and threads included."""

    def __init__(self, runner: RunnerInterface) -> None:
        self.pipeline_depth = runner.pipeline_depth
        self._runner = runner

    async def load(self) -> None:
        await self._runner.load()

    @property
    def num_kv_blocks(self) -> int:
        return self._runner.num_kv_blocks

    @property
    def num_state_slots(self) -> int | None:
        return self._runner.num_state_slots

    @property
    def windows(self) -> WindowSpec | None:
        return self._runner.windows

    @property
    def tells_prompts(self) -> bool:
        return self._runner.tells_prompts

    @property
    def reads_images(self) -> bool:
        return self._runner.reads_images

    @property
    def num_compute_threads(self) -> int | None:
        return self._runner.num_compute_threads

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._runner.execute_model(scheduler_output)

    async def close(self) -> None:
        await self._runner.close()
