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
"""

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from agent_clients import ChatClients, OpenAIClients, ResponsesClients
from agent_processes import CodexClients
from harness import answers

from aioserve.config import EngineConfig
from aioserve.lab.bench.exchange import Exchange
from aioserve.lab.comparison.measures import programs_of
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.logs.what_if import read_traffic
from aioserve.lab.simulation.outcome import RequestOutcome
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload

SERVERS = ("zoo.continuum,scheduler.max_leased_share=0", "zoo.continuum", "chunked_prefill")
CLIENTS: dict[str, type[OpenAIClients]] = {
    "responses": ResponsesClients,
    "chat": ChatClients,
    "codex": CodexClients,
}
BACKGROUND = "background"  # the class of single requests; all others are turns of agents
CACHE = re.compile(r"^aioserve_prefix_cache_(queried|hit)_tokens_total\S* (\S+)$", re.MULTILINE)
STEP_TIMES = (
    *("base_ms", "prefill_token_us", "decode_us", "context_token_us"),
    *("query_context_ns", "prefill_us", "idle_ms"),
)

Row = dict[str, float]


class Server(NamedTuple):
    """A server that runs, and what it was asked to be."""

    spec: str
    url: str


def settings_of(spec: str, given: argparse.Namespace) -> list[tuple[str, str]]:
    """The settings of a server."""
    policy, *others = spec.split(",")
    return [
        ("scheduler.policy", policy),
        ("cache.num_kv_blocks", str(given.blocks)),
        ("scheduler.max_num_batched_tokens", str(given.step_tokens)),
        ("model.max_model_len", str(given.max_model_len)),
        *((name, value) for name, _, value in (other.partition("=") for other in others)),
    ]


@contextlib.contextmanager
def sigterm_held_back() -> Iterator[None]:
    """A SIGTERM that comes in the block takes effect at its end."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in heard:
            signal.raise_signal(number)


@contextlib.contextmanager
def serving(spec: str, log: Path, given: argparse.Namespace) -> Iterator[Server]:
    """A server that is ready. Raises `RuntimeError` with its log if it does not start."""
    words = [sys.executable, "-m", "aioserve", "--model", given.model, "--port", "0"]
    words += ["--decision-log", str(log), *shlex.split(given.flags)]
    for name, value in settings_of(spec, given):
        words += ["--set", f"{name}={value}"]
    with contextlib.ExitStack() as stack:
        with sigterm_held_back():  # until what is started will be ended
            process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.terminate)
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line)
            if address := re.search(r"listening on (http://[^\s,]+)", line):
                break
        else:
            raise RuntimeError(f"{' '.join(words)} does not start:\n{''.join(told)}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or it fills
        while not answers(address[1] + "/ready"):
            time.sleep(0.2)
        yield Server(spec, address[1])


def prefix_cache(server: Server) -> tuple[float, float]:
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


def percentile(seconds: Sequence[float], which: float) -> float:
    """The percentile; NaN of an empty list."""
    return float(np.percentile(seconds, which)) if len(seconds) else float("nan")


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


def run_live(server: Server, workload: Workload, given: argparse.Namespace) -> Row:
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


def run_simulated(
    spec: str, workload: Workload, log: Path, given: argparse.Namespace
) -> tuple[Row, str]:
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


def ratio(rounds: list[dict[str, Row]], spec: str, name: str) -> float | None:
    """The median over rounds of a server's value over the first server's; None: there is none."""
    first = next(iter(rounds[0])) if rounds else ""
    found = [run[spec][name] / run[first][name] for run in rounds if run[first][name]]
    return statistics.median(found) if found else None


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
                found = ratio(rounds, spec, name)
                cells.append("-" if found is None else f"{found:.2f}x")
        print(f"{name:34}" + "".join(f"{cell:>10}" for cell in cells))


def main(given: argparse.Namespace) -> None:
    """Start the servers, have them take turns, simulate the same, print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end as well
    source = WorkloadSource(path=given.workload)
    workloads = [
        stretched(source.load(given.seed + k), given.time_scale) for k in range(given.rounds)
    ]
    live: list[dict[str, Row]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = {spec: Path(folder) / f"{k}.log" for k, spec in enumerate(given.servers)}
        servers = [stack.enter_context(serving(spec, logs[spec], given)) for spec in given.servers]
        for k, workload in enumerate(workloads):
            found: dict[str, Row] = {}
            for server in servers[k % len(servers) :] + servers[: k % len(servers)]:
                found[server.spec] = run_live(server, workload, given)
                print(
                    f"round {k}, {server.spec}: {json.dumps(found[server.spec])}", file=sys.stderr
                )
            live.append({spec: found[spec] for spec in given.servers})
        stack.pop_all().close()  # so that the logs are whole
        log = logs[given.servers[0]]
        virtual = []
        error = "not simulated: the prompts of Codex are not those of the workload"
        for workload in workloads if given.client != "codex" else ():
            rows = {spec: run_simulated(spec, workload, log, given) for spec in given.servers}
            virtual.append({spec: row for spec, (row, _) in rows.items()})
            error = next(iter(rows.values()))[1]
    table(live, virtual, given.servers)
    print(f"virtual clock: {error}")
    print(json.dumps({"servers": given.servers, "live": live, "virtual": virtual}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("servers", nargs="*", metavar="SERVER", default=list(SERVERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--client", choices=tuple(CLIENTS), default="responses")
    parser.add_argument("--workload", default="agent_sessions", help="a file, or a shipped name")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--blocks", type=int, default=180, help="of the KV cache, 16 tokens each")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--step-tokens", type=int, default=256, help="the token budget of a step")
    parser.add_argument("--flags", default="--threads 1", help="more flags of every server")
    main(parser.parse_args())
