"""Agents that are real: each turn of a program is a run of Codex, as npm has it.

A program is one session of Codex, which has a home of its own: `codex exec`, then `codex exec
resume --last` for each further turn. What Codex sends is its own affair: instructions, tools, all
that was said, and the header that names the session. Its sandbox stays: a model may call its shell.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from agent_clients import ResponsesClients

from aioserve.lab.bench.exchange import Exchange, ServerError
from aioserve.lab.workloads.workload import WorkloadRequest

CODEX = Path(__file__).parents[1] / ".venv/agents/node_modules/@openai/codex/bin/codex.js"
CONFIG = Path(__file__).with_name("codex.toml").read_text(encoding="utf-8")
Usage = tuple[int, int, int]  # tokens of prompts, those of them that were cached, and of replies


class CodexClients(ResponsesClients):
    """Programs by Codex, single requests by `openai`. The first token of a turn of Codex is not
    told: its time is that of the last one, the start of the process included.
    """

    async def run(self) -> None:
        if not CODEX.exists():
            raise FileNotFoundError(f"{CODEX}: make test-clients installs Codex where there is npm")
        self._used: dict[int, Usage] = {}  # by program, so far
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            await super().run()

    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        if request.program < 0:
            await super().send(i, request, exchange)
            return
        home = self._folder / str(request.program)
        if request.follows < 0:
            home.mkdir()
            config = CONFIG.format(model=self.model, url=self.url)
            (home / "config.toml").write_text(config, encoding="utf-8")
        told = await self._turn(home, self.messages(request)[-1]["content"], request.follows >= 0)
        usage = next((event["usage"] for event in told if event["type"] == "turn.completed"), None)
        if usage is None:
            raise ServerError("Codex", json.dumps(told[-1:]))
        names = ("input_tokens", "cached_input_tokens", "output_tokens")
        so_far = tuple(int(usage[name]) for name in names)
        before = self._used.get(request.program, (0, 0, 0))
        self._used[request.program] = so_far[0], so_far[1], so_far[2]
        exchange.num_prompt_tokens = so_far[0] - before[0]
        exchange.num_cached_tokens = so_far[1] - before[1]
        exchange.num_output_tokens = so_far[2] - before[2]
        exchange.token_times.append(self.clock() - self.start)
        exchange.finish_reason = "stop"

    async def _turn(self, home: Path, text: str, goes_on: bool) -> list[dict[str, Any]]:
        """What Codex tells of one turn, its events in order."""
        words = ["node", str(CODEX), "exec", *(["resume", "--last"] if goes_on else [])]
        process = await asyncio.create_subprocess_exec(
            *(*words, "--json", "--skip-git-repo-check", text),
            cwd=home,
            env={**os.environ, "HOME": str(home), "CODEX_HOME": str(home), "LOCAL_KEY": "none"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        told, _ = await process.communicate()
        return [json.loads(line) for line in told.splitlines() if line.startswith(b"{")]
