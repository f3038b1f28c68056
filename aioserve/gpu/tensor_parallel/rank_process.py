"""A process beside the first rank: hears what to load, loads it, does the steps that it is told.

`python -m aioserve.gpu.tensor_parallel.rank_process MODULE SOCKET`, run by the first rank. Light
until it is told what to load: then `load_share` of the module does it, and what that returns does
the steps. Knows messages and their order.
"""

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aioserve.errors import RunnerDeadError
from aioserve.gpu.tensor_parallel.processes import (
    Answer,
    FirstRank,
    Message,
    Start,
    decode,
    in_a_line,
)
from aioserve.model_source.info import ModelInfo
from aioserve.support.logs import set_up_logging
from aioserve.support.progress import show_no_bars

if TYPE_CHECKING:
    import torch

    from aioserve.gpu.tensor_parallel.group import GroupedRanks

#: Loads a share of a model; what it returns does what the first rank says.
LoadShare = Callable[[FirstRank, Start, ModelInfo], Callable[[Message], None]]


def run_rank(module: str, file: int) -> int:
    """Serve as a rank until there is no more to do, with what `module` loads; `file` is the socket.
    Returns the exit code.
    """
    first = FirstRank(file)
    try:
        start = first.hear(decode)
        assert isinstance(start, Start)
        return _run(first, start, module)
    except (EOFError, RunnerDeadError):  # the first rank tells why
        return 0
    except Exception as error:
        first.answer(Answer(error=in_a_line(error)))
        return 1


def meet(first: FirstRank, start: Start, device: "torch.device | None" = None) -> "GroupedRanks":
    """To be called by `LoadShare` when nothing but the model is left to load: it is noticed late if
    a rank is expected there and does not come.
    """
    from aioserve.gpu.tensor_parallel.group import GroupedRanks

    settings = start.config.runner
    first.answer(Answer())
    return GroupedRanks(
        start.rank,
        settings.tensor_parallel_size,
        Path(start.meeting),
        settings.rank_timeout,
        device,
    )


def _run(first: FirstRank, start: Start, module: str) -> int:
    from aioserve.gpu.tensor_parallel.plan import check_model

    server = start.config.server
    # What it loads and serves is told by the first rank.
    level = "debug" if server.log_level == "debug" else "warning"
    set_up_logging(level, server.log_format, f"rank {start.rank}")
    show_no_bars()
    info = ModelInfo(start.config.model)
    check_model(start.config, info)
    load: LoadShare = importlib.import_module(module).load_share
    obey = load(first, start, info)
    gc.collect()
    gc.freeze()  # else it is looked at again and again
    first.answer(Answer(has_loaded=True))
    while True:
        obey(first.hear(decode))


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1], int(sys.argv[2])))
