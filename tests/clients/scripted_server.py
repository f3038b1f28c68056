"""A server that says what it is told to: a line of JSON on standard input is its next text.

Run by the server's own Python; the clients that ask it live in another environment.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.server.scripted import HERMES, saying  # noqa: E402


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with saying("", Path(folder), HERMES) as server:
            print(f"listening on {server.url} ", file=sys.stderr, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                server.say(json.loads(line))
                print("said", flush=True)


asyncio.run(main())
