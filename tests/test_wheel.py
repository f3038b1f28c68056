"""What is installed: one package with all its data; and it works where there is no compiler.

The second half needs a wheel that takes half a minute to build: `make test-wheel` does both.
"""

import os
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aioserve.kernels.library import VARIANTS, usable_variants
from aioserve.kernels.tokens import TOKEN_VARIANTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WHEEL = os.environ.get("AIOSERVE_WHEEL", "")


def test_what_is_installed_is_all_there_is_but_the_sources_of_the_kernels(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    wanted = {str(path.relative_to(ROOT)) for path in ROOT.glob("aioserve/**/*")}
    for folder in ("configs", "policies"):
        wanted |= {f"aioserve/{path.relative_to(ROOT)}" for path in ROOT.glob(f"{folder}/**/*")}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*")} == {
        path
        for path in wanted | {"aioserve", "aioserve/configs", "aioserve/policies"}
        if "__pycache__" not in path and not path.startswith("aioserve/kernels/src")
        if not path.endswith((".so", ".d.ts"))  # types of the page are for its checker alone
    }


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux")
def test_every_variant_of_the_kernels_is_built() -> None:
    code = """
from distutils.core import run_setup
print(*(extension.name for extension in run_setup("setup.py", stop_after="init").ext_modules))
"""
    printed = subprocess.run(
        [sys.executable, "-c", f"import setuptools{code}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {"aioserve.kernels._cpu", "aioserve.kernels._baseline"} <= set(printed.split())
    names = ("cpu", *VARIANTS, *(f"tokens_{name}" for name in TOKEN_VARIANTS))
    assert set(printed.split()) <= {f"aioserve.kernels._{name}" for name in names}
    assert {f"aioserve.kernels._{name}" for name in usable_variants()} <= set(printed.split())


class Installed:
    """The wheel in an environment of its own, with a PATH without a compiler.

    Nothing is downloaded: what it depends on is lent by the environment that runs the tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv/bin/python"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--python", self.python, "install", "-q"),
                *("--disable-pip-version-check", "--no-index", "--no-deps", WHEEL),
            ],
            check=True,
        )
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        self.installed = {path.name for path in packages.iterdir()}
        (packages / "lent.pth").write_text("\n".join(site.getsitepackages()))
        (folder / "tools").mkdir()
        (folder / "tools/curl").symlink_to(shutil.which("curl") or "/usr/bin/curl")
        self.path = f"{self.python.parent}:{folder / 'tools'}"
        self.work = folder / "work"  # where the user is: not the clone
        (self.work / "path/to").mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return kept | {"PATH": self.path}

    def run(self, command: str) -> str:
        result = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    @contextmanager
    def serving(self, command: str) -> Iterator[tuple[str, str]]:
        """The server that `command` starts, on another port: its URL and what it logged so far."""
        python, *words = shlex.split(command, comments=True)
        process = subprocess.Popen(
            [self.python.parent / python, *words, "--port", "0"],
            cwd=self.work,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            log = ""
            while not (found := re.search(r"listening on (http://\S+)", log)):
                line = process.stderr.readline()
                assert line, f"{command}\n{log}"
                log += line
            yield found[1], log
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, process.stderr.read()
        finally:
            process.kill()
            process.communicate()


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("python -m aioserve")]


needs_wheel = pytest.mark.skipif(not WHEEL, reason="needs a wheel: make test-wheel builds it")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@needs_wheel
def test_the_wheel_serves_every_python_and_has_every_variant() -> None:
    assert re.fullmatch(r"aioserve-[\d.]+-py3-none-manylinux\S+_x86_64\.whl", Path(WHEEL).name)
    with zipfile.ZipFile(WHEEL) as wheel:
        names = wheel.namelist()
    compiled = {name for name in names if name.endswith(".so")}
    variants = [name for name in VARIANTS if "neon" not in name]
    assert compiled == {f"aioserve/kernels/_{name}.so" for name in ("cpu", *variants)}
    assert {name.split("/")[0] for name in names} == {
        "aioserve",
        "-".join(Path(WHEEL).name.split("-")[:2]) + ".dist-info",
    }


@needs_wheel
def test_nothing_of_ours_but_one_package_is_installed(installed: Installed) -> None:
    (info,) = [name for name in installed.installed if name.endswith(".dist-info")]
    assert installed.installed == {"aioserve", info}
    printed = installed.run("python -c 'import aioserve; print(aioserve.__file__)'")
    assert Path(printed.strip()).is_relative_to(installed.folder)


@needs_wheel
def test_the_environment_has_no_compiler(installed: Installed) -> None:
    for name in ("cc", "gcc", "g++", "clang", "tcc", "c99"):
        assert shutil.which(name, path=installed.path) is None


@needs_wheel
def test_the_server_answers_the_curl_of_the_readme(installed: Installed) -> None:
    (curl,) = re.findall(r"^```bash\n(curl .*?)^```", README, re.DOTALL | re.MULTILINE)
    with installed.serving("python -m aioserve") as (url, log):
        assert f"compiled kernels, {usable_variants()[0]}" in log
        streamed = installed.run(curl.replace("http://127.0.0.1:8000", url))
    assert streamed.endswith("data: [DONE]\n\n")


@needs_wheel
@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_works(installed: Installed, command: str) -> None:
    code = installed.run("python -c 'import aioserve; print(aioserve.__path__[0])'")
    model = installed.work / "path/to/hf-directory"
    if not model.exists():
        shutil.copytree(Path(code.strip()) / "model_source" / "embedded", model)
    words = shlex.split(command, comments=True)[3:]
    if words == ["chat"]:  # with the server of the lines above it
        with installed.serving("python -m aioserve") as (url, _):
            assert installed.run(f"echo Hello | python -m aioserve chat {url}").strip()
    elif words[0].startswith("--") and not words[0].startswith("--help"):
        with installed.serving(command):
            pass
    else:
        assert installed.run(command)


@needs_wheel
def test_a_policy_by_file_serves(installed: Installed) -> None:
    (policy,) = re.findall(r"^```python\n(.*?class Chunked.*?)^```", README, re.DOTALL | re.M)[:1]
    (command,) = re.findall(r"`(python -m aioserve --policy path/to/mine\.py:\w+)`", README)
    code = policy.replace("ChunkedPrefillScheduler", "MyScheduler")
    (installed.work / "path/to/mine.py").write_text(code)
    with installed.serving(command) as (_, log):
        assert "policy path/to/mine.py:MyScheduler" in log
