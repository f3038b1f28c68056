"""Public chat templates of many models, which the source package of llama-cpp-python holds.

They are fetched into `build/`, which git ignores: they belong to others. Knows no format.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
BUILD_TOOLS = ("scikit-build-core==1.1.2",)  # pip asks a source package for its metadata
FOLDER = Path(__file__).parents[2] / "build" / "chat-templates" / VERSION


def public_templates() -> dict[str, str]:
    """The templates by the names of their files, without `.jinja`; fetched the first time: 77 MB,
    of which 0.5 MB are kept.
    """
    if not FOLDER.exists():
        fetch(FOLDER)
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}


def fetch(folder: Path) -> None:
    """Download the pinned package with pip, and keep its templates alone in `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        download(Path(place))
        (archive,) = Path(place).glob("*.tar.gz")
        kept = Path(place, "kept")
        kept.mkdir()
        with tarfile.open(archive) as source:
            for member in source:
                path = Path(member.name)
                if path.suffix == ".jinja" and path.parent.name == "templates":
                    text = source.extractfile(member)
                    assert text is not None, "a template is a file"
                    (kept / path.name).write_bytes(text.read())
        kept.rename(folder)


def download(place: Path) -> None:
    """The source package as a file in `place`."""
    tools = place / "tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--target", tools, *BUILD_TOOLS], check=True)
    words = ["--no-binary", PACKAGE, "--no-deps", "--no-build-isolation", "-d", place]
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run([*pip, "download", *words, f"{PACKAGE}=={VERSION}"], check=True, env=environment)
