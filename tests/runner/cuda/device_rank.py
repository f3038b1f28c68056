"""A rank on a device that is not one: what its process loads."""

from collections.abc import Callable

import torch

from aioserve.gpu.cuda.sharded_runner import follow
from aioserve.gpu.tensor_parallel.processes import FirstRank, Message, Start
from aioserve.gpu.tensor_parallel.rank_process import meet
from aioserve.model_source.info import ModelInfo
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_rank


def load_share(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[Message], None]:
    torch.set_num_threads(1)
    if start.config.model.served_model_name == "failing":
        raise MemoryError("as asked")
    ranks = meet(first, start)
    # It computes what it is told at once: nobody waits for it here.
    with torch.inference_mode():
        return follow(make_rank(start.config, info, FakeDevice(eagerness=1.0), ranks))
