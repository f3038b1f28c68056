"""What must be equal for two engines to compute the same bytes of KV: a model's files, in short.

Knows files and settings. Does not know how a model reads them.
"""

import glob
import hashlib
import os
import re
from pathlib import Path

# All that decides about K and V: weights, configuration, code that comes along.
SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".json", ".py"}
_PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")  # ends the names of a GGUF model in several files
STRIDE, PIECE = 1 << 20, 4096  # bytes: of every `STRIDE`, the first `PIECE` are read


def fingerprint(path: Path) -> str:
    """Of a model's directory, file or files in parts: names, sizes, times of change and a sample of
    the contents, so that it takes no second reading of all weights. A copy of the files may have
    another one.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES and f.is_file())
    elif _PART.search(path.name):
        files = sorted(path.parent.glob(_PART.sub(r"-*\1", glob.escape(path.name))))
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        with file.open("rb") as opened:
            for offset in range(0, stat.st_size, STRIDE):
                digest.update(os.pread(opened.fileno(), PIECE, offset))
    return digest.hexdigest()[:32]
