"""Hints reach the policy from every door, and nonsense is refused at the door."""

from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import RequestError
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.what_if import make_workload, read_traffic
from aioserve.request import MAX_HINTS, Hints, RequestSpec

NOTING = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput

SEEN = []


class Noting(BaseScheduler):
    """First come, first served; notes the hints of each request."""

    def order(self, request):
        SEEN.append(dict(request.hints))
        return request.hints.get("predicted_output_tokens", 0)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
'''
GOOD: Hints = {
    "predicted_output_tokens": 12,
    "session": "s-1",
    "reading_speed": 4.5,
    "offline": True,
}


def noting(tmp_path: Path) -> str:
    file = tmp_path / "noting.py"
    file.write_text(NOTING)
    return f"{file}:Noting"


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"A": 1}, "the name of a hint"),
        ({"": 1}, "the name of a hint"),
        ({"a" * 65: 1}, "the name of a hint"),
        ({f"h{i}": 1 for i in range(MAX_HINTS + 1)}, "at most 16 hints"),
        ({"a": "x" * 257}, "up to 256 characters"),
        ({"a": "line\nline"}, "printable"),
        ({"a": None}, "a text, a number or a flag"),
        ({"a": [1]}, "a text, a number or a flag"),
        ({"a": float("nan")}, "finite"),
        ({"a": 2**63}, "finite 64-bit"),
        ({"a": 10**400}, "finite 64-bit"),  # no float has as much
        ([("a", 1)], "must be a map"),
    ],
)
def test_what_is_no_hint_is_refused_with_the_field(hints: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        RequestSpec("r", [1], SamplingParams(), hints=hints)
    assert caught.value.param == "hints"


async def test_a_policy_reads_the_hints_of_a_request_and_a_log_keeps_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=noting(tmp_path), decision_log=str(log)),
    )
    async with AsyncEngine(config) as engine:
        async for _ in engine.generate([1, 2], SamplingParams(max_tokens=2), hints=GOOD):
            pass
        async for _ in engine.generate([1, 2], SamplingParams(max_tokens=30)):
            pass
        with pytest.raises(RequestError, match="the name of a hint"):
            await engine.add_request([1], hints={"?": 1})
    workload = make_workload(read_traffic(DecisionLog(str(log))), "log")
    assert [request.hints for request in workload.requests] == [GOOD, {}]
