"""A trained model says the same under aioserve's scheduler as under vLLM's own, up to ties."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from aioserve.errors import AioserveError
from aioserve.model_source.downloads import fetch
from tests.processes import PATIENCE

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["plain", "asynchronous", "drafts"])
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_replies_of_a_trained_model_part_at_ties_alone(kind: str, count: int) -> None:
    """In a process of its own: vLLM starts no second engine behind one with n-grams."""
    try:
        fetch("smollm2")
    except AioserveError as error:
        pytest.skip(str(error))
    program = ROOT / "benchmarks" / "vllm_tokens.py"
    command = [sys.executable, program, "--kinds", kind, "--prompts", str(count)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60 * PATIENCE, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    rows = json.loads(result.stdout.strip().splitlines()[-1])["rows"]
    assert rows[0]["run"] == "vLLM"
    assert all(row["replies"] > 0.5 * count and row["others"] == 0 for row in rows)
    assert rows[1]["preempted"] > 0
