"""The model on several processes: this one is the first rank, and hands each step to the others.

A `ThreadedRunner` in all else: it samples, masks and pools alone. Knows ranks and their end.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.runner import ThreadedRunner
from aioserve.runner.tensor_parallel.messages import Sampled, Step
from aioserve.runner.tensor_parallel.plan import check_model, check_settings
from aioserve.runner.tensor_parallel.processes import OtherRanks, in_a_line
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from torch import Tensor

    from aioserve.model_source.adapter import AdapterFiles
    from aioserve.runner.cpu.sampler import SampledTokens
    from aioserve.runner.grammar_rows import Masks
    from aioserve.runner.sampling_columns import SamplingInputs


class ShardedRunner(ThreadedRunner):
    """Ends, and says so, when one of its ranks does: without it the others have no whole model."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` for settings that do not go with ranks."""
        check_settings(config)
        super().__init__(config, model_info)
        self._others: OtherRanks | None = None
        self._is_sampled = False  # whether the others know what the step has chosen
        self._death: RunnerDeadError | None = None
        self._on_death: Callable[[], None] = lambda: None

    async def load(self) -> None:
        loop = asyncio.get_running_loop()

        def on_end(error: RunnerDeadError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(self._on_end, error)

        # Before this process imports what takes seconds: they import the same beside it.
        self._others = OtherRanks(
            "aioserve.runner.cpu.rank",
            self._config,
            on_end,
        )
        await super().load()

    @property
    def num_compute_threads(self) -> int | None:
        """Of all ranks, if the others have as many as the first."""
        own = super().num_compute_threads
        return None if own is None else own * self._config.runner.tensor_parallel_size

    def check(self) -> None:
        if self._death is not None:
            raise self._death

    def watch(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        raise ConfigError("adapters are not served with runner.tensor_parallel_size above 1")

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._others is not None:
                await asyncio.to_thread(self._others.close)

    def _on_end(self, error: RunnerDeadError) -> None:
        self._death = error
        self._on_death()

    # What follows runs on the runner's thread.

    def _load(self) -> None:
        from aioserve.runner.cpu.load import load_on_cpu
        from aioserve.runner.tensor_parallel.group import Ranks

        assert self._others is not None
        try:
            check_model(self._config, self._model_info)
            settings = self._config.runner
            self._others.wait_here()
            ranks = Ranks(
                0, settings.tensor_parallel_size, self._others.meeting, settings.rank_timeout
            )
            self._executor = load_on_cpu(self._config, self._model_info, self.grammars, ranks)
            self._executor.choose = self._choose
            self._others.wait_loaded()
        except Exception as error:
            why = self._others.why(error)
            if isinstance(why, RunnerDeadError):  # nothing runs yet that could die of it
                raise ConfigError(in_a_line(why)) from error
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        assert self._others is not None
        self._is_sampled = False
        try:
            self._others.tell(Step(scheduler_output))
            return super()._execute(scheduler_output)
        except Exception as error:
            if self._is_sampled:  # all have come as far as that: only this step is lost
                raise
            why = self._others.why(error)
            if isinstance(why, RunnerDeadError):
                raise why from error
            reason = f"a step has failed before all ranks were through it: {in_a_line(error)}"
            raise RunnerDeadError(reason) from error

    def _choose(
        self, logits: "Tensor", inputs: "SamplingInputs", masks: "Masks | None"
    ) -> "SampledTokens":
        from aioserve.runner.cpu.sampler import sample

        assert self._others is not None
        self._is_sampled = True
        try:
            sampled = sample(logits, inputs, masks)
        except Exception:
            self._others.tell(Sampled(None))
            raise
        self._others.tell(Sampled(sampled.token_ids.tolist()))
        return sampled
