"""The C program that checks kernels without torch: it passes here, and it can fail.

It is written for processors that are only emulated: `make test-isa` and `make test-arm`.
"""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from aioserve.kernels import usable_variants
from aioserve.kernels.library import extension
from tests import processes
from tests.slow import mostly_slow

COMPILER = os.environ.get("CC", "cc")
if not usable_variants() or shutil.which(COMPILER) is None:
    pytest.skip("no kernels, or no compiler", allow_module_level=True)

SOURCE = Path(__file__).with_name("check_kernels.c")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("check") / "check_kernels")
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    compiled = processes.run(COMPILER, *flags, "-o", path, str(SOURCE), "-ldl", "-lm")
    assert compiled.returncode == 0, compiled.stderr
    return path


@pytest.mark.parametrize("variant", mostly_slow(usable_variants(), but=usable_variants()[-1:]))
def test_every_kernel_gives_what_loops_over_numbers_give(program: str, variant: str) -> None:
    result = processes.run(program, str(extension(variant)))
    assert result.returncode == 0, result.stdout + result.stderr
    passed, failed = result.stdout.splitlines()[-1].split(" passed, ")
    assert int(passed) > 150
    assert failed == "0 failed"


def test_a_library_with_wrong_or_no_kernels_fails(program: str, tmp_path: Path) -> None:
    """One kernel that does nothing, and no others."""
    source, library = tmp_path / "wrong.c", tmp_path / "wrong.so"
    source.write_text("void silu_and_mul_f32(void) {}\n")
    processes.run(COMPILER, "-shared", "-fPIC", "-o", str(library), str(source), check=True)
    assert hasattr(ctypes.CDLL(str(library)), "silu_and_mul_f32")
    result = processes.run(program, str(library))
    assert result.returncode == 1
    assert "FAILED silu_and_mul_f32 [1, 16]: out[0] is " in result.stdout
    assert "FAILED rms_norm_bf16: the library has no such function" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("0 passed, ")
