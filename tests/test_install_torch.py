"""Which build of torch `make` installs: with and without a card, and with what can be reached."""

import functools
import http.server
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "requirements/install_torch.py"
spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
assert spec is not None
assert spec.loader is not None
install_torch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install_torch)

WHEEL = f"torch-{install_torch.PINNED}+cpu-py3-none-any.whl"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have one build")


@pytest.fixture(autouse=True)
def no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_INDEX", raising=False)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index with a torch of a few bytes."""
    folder = tmp_path / "index/torch"
    folder.mkdir(parents=True)
    info = f"torch-{install_torch.PINNED}+cpu.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("torch.py", "")
        name = f"Name: torch\nVersion: {install_torch.PINNED}+cpu\n"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\n{name}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    handler = functools.partial(Quiet, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_without_a_card_the_cpu_build_comes_from_pytorchs_index(index: str) -> None:
    assert install_torch.choose(index)[0] == index


def test_with_a_card_the_package_index_is_asked(index: str, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: a card'\n")
    driver.chmod(0o755)
    assert install_torch.choose(index) == (
        None,
        "the CUDA build (2.6 GB), for the NVIDIA card of this machine",
    )
    driver.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert install_torch.choose(index)[0] == index


def test_an_index_that_refuses_or_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        chosen, words = install_torch.choose(url, timeout=0.2)
    assert chosen is None
    assert f"{url} cannot be reached: the package index's build, up to 2.6 GB" in words
    chosen, words = install_torch.choose(url)  # nobody listens there any more
    assert chosen is None


def test_who_names_an_index_is_not_second_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_INDEX", "http://mine")
    assert install_torch.choose() == ("http://mine", "from http://mine")


def test_pip_takes_the_build_from_the_index_that_is_named(index: str, tmp_path: Path) -> None:
    """The script as make runs it, but into a folder, and past the torch that is installed."""
    code = f"""
import runpy
script = runpy.run_path({str(SCRIPT)!r})
script["main"].__globals__["is_installed"] = lambda: False
raise SystemExit(script["main"]())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP")}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_TARGET": str(tmp_path / "site"),
        "TORCH_INDEX": index,
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"torch {install_torch.PINNED}: from {index}\n"
    assert (tmp_path / "site/torch.py").exists()


def test_a_build_that_lies_in_a_folder_of_pips_must_be_a_pinned_one(
    index: str, tmp_path: Path
) -> None:
    """The CPU build is chosen from PIP_FIND_LINKS, and refused, since its hash is of no pin."""
    code = f"""
import runpy
script = runpy.run_path({str(SCRIPT)!r})
script["main"].__globals__["is_installed"] = lambda: False
script["main"].__globals__["choose"] = lambda: (None, "the package index's build")
raise SystemExit(script["main"]())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP")}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_TARGET": str(tmp_path / "site"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index/torch"),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f"{WHEEL} has the SHA-256" in result.stderr
    assert not (tmp_path / "site").exists()


def test_an_installed_torch_is_left_alone() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout + result.stderr == ""
