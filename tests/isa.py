"""Runs the tests on every variant of the kernels and every element type: `make test-isa`.

First what this CPU runs itself, then what an emulator runs of lesser ones. Says at the end what was
run and what was not. Knows which tests depend on either; the tests know nothing about it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from aioserve.kernels import usable_variants
from aioserve.kernels.library import VARIANTS, extension
from aioserve.kernels.tokens import library_for
from tests.variants import DTYPES

ROOT = Path(__file__).parents[1]
# What depends on the kernels and on the type of a model. Kernels' own tests take all by themselves.
MATRIX = ["tests/runner", "--ignore=tests/runner/cuda", "tests/test_reference.py"]
# Emulated models, with the best variant that each has. Debian's qemu 7.2 has no AVX-512.
EMULATED = {"Nehalem": "baseline", "max": "avx2"}
HOW_TO_EMULATE = "apt-get install qemu-user"


class Result(NamedTuple):
    """One run: where, what, and how it went."""

    where: str
    what: str
    counts: str
    is_good: bool


def run_pytest(where: str, what: str, *words: str, **environment: str) -> Result:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *words]
    print(f"--- {where}: {what}", flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    with process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return Result(where, what, re.sub(r" in [\d.]+s.*", "", last), process.returncode == 0)


def check_emulated(model: str, variant: str) -> Result:
    """The C program that checks kernels, on an emulated CPU."""
    where, what = f"emulated {model}", f"{variant}: every kernel, every type"
    print(f"--- {where}: {what}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/check_kernels"
        source = str(ROOT / "tests/kernels/check_kernels.c")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-o", program, source, "-ldl", "-lm"], check=True)
        result = subprocess.run(
            [
                *("qemu-x86_64", "-cpu", model, program),
                *(str(extension(variant)), str(library_for(variant))),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )
    print(result.stdout, end="", flush=True)
    counts = (result.stdout.splitlines() or ["nothing was printed"])[-1]
    return Result(where, what, counts, result.returncode == 0)


def main() -> int:
    """Runs all of it; 1 if anything failed."""
    usable = usable_variants()
    results = [run_pytest("this CPU", "kernels, all variants and types", "tests/kernels")]
    for variant in (*usable, "off"):
        for dtype in DTYPES:
            environment = {"AIOSERVE_KERNELS": variant, "AIOSERVE_TEST_DTYPE": dtype}
            results.append(run_pytest("this CPU", f"{variant}, {dtype}", *MATRIX, **environment))
    not_run = [f"{name} on this CPU: not built, or it lacks the instructions"
               for name in VARIANTS if name not in usable]  # fmt: skip
    if shutil.which("qemu-x86_64"):
        for model, variant in EMULATED.items():
            if extension(variant).exists():
                results.append(check_emulated(model, variant))
            else:
                not_run.append(f"{variant} on an emulated {model}: not built")
        words = ("-n", "0", "tests/emulated")
        results.append(
            run_pytest("emulated", "the whole server", *words, AIOSERVE_TEST_EMULATED="1")
        )
    else:
        not_run.append(f"lesser CPUs, emulated: {HOW_TO_EMULATE}")
    print("\nWhat was run:")
    for result in results:
        verdict = "" if result.is_good else "  <-- FAILED"
        print(f"  {result.where:18} {result.what:36} {result.counts}{verdict}")
    print("What was not:" if not_run else "Nothing was left out.")
    for line in not_run:
        print(f"  {line}")
    return not all(result.is_good for result in results)


if __name__ == "__main__":
    sys.exit(main())
