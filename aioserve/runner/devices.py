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
    ("cache", "kv_cache_dtype", ("auto", "fp8")),
)


def choose_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """Return the device on which the model will run. Raises `ConfigError` if it cannot, or for a
    setting that would be ignored there.
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
    if device == "cuda" and num_cuda_devices() < config.runner.tensor_parallel_size:
        raise ConfigError(
            f"runner.tensor_parallel_size is {config.runner.tensor_parallel_size}, but the driver "
            f"reports {num_cuda_devices()} CUDA devices"
        )
    return device


def has_cuda() -> bool:
    """Return whether the driver is there and has a device."""
    return num_cuda_devices() > 0


def num_cuda_devices() -> int:
    """Return the number of CUDA devices, as the driver reports; asked without loading torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
