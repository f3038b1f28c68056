"""Whether plans or answers depend on the order of sets of strings, another one in every process.

Makes the same calls, or asks the same questions, in two processes with different values of
PYTHONHASHSEED and compares what comes back.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from inspect import getmodule
from itertools import zip_longest
from typing import Any

from aioserve.testing.bench import Bench
from aioserve.testing.calls import write_program
from aioserve.testing.violation import HashOrder, RouterViolation

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
    """Return what the process has planned; None if it could not import the policy."""
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


# Whether answers of a router or autoscaler depend on the order of sets of strings. That order is
# another one in every process: the same questions are asked in two, with different values of
# PYTHONHASHSEED. Knows processes and answers. Knows no rule.


# for a process that imports aioserve and asks some hundred times: it has hung

_ASKING = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module = importlib.import_module(sys.argv[2])
print(json.dumps(module.answers_of(sys.argv[3], json.loads(sys.argv[4]))))
"""


def check_answers_alike(kind: type, options: Mapping[str, Any], word: str, module: str) -> None:
    """Raise `RouterViolation` if the function `answers_of` of `module` returns other answers where
    strings have other hashes. Looks at nothing if no other process can import the class. `word`
    says what the class is.
    """
    spec = _spec_of(kind, word)
    if spec is None:
        return
    words = json.dumps(sys.path), module, spec, json.dumps(dict(options))
    one, other = (_answers_with(seed, words, word) for seed in SEEDS)
    for number, (first, second) in enumerate(zip_longest(one, other)):
        if first != second:
            raise RouterViolation(
                f"{kind.__name__}: answer {number} is {second} with PYTHONHASHSEED={SEEDS[1]} "
                f"and {first} with {SEEDS[0]}; does the {word} walk through a set of strings?"
            )


def _answers_with(hash_seed: str, words: tuple[str, ...], word: str) -> list[Any]:
    child = subprocess.run(
        [sys.executable, "-c", _ASKING, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if child.returncode:
        raise RouterViolation(f"a process that asks the {word} has failed: {child.stderr[-800:]}")
    found: list[Any] = json.loads(child.stdout)
    return found


def _spec_of(kind: type, word: str) -> str | None:
    module = getmodule(kind)
    if module is None or module.__name__ == "__main__":
        return None
    if module.__name__.startswith(f"aioserve_{word}_"):  # from a file, which its loader loads
        return f"{module.__file__}:{kind.__qualname__}"
    is_there = getattr(module, kind.__qualname__, None) is kind
    return f"{module.__name__}:{kind.__qualname__}" if is_there else None
