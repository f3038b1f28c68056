"""Whether answers of a router or autoscaler depend on the order of sets of strings.

That order is another one in every process: the same questions are asked in two, with different
values of PYTHONHASHSEED. Knows processes and answers. Knows no rule.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from inspect import getmodule
from itertools import zip_longest
from typing import Any

from aioserve.testing.violation import RouterViolation

HASH_SEEDS = "1", "2"
SECONDS = 120.0  # for a process that imports aioserve and asks some hundred times: it has hung

_CHILD = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module = importlib.import_module(sys.argv[2])
print(json.dumps(module.answers_of(sys.argv[3], json.loads(sys.argv[4]))))
"""


def check_hash_order(kind: type, options: Mapping[str, Any], word: str, module: str) -> None:
    """Raise `RouterViolation` if the function `answers_of` of `module` returns other answers where
    strings have other hashes. Looks at nothing if no other process can import the class. `word`
    says what the class is.
    """
    spec = _spec_of(kind, word)
    if spec is None:
        return
    words = json.dumps(sys.path), module, spec, json.dumps(dict(options))
    one, other = (_answers_with(seed, words, word) for seed in HASH_SEEDS)
    for number, (first, second) in enumerate(zip_longest(one, other)):
        if first != second:
            raise RouterViolation(
                f"{kind.__name__}: answer {number} is {second} with PYTHONHASHSEED={HASH_SEEDS[1]} "
                f"and {first} with {HASH_SEEDS[0]}; does the {word} walk through a set of strings?"
            )


def _answers_with(hash_seed: str, words: tuple[str, ...], word: str) -> list[Any]:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, *words],
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
