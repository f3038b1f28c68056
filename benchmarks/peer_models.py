"""Makes the files that all servers of `bench_peers.py` serve, from one small model that can talk.

    python benchmarks/peer_models.py

The model is SmolLM2-135M-Instruct, which `python -m aioserve fetch smollm2` fetches.
`llama-quantize` writes BF16.gguf, F16.gguf, Q8_0.gguf and Q4_0.gguf from it; the weights of
BF16.gguf go into a directory as well, for servers that read no GGUF. What is there is not made
again.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peer_servers import BFLOAT16, DIRECTORY, FILES, HALF, MODELS, PEERS, ROOT

SOURCE = ROOT / "models" / "smollm2.gguf"
QUANTIZE = PEERS / "llama.cpp" / "llama-quantize"


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


if __name__ == "__main__":
    try:
        make_files()
    except RuntimeError as error:
        sys.exit(f"peer_models.py: {error}")
    print(MODELS)
