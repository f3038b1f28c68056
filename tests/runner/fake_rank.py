"""A rank that loads nothing: `python -m tests.runner.fake_rank SOCKET`. The model's name says what
it does: it fails, leaves, or waits for steps.
"""

import os
import sys

from aioserve.runner.tensor_parallel.messages import Answer, Start, decode
from aioserve.runner.tensor_parallel.processes import FirstRank

if __name__ == "__main__":
    first = FirstRank(int(sys.argv[1]))
    start = first.hear(decode)
    assert isinstance(start, Start)
    behaviour = start.config.model.model
    if behaviour == "fails":
        first.answer(Answer(f"rank {start.rank} says why"))
        sys.exit(1)
    if behaviour == "leaves":
        os._exit(7)
    first.answer(Answer())
    try:
        while True:
            first.hear(decode)
    except EOFError:
        if behaviour == "stays":
            while True:
                os.read(os.pipe()[0], 1)
