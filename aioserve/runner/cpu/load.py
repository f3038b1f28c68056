"""From settings to a model on this CPU: which type, and what is tried again in another.

Knows what this CPU is good at; how weights are read and checked is known elsewhere.
"""

import gc
import logging

import msgspec

from aioserve.config import ModelConfig
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_info import ModelInfo
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.fused import CpuPlace
from aioserve.runner.loader import load_model
from aioserve.runner.served_model import ServedModel

logger = logging.getLogger(__name__)


def load_model_on_cpu(config: ModelConfig, info: ModelInfo) -> ServedModel:
    """Load the weights of `info.path`. Raises `ConfigError`."""
    resolved = with_dtype(config)
    model = load_model(resolved, info, CpuPlace())
    is_right = model.is_compiled or machine.has_native_bf16() or resolved.dtype == "float32"
    if config.dtype != "auto" or is_right:
        return model
    logger.info("%s is loaded again, as float32: the CPU has no bfloat16 of its own", model.name)
    del model
    gc.collect()  # modules know each other
    return load_model(msgspec.structs.replace(config, dtype="float32"), info, CpuPlace())


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The model's settings with "auto" resolved, rightly if our kernels serve the model."""
    if config.dtype != "auto":
        return config
    try:
        is_fast = machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        is_fast = False
    return msgspec.structs.replace(config, dtype="bfloat16" if is_fast else "float32")
