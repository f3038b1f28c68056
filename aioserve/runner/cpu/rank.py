"""A rank beside the first on a CPU: `python -m aioserve.runner.cpu.rank SOCKET`, run by that one.

Computes the steps that it is told on its share of the model; samples nothing. Knows messages and
`StepExecutor`.
"""

import contextlib
import sys
from collections.abc import Callable

import numpy as np

from aioserve.errors import RequestFailedError
from aioserve.model_info import ModelInfo
from aioserve.runner.tensor_parallel.messages import Sampled, Start, decode
from aioserve.runner.tensor_parallel.processes import FirstRank
from aioserve.runner.tensor_parallel.rank_process import meet, run_rank
from aioserve.scheduler.output import SchedulerOutput


def _load(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[SchedulerOutput], None]:
    from aioserve.runner.cpu.load import load_on_cpu
    from aioserve.runner.cpu.sampler import SampledTokens

    def choose(*_: object) -> SampledTokens:
        """The tokens that the first rank has chosen."""
        sampled = first.hear(decode)
        assert isinstance(sampled, Sampled)
        if sampled.token_ids is None:
            raise RequestFailedError("the step has failed on the first rank")
        return SampledTokens(np.array(sampled.token_ids, dtype=np.int64), {})

    executor = load_on_cpu(start.config, info, ranks=meet(first, start))
    executor.choose = choose

    def execute(step: SchedulerOutput) -> None:
        with contextlib.suppress(RequestFailedError):
            executor.execute_model(step)

    return execute


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), _load))
