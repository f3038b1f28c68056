"""A rank beside the first: `python -m aioserve.runner.cpu.rank SOCKET`, run by that one.

Computes the steps that it is told on its share of the model; samples nothing. Knows messages and
`StepExecutor`.
"""

import contextlib
import gc
import logging
import sys
from pathlib import Path

import numpy as np

from aioserve.errors import RequestFailedError, RunnerDeadError
from aioserve.model_info import ModelInfo
from aioserve.runner.tensor_parallel.messages import Answer, Sampled, Start, Step, decode
from aioserve.runner.tensor_parallel.processes import FirstRank, in_a_line


def main(file: int) -> int:
    """Until there is no more to do; returns the exit code."""
    first = FirstRank(file)
    try:
        start = first.hear(decode)
        assert isinstance(start, Start)
        return _run(first, start)
    except (EOFError, RunnerDeadError):  # the first rank tells why
        return 0
    except Exception as error:
        first.answer(Answer(error=in_a_line(error)))
        return 1


def _run(first: FirstRank, start: Start) -> int:
    from aioserve.runner.cpu.load import load_on_cpu
    from aioserve.runner.cpu.sampler import SampledTokens
    from aioserve.runner.tensor_parallel.group import Ranks
    from aioserve.runner.tensor_parallel.plan import check_model

    def choose(*_: object) -> SampledTokens:
        """What the first rank has chosen."""
        sampled = first.hear(decode)
        assert isinstance(sampled, Sampled)
        if sampled.token_ids is None:
            raise RequestFailedError("the step has failed on the first rank")
        return SampledTokens(np.array(sampled.token_ids, dtype=np.int64), {})

    config, level = start.config, start.config.server.log_level
    # What it loads and serves is told by the first rank.
    logging.basicConfig(
        level="DEBUG" if level == "debug" else "WARNING",
        format=f"%(asctime)s %(levelname)-7s rank {start.rank} %(name)s: %(message)s",
    )
    info = ModelInfo(config.model)
    check_model(config, info)
    first.answer(Answer())
    settings, meeting = config.runner, Path(start.meeting)
    ranks = Ranks(start.rank, settings.tensor_parallel_size, meeting, settings.rank_timeout)
    executor = load_on_cpu(config, info, ranks=ranks)
    executor.choose = choose
    gc.collect()
    gc.freeze()  # else it is looked at again and again
    first.answer(Answer(has_loaded=True))
    while True:
        message = first.hear(decode)
        assert isinstance(message, Step)
        with contextlib.suppress(RequestFailedError):
            executor.execute_model(message.step)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
