"""What is loaded to serve: modules and lines of aioserve by scenario, and lines by folder.

`make size`. A file counts where it is imported: what a process loads is what one has to know to
follow it. A scenario runs behind those that load a part of what it loads, in one process, after a
first start of the embedded engine, so that it finds what a start keeps for later ones; the modules
of aioserve count that are loaded at its end. `LIMITS` are held by tests/test_size.py, with `SLACK`
lines to spare. They are lowered freely, and raised only with the reason beside the limit.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".c", ".h", ".js", ".css", ".html"}


class Loaded(NamedTuple):
    """What a scenario has loaded of aioserve."""

    modules: int
    lines: int


#: One text prompt on the embedded model, in an engine of one's own.
ENGINE = """
import asyncio
from aioserve import AsyncEngine, SamplingParams
async def main():
    async with AsyncEngine() as engine:
        async for output in engine.generate("What news?", SamplingParams(max_tokens=4)):
            pass
asyncio.run(main())
"""
#: The server's own process, which streams one chat completion and stops.
SERVER = """
import asyncio, threading, urllib.request, json, os, signal, socket
from aioserve.cli.main import main
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
def ask():
    import time
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(url + "/ready", timeout=60).read()
            break
        except OSError:
            time.sleep(0.1)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4}
    data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", data, head)
    text = urllib.request.urlopen(request, timeout=60).read().decode()
    assert "[DONE]" in text, text
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
assert main(["--port", str(port), "--kv-cache-gib", "0.05"]) == 0
"""
COMPARE = """
from aioserve.cli.main import main
policies = ["fcfs", "chunked_prefill"]
assert main(["compare", *policies, "--workload", "mixed", "--limit", "5", "--jobs", "1"]) == 0
"""
POLICY = "import aioserve.policies.chunked_prefill"

SCENARIOS = {
    "an embedded engine, one text prompt": ENGINE,
    "the server, one streamed chat completion": SERVER,
    "compare fcfs chunked_prefill": COMPARE,
    "importing a policy": POLICY,
}
#: The scenarios of each process, one after the other: each loads all that those before it do.
PROCESSES = (
    (
        "importing a policy",
        "an embedded engine, one text prompt",
        "the server, one streamed chat completion",
    ),
    ("compare fcfs chunked_prefill",),
)
#: Lines that a scenario may load beyond its limit, so that a small feature touches no limit. What
#: is beyond this raises the limit to what is loaded then, with its reason.
SLACK = 250
#: The most that each scenario may load, but for `SLACK`. The aims: 110 modules and 18,000 lines,
#: 180 and 28,000, 140 and 18,000, 25 and 4,000.
# N-gram drafts are made by default: five modules, 1,150 lines together.
LIMITS = {
    "an embedded engine, one text prompt": Loaded(90, 22_900),
    "the server, one streamed chat completion": Loaded(139, 33_190),
    "compare fcfs chunked_prefill": Loaded(79, 21_940),
    "importing a policy": Loaded(14, 3_580),
}

_TELL = """
import sys as _sys
print("\\nLOADED", *sorted(
    m.__file__ for n, m in list(_sys.modules.items())
    if n.split(".")[0] == "aioserve" and getattr(m, "__file__", None)
))
print(*sorted({n.split(".")[0] for n in _sys.modules}))
"""


@functools.cache
def _run(names: tuple[str, ...]) -> list[list[list[str]]]:
    """Return for each of these scenarios the files of aioserve and the top-level packages that are
    loaded at its end, in one process.
    """
    result = subprocess.run(
        [sys.executable, "-c", "".join(SCENARIOS[name] + _TELL for name in names)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": _cache()},
    )
    if result.returncode:
        raise RuntimeError(f"{', '.join(names)}: {result.stderr[-2000:]}")
    told = result.stdout.split("\nLOADED")[1:]
    return [[line.split() for line in one.strip().split("\n")[:2]] for one in told]


@functools.cache
def _cache() -> str:
    """Return a folder in which a first start of the embedded engine has kept what it keeps: in this
    process, which may have torch already.
    """
    folder = tempfile.mkdtemp(prefix="aioserve-size-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        exec(ENGINE, {})
    if not any(Path(folder).rglob("*.*")):
        raise RuntimeError("the first start has kept nothing for later ones")
    return folder


def _loaded(scenario: str) -> list[list[str]]:
    [names] = [names for names in PROCESSES if scenario in names]
    return _run(names)[names.index(scenario)]


def loaded_files(scenario: str) -> list[Path]:
    """The files of aioserve that a scenario has loaded when it ends."""
    return [Path(name) for name in _loaded(scenario)[0] if name.endswith(".py")]


def loaded_packages(scenario: str) -> set[str]:
    """The top-level packages that a scenario has loaded when it ends, those of others as well."""
    return set(_loaded(scenario)[1])


def measure(scenario: str) -> Loaded:
    """Modules and lines that a scenario has loaded when it ends."""
    files = loaded_files(scenario)
    return Loaded(len(files), sum(map(_lines, files)))


def folders() -> dict[str, tuple[int, int]]:
    """By folder, each package of `aioserve` apart: files and lines."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for top in ("aioserve", "policies", "benchmarks", "tests"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                names = path.relative_to(ROOT).parts
                folder = "/".join(names[: 2 if top == "aioserve" and len(names) > 2 else 1])
                files[folder] += 1
                lines[folder] += _lines(path)
    return {folder: (files[folder], lines[folder]) for folder in files}


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def main() -> int:
    """Print both tables. Returns 1 if a scenario loads more than its limit and slack, else 0."""
    print(f"{'folder':24} {'files':>5} {'lines':>7}")
    counts = folders()
    for folder, (files, lines) in counts.items():
        print(f"{folder:24} {files:5} {lines:7,}")
    files, lines = map(sum, zip(*counts.values(), strict=True))
    print(f"{'in all':24} {files:5} {lines:7,}\n")
    print(f"{'loaded by':42} {'modules':>7} {'limit':>5} {'lines':>7} {'limit':>7}")
    over = False
    for name, limit in LIMITS.items():
        found = measure(name)
        print(f"{name:42} {found.modules:7} {limit.modules:5} {found.lines:7,} {limit.lines:7,}")
        over = over or found.modules > limit.modules or found.lines > limit.lines + SLACK
    return over


if __name__ == "__main__":
    sys.exit(main())
