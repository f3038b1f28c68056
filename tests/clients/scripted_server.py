"""A server that says what it is told to: a line of JSON on standard input has its next texts.

An empty line asks for the prompts of the requests since then, as a line of JSON.

With `agents` as its argument it has a chat template and a context length for command-line agents.
Run by the server's own Python; the clients that ask it live in another environment.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.server.scripted import HERMES, SYSTEM_FIRST, saying  # noqa: E402

# Codex has a custom tool for names of models that it knows.
FOR_AGENTS = {"name": ("embedded", "gpt-5.5"), "max_model_len": 200_000, "max_body_mib": 16}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        is_for_agents = sys.argv[1:] == ["agents"]
        template = SYSTEM_FIRST if is_for_agents else HERMES
        settings = FOR_AGENTS if is_for_agents else {}
        async with saying("", Path(folder), template, **settings) as server:
            print(f"listening on {server.url} ", file=sys.stderr, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                if line == "\n":
                    print(json.dumps(server.prompts()), flush=True)
                else:
                    said = json.loads(line)
                    server.say(*said["texts"], slowdown=said["slowdown"])
                    print("said", flush=True)


asyncio.run(main())
