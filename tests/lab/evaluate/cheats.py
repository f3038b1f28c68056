"""Policies that cheat, as texts: each reads what no policy may know, or does what none may do.

The body of `schedule` is that of `chunked_prefill`; what is added stands before it.
"""

HEAD = """
from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput
"""
CLASS = """
class Cheat(BaseScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        {begin}

    def order(self, request: Request):
        return {order}

    def schedule(self) -> SchedulerOutput:
        {first}
        step = self.new_step(512)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
"""


def policy(
    imports: str = "", order: str = "request.arrival_time", first: str = "pass", begin: str = "pass"
) -> str:
    """The text of a policy with something added."""
    return imports + HEAD + CLASS.format(order=order, first=first, begin=begin)


HONEST = policy()
#: It has the simulated runner tell it how long replies will be, and serves the shortest first. No
#: function of the interpreter that an audit hook hears of is called.
READS_LENGTHS = policy(
    """
import sys
LENGTHS = {}

def _listen():
    runner = sys.modules["aioserve.runner.simulated"].SimulatedRunner
    run_step = runner.run_step

    def told(self, *args):
        LENGTHS.update(self.output_tokens)
        return run_step(self, *args)

    runner.run_step = told

_listen()
""",
    "(LENGTHS.get(request.request_id, 200), request.arrival_time)",
)
READS_CLOCK = policy("import time\n", "time.monotonic()")
READS_WORKLOAD = policy(
    "import gc\n", first="found = [o for o in gc.get_objects() if type(o).__name__ == 'Workload']"
)
LOADS_WORKLOAD = policy("from aioserve.lab.zoo.standing import load_workload\n")
READS_FILE = policy(first="open('/etc/hostname').read()")
WRITES_FILE = policy(first="open('found', 'w').write('x')")
STARTS_PROCESS = policy("import os\n", first="os.system('true')")
CONNECTS = policy("import socket\n", first="socket.socket().connect(('127.0.0.1', 9))")
HIDES = policy(first="getattr(self, '_' + '_class_' + '_')")
HANGS = policy(first="\n        while True: pass")
HOARDS = policy(first="self.kept = [0] * 10**10")
LOSES = policy(first="\n        for request in self.running: request.num_computed_tokens = 0")
NONSENSE = "What news, my lord?"
