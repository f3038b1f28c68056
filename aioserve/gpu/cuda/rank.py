"""A rank beside the first on a card: `python -m aioserve.gpu.cuda.rank SOCKET`, run by that one.

Launches the steps that it is told on its share of the model. The tokens come from the first rank's
card to its own. Knows messages and `StepExecutor`.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioserve.gpu.tensor_parallel.processes import FirstRank, Message, Start, Step
from aioserve.gpu.tensor_parallel.rank_process import meet, run_rank
from aioserve.model_source.info import ModelInfo

if TYPE_CHECKING:
    from aioserve.gpu.cuda.executor import LaunchedParts, StepExecutor


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


def _load(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[Message], None]:
    import torch

    from aioserve.gpu.cuda.load import load_on_cuda

    device = torch.device("cuda", start.rank)
    torch.cuda.set_device(device)
    ranks = meet(first, start, device)
    with torch.inference_mode():
        executor = load_on_cuda(start.config, info, ranks=ranks)
        executor.attach()
    return follow(executor)


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), _load))
