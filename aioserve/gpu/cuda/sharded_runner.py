"""The model on several cards: this process is the first rank, and hands each step to the others.

An `OverlappedRunner` in all else: it samples and masks alone, and its card tells theirs the tokens.
The others launch the steps that they are told, each on its share of the model. Knows ranks and
their end.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.gpu.cuda.runner import OverlappedRunner
from aioserve.gpu.tensor_parallel.plan import EXPERTS, check_model, check_settings, plan_in_config
from aioserve.gpu.tensor_parallel.processes import FirstRank, Message, Start, Step
from aioserve.gpu.tensor_parallel.rank_process import meet
from aioserve.gpu.tensor_parallel.watch import FirstRankRunner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import OUTPUT_COMPILERS, OutputCompiler
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.gpu.cuda.executor import LaunchedParts, StepExecutor
    from aioserve.runner.interface import AdapterFiles
    from aioserve.runner.ranks import Ranks

#: Loads the first rank's share.
Build = Callable[["Ranks", OutputCompiler | None], "StepExecutor"]


class ShardedOverlappedRunner(FirstRankRunner, OverlappedRunner):
    """Ends, and says so, when a step fails or one of its ranks ends: what the cards of the others
    wait for does not come.
    """

    _rank_module = "aioserve.gpu.cuda.sharded_runner"

    def __init__(
        self, config: EngineConfig, model_info: ModelInfo, build: Build | None = None
    ) -> None:
        """`build`: if not on the first card. Raises `ConfigError` for settings that do not go with
        ranks.
        """
        check_settings(config)
        for name, is_asked in (
            ("model.quantization", config.model.quantization is not None),
            ("model.activations", config.model.activations is not None),
            ("adapters.lora", config.adapters.lora),
            ("cache.kv_connector", config.cache.kv_connector != "none"),
            ("a GGUF file or another of quantized weights", model_info.source.is_quantized),
            ("a model with experts", EXPERTS in plan_in_config(model_info.hf_config).values()),
        ):
            if is_asked:
                raise ConfigError(
                    f"runner.tensor_parallel_size is {config.runner.tensor_parallel_size}, but "
                    f"CUDA ranks do not serve {name}: leave it out"
                )
        if config.speculation.drafts_surely:
            raise ConfigError(
                f"runner.tensor_parallel_size is {config.runner.tensor_parallel_size}, but "
                "CUDA ranks do not serve speculation: leave speculative_method out"
            )
        check_model(config, model_info)
        model_info.check_positions()
        grammars = None
        if not model_info.config.skip_tokenizer_init:
            grammars = OUTPUT_COMPILERS["llguidance"](model_info, config.structured_outputs)
        super().__init__(self._build_first, grammars)
        self._config, self._model_info, self._make_first = config, model_info, build

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        raise ConfigError("adapters are not served with runner.tensor_parallel_size above 1")

    # On the launching thread.

    def _build_first(self) -> "StepExecutor":
        if self._make_first is not None:
            with self._loading() as ranks:
                return self._make_first(ranks, self.grammars)
        import torch

        from aioserve.gpu.cuda.load import load_on_cuda

        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        with self._loading(device) as ranks:
            return load_on_cuda(self._config, self._model_info, self.grammars, ranks)

    def _launch_step(
        self, executor: "StepExecutor", step: SchedulerOutput
    ) -> "LaunchedParts | ModelRunnerOutput | Exception":
        try:
            self._others.tell(Step(step))
        except RunnerDeadError as error:
            return error
        return super()._launch_step(executor, step)

    def _explain(self, executor: "StepExecutor", error: Exception) -> Exception:
        dead = self._end_of(error)
        if dead is not error:
            dead.__cause__ = error
        return dead


# A rank beside the first on a card, in a process of its own.


def follow(executor: "StepExecutor") -> Callable[[Message], None]:
    """Return what does steps with it, each launched before the last one is over, as on the first
    rank.
    """
    import torch

    away: list[LaunchedParts] = []

    @torch.inference_mode()
    def execute(message: Message) -> None:
        assert isinstance(message, Step)
        if (launched := executor.launch(message.step)) is not None:
            away.append(launched)
        if len(away) > 1:
            executor.finish(away.pop(0))

    return execute


def load_share(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[Message], None]:
    """Load the share of a rank beside the first. Return what does as the first rank says."""
    import torch

    from aioserve.gpu.cuda.load import load_on_cuda

    device = torch.device("cuda", start.rank)
    torch.cuda.set_device(device)
    ranks = meet(first, start, device)
    with torch.inference_mode():
        executor = load_on_cuda(start.config, info, ranks=ranks)
        executor.attach()
    return follow(executor)
