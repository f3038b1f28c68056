"""Steps on graphics cards: CUDA, and one model on several ranks."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {
    # By where they compute: `runner.interface`.
    "runners": {
        "cpu ranks": "aioserve.gpu.tensor_parallel.cpu_runner:ShardedRunner",
        "cuda": "aioserve.gpu.cuda.runner:SleepingOverlappedRunner.on_cuda",
        "cuda ranks": "aioserve.gpu.cuda.sharded_runner:ShardedOverlappedRunner",
    },
}
