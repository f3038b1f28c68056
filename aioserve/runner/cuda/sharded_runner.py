"""The model on several cards: this process is the first rank, and hands each step to the others.

An `OverlappedRunner` in all else: it samples and masks alone, and its card tells theirs the tokens.
Knows ranks and their end.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.grammars import GrammarCompiler
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cuda.runner import OverlappedRunner
from aioserve.runner.tensor_parallel.messages import Step
from aioserve.runner.tensor_parallel.plan import check_model, check_settings
from aioserve.runner.tensor_parallel.processes import OtherRanks, in_a_line
from aioserve.runner.tensor_parallel.watch import RankWatch
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.model_source.adapter import AdapterFiles
    from aioserve.runner.cuda.executor import LaunchedStep, StepExecutor
    from aioserve.runner.tensor_parallel.group import Ranks

#: Loads the first rank's share; the others, whom it meets, are these.
Build = Callable[[OtherRanks, GrammarCompiler | None], "tuple[StepExecutor, Ranks]"]


class ShardedOverlappedRunner(OverlappedRunner):
    """Ends, and says so, when a step fails or one of its ranks ends: what the cards of the others
    wait for does not come.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        build: Build | None = None,
        module: str = "aioserve.runner.cuda.rank",
    ) -> None:
        """`build` and `module`: of the first rank, and what the others run. Raises `ConfigError`
        for settings that do not go with ranks.
        """
        check_settings(config)
        if config.speculation.speculative_method != "none":
            raise ConfigError(
                f"runner.tensor_parallel_size is {config.runner.tensor_parallel_size}, but "
                "speculation is not served so on CUDA: leave speculative_method out"
            )
        check_model(config, model_info)
        model_info.check_positions()
        grammars = None
        if not model_info.config.skip_tokenizer_init:
            grammars = GrammarCompiler(model_info)
        super().__init__(self._build_first, grammars)
        self._config, self._model_info, self._module = config, model_info, module
        self._make_first = build or self._on_cuda
        self._rank_watch = RankWatch()
        self._ranks: Ranks | None = None

    async def load(self) -> None:
        self._rank_watch.start(self._module, self._config)
        await super().load()

    def check(self) -> None:
        self._rank_watch.check()

    def watch(self, on_death: Callable[[], None]) -> None:
        def leave() -> None:
            if self._ranks is not None:
                self._ranks.leave()  # else the card waits for who has gone
            on_death()

        self._rank_watch.on_death = leave

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        raise ConfigError("adapters are not served with runner.tensor_parallel_size above 1")

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._rank_watch.close()

    # On the launching thread.

    def _build_first(self) -> "StepExecutor":
        others = self._rank_watch.others
        try:
            executor, self._ranks = self._make_first(others, self.grammars)
            others.wait_loaded()
        except Exception as error:
            why = others.why(error)
            if isinstance(why, RunnerDeadError):  # nothing runs yet that could die of it
                raise ConfigError(in_a_line(why)) from error
            raise
        return executor

    def _on_cuda(
        self, others: OtherRanks, grammars: GrammarCompiler | None
    ) -> "tuple[StepExecutor, Ranks]":
        import torch

        from aioserve.runner.cuda.load import load_on_cuda
        from aioserve.runner.tensor_parallel.group import Ranks

        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        settings = self._config.runner
        size, timeout = settings.tensor_parallel_size, settings.rank_timeout
        others.wait_here()
        ranks = Ranks(0, size, others.meeting, timeout, device)
        return load_on_cuda(self._config, self._model_info, grammars, ranks), ranks

    def _launch_step(
        self, executor: "StepExecutor", step: SchedulerOutput
    ) -> "LaunchedStep | ModelRunnerOutput | Exception":
        try:
            self._rank_watch.others.tell(Step(step))
        except RunnerDeadError as error:
            return error
        return super()._launch_step(executor, step)

    def _explain(self, executor: "StepExecutor", error: Exception) -> Exception:
        why = self._rank_watch.others.why(error)
        if isinstance(why, RunnerDeadError):
            return why
        reason = f"a step has failed, and the ranks may no longer agree: {in_a_line(error)}"
        dead = RunnerDeadError(reason)
        dead.__cause__ = error
        return dead
