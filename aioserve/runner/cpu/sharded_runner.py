"""The model on several processes: this one is the first rank, and hands each step to the others.

A `ThreadedRunner` in all else: it samples, masks and pools alone. Knows ranks and their end.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.runner import ThreadedRunner
from aioserve.runner.tensor_parallel.messages import Sampled, Step
from aioserve.runner.tensor_parallel.plan import check_model, check_settings
from aioserve.runner.tensor_parallel.processes import in_a_line
from aioserve.runner.tensor_parallel.watch import RankWatch
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
        self._ranks = RankWatch()
        self._is_sampled = False  # whether the others know what the step has chosen

    async def load(self) -> None:
        # Before this process imports what takes seconds: they import the same beside it.
        self._ranks.start("aioserve.runner.cpu.rank", self._config)
        await super().load()

    @property
    def num_compute_threads(self) -> int | None:
        """Of all ranks, if the others have as many as the first."""
        own = super().num_compute_threads
        return None if own is None else own * self._config.runner.tensor_parallel_size

    def check(self) -> None:
        self._ranks.check()

    def watch(self, on_death: Callable[[], None]) -> None:
        self._ranks.on_death = on_death

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        raise ConfigError("adapters are not served with runner.tensor_parallel_size above 1")

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._ranks.close()

    # What follows runs on the runner's thread.

    def _load(self) -> None:
        from aioserve.runner.cpu.load import load_on_cpu
        from aioserve.runner.tensor_parallel.group import Ranks

        try:
            check_model(self._config, self._model_info)
            settings = self._config.runner
            self._ranks.others.wait_here()
            ranks = Ranks(
                0, settings.tensor_parallel_size, self._ranks.others.meeting, settings.rank_timeout
            )
            self._executor = load_on_cpu(self._config, self._model_info, self.grammars, ranks)
            self._executor.choose = self._choose
            self._ranks.others.wait_loaded()
        except Exception as error:
            why = self._ranks.others.why(error)
            if isinstance(why, RunnerDeadError):  # nothing runs yet that could die of it
                raise ConfigError(in_a_line(why)) from error
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._is_sampled = False
        try:
            self._ranks.others.tell(Step(scheduler_output))
            return super()._execute(scheduler_output)
        except Exception as error:
            if self._is_sampled:  # all have come as far as that: only this step is lost
                raise
            why = self._ranks.others.why(error)
            if isinstance(why, RunnerDeadError):
                raise why from error
            reason = f"a step has failed before all ranks were through it: {in_a_line(error)}"
            raise RunnerDeadError(reason) from error

    def _choose(
        self, logits: "Tensor", inputs: "SamplingInputs", masks: "Masks | None"
    ) -> "SampledTokens":
        from aioserve.runner.cpu.sampler import sample

        self._is_sampled = True
        try:
            sampled = sample(logits, inputs, masks)
        except Exception:
            self._ranks.others.tell(Sampled(None))
            raise
        self._ranks.others.tell(Sampled(sampled.token_ids.tolist()))
        return sampled
