"""What leases are worth to agents of ten turns, by a real client, and what they cost the others.

    python benchmarks/agent_sessions.py [--rounds 3] [--client responses|chat|codex]
        [--blocks 180] [--model smollm2] [--workload agent_sessions] [--time-scale 1] [SERVER ...]

A SERVER is a policy, and settings behind commas: zoo.continuum,scheduler.max_leased_share=0. Each
is a real `python -m aioserve` with a KV cache that the load is too large for. Agents pause for a
tool between their turns, single requests fill the cache meanwhile; all are sent by the Python
client of OpenAI, and what names a conversation is its `prompt_cache_key`. With --client codex each
agent is a session of the real Codex. In each round the servers take turns with the same texts. Told
are medians of the rounds, ratios to the first server within a round, and the same ratios on the
virtual clock, with step times fitted to the first server's decision log. The last line is JSON.

`computed again` are prompt tokens of later turns that the turn before had computed or generated.
The load is one for a machine that computes 400 prompt tokens a second. For others --time-scale
stretches all times, pauses included: 0.25 for 1,600 tokens a second. Where others use the machine
as well, --flags "--runner simulated --step-prefill-token-us 2500 --step-base-ms 12 --step-decode-us
3000" has the servers wait for modelled steps instead of computing: all else is the same.

What a conversation has said is sent again with each turn: the model's replies as they came, all
else as the user's words. `prompt_cache_key` names it, as Codex and others do; no request has a
field that only aioserve knows but `ignore_eos`, which keeps replies to their length.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
import urllib.request
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import openai
from harness import Args, Opt, Program, percentile, ratio, serving, turns

from aioserve.config import EngineConfig
from aioserve.lab.bench import WORDS, Exchange, ServerError
from aioserve.lab.comparison.measures import programs_of
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.simulation.outcome import RequestOutcome
from aioserve.lab.simulation.run import Clients, Progress, simulate, simulated
from aioserve.lab.what_if import read_traffic
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload, WorkloadRequest, text_tokens

SERVERS = ("zoo.continuum,scheduler.max_leased_share=0", "zoo.continuum", "chunked_prefill")
BACKGROUND = "background"  # the class of single requests; all others are turns of agents
CACHE = re.compile(r"^aioserve_prefix_cache_(queried|hit)_tokens_total\S* (\S+)$", re.MULTILINE)
STEP_TIMES = (
    *("base_ms", "prefill_token_us", "decode_us", "context_token_us"),
    *("query_context_ns", "prefill_us", "idle_ms"),
)
CODEX = Path(__file__).parents[1] / ".venv/agents/node_modules/@openai/codex/bin/codex.js"
CONFIG = Path(__file__).with_name("codex.toml").read_text(encoding="utf-8")
PATIENCE = 600.0  # seconds that a reply may take in all: a request that takes longer has failed

Row = dict[str, float]
Usage = tuple[int, int, int]  # tokens of prompts, those of them that were cached, and of replies


# Clients.


class OpenAIClients(Clients):
    """The clients of a workload, each request sent by `openai`; `exchanges` hold what came back."""

    def __init__(
        self, url: str, model: str, workload: Workload, progress: Progress = lambda count: None
    ) -> None:
        super().__init__(workload, time.perf_counter, progress)
        self.exchanges = [Exchange() for _ in workload.requests]
        self.texts: dict[int, str] = {}  # replies, by the place of their request
        self.url, self.model = url, model
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )

    async def run(self) -> None:
        """Send the workload; returns when its last request has been answered or has failed."""
        async with self._client:
            self.start = self.clock()
            await self.come()

    async def ask(self, i: int, due: float) -> list[int]:
        """Send request `i`. Its tokens are not told over HTTP: what later turns repeat is its text,
        in `texts`, so that none are returned.
        """
        exchange = self.exchanges[i]
        exchange.is_sent, exchange.arrival = True, self.clock() - self.start
        exchange.lateness = exchange.arrival + self.start - due
        try:
            await self.send(i, self.workload.requests[i], exchange)
        except (openai.OpenAIError, ServerError) as error:
            exchange.error = type(error).__name__, str(error)
        exchange.end = self.clock() - self.start
        return []

    @abstractmethod
    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        """Read the reply to a request as it streams. Raises `openai.OpenAIError`, or `ServerError`
        where another client asks.
        """

    def messages(self, request: WorkloadRequest) -> Any:
        """The prompt of a request: a system prompt if two texts begin it, then turns."""
        found: list[dict[str, str]] = []
        for number, piece in enumerate(request.pieces):
            if piece.reply_of >= 0:
                found.append({"role": "assistant", "content": self.texts.get(piece.reply_of, "")})
                continue
            tokens = text_tokens(piece.text, piece.length, 1 << 16)
            is_system = number == 0 and [piece.reply_of for piece in request.pieces[1:2]] == [-1]
            role = "system" if is_system else "user"
            content = " ".join(WORDS[token % len(WORDS)] for token in tokens)
            found.append({"role": role, "content": content})
        return found

    def labels(self, request: WorkloadRequest) -> dict[str, Any]:
        """What names the conversation of a request, if it has one."""
        if request.session < 0:
            return {}
        return {"prompt_cache_key": f"{self.workload.seed}-{request.session}"}


class ResponsesClients(OpenAIClients):
    """By `/v1/responses`, as Codex and the newer packages for agents ask."""

    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        text = ""
        stream: Any = await self._client.responses.create(
            model=self.model,
            input=self.messages(request),
            stream=True,
            store=False,
            max_output_tokens=request.output_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            **self.labels(request),
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                exchange.token_times.append(self.clock() - self.start)
                text += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                usage = event.response.usage
                exchange.num_prompt_tokens = usage.input_tokens
                exchange.num_output_tokens = usage.output_tokens
                exchange.num_cached_tokens = usage.input_tokens_details.cached_tokens
                exchange.finish_reason = "length"
        self.texts[i] = text


class ChatClients(OpenAIClients):
    """Sends each turn to `/v1/chat/completions`, by the package `openai`."""

    async def send(self, i: int, request: WorkloadRequest, exchange: Exchange) -> None:
        text = ""
        stream: Any = await self._client.chat.completions.create(
            model=self.model,
            messages=self.messages(request),
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=request.output_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            **self.labels(request),
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                exchange.token_times.append(self.clock() - self.start)
                text += chunk.choices[0].delta.content
            if chunk.usage is not None:
                exchange.num_prompt_tokens = chunk.usage.prompt_tokens
                exchange.num_output_tokens = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                exchange.num_cached_tokens = (details and details.cached_tokens) or 0
                exchange.finish_reason = "length"
        self.texts[i] = text


class CodexClients(ResponsesClients):
    """Programs by Codex, single requests by `openai`. A program is one session of Codex, which has
    a home of its own and its sandbox: a model may call its shell. The first token of a turn is not
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


CLIENTS: dict[str, type[OpenAIClients]] = {
    "responses": ResponsesClients,
    "chat": ChatClients,
    "codex": CodexClients,
}


# Servers, and what is made of a run.


class Running(NamedTuple):
    """A server that runs, and what it was asked to be."""

    spec: str
    url: str


def settings_of(spec: str, given: Args) -> list[tuple[str, str]]:
    """The settings of a server."""
    policy, *others = spec.split(",")
    return [
        ("scheduler.policy", policy),
        ("cache.num_kv_blocks", str(given.blocks)),
        ("scheduler.max_num_batched_tokens", "256"),
        ("model.max_model_len", str(given.max_model_len)),
        *((name, value) for name, _, value in (other.partition("=") for other in others)),
    ]


def words_of(spec: str, log: Path, given: Args) -> list[str]:
    """What the command line of a server says."""
    words = ["--model", given.model, "--decision-log", str(log), *shlex.split(given.flags)]
    return words + [f"--set={name}={value}" for name, value in settings_of(spec, given)]


def prefix_cache(server: Running) -> tuple[float, float]:
    """Tokens looked up in the prefix cache so far, and those found, by `/metrics`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        found = dict(CACHE.findall(answer.read().decode()))
    return float(found["queried"]), float(found["hit"])


def stretched(workload: Workload, factor: float) -> Workload:
    """The same requests with all times, pauses among them, multiplied by `factor`."""
    requests = [
        msgspec.structs.replace(request, arrival=request.arrival * factor)
        for request in workload.requests
    ]
    return msgspec.structs.replace(workload, requests=tuple(requests))


def measure(
    workload: Workload, outcomes: Sequence[RequestOutcome], prompt_tokens: Sequence[int]
) -> Row:
    """One run in numbers; of requests that got there."""
    programs = programs_of(workload)
    turns = [i for program in programs for i in program if outcomes[i].is_finished]
    first = {program[0] for program in programs}
    prompts = sum(prompt_tokens[i] for i in turns)
    cached = sum(outcomes[i].num_cached_tokens for i in turns)
    again = 0
    for i in turns:
        if i in first or not outcomes[before := workload.requests[i].follows].is_finished:
            continue
        known = prompt_tokens[before] + outcomes[before].num_output_tokens
        again += max(0, min(known, prompt_tokens[i]) - outcomes[i].num_cached_tokens)
    whole = [p for p in programs if all(outcomes[i].is_finished for i in p)]
    took = [outcomes[p[-1]].end - outcomes[p[0]].arrival for p in whole]
    waits = [outcomes[i].ttft for i in turns]
    kinds = [request.kind for request in workload.requests]
    others = [o for kind, o in zip(kinds, outcomes, strict=True) if kind == BACKGROUND]
    served = [o for o in others if o.is_finished]
    lasted = [o.end - o.arrival for o in served]
    return {
        "agents: prompt tokens": prompts,
        "agents: computed": prompts - cached,
        "agents: computed again": again,
        "agents: found in the cache, %": 100 * cached / max(prompts, 1),
        "agents: program mean, s": statistics.fmean(took) if took else float("nan"),
        "agents: program p99, s": percentile(took, 99),
        "agents: TTFT mean, s": statistics.fmean(waits) if waits else float("nan"),
        "agents: TTFT p99, s": percentile(waits, 99),
        "agents: programs that failed": len(programs) - len(whole),
        "background: TTFT mean, s": statistics.fmean(o.ttft for o in served),
        "background: TTFT p99, s": percentile([o.ttft for o in served], 99),
        "background: end to end mean, s": statistics.fmean(lasted),
        "background: end to end p99, s": percentile(lasted, 99),
        "background: requests that failed": len(others) - len(served),
        "all: seconds to the last answer": max(o.end for o in outcomes),
    }


def run_live(server: Running, workload: Workload, given: Args) -> Row:
    """Send the workload to a server."""
    clients = CLIENTS[given.client](server.url, given.model, workload)
    queried, hit = prefix_cache(server)
    asyncio.run(clients.run())
    queried, hit = (b - a for a, b in zip((queried, hit), prefix_cache(server), strict=True))
    exchanges: list[Exchange] = clients.exchanges
    for error in {exchange.error for exchange in exchanges if exchange.error}:
        print(f"{server.spec}: {': '.join(error)}", file=sys.stderr)
    row = measure(workload, exchanges, [exchange.num_prompt_tokens for exchange in exchanges])
    return row | {"all: found in the cache, %": 100 * hit / max(queried, 1)}


def run_simulated(spec: str, workload: Workload, log: Path, given: Args) -> tuple[Row, str]:
    """The same workload on the virtual clock, and where its step times are from."""
    times = read_traffic(DecisionLog(str(log))).step_time
    settings = [
        *settings_of(spec, given),
        *((f"runner.step_{name}", getattr(times, name)) for name in STEP_TIMES),
    ]
    outcome = simulate(simulated(EngineConfig.load(None, settings)), workload)
    lengths = [request.num_prompt_tokens for request in workload.requests]
    row = measure(workload, outcome.requests, lengths)
    found = sum(o.num_cached_tokens for o in outcome.requests)
    return row | {"all: found in the cache, %": 100 * found / sum(lengths)}, times.error


def table(live: list[dict[str, Row]], virtual: list[dict[str, Row]], specs: list[str]) -> None:
    """Print medians, and ratios to the first server: live, and on the virtual clock."""
    names = ["first", *"abcdefgh"[: len(specs) - 1]]
    for name, spec in zip(names, specs, strict=True):
        print(f"{name}: {spec}")
    heads = ["first", *(word for name in names[1:] for word in (name, "live", "virtual"))]
    print(f"{'':34}" + "".join(f"{head:>10}" for head in heads))
    for name in live[0][specs[0]]:
        values = [f"{statistics.median(run[spec][name] for run in live):.4g}" for spec in specs]
        cells = values[:1]
        for spec, value in zip(specs[1:], values[1:], strict=True):
            cells.append(value)
            for rounds in (live, virtual):
                found = ratio(*([run[which][name] for run in rounds] for which in (spec, specs[0])))
                cells.append("-" if math.isnan(found) else f"{found:.2f}x")
        print(f"{name:34}" + "".join(f"{cell:>10}" for cell in cells))


program = Program(__doc__)


@program.command(
    words={"servers": SERVERS},
    rounds=3,
    client=Opt("responses", choices=CLIENTS),
    workload=Opt("agent_sessions", "a file, or a shipped name"),
    time_scale=1.0,
    model="smollm2",
    blocks=Opt(180, "of the KV cache, 16 tokens each"),
    max_model_len=2048,
    flags=Opt("--threads 1", "more flags of every server"),
)
def main(given: Args) -> dict[str, Any]:
    """Start the servers, have them take turns, simulate the same, print."""
    source = WorkloadSource(path=given.workload)
    workloads = [stretched(source.load(seed), given.time_scale) for seed in range(given.rounds)]
    live: list[dict[str, Row]] = [{} for _ in workloads]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = {spec: Path(folder) / f"{k}.log" for k, spec in enumerate(given.servers)}
        servers = {}
        for spec, log in logs.items():
            url = stack.enter_context(serving(*words_of(spec, log, given))).url
            servers[spec] = Running(spec, url)
        for number, spec in turns(given.servers, given.rounds):
            row = live[number][spec] = run_live(servers[spec], workloads[number], given)
            print(f"round {number}, {spec}: {json.dumps(row)}", file=sys.stderr)
        stack.pop_all().close()  # so that the logs are whole
        virtual = []
        error = "not simulated: the prompts of Codex are not those of the workload"
        for workload in workloads if given.client != "codex" else ():
            log = logs[given.servers[0]]
            rows = {spec: run_simulated(spec, workload, log, given) for spec in given.servers}
            virtual.append({spec: row for spec, (row, _) in rows.items()})
            error = next(iter(rows.values()))[1]
    table(live, virtual, given.servers)
    print(f"virtual clock: {error}")
    return {"servers": given.servers, "live": live, "virtual": virtual}


if __name__ == "__main__":
    program.main()
