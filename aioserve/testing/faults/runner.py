"""A runner that fails as runners may: it raises, hangs, is slow, or says what cannot be.

Knows the interface; the steps that go well are the real runner's.
"""

import asyncio
from typing import Any

import msgspec

from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import NOT_FINITE, RunnerInterface
from aioserve.scheduler.output import SchedulerOutput
from aioserve.testing.faults.fault import SLOW_SECONDS, Faults, planted

#: What a step may do.
RUNNER_KINDS = (
    "raises",  # when it is done
    "raises unread",  # before the real runner hears of it
    "raises at once",  # and not where its result is awaited
    "no memory",
    "cancelled",
    "slow",
    "short",  # a row of tokens is missing
    "many",  # a row has tokens that were not asked for
    "foreign",  # tokens that the model does not have
    "stranger",  # tokens for a request that is not there
    "nan",
)
HANGS = "hangs"  # the step does not come back: for engines whose watchdog ends it


class FaultyRunner:
    """Around the steps of a real runner, of any kind."""

    def __init__(self, runner: RunnerInterface, faults: Faults, part: str = "runner") -> None:
        """From now on `runner` meets the faults of `part`."""
        self._execute = runner.execute_model
        self._faults, self._part = faults, part
        runner.__dict__["execute_model"] = self

    def __call__(self, step: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        # A step that only tells of departures has no result that could be wrong.
        kind = self._faults.comes(self._part) if step.num_scheduled_tokens else None
        if kind is None:
            return self._execute(step)
        self._faults.touched.update(step.num_scheduled_tokens)
        loop = asyncio.get_running_loop()
        if kind == "raises at once":
            raise RuntimeError(f"planted in {self._part}")
        if kind in ("raises unread", HANGS):
            future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
            if kind != HANGS:
                future.set_exception(RuntimeError(f"planted in {self._part}"))
            return future
        return loop.create_task(self._wrong(kind, self._execute(step)))

    async def _wrong(
        self, kind: str, step: "asyncio.Future[ModelRunnerOutput]"
    ) -> ModelRunnerOutput:
        result = await step
        if kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
            return result
        if kind in ("raises", "no memory", "cancelled"):
            raise planted(kind, self._part)
        return spoilt(kind, result)


def spoilt(kind: str, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """A result that is wrong in one way of `RUNNER_KINDS`, in its first row."""
    tokens = [list(own) for own in result.sampled_token_ids]
    changed: dict[str, Any] = {"sampled_token_ids": tokens}
    if kind == "short":
        tokens.pop(0)
    elif kind == "many":
        tokens[0] += [1, 2, 3]
    elif kind == "foreign":
        tokens[0] = [10**9, -1][: max(len(tokens[0]), 1)]
    elif kind == "stranger":
        changed["req_ids"] = ["nobody", *result.req_ids[1:]]
    elif kind == "nan":
        tokens[0] = []
        name = result.req_ids[0]
        changed["failed"] = {name: NOT_FINITE}
        changed["logprobs"] = {key: told for key, told in result.logprobs.items() if key != name}
    return msgspec.structs.replace(result, **changed)
