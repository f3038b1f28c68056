"""A server that says what it is told to: a line of JSON on standard input has its next texts.

An empty line asks for the prompts of the requests since then, as a line of JSON.

With `agents` as its argument it has a chat template and a context length for agents; with `seeing`
it reads images.
Run by the server's own Python; the clients that ask it live in another environment.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.server.scripted import (  # noqa: E402
    HERMES,
    SEEING,
    SYSTEM_FIRST,
    make_seeing_files,
    saying,
)

# Codex has a custom tool for names of models that it knows.
FOR_AGENTS = {"name": ("embedded", "gpt-5.5"), "max_model_len": 200_000, "max_body_mib": 16}
#: By the argument: the chat template, and what else is set.
KINDS = {
    "": (HERMES, {}),
    "agents": (SYSTEM_FIRST, FOR_AGENTS),
    "seeing": (SEEING, {"make": make_seeing_files}),
}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        template, settings = KINDS["".join(sys.argv[1:])]
        async with saying("", Path(folder), template, step_ms=1, **settings) as server:
            print(f"listening on {server.url} ", file=sys.stderr, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                if line == "\n":
                    print(json.dumps(server.prompts()), flush=True)
                else:
                    said = json.loads(line)
                    server.say(*said["texts"], slowdown=said["slowdown"])
                    print("said", flush=True)


asyncio.run(main())
