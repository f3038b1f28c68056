"""vLLM in processes of its own: its replies under aioserve's scheduler are those under its own, and
the commands of the page lead to a policy that serves.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from aioserve.errors import AioserveError
from aioserve.model_source.downloads import fetch
from tests.processes import PATIENCE, started

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
#: As where vLLM is installed: its commands are found, and its own kernels are compiled for no test.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def done(
    words: Sequence[str | Path], patience: float = 60 * PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program in this folder, to its end, which has to be a good one."""
    result = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=patience,
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result


@pytest.mark.parametrize("kind", ["plain", "asynchronous", "drafts"])
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_replies_of_a_trained_model_part_at_ties_alone(kind: str, count: int) -> None:
    """In a process of its own: vLLM starts no second engine behind one with n-grams."""
    try:
        fetch("smollm2")
    except AioserveError as error:
        pytest.skip(str(error))
    program = ROOT / "benchmarks" / "vllm_right.py"
    result = done([sys.executable, program, "tokens", "--kinds", kind, "--prompts", str(count)])
    rows = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert rows[0]["run"] == "vLLM"
    assert all(row["replies"] > 0.5 * count and row["others"] == 0 for row in rows)
    assert rows[1]["preempted"] > 0


def test_replies_of_the_second_model_runner_are_those_of_vllms_own_scheduler() -> None:
    """The usual one on a card. It is chosen when vLLM is imported, so in a process of its own."""
    words = [sys.executable, "-m", "tests.vllm.second_runner", "asynchronous", "6"]
    told = json.loads(done(words, VLLM_USE_V2_MODEL_RUNNER="1").stdout.strip().splitlines()[-1])
    assert told["replies"] == 6
    assert told["preempted"] > 0


def test_the_cost_of_a_step_is_measured_while_requests_end_and_come_in_every_step() -> None:
    """A program that waits for a step without arrivals before it measures never measures anything
    at 256 running requests, of which some end in each step.
    """
    program = ROOT / "benchmarks" / "vllm_speed.py"
    words = [
        sys.executable,
        program,
        "scheduler",
        "--running",
        "256",
        "--kind",
        "churn",
        "--rounds",
        "1",
    ]
    [row] = json.loads(done(words).stdout.strip().splitlines()[-1])["results"]
    assert row["kind"] == "churn"
    num_steps, rest = divmod(row["tokens"]["vllm"], 256)  # each request gets a token in each step
    assert num_steps > 0
    assert rest == 0
    assert set(row["tokens"].values()) == {row["tokens"]["vllm"]}


# The page docs/vllm.md.


def commands_of_the_page() -> list[list[str]]:
    """The words of each command of its first block."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    [block] = re.findall(r"in five commands.*?^```bash\n(.*?)^```", page, re.M | re.S)[:1]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]


def test_the_five_commands_of_the_page_lead_to_a_policy_that_serves(tmp_path: Path) -> None:
    """All but the first, which has been run where this test runs."""
    install, compare, check, serve, send = commands_of_the_page()
    assert install[1:6] == ["pip", "install", "--no-deps", "-e", "."]
    assert "by client" in done([*compare, "--seeds", "1"]).stdout
    assert " passed" in done([*check, "--examples", "2"]).stdout
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    log = tmp_path / "served.log"
    serve = [word.replace("served.log", str(log)) for word in serve]
    serve += ["--port", url.rpartition(":")[2]]
    with (
        (tmp_path / "output").open("wb") as output,
        started(
            *serve, patience=60 * PATIENCE, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output
        ) as server,
    ):
        while not answers(f"{url}/health"):
            assert server.poll() is None, (tmp_path / "output").read_text()[-3000:]
            time.sleep(0.2)
        words = [word.replace("http://127.0.0.1:8000", url) for word in send]
        assert words != send
        found = json.loads(done([*words, "--json"]).stdout.strip().splitlines()[-1])
        assert found["requests"]["finished"] == 60
        server.terminate()
        server.wait()
    told = json.loads(
        done([sys.executable, "-m", "aioserve", "replay", log]).stdout.splitlines()[-1]
    )
    assert told["identical"]
    assert told["requests"] >= 60


def answers(url: str) -> bool:
    """Whether a server answers there, within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False
