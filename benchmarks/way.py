"""The way of a request: which files, functions and lines run for one streamed completion.

    python benchmarks/way.py [--files]

Starts the server in this process, streams one completion to warm it up and then watches a second
one with a trace function, on the event loop and on the engine's threads. Counts this package and
the policies alone: not the client, not the start, no library, nothing compiled. `--files` lists
each file with its lines. The last line is JSON.
"""

import asyncio
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp
from harness import Args, Opt, Program

import aioserve
from aioserve import AsyncEngine, EngineConfig
from aioserve.server.app import listening
from aioserve.server.sockets import open_doors

PACKAGE = Path(aioserve.__file__).parent
FOLDERS = (str(PACKAGE) + "/", str(PACKAGE.parent / "policies") + "/")


program = Program(__doc__)


class Watch:
    """What runs of the package while `is_on`: lines by file, and functions."""

    def __init__(self) -> None:
        self.is_on = False
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.functions: set[CodeType] = set()

    def see(self, frame: FrameType, event: str, arg: object) -> Any:
        """For `sys.settrace`: also frames that began before it was switched on."""
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        if self.is_on:
            self.functions.add(frame.f_code)
            if event == "line":
                self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self.see


async def stream(url: str) -> None:
    """One completion of 16 tokens, read to its end."""
    body = {"prompt": "What news, my lord?", "max_tokens": 16, "stream": True, "model": "embedded"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n"), text


async def walk(config: EngineConfig, watch: Watch) -> None:
    async with AsyncEngine(config) as engine, listening(engine, open_doors(config)) as url:
        await stream(url)
        watch.is_on = True
        await stream(url)
        watch.is_on = False


@program.command(
    files=Opt(False, "list them"),
)
def main(args: Args) -> dict[str, int]:
    """Walk once, and count."""
    settings = [
        ("runner.runner", "simulated"),
        ("scheduler.policy", "chunked_prefill"),
        ("server.port", 0),
    ]
    watch = Watch()
    threading.settrace(watch.see)
    sys.settrace(watch.see)
    try:
        asyncio.run(walk(EngineConfig.load(None, settings), watch))
    finally:
        sys.settrace(None)
        threading.settrace(None)
    counts = {
        str(Path(name).relative_to(PACKAGE.parent)): len(lines)
        for name, lines in sorted(watch.lines.items())
    }
    if args.files:
        for name, lines in counts.items():
            print(f"{lines:6} {name}")
    found = {
        "files": len(counts),
        "functions": len(watch.functions),
        "lines": sum(counts.values()),
        "lines_of_these_files": sum(
            (PACKAGE.parent / name).read_text(encoding="utf-8").count("\n") for name in counts
        ),
    }
    print(
        f"{found['files']} files, of {found['lines_of_these_files']:,} lines, of which "
        f"{found['lines']:,} run, in {found['functions']} functions"
    )
    return found


if __name__ == "__main__":
    program.main()
