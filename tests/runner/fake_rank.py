"""A rank that loads nothing: `python -m tests.runner.fake_rank MODULE SOCKET`.

The name of the model says what it does: it fails, leaves, waits for steps, stays when it should
end, or is deaf.
"""

import os
import sys

from aioserve.gpu.tensor_parallel.processes import Answer, FirstRank, Start, decode

if __name__ == "__main__":
    first = FirstRank(int(sys.argv[2]))
    start = first.hear(decode)
    assert isinstance(start, Start)
    behaviour = start.config.model.model
    if behaviour == "fails":
        first.answer(Answer(error=f"rank {start.rank} says why"))
        sys.exit(1)
    if behaviour == "leaves":
        os._exit(7)
    first.answer(Answer())
    first.answer(Answer(has_loaded=True))
    try:
        while behaviour != "deaf":
            first.hear(decode)
    except EOFError:
        pass
    while behaviour in ("stays", "deaf"):
        os.read(os.pipe()[0], 1)
