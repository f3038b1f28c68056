"""Installs the pinned torch in the build that this machine needs, unless it is there already.

    python requirements/install_torch.py    # make does; TORCH_INDEX=URL decides instead

On Linux the package index has the CUDA build, of which a machine without a card has no use: there
the CPU build comes from PyTorch's own index, if that can be reached.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PINNED = re.search(r"^torch==(\S+)", Path(__file__).with_name("runtime.txt").read_text(), re.M)[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_SIZE, CUDA_SIZE = "190 MB", "2.6 GB"
TIMEOUT = 5.0  # seconds


def main() -> int:
    if is_installed():
        return 0
    index, words = choose()
    print(f"torch {PINNED}: {words}", flush=True)
    if index is None:
        return install(None)
    code = install(index)
    if code and index == CPU_INDEX:
        print(f"torch {PINNED}: not there; the package index's build, up to {CUDA_SIZE}")
        return install(None)
    return code


def is_installed() -> bool:
    """Any build of the pinned version will do."""
    try:
        return version("torch").partition("+")[0] == PINNED
    except PackageNotFoundError:
        return False


def choose(cpu_index: str = CPU_INDEX, timeout: float = TIMEOUT) -> tuple[str | None, str]:
    """PyTorch's index to take it from, None for the usual one; and what that means, in words."""
    asked = os.environ.get("TORCH_INDEX")
    if asked:
        return asked, f"from {asked}"
    if sys.platform != "linux":
        return None, "the package index's build for this system"
    if has_card():
        return None, f"the CUDA build ({CUDA_SIZE}), for the NVIDIA card of this machine"
    if answers(cpu_index, timeout):
        return cpu_index, f"the CPU build ({CPU_SIZE}), since there is no NVIDIA card here"
    return None, (
        f"no NVIDIA card here, but {cpu_index} cannot be reached: "
        f"the package index's build, up to {CUDA_SIZE} with CUDA (TORCH_INDEX=URL for another)"
    )


def has_card() -> bool:
    """Whether NVIDIA's driver, which brings `nvidia-smi`, lists one."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def answers(index: str, timeout: float) -> bool:
    """Whether an index has torch, as far as `timeout` seconds can tell."""
    found, done = threading.Event(), threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=timeout):  # noqa: S310
                found.set()
        except (OSError, HTTPException):
            pass
        finally:
            done.set()

    # A thread, since looking up a name knows no timeout.
    threading.Thread(target=ask, daemon=True).start()
    done.wait(timeout)
    return found.is_set()


def known_hashes() -> set[str]:
    """Return the SHA-256 of every pinned build."""
    files = ("runtime.txt", "torch_cpu.txt")
    text = "".join(Path(__file__).with_name(name).read_text() for name in files)
    pins = re.findall(r"^torch==\S+ \\\n((?:    --hash=.*\n)+)", text, re.M)
    return set(re.findall(r"--hash=sha256:(\S+)", "".join(pins)))


def install(index: str | None) -> int:
    """Run pip, with its bar if somebody looks; returns its exit code."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        pip.append("-q")
    command = [*pip, "install", "--no-compile"]  # as in the Makefile
    if index is not None:
        # Nothing but torch from there: all else is pinned in runtime.txt.
        command += ["--index-url", index, "--no-deps"]
    code = 0
    if index is None:  # by its hash; of builds from another index not all are known
        # pip prefers a file whose hash an index states to the CPU build that lies in a folder of
        # PIP_FIND_LINKS. So it chooses without hashes, and what it chose is compared with them.
        with tempfile.TemporaryDirectory() as folder:
            download = [*pip, "download", "--no-deps", "-d", folder, f"torch=={PINNED}"]
            code = subprocess.run(download, check=False).returncode
            if not code:
                [wheel] = Path(folder).iterdir()
                with wheel.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest not in known_hashes():
                    print(
                        f"{wheel.name} has the SHA-256 {digest}, which is not one of those in "
                        "requirements/runtime.txt and torch_cpu.txt: it was not installed",
                        file=sys.stderr,
                    )
                    return 1
                by_file = [*command, "--no-deps", str(wheel)]
                code = subprocess.run(by_file, check=False).returncode
    # What torch asks for besides: of the CUDA build NVIDIA's libraries, pinned by torch.
    code = code or subprocess.run([*command, f"torch=={PINNED}"], check=False).returncode
    if code and index is None:
        running = ".".join(map(str, sys.version_info[:2]))
        print(
            f"torch {PINNED} could not be installed for Python {running}, as pip says above. "
            "Another Python: make clean, then make serve PYTHON=python3.13",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
