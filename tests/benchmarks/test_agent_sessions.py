"""A lease is worth its tokens to an agent that a real client drives."""

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import run, started, until

WORKLOAD = """
duration: 4
classes:
  - name: agent
    arrivals: {kind: gamma, rate: 0.5, cv: 0.1}
    prompt: {kind: constant, value: 200}
    output: {kind: constant, value: 4}
    program:
      stages: [{}]
      rounds: {kind: constant, value: 3}
      pause_seconds: {kind: constant, value: 1.5}
  - name: background
    arrivals: {kind: poisson, rate: 8}
    prompt: {kind: constant, value: 250}
    output: {kind: constant, value: 4}
"""
SERVERS = ("zoo.continuum,scheduler.max_leased_share=0", "zoo.continuum")


@pytest.mark.slow
@pytest.mark.parametrize("client", ["responses", "chat"])
def test_a_leased_prefix_outlives_the_pause_of_a_tool(tmp_path: Path, client: str) -> None:
    workload = tmp_path / "agents.yaml"
    workload.write_text(WORKLOAD)
    result = run(
        *(sys.executable, "benchmarks/agent_sessions.py", *SERVERS, "--rounds", "1"),
        *("--client", client, "--workload", str(workload), "--blocks", "120"),
        *("--model", "embedded", "--max-model-len", "1600"),
        *("--flags", "--runner simulated --step-base-ms 5 --step-prefill-token-us 50"),
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    for where in ("live", "virtual"):
        (found,) = told[where]
        without, leased = (found[server] for server in SERVERS)
        assert (
            without["agents: programs that failed"] == leased["agents: programs that failed"] == 0
        )
        assert leased["background: requests that failed"] == 0
        assert leased["agents: computed again"] < without["agents: computed again"], where


@pytest.mark.slow
def test_its_servers_end_with_it_when_it_is_terminated(tmp_path: Path) -> None:
    workload = tmp_path / "agents.yaml"
    workload.write_text(WORKLOAD)
    command = (sys.executable, "benchmarks/agent_sessions.py", *SERVERS, "--rounds", "9")
    with started(*command, "--workload", str(workload), "--model", "embedded") as process:
        own = psutil.Process(process.pid)
        until(lambda: len(own.children()) == len(SERVERS), "all servers are started")
        servers = own.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        assert not [server for server in servers if server.is_running()]
