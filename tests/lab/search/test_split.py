"""What trains has no request in common with what is held out."""

from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.tuning import split, two_workloads
from aioserve.lab.workloads.synthetic import WorkloadSource

LINE = '{{"arrival": {}, "prompt_tokens": {}, "output_tokens": 3}}\n'


def log(path: Path, arrivals: list[float]) -> WorkloadSource:
    path.write_text("".join(LINE.format(at, 10 + i) for i, at in enumerate(arrivals)))
    return WorkloadSource(path=str(path))


def test_the_first_part_of_a_trace_trains_and_the_later_one_is_held_out(tmp_path: Path) -> None:
    source = log(tmp_path / "log.jsonl", [float(second) for second in range(11)])
    parts = split(source, [0], 0.3)
    prompts = [
        [request.num_prompt_tokens - 10 for request in workload.requests]
        for workload in (parts.training[0], parts.held_out[0])
    ]
    assert prompts == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10]]
    assert parts.held_out[0].requests[0].arrival == pytest.approx(0.0)
    assert "trained on the 3 requests of the first 3 s, held out: the 8 after them" in parts.words


def test_seeds_of_a_description_that_train_are_not_held_out() -> None:
    parts = split(WorkloadSource(path="mixed", limit=20), [4, 5], 0.5)
    assert [workload.seed for workload in parts.training] == [4, 5]
    assert [workload.seed for workload in parts.held_out] == [6, 7]
    assert parts.words == "trained on mixed.yaml with seeds 4 to 5, held out: seeds 6 to 7 of it"


def test_another_workload_is_held_out_as_a_whole(tmp_path: Path) -> None:
    source = log(tmp_path / "log.jsonl", [0.0, 1.0])
    parts = two_workloads(source, [0], WorkloadSource(path="mixed", limit=20), [0, 1])
    assert [len(workload.requests) for workload in parts.training] == [2]
    assert [len(workload.requests) for workload in parts.held_out] == [20, 20]
    assert parts.words == (
        "trained on log.jsonl with seed 0, held out: mixed.yaml with seeds 0 to 1"
    )


def test_what_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    at_once = log(tmp_path / "once.jsonl", [0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="all requests arrive at once"):
        split(at_once, [0], 0.5)
    with pytest.raises(ConfigError, match="is the workload that trains"):
        two_workloads(at_once, [0], at_once, [0])
