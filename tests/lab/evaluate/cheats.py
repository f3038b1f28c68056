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
WIDE = HONEST.replace("self.new_step(512)", "self.new_step()")
#: It would have the simulated runner tell it how long replies will be, and serves the shortest
#: first. No function of the interpreter that an audit hook hears of is called.
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


# Policies of an attacker, whom neither the look nor the hook stops: once they are made, their
# module says that it is another one.


#: Names of classes of which a policy may find no object: what holds lengths, arrivals to come, or
#: what is measured.
SECRET = ("Workload", "WorkloadRequest", "RunOutcome", "RequestOutcome", "SimulatedRunner", "Task")


def free(imports: str, first: str) -> str:
    """The text of such a policy."""
    modules = f"import asyncio, gc, os, sys, time\nSECRET = set({SECRET})\n"
    return policy(modules + imports, first=first, begin='globals()["__name__"] = "innocent"')


#: They walk through all that their process holds, and raise what they found.
BY_HEAP = free(
    """
def walk():
    return {type(o).__name__ for o in gc.get_objects()}
""",
    first="raise ValueError(f'found {sorted(walk() & SECRET)}')",
)
BY_REFERENCE = free(
    """
def walk():
    todo, seen, found = [sys.modules], set(), set()
    while todo:
        one = todo.pop()
        found.add(type(one).__name__)
        for other in gc.get_referents(one):
            if id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
    return found
""",
    first="raise ValueError(f'found {sorted(walk() & SECRET)}')",
)
BY_FRAMES = free(
    """
def walk():
    found = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            for one in frame.f_locals.values():
                own = vars(one).values() if hasattr(one, "__dict__") else ()
                found |= {type(of).__name__ for of in (one, *own)}
            frame = frame.f_back
    return found
""",
    first="raise ValueError(f'found {sorted(walk() & SECRET)}')",
)
BY_TASKS = free(
    """
def walk():
    found = set()
    loop = asyncio._get_running_loop()
    for task in asyncio.all_tasks(loop) if loop else ():
        for frame in task.get_stack():
            found |= {type(one).__name__ for one in frame.f_locals.values()}
    return found
""",
    first="raise ValueError(f'found {sorted(walk() & SECRET)}')",
)
WALKS = {
    "the heap": BY_HEAP,
    "references": BY_REFERENCE,
    "frames": BY_FRAMES,
    "tasks": BY_TASKS,
}
#: It writes a result of its own on the line to the process that measures.
WRITES_THE_RESULT = free(
    """
def say():
    data = b'{"in_time": 1.0}'
    os.write(3, len(data).to_bytes(4, "little") + bytes(1) + data)
""",
    first="say()",
)
#: They plan what there is not: tokens of a step, KV blocks, blocks that others hold, prefixes.
TAKES_MORE_TOKENS = policy(first="self.max_num_batched_tokens = 10**6").replace(
    "self.new_step(512)", "self.new_step(10**6)"
)
MAKES_BLOCKS = policy(
    begin="""
        pool = self.kv_cache.pool
        pool._unused += range(pool.num_blocks, 2 * pool.num_blocks)
        pool.contents *= 2
        pool.ref_counts *= 2
        pool.num_blocks *= 2
        pool.num_free_blocks *= 2
"""
)
HANDS_BLOCKS_OUT_TWICE = policy(
    begin="""
        pool = self.kv_cache.pool
        pool._unused += pool._unused[-9:]
        pool.num_free_blocks += 9
"""
)
CLAIMS_PREFIXES = policy(
    """
import msgspec
def lie(output):
    new = [msgspec.structs.replace(n, num_computed_tokens=16) for n in output.scheduled_new_reqs]
    return msgspec.structs.replace(output, scheduled_new_reqs=new)
""",
).replace("return step.output()", "return lie(step.output())")
#: It takes its time in each step, and has stopped the clocks of its process.
STOPS_THE_CLOCKS = free(
    """
def stop():
    for name in ("thread_time", "process_time", "perf_counter", "monotonic"):
        setattr(time, name, lambda: 0.0)

stop()
""",
    first="sum(range(300_000))",
).replace("self.new_step(512)", "self.new_step()")
