"""Which variant is taken, and that only one OpenMP runtime is loaded."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, library, usable_variants

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)


def test_the_best_variant_is_taken_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIOSERVE_KERNELS", raising=False)
    assert library.choose_variant() == usable_variants()[0]
    monkeypatch.setenv("AIOSERVE_KERNELS", "baseline")
    assert library.choose_variant() == "baseline"


def test_off_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSERVE_KERNELS", "off")
    with pytest.raises(KernelsUnavailableError, match="AIOSERVE_KERNELS=off"):
        library.choose_variant()


def test_an_unknown_variant_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSERVE_KERNELS", "mmx")
    with pytest.raises(ConfigError, match=r"must be one of off, .*baseline here, not 'mmx'"):
        library.choose_variant()


def test_a_cpu_gets_no_instructions_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = {*avx2, "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    for flags, best in [
        ({"avx2", "fma"}, "baseline"),
        ({*avx2, "avx512f"}, "avx2"),
        (avx512, "avx512"),
        ({*avx2, "avx_vnni"}, "avx2_vnni"),
        ({*avx512, "avx512_bf16"}, "avx512"),
        ({*avx512, "avx512_vnni"}, "avx512_vnni"),
        ({*avx512, "avx512_bf16", "avx512_vnni"}, "avx512_bf16"),
        ({*avx512, "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}, "amx_bf16"),
    ]:
        monkeypatch.setattr(library, "cpu_flags", lambda flags=flags: flags)
        assert usable_variants()[0] == best
    monkeypatch.setattr(library, "cpu_flags", set[str])
    assert usable_variants() == ["baseline"]


def test_kernels_of_other_sources_than_those_beside_them_are_not_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variant = usable_variants()[0]
    changed = tmp_path / "src"
    shutil.copytree(library.SOURCES, changed)
    monkeypatch.setattr(library, "SOURCES", changed)
    assert library.open_library(variant)
    with (changed / "attention.h").open("a") as source:
        source.write("// another line\n")
    with pytest.raises(KernelsUnavailableError, match=f"_{variant}.so was compiled from other"):
        library.open_library(variant)
    monkeypatch.setattr(library, "SOURCES", tmp_path / "of a wheel")
    assert library.open_library(variant)


def test_the_kernels_share_torchs_openmp_runtime() -> None:
    code = (
        "import torch; from aioserve.kernels import Kernels, usable_variants;"
        "k = Kernels(usable_variants()[0]);"
        "k.rms_norm(torch.ones(99, 512), torch.ones(512), 1e-5, torch.ones(99, 512));"
        "print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert len(set(re.findall(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*", maps))) == 1
