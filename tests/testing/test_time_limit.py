"""What a call that did not come back leaves behind in its thread."""

import subprocess
import sys

PROGRAM = """
import bdb
from aioserve.testing.violation import OutOfTime, begin_call, end_call

{prepare}
for _ in range(3):
    call = begin_call(0.1)
    try:
        while True:
            pass
    except (OutOfTime, KeyboardInterrupt):
        end_call(call)
assert bdb.Bdb().runcall(lambda: 42) == 42
"""
#: By its own handler of SIGINT a program makes the interrupt come as an exception alone.
BY_EXCEPTION = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def test_a_debugger_can_trace_after_a_call_that_was_ended() -> None:
    for prepare in ("", BY_EXCEPTION):
        program = PROGRAM.format(prepare=prepare)
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
