"""Which device a configuration means, and what makes no sense there. Free of torch."""

import ctypes
from typing import Literal

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig
from aioserve.errors import ConfigError

_CUDA_ONLY = (
    ("runner", RunnerConfig(), ("gpu_memory_utilization", "enforce_eager")),
    ("cache", CacheConfig(), ("kv_cache_dtype",)),
)
_CPU_ONLY = (("runner", RunnerConfig(), ("threads",)),)


def choose_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """Where the model will run. Raises `ConfigError` if it cannot, or for a setting that would be
    ignored there.
    """
    wanted = config.runner.device
    if wanted == "cuda" and not has_cuda():
        raise ConfigError("runner.device is cuda, but the driver reports no CUDA device")
    device: Literal["cpu", "cuda"] = "cuda" if wanted != "cpu" and has_cuda() else "cpu"
    for section, defaults, names in _CUDA_ONLY if device == "cpu" else _CPU_ONLY:
        settings = getattr(config, section)
        for name in names:
            if getattr(settings, name) != getattr(defaults, name):
                raise ConfigError(
                    f"{section}.{name} is {getattr(settings, name)!r}, but the model runs on the "
                    f"{device.upper()}, where it means nothing (runner.device is {wanted})"
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
