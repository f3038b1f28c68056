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


INTERRUPTED = """
import sys
from aioserve.testing.violation import begin_call, end_call

def interrupt(frame, event, argument):
    if frame.f_code.co_name == "end":
        sys.settrace(None)
        raise KeyboardInterrupt

call = begin_call(60.0)
sys.settrace(interrupt)
try:
    end_call(call)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_ctrl_c_at_the_very_end_of_a_call_is_not_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], check=False, timeout=60)
    assert ended.returncode == 7
