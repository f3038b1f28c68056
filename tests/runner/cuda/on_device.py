"""The CUDA runner as it is loaded, on a device that is not one."""

import torch

from aioserve.config import EngineConfig
from aioserve.grammars import GrammarCompiler
from aioserve.model_info import ModelInfo
from aioserve.runner.cuda import load
from aioserve.runner.cuda.executor import StepExecutor
from aioserve.runner.cuda.fused import CudaPlace
from aioserve.runner.cuda.runner import OverlappedRunner
from aioserve.runner.spec_decode.drafts import find_draft
from aioserve.runner.tensor_parallel.group import Ranks
from tests.runner.cuda.fake_device import FakeDevice


def make_rank(
    config: EngineConfig,
    info: ModelInfo,
    device: FakeDevice,
    ranks: Ranks,
    grammars: GrammarCompiler | None = None,
) -> StepExecutor:
    """The same for one of several ranks."""
    place = CudaPlace(torch.device("cpu"), has_triton=False, ranks=ranks)
    model, _ = load.load_models(info, None, place)
    return load.make_executor(config, info, model, device, device.card(), grammars, ranks=ranks)


def make_device_runner(config: EngineConfig, device: FakeDevice) -> OverlappedRunner:
    """All of `load_on_cuda` but what asks CUDA; drafts included."""
    info = ModelInfo(config.model)
    grammars = None if config.model.skip_tokenizer_init else GrammarCompiler(info)

    def build() -> StepExecutor:
        load.check_served(config, info)
        place = CudaPlace(torch.device("cpu"), has_triton=False)
        model, draft = load.load_models(info, find_draft(config, info), place)
        return load.make_executor(config, info, model, device, device.card(), grammars, draft)

    return OverlappedRunner(build, grammars)
