"""Kernels that get no memory: the call raises, the request fails, and the process serves the next.

The memory is refused by shortage.c, which a process of Python loads before all else.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from aioserve.kernels import usable_variants
from tests import processes
from tests.models import make_model

COMPILER = os.environ.get("CC", "cc")
if not usable_variants() or shutil.which(COMPILER) is None:
    pytest.skip("no kernels, or no compiler", allow_module_level=True)

ROOT = Path(__file__).parents[2]

BEGIN = """
import asyncio, ctypes, sys
import torch
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig
from aioserve.errors import RequestFailedError
from aioserve.kernels import load_kernels
from aioserve.kernels.library import choose_variant, extension
from aioserve.runner.cpu.products import PanelLinear

shortage = ctypes.CDLL(None)
shortage.refuse.argtypes = (ctypes.c_void_p, ctypes.c_int64)
library = ctypes.CDLL(str(extension(choose_variant())))
inside = ctypes.cast(library.linear_f32, ctypes.c_void_p)
"""

ONE_PRODUCT = """
torch.manual_seed(0)
linear = PanelLinear.of(load_kernels(), torch.randn(70, 64), None)
x = torch.randn(50, 64)
right = linear(x)
shortage.refuse(inside, 1)
try:
    linear(x)
except MemoryError as error:
    print(error)
print(shortage.was_refused(), torch.equal(linear(x), right))
"""

A_SERVER_S_STEPS = """
async def main():
    config = EngineConfig(
        model=ModelConfig(model=sys.argv[1], dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(num_kv_blocks=20),
    )
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    async with AsyncEngine(config) as engine:

        async def generate(length):
            outputs = [output async for output in engine.generate([*range(9, 9 + length)], params)]
            return [token for output in outputs for token in output.token_ids]

        right = await generate(30)
        shortage.refuse(inside, 1)
        again = await generate(30)
        print("a step without memory:", shortage.was_refused(), again == right)
        shortage.refuse(inside, 0)
        try:
            await generate(31)
        except RequestFailedError as error:
            print(error)
        print("a request without memory:", shortage.was_refused(), await generate(30) == right)

asyncio.run(main())
"""


def run(tmp_path: Path, code: str, *words: str) -> list[str]:
    """What the code prints in a process whose memory can be refused."""
    shim = str(tmp_path / "shortage.so")
    source = str(Path(__file__).with_name("shortage.c"))
    compiled = processes.run(COMPILER, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl")
    assert compiled.returncode == 0, compiled.stderr
    environment = {**os.environ, "LD_PRELOAD": shim, "PYTHONPATH": str(ROOT)}
    result = processes.run(sys.executable, "-c", BEGIN + code, *words, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_product_without_memory_raises_and_the_next_one_is_right(tmp_path: Path) -> None:
    assert run(tmp_path, ONE_PRODUCT) == [
        "no memory for the intermediate numbers of linear_f32",
        "1 True",
    ]


@pytest.mark.slow  # quick: a product here, and steps without memory in tests/runner/cpu
def test_a_request_for_which_kernels_get_no_memory_fails_alone(tmp_path: Path) -> None:
    """A step is run again first: where there is memory by then, nothing is lost."""
    make_model("llama", tmp_path / "model")
    assert run(tmp_path, A_SERVER_S_STEPS, str(tmp_path / "model")) == [
        "a step without memory: 1 True",
        "out of memory: the step that served this request does not fit, even alone",
        "a request without memory: 1 True",
    ]
