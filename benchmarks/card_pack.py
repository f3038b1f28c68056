"""Packs what card.py needs on a machine with a card and without a network, into a few wheels.

    python benchmarks/card_pack.py kernels          # compiles flashinfer's kernels, without a card
    python benchmarks/card_pack.py wheels           # fetches wheels, puts the kernels into one

The kernels are those that card_stages.KINDS ask for; nvcc, ninja and flashinfer are needed, and no
driver. A kernel takes one to five minutes on two cores. The wheels are for another Python than this
one, if asked, and together have at most as many bytes as may be carried. docs/gpu.md says how they
are used.
"""

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import ROOT, Args, Opt, Program

program = Program(__doc__)

FLASHINFER = "flashinfer-python==0.7.2.post1"
#: What flashinfer and aioserve need, and an image with torch and transformers lacks.
OTHERS = ("apache-tvm-ffi==0.1.15.post2", "msgspec==0.22.0")
TOOLS = ("nvidia-ml-py==13.615.71", "ninja==1.13.2")  # what compiling needs beside torch
KERNELS = ROOT / "build" / "card" / "kernels"
WHEELS = ROOT / "build" / "card" / "wheels"
DATA = "flashinfer/data/"
MIB = 1 << 20


# Kernels.


@program.command(
    "kernels",
    folder=Opt(str(KERNELS), "where flashinfer keeps its cache"),
    arch=Opt("9.0a", "compute capability of the card"),
    only=Opt("", "kinds of attention that have this in their name"),
)
def kernels(args: Args) -> tuple[None, int]:
    """Compile the kernels of every kind, one after another; what is compiled already is kept."""
    folder = Path(args.folder)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = args.arch
    find_tools(folder)
    import torch
    from card_stages import KINDS, MAX_MODEL_LEN

    from aioserve.gpu.cuda.flashinfer_attention import have_kernels

    flashinfer = without_card(args.arch, _build_only)
    device: Any = NoDevice()
    failed = 0
    for kind in KINDS:
        if args.only not in str(kind):
            continue
        began = time.monotonic()
        try:
            calls = [kind.call_on(device.torch_device)]
            have_kernels(flashinfer, kind.spec, calls, torch.bfloat16, device, MAX_MODEL_LEN)
        except Exception as error:  # what its compiler raises has no common class
            failed += 1
            traceback.print_exc()
            print(f"{kind}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)
    for path in compiled(folder):
        print(f"{path.stat().st_size / MIB:6.2f} MiB {path.stem}")
    return None, int(failed > 0)


def find_tools(folder: Path) -> None:
    """Make flashinfer importable, and a compiler of CUDA usable, on a machine without a driver."""
    if importlib.util.find_spec("flashinfer") is None:
        site = folder / "site"
        if not site.is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
            command += ["--target", str(site), FLASHINFER, OTHERS[0], *TOOLS]
            subprocess.run(command, check=True)
        sys.path.insert(0, str(site))
        os.environ["PATH"] = f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"
    if "CUDA_HOME" not in os.environ:  # nvcc on PATH may be a script beside no headers
        command = ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        here = next(line for line in told.splitlines() if "_HERE_=" in line)
        os.environ["CUDA_HOME"] = str(Path(here.partition("_HERE_=")[2]).parent)
    stub = folder / "stub" / "libcuda.so"  # modules are linked with the driver's library
    stub.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-x", "c", os.devnull, "-o", str(stub)]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    flags = os.environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{stub.parent}".strip()


class NoDevice:
    """The place of a device that nothing is sent to."""

    def __init__(self) -> None:
        import torch

        self.torch_device = torch.device("cpu")

    def record(self) -> "NoDevice":
        """Return a point in a queue that has nothing in it."""
        return self

    def launch(self, work: Callable[[], None]) -> None:
        """Do nothing: there is no kernel to run."""

    def wait(self) -> None:
        """Return at once, as no device has work to do."""


def without_card(arch: str, load: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    """Return flashinfer, changed so that it makes wrappers and plans for a card of compute
    capability `arch` that is not there. `load` is given what describes a module of kernels, and
    what compiles and loads it; what it returns is used as the module.
    """
    import flashinfer
    import torch

    empty = torch.empty

    def empty_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return empty(*args, **kwargs)

    torch.empty = empty_unpinned  # type: ignore[assignment]
    if torch.version.cuda is None:  # of a torch for the CPU, whose version is compared
        torch.version.cuda = "12.9"
    major, minor = (int("".join(filter(str.isdigit, number))) for number in arch.split("."))
    properties = SimpleNamespace(  # of an H200
        major=major,
        minor=minor,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=228 << 10,
        shared_memory_per_block_optin=227 << 10,
    )
    told: dict[str, Callable[[Any], Any]] = {
        "get_compute_capability": lambda device: (major, minor),
        "get_device_properties": lambda device: properties,
        "get_device_sm_count": lambda device: properties.multi_processor_count,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flashinfer":
            for asked, tell in told.items():
                if asked in vars(module):
                    setattr(module, asked, tell)
    described = importlib.import_module("flashinfer.jit.core").JitSpec
    build = described.build_and_load
    described.build_and_load = lambda self: load(self, partial(build, self))
    return flashinfer


class Built:
    """A module that was compiled and loaded, which is asked to plan, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: (0, 0)


def _build_only(described: Any, build: Callable[[], Any]) -> Built:
    build()
    return Built()


def compiled(folder: Path) -> list[Path]:
    """Return the compiled modules in a cache of flashinfer, one of each name."""
    found = {path.stem: path for path in sorted(folder.rglob("cached_ops/*/*.so"))}
    return [found[name] for name in sorted(found)]


# Wheels.


@program.command(
    "wheels",
    folder=Opt(str(WHEELS), "where the wheels go"),
    kernels=Opt(str(KERNELS), "flashinfer's cache, whose kernels are packed"),
    python=Opt(f"{sys.version_info.major}.{sys.version_info.minor}", "version of Python there"),
    also=Opt([""], "more packages that are missing there"),
    no_sources=Opt(False, "leave out what compiles kernels that are not packed"),
    most=Opt(64.0, "MiB that all wheels may have"),
)
def wheels(args: Args) -> tuple[None, int]:
    """Fetch wheels, trim flashinfer's, and put the compiled kernels into it."""
    folder, fetched = Path(args.folder), Path(args.folder).with_suffix(".fetched")
    folder.mkdir(parents=True, exist_ok=True)
    for package in (FLASHINFER, *OTHERS, *filter(None, args.also)):
        target = fetched if package == FLASHINFER else folder
        subprocess.run(download(package, args.python, target), check=True)
    whole = next(fetched.glob("flashinfer_python-*.whl"))
    modules = compiled(Path(args.kernels))
    trim(whole, folder / whole.name, modules, has_sources=not args.no_sources)
    if not check_import(folder / whole.name, Path(args.kernels)):
        print(
            "flashinfer's import from the trimmed wheel was not tried, as tvm_ffi is not here: "
            "`python benchmarks/card_pack.py kernels` installs it",
            file=sys.stderr,
        )
    total = 0.0
    for path in sorted(folder.glob("*.whl")):
        total += (size := path.stat().st_size / MIB)
        print(f"{size:6.2f} MiB {path.name}")
    print(f"{total:6.2f} MiB in all, {len(modules)} compiled kernels among them")
    if total > args.most:
        print(f"more than {args.most:g} MiB: try --no-sources", file=sys.stderr)
        return None, 1
    return None, 0


def download(package: str, python: str, folder: Path) -> list[str]:
    """Return the command that fetches a wheel for Linux and that version of Python."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for libc in ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{libc}_x86_64"]
    return [*command, package]


def is_kept(name: str, size: int, *, has_sources: bool) -> bool:
    """Return whether a file of flashinfer's wheel is needed for attention without experts."""
    dropped = ("b12x/", "flashinfer/experimental/b12x/", "flashinfer/moe_ep/kernel_src/")
    if name.startswith(dropped):
        return False
    if not name.startswith(DATA):
        return True
    part = name.removeprefix(DATA)
    if part.startswith(("csrc/", "cutlass/", "cccl/", "include/", "spdlog/")) and not has_sources:
        return False
    if part.startswith("csrc/"):  # the top alone: what is below is for single models
        return part.count("/") == 1 and size < 120_000
    if part.startswith("cutlass/"):
        return part.startswith(("cutlass/include/", "cutlass/tools/util/include/"))
    return not part.startswith("cccl/python")


def trim(whole: Path, target: Path, modules: list[Path], *, has_sources: bool) -> None:
    """Write a wheel with the files of `whole` that are needed, and with compiled `modules`, which
    flashinfer loads before it would compile.
    """
    record = ""
    lines = list[str]()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(target, "w") as out:

        def put(name: str, data: bytes) -> None:
            info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(info, data, compresslevel=9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            lines.append(f"{name},sha256={digest.decode()},{len(data)}")

        for name, data in _files(source, has_sources):
            if name.endswith(".dist-info/RECORD"):
                record = name
            else:
                put(name, data)
        for path in modules:
            put(f"{DATA}aot/{path.stem}/{path.name}", path.read_bytes())
        info = zipfile.ZipInfo(record, (2026, 1, 1, 0, 0, 0))
        info.external_attr = 0o644 << 16
        out.writestr(info, "\n".join([*lines, f"{record},,", ""]))


def check_import(wheel: Path, kernels: Path) -> bool:
    """Import flashinfer from a wheel, with what was installed beside `kernels`. Returns whether it
    was tried: tvm_ffi is needed. Raises `CalledProcessError` if the import fails, as it does where
    something was left out that it needs.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as source:
            source.extractall(folder)
        paths = [folder, str(kernels / "site"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLASHINFER_WORKSPACE_BASE": folder,
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        }
        code = "import importlib.util as u, sys; u.find_spec('tvm_ffi') or sys.exit(3)\n"
        command = [sys.executable, "-c", code + "import flashinfer"]
        done = subprocess.run(command, env=env, check=False)
        if done.returncode == 3:
            return False
        done.check_returncode()
    return True


def _files(source: zipfile.ZipFile, has_sources: bool) -> Iterator[tuple[str, bytes]]:
    for info in source.infolist():
        if not info.is_dir() and is_kept(info.filename, info.file_size, has_sources=has_sources):
            yield info.filename, source.read(info)


if __name__ == "__main__":
    program.main()
