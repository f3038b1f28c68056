"""Whether plans depend on the order of sets of strings, which is another one in every process.

Makes the same calls in two processes with different values of PYTHONHASHSEED and compares what they
plan. Knows processes and plans. Knows nothing about rules.
"""

import importlib
import json
import os
import subprocess
import sys
from inspect import getmodule

from aioserve.testing.bench import Bench
from aioserve.testing.calls import write_program
from aioserve.testing.violation import HashOrder

SEEDS = "1", "2"
SECONDS = 120.0  # for a process that imports aioserve and makes a few calls: it has hung

#: Runs the program on its input, whatever it raises, and prints what was planned.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
names = {}
try:
    exec(sys.stdin.read(), names)
except ImportError:
    names["harness"] = None  # the policy is of a file that only pytest finds
except Exception:
    if "harness" not in names:
        raise
print(json.dumps(names["harness"] and [
    [step.step_id, list(step.num_scheduled_tokens.items()), step.preempted_req_ids]
    for step in names["harness"].steps
]))
"""

_Plan = tuple[int, list[tuple[str, int]], list[str]]


def check_hash_order(bench: Bench) -> None:
    """Raise `HashOrder` if the calls so far give other plans where strings have other hashes. Does
    nothing for a class that a program cannot import, as one within a function.
    """
    if not _is_importable(bench.policy):
        return
    calls = [call for call in bench.calls if not call.method.startswith("check_")]
    program = write_program(bench, calls)
    children = [_start(program, seed) for seed in SEEDS]
    try:
        one, other = (_plans(child, program) for child in children)
    finally:
        for child in children:  # none goes on if another one failed
            child.kill()
            child.communicate()
    for plan, expected in zip(other or (), one or (), strict=False):
        if plan != expected:
            raise HashOrder(
                f"step {expected[0]}: the same events gave another plan where strings have other "
                f"hashes: {_told(plan)} with PYTHONHASHSEED={SEEDS[1]}, {_told(expected)} with "
                f"{SEEDS[0]}; does the policy walk through a set of strings?"
            )


def _is_importable(policy: type) -> bool:
    module = getmodule(policy)
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.startswith("aioserve_policy_"):  # from a file, which `load_policy` loads
        return True
    return getattr(importlib.import_module(module.__name__), policy.__qualname__, None) is policy


def _start(program: str, seed: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None, "it was asked for"
    child.stdin.write(program)
    child.stdin.close()
    child.stdin = None  # `communicate` would close it again
    return child


def _plans(child: subprocess.Popen[str], program: str) -> list[_Plan] | None:
    """What the process has planned; None if it could not import the policy."""
    printed, errors = child.communicate(timeout=SECONDS)
    if child.returncode:
        raise RuntimeError(f"the program did not run in a process of its own:\n{program}\n{errors}")
    found: list[_Plan] | None = json.loads(printed)
    return found


def _told(plan: _Plan) -> str:
    _, tokens, preempted = plan
    words = ", ".join(f"{name} {count}" for name, count in tokens[:8])
    gone = f", preempts {', '.join(preempted)}" if preempted else ""
    return f"[{words}{', ...' if len(tokens) > 8 else ''}]{gone}"
