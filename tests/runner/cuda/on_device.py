"""The CUDA runner as it is loaded, on a device that is not one."""

import torch

from aioserve.config import EngineConfig
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.spec_decode.drafts import find_draft
from aioserve.gpu.cuda import load
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.gpu.cuda.runner import SleepingOverlappedRunner
from aioserve.model_source.info import ModelInfo
from aioserve.runner.ranks import Ranks
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
    model, _ = load.load_models(config, info, None, place)
    return load.make_executor(config, info, model, device, device.card(), grammars, ranks=ranks)


def make_device_runner(config: EngineConfig, device: FakeDevice) -> SleepingOverlappedRunner:
    """All of `load_on_cuda` but what asks CUDA; drafts included."""
    info = ModelInfo(config.model)
    grammars = None if config.model.skip_tokenizer_init else GrammarCompiler(info)

    def make(config: EngineConfig, info: ModelInfo) -> StepExecutor:
        load.check_served(info)
        place = CudaPlace(torch.device("cpu"), has_triton=False)
        model, draft = load.load_models(config, info, find_draft(config, info), place)
        return load.make_executor(config, info, model, device, device.card(), grammars, draft)

    return SleepingOverlappedRunner(config, info, make, grammars)
