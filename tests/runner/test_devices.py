"""Where a model runs, and settings that mean nothing there."""

from typing import Any

import pytest

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig
from aioserve.errors import ConfigError
from aioserve.runner import devices
from aioserve.runner.devices import choose_device


def choose(has_cuda: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: int(has_cuda))
    cache = CacheConfig(kv_cache_dtype=settings.pop("kv_cache_dtype", "auto"))
    return choose_device(EngineConfig(cache=cache, runner=RunnerConfig(**settings)))


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "device"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_auto_takes_a_cuda_device_if_there_is_one(
    wanted: str, has_cuda: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(has_cuda, monkeypatch, device=wanted) == device


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reports no CUDA device"):
        choose(False, monkeypatch, device="cuda")


@pytest.mark.parametrize(
    ("has_cuda", "settings", "message"),
    [
        (False, {"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is 0.5, but .* the CPU"),
        (False, {"enforce_eager": True}, "enforce_eager is True, but the model runs on the CPU"),
        (False, {"kv_cache_dtype": "fp8"}, "cache.kv_cache_dtype is 'fp8', but .* the CPU"),
        (True, {"kv_cache_dtype": "int8"}, "cache.kv_cache_dtype is 'int8', but .* the CUDA"),
        (True, {"threads": 2}, "runner.threads is 2, but the model runs on the CUDA"),
        (
            True,
            {"tensor_parallel_size": 2},
            "tensor_parallel_size is 2, but the driver reports 1 CUDA",
        ),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(
    has_cuda: bool, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(has_cuda, monkeypatch, **settings)
