"""The whole server on an emulated CPU: it starts, answers, and ends when it is told to.

An emulator hides the machine's instructions from torch as well, which no setting does. It takes
minutes, most of them to import torch: `make test-isa` runs this.
"""

import json
import os
import shutil
import signal
import sys
import urllib.request
from typing import Any

import pytest

from tests.processes import JSON, serving

if not os.environ.get("AIOSERVE_TEST_EMULATED"):
    pytest.skip("make test-isa runs these", allow_module_level=True)
if shutil.which("qemu-x86_64") is None:
    pytest.skip("qemu-x86_64 is not installed", allow_module_level=True)

PATIENCE = 3000.0  # for all of a server's life; emulated on two idle cores its start takes minutes
# CPUs, and the variant of the kernels that they should get: none with AVX; AVX2 without AVX-512.
CPUS = {"Nehalem": "baseline", "max": "avx2"}
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]


def complete(dtype: str, *, cpu: str | None, **environment: str) -> tuple[list[int], str]:
    """Greedy tokens of a server, and its log."""
    python = [sys.executable]
    if cpu is not None:
        python = ["qemu-x86_64", "-cpu", cpu, sys.executable]
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    # What says which CPU this machine has is not for another's.
    own = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    with serving(
        *("--dtype", dtype, "--threads", "1", "--max-num-seqs", "4"),
        python=python,
        patience=PATIENCE,
        env={**own, **environment},
    ) as (process, url):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, JSON)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            answer: Any = json.load(response)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, log
        assert "Traceback" not in log
    tokens: list[int] = answer["choices"][0]["token_ids"]
    assert len(tokens) == 8
    return tokens, log


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cpu", CPUS)
def test_a_lesser_cpu_serves_the_tokens_that_this_one_serves(cpu: str, dtype: str) -> None:
    tokens, _ = complete(dtype, cpu=cpu)
    expected, _ = complete(dtype, cpu=None, AIOSERVE_KERNELS=CPUS[cpu])
    if dtype == "float32":
        assert tokens == expected
    else:  # products that torch makes here and there may round at other places
        assert tokens[0] == expected[0]
