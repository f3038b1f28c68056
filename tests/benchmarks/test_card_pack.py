"""What is packed for a card's machine: less sources, more kernels, and still a wheel."""

import base64
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from card_pack import check_import, compiled, is_kept, trim

KEPT = {
    "flashinfer/decode.py": b"decode = 1\n",
    "flashinfer/data/csrc/batch_decode.cu": b"// decodes",
    "flashinfer/data/cutlass/include/cutlass/array.h": b"// arrays",
    "flashinfer/data/include/flashinfer/page.cuh": b"// pages",
}
DROPPED = {
    "flashinfer/experimental/b12x/kernel.py": b"",
    "flashinfer/data/csrc/fused_moe/moe.cu": b"",
    "flashinfer/data/csrc/one_model.cu": b"x" * 120_000,
    "flashinfer/data/cutlass/examples/a.cu": b"",
    "flashinfer/data/cccl/python/a.py": b"",
}
INFO = "flashinfer_python-0.7.2.dist-info"
META = {
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": b"of other files",
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "flashinfer_python-0.7.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        for name, data in (KEPT | DROPPED | META).items():
            out.writestr(name, data)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    ops = tmp_path / "kernels" / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops"
    for name in ("decode_128", "prefill_64"):
        (ops / name).mkdir(parents=True)
        (ops / name / f"{name}.so").write_bytes(name.encode())
        (ops / name / "build.ninja").write_text("")
    return tmp_path / "kernels"


def test_the_trimmed_wheel_installs_and_has_the_kernels_where_flashinfer_looks(
    whole: Path, cache: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / whole.name
    target.parent.mkdir()
    trim(whole, target, compiled(cache), has_sources=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    site = tmp_path / "site"
    subprocess.run([*command, "--no-compile", "--target", str(site), str(target)], check=True)
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    kernels = {f"flashinfer/data/aot/{name}/{name}.so" for name in ("decode_128", "prefill_64")}
    assert {name for name in found if not name.startswith(INFO)} == KEPT.keys() | kernels
    with zipfile.ZipFile(target) as wheel:
        lines = wheel.read(f"{INFO}/RECORD").decode().splitlines()
        recorded = dict(line.split(",", 1) for line in lines)
        assert recorded.keys() == set(wheel.namelist())
        for name in recorded.keys() - {f"{INFO}/RECORD"}:
            data = wheel.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert recorded[name] == f"sha256={digest},{len(data)}"


def test_without_sources_only_python_and_kernels_are_left() -> None:
    kept = {name for name, data in KEPT.items() if is_kept(name, len(data), has_sources=False)}
    assert kept == {"flashinfer/decode.py"}


def test_a_cache_without_kernels_packs_none(tmp_path: Path) -> None:
    assert compiled(tmp_path) == []


def test_an_import_is_tried_where_what_it_needs_is_there_and_said_not_to_be_elsewhere(
    tmp_path: Path,
) -> None:
    wheel, kernels = tmp_path / "flashinfer.whl", tmp_path / "kernels"

    def write(code: str) -> None:
        with zipfile.ZipFile(wheel, "w") as out:
            out.writestr("flashinfer/__init__.py", code)

    write("raise ImportError('a file was left out')")
    if importlib.util.find_spec("tvm_ffi") is None:
        assert not check_import(wheel, kernels)
    (kernels / "site" / "tvm_ffi").mkdir(parents=True)
    (kernels / "site" / "tvm_ffi" / "__init__.py").write_text("")
    with pytest.raises(subprocess.CalledProcessError):
        check_import(wheel, kernels)
    write("import tvm_ffi")
    assert check_import(wheel, kernels)
