"""Which device a configuration means, and what makes no sense there. Free of torch."""

import ctypes
from typing import Any, Literal

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.errors import ConfigError

# Settings of one device, each with what it may say on the other.
_CUDA_ONLY: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("runner", "gpu_memory_utilization", (RunnerConfig().gpu_memory_utilization,)),
    ("runner", "enforce_eager", (RunnerConfig().enforce_eager,)),
    ("cache", "kv_cache_dtype", ("auto", "int8")),
)
_CPU_ONLY: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("runner", "threads", (RunnerConfig().threads,)),
    ("runner", "tensor_parallel_size", (1,)),
    ("cache", "kv_cache_dtype", ("auto", "fp8")),
)


def choose_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """Where the model will run. Raises `ConfigError` if it cannot, or for a setting that would be
    ignored there.
    """
    wanted = config.runner.device
    if wanted == "cuda" and not has_cuda():
        raise ConfigError("runner.device is cuda, but the driver reports no CUDA device")
    device: Literal["cpu", "cuda"] = "cuda" if wanted != "cpu" and has_cuda() else "cpu"
    for section, name, harmless in _CUDA_ONLY if device == "cpu" else _CPU_ONLY:
        given = getattr(getattr(config, section), name)
        if given not in harmless:
            raise ConfigError(
                f"{section}.{name} is {given!r}, but the model runs on the {device.upper()}, where "
                f"it means nothing (runner.device is {wanted})"
            )
    return device


def has_cuda() -> bool:
    """Whether the driver is there and has a device; asked without loading torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )
