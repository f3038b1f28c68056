"""A runner that passes everything on to another: the base of those that look at steps.

Knows the interface. Notes nothing.
"""

import asyncio

from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.info import RunnerInfo
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler.output import SchedulerOutput


class DelegatingRunner(RunnerInterface):
    """A runner that passes all on to another one: to the engine it is that one, pipeline and
    threads included.
    """

    def __init__(self, runner: RunnerInterface) -> None:
        self._runner = runner

    async def load(self) -> RunnerInfo:
        return await self._runner.load()

    @property
    def num_compute_threads(self) -> int | None:
        return self._runner.num_compute_threads

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._runner.execute_model(scheduler_output)

    async def close(self) -> None:
        await self._runner.close()
