"""Servers of one model that can be measured side by side: how each is started, and with what.

aioserve is this checkout's. The others are in `.venv/peers`, where `build_peers.py` puts them; one
that is missing is left out by name. Each computes with a thread per core and has seats for 64
streams. Knows nothing about loads.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quiet import resident_mib, tree

from aioserve.runner.cpu.machine import default_num_threads

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv" / "peers"
MODELS = PEERS / "models"
BFLOAT16 = "bfloat16"
FILES = {BFLOAT16: MODELS / "BF16.gguf", "Q8_0": MODELS / "Q8_0.gguf", "Q4_0": MODELS / "Q4_0.gguf"}
HALF = MODELS / "F16.gguf"  # for OpenVINO, which reads no BF16 and computes in bfloat16
DIRECTORY = MODELS / "directory"  # the weights of BF16.gguf for those that read no GGUF
SEATS = 64
SLOT_TOKENS = 2176  # of a slot of llama.cpp: the longest load has 2,064
START_SECONDS = 600.0


class Server(NamedTuple):
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


class Running(NamedTuple):
    """A server that has answered."""

    pid: int
    url: str
    start_seconds: float

    def resident_mib(self) -> float:
        """Resident memory of all its processes now."""
        return resident_mib(tree(self.pid))


def servers() -> list[Server]:
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


def ours(key: str, label: str, weights: str, activations: str | None = None) -> Server:
    """This checkout."""
    words = [sys.executable, "-m", "aioserve", "--model", str(FILES[weights]), "--port", "{port}"]
    words += ["--log-level", "warning"]
    words += ["--activations", activations] if activations else []
    return Server(key, label, weights, tuple(words), (FILES[weights],), ready="/ready")


@functools.cache
def has_flag(flag: str) -> bool:
    """Whether this checkout's server knows the flag."""
    command = [sys.executable, "-m", "aioserve", "--help=all"]
    return flag in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def llama_cpp(weights: str) -> Server:
    """llama.cpp's own server, compiled for this CPU. It repacks Q4_0 and Q8_0 as it loads."""
    program = PEERS / "llama.cpp" / "llama-server"
    words = _llama_words(program, weights, "--no-webui", "--cache-ram", "0")
    return Server(f"llama.cpp-{weights}", "llama.cpp", weights, words, (program, FILES[weights]))


def ik_llama_cpp(weights: str) -> Server:
    """The fork with kernels and layouts of its own, which `-rtr` makes as it loads. Its flash
    attention is off: with several requests in a batch it ends the server, `GGML_ASSERT(S > 0)`.
    """
    program = PEERS / "ik_llama.cpp" / "llama-server"
    words = _llama_words(program, weights, "-rtr", "-no-fa")
    return Server(f"ik_llama-{weights}", "ik_llama.cpp", weights, words, (program, FILES[weights]))


def _llama_words(program: Path, weights: str, *more: str) -> tuple[str, ...]:
    threads = str(default_num_threads())
    words = [str(program), "-m", str(FILES[weights]), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["-np", str(SEATS), "-c", str(SEATS * SLOT_TOKENS), "-t", threads, "-tb", threads]
    return (*words, *more)


def vllm() -> Server:
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
    return Server("vllm", "vLLM (CPU)", BFLOAT16, tuple(words), needs, tuple(environment.items()))


def openvino() -> list[Server]:
    """OpenVINO GenAI behind `openvino_server.py`: its packages bring no server."""
    python = PEERS / "openvino" / "bin" / "python"
    script = str(Path(__file__).with_name("openvino_server.py"))
    found = []
    for weights, file in (FILES | {BFLOAT16: HALF}).items():
        words = (str(python), script, str(file), "--port", "{port}")
        needs = (python, file)
        found.append(Server(f"openvino-{weights}", "OpenVINO GenAI", weights, words, needs))
    return found


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Start the server, and stop it and all that it started at the end. Its output goes to `log`.

    Raises `RuntimeError` if it ends, or does not answer, within ten minutes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    words = [word.format(port=port) for word in server.words]
    environment = {**os.environ, **dict(server.environment)}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            words, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            while not _answers(url + server.ready):
                if process.poll() is not None:
                    raise RuntimeError(f"{server.key} ended with {process.returncode}: see {log}")
                if time.monotonic() > began + START_SECONDS:
                    raise RuntimeError(f"{server.key} does not answer: see {log}")
                time.sleep(0.1)
            yield Running(process.pid, url, time.monotonic() - began)
        finally:
            _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the group that the process leads, politely first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            if sign == signal.SIGTERM:
                time.sleep(0.5)  # for its children, which end with it


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
