"""That the CPU itself is asked what it can do, emulated or not."""

import shutil
import subprocess
import sys

import pytest
import torch

from aioserve.kernels import library

if not library.extension("cpu").exists():
    pytest.skip("the kernels were not built", allow_module_level=True)

# A CPU before AVX, and one with AVX2 and no AVX-512, with what must be found there.
EMULATED: dict[str, set[str]] = {"Nehalem": set(), "max": {"avx2", "f16c", "fma"}}


def test_the_flags_are_those_that_torch_finds() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    expected = {"AVX2": {"avx2", "fma"}, "AVX512": {"avx2", "fma", "avx512f", "avx512bw"}}
    assert expected.get(capability, set()) <= library.cpu_flags()


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.parametrize("model", EMULATED)
def test_an_emulated_cpu_is_not_taken_for_the_machine_around_it(model: str) -> None:
    code = (  # without the package around it, which imports torch: seconds under emulation
        f"import runpy; names = runpy.run_path({library.__file__!r}); print(*names['cpu_flags']())"
    )
    found = subprocess.run(
        ["qemu-x86_64", "-cpu", model, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(found.split()) == EMULATED[model]
