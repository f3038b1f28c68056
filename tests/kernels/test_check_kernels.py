"""The C program that checks kernels without torch: it passes here, and it can fail.

It is written for processors that are only emulated: `make test-isa` and `make test-arm`. Under
sanitizers it runs on kernels that are compiled for it.
"""

import ctypes
import os
import runpy
import shutil
from pathlib import Path

import pytest

from aioserve.kernels import usable_variants
from aioserve.kernels.library import extension
from aioserve.kernels.tokens import library_for
from tests import processes
from tests.slow import mostly_slow

COMPILER = os.environ.get("CC", "cc")
if not usable_variants() or shutil.which(COMPILER) is None:
    pytest.skip("no kernels, or no compiler", allow_module_level=True)

SOURCE = Path(__file__).with_name("check_kernels.c")
ROOT = Path(__file__).parents[2]
# Faults end the program, also those of undefined behaviour, which would only be printed.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compile_checks(path: Path, *flags: str) -> str:
    flags = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags)
    compiled = processes.run(COMPILER, *flags, "-o", str(path), str(SOURCE), "-ldl", "-lm")
    assert compiled.returncode == 0, compiled.stderr
    return str(path)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_checks(tmp_path_factory.mktemp("check") / "check_kernels")


@pytest.mark.parametrize("variant", mostly_slow(usable_variants(), but=usable_variants()[-1:]))
def test_every_kernel_gives_what_loops_over_numbers_give(program: str, variant: str) -> None:
    result = processes.run(program, str(extension(variant)), str(library_for(variant)))
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


@pytest.mark.slow
@pytest.mark.parametrize("variant", usable_variants())
def test_no_kernel_reads_beyond_its_arrays_or_does_what_c_leaves_undefined(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In kernels that are compiled as by setup.py, but for the optimization."""
    checks = compile_checks(tmp_path / "check_kernels", *SANITIZERS)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    own_flags: list[str] = runpy.run_path("setup.py")["FLAGS"][variant]
    kernels = str(tmp_path / "kernels.so")
    flags = ["-shared", "-fPIC", "-O0", "-g", "-std=gnu11", "-fopenmp", "-w", *SANITIZERS]
    tokens = str(tmp_path / "tokens.so")
    for library, source in ((kernels, "kernels.c"), (tokens, "tokens/choose_tokens.c")):
        path = f"aioserve/kernels/src/{source}"
        built = processes.run(COMPILER, *flags, *own_flags, "-o", library, path)
        assert built.returncode == 0, built.stderr
    result = processes.run(checks, kernels, tokens)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[:4000]


def test_rows_of_a_step_have_one_order(tmp_path: Path) -> None:
    """A row is beside itself, and of any three no two are on both sides of the third."""
    program, source = tmp_path / "order", tmp_path / "order.c"
    source.write_text(ORDER)
    kernels = str(ROOT / "aioserve/kernels/src")
    flags = ("-O1", "-std=gnu11", "-fopenmp", "-Wno-psabi", f"-I{kernels}")
    compiled = processes.run(COMPILER, *flags, "-o", str(program), str(source), "-lm")
    assert compiled.returncode == 0, compiled.stderr
    result = processes.run(str(program))
    assert (result.returncode, result.stdout) == (0, "")


ORDER = """
#include <stdio.h>
#include "plan.h"
int main(void) {
    // pieces that a row sees whole, their blocks (of a piece each), its first token
    enum { ROWS = 3 * 3 * 3 * 3 };
    static int32_t blocks[ROWS][2];
    static row rows[ROWS];
    for (int i = 0; i < ROWS; i++) {
        blocks[i][0] = i % 3, blocks[i][1] = i / 3 % 3;
        rows[i] = (row){blocks[i], i * 37 % ROWS, 1, 0, PIECE, i / 9 % 3, 0};
    }
    for (int a = 0; a < ROWS; a++)
        for (int b = 0; b < ROWS; b++) {
            const int own = compare_rows(rows + a, rows + b);
            if (own != -compare_rows(rows + b, rows + a)) return !!puts("both are first");
            if ((own == 0) != (a == b)) return !!puts("two rows are the same");
            for (int c = 0; c < ROWS; c++)
                if (own < 0 && compare_rows(rows + b, rows + c) < 0
                    && compare_rows(rows + a, rows + c) >= 0)
                    return !!puts("a cycle");
        }
    return 0;
}
"""
