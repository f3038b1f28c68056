"""The model on several processes: this one is the first rank, and hands each step to the others.

A `ThreadedRunner` in all else: it samples, masks and pools alone. Knows ranks and their end.
"""

from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.runner import ThreadedRunner
from aioserve.runner.tensor_parallel.messages import Sampled, Step
from aioserve.runner.tensor_parallel.plan import check_model, check_settings
from aioserve.runner.tensor_parallel.watch import FirstRankRunner
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from torch import Tensor

    from aioserve.runner.batch.grammar_rows import Masks
    from aioserve.runner.batch.sampling_columns import SamplingInputs
    from aioserve.runner.cpu.executor import StepExecutor
    from aioserve.runner.cpu.sampler import SampledTokens


class ShardedRunner(FirstRankRunner, ThreadedRunner):
    """Ends, and says so, when one of its ranks does: without it the others have no whole model."""

    _rank_module = "aioserve.runner.cpu.rank"
    _is_sampled = False  # whether the others know what the step has chosen

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` for settings that do not go with ranks."""
        check_settings(config)
        super().__init__(config, model_info)

    @property
    def num_compute_threads(self) -> int | None:
        """The threads of all ranks, if the others have as many as the first."""
        own = super().num_compute_threads
        return None if own is None else own * self._config.runner.tensor_parallel_size

    # What follows runs on the runner's thread.

    def _load(self) -> "StepExecutor":
        from aioserve.runner.cpu.load import load_on_cpu

        check_model(self._config, self._model_info)
        with self._loading() as ranks:
            executor = load_on_cpu(self._config, self._model_info, self.grammars, ranks)
            executor.choose = self._choose
        return executor

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._is_sampled = False
        try:
            self._others.tell(Step(scheduler_output))
            return super()._execute(scheduler_output)
        except Exception as error:
            if self._is_sampled:  # all have come as far as that: only this step is lost
                raise
            raise self._end_of_step(error) from error

    def _choose(
        self, logits: "Tensor", inputs: "SamplingInputs", masks: "Masks | None"
    ) -> "SampledTokens":
        from aioserve.runner.cpu.each_row import sample_each

        self._is_sampled = True
        try:
            sampled = sample_each(logits, inputs, masks)
        except Exception:
            self._others.tell(Sampled(None))
            raise
        self._others.tell(Sampled(sampled.token_ids.tolist()))
        return sampled
