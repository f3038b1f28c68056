"""A rank beside the first on a CPU: a process of its own, which that one starts.

`python -m aioserve.gpu.tensor_parallel.cpu_rank SOCKET`. Light until it is told what to load: from
then on `cpu_following_rank` does what it is told.
"""

import sys
from collections.abc import Callable

from aioserve.gpu.tensor_parallel.processes import FirstRank, Message, Start
from aioserve.gpu.tensor_parallel.rank_process import run_rank
from aioserve.model_source.info import ModelInfo


def _load(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[Message], None]:
    from aioserve.gpu.tensor_parallel.cpu_following_rank import FollowingRank

    return FollowingRank(first, start, info).obey


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), _load))
