"""vLLM in processes of its own: its replies under aioserve's scheduler are those under its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from aioserve.errors import AioserveError
from aioserve.model_source.downloads import fetch
from tests.processes import PATIENCE

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]


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
        env=os.environ | environment,
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
    program = ROOT / "benchmarks" / "vllm_tokens.py"
    result = done([sys.executable, program, "--kinds", kind, "--prompts", str(count)])
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
