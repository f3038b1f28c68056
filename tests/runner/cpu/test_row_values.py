"""Values of rows: entropy against its definition, functions of others, and what they do wrong."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.request import find_function
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.cpu.asked_results import RowValueStep

HERE = __name__


def margin(logits: Tensor) -> Tensor:
    """How much larger the largest logit is than the next one."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def as_list(logits: Tensor) -> list[float]:
    return [float(row.argmax()) for row in logits]


def raises(logits: Tensor) -> Tensor:
    raise IndexError("planted")


def one_too_few(logits: Tensor) -> Tensor:
    return logits[1:, 0]


def infinite(logits: Tensor) -> Tensor:
    return torch.full((len(logits),), math.inf)


not_a_function = 3


def inputs_of(sampling: list[int], num_requests: int) -> StepInputs:
    empty = np.zeros(0, dtype=np.int64)
    fields: dict[str, Any] = dict.fromkeys(StepInputs.__dataclass_fields__, empty)
    del fields["parts"], fields["drafts"]
    names = [f"r{i}" for i in range(num_requests)]
    return StepInputs(**fields | {"req_ids": names, "sampling": np.array(sampling)})


def values_of(
    names: tuple[str, ...], logits: Tensor, sampling: list[int], kept: list[list[int]]
) -> dict[str, dict[str, float]]:
    wanted = {f"r{i}": names for i in range(len(kept))}
    step = RowValueStep(wanted, logits)
    return step.of_newest(inputs_of(sampling, len(kept)), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_is_that_of_the_distribution_in_nats(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(21, 300)).to(dtype)  # more rows than are computed at a time
    logits[4] = 0.0
    logits[5] = torch.where(torch.arange(300) == 7, 100.0, 0.0)
    logits[6, 100:] = -math.inf
    before = logits.clone()
    found = values_of(("entropy",), logits, list(range(21)), [[1]] * 21)
    assert torch.equal(logits, before)
    for row in range(21):
        p = logits[row].double().softmax(0)
        p = p[p > 0]
        expected = -(p * p.log()).sum().item()
        assert found[f"r{row}"]["entropy"] == pytest.approx(expected, abs=1e-4)
    assert found["r4"]["entropy"] == pytest.approx(math.log(300), abs=1e-5)
    assert found["r5"]["entropy"] == pytest.approx(0, abs=1e-5)


def test_of_a_request_with_drafts_the_row_of_its_newest_token_counts() -> None:
    """Three requests: one is half-way in its prompt, one had two drafts, of which one was right."""
    logits = torch.arange(8.0)[:4, None] * torch.tensor([0.0, 1.0])
    found = values_of((f"{HERE}:margin",), logits, [0, 1, 1, 1], [[4], [5, 6], []])
    assert found == {"r0": {f"{HERE}:margin": 0.0}, "r1": {f"{HERE}:margin": 2.0}}


def test_a_function_may_return_any_numbers_one_for_each_row() -> None:
    logits = torch.eye(3)
    found = values_of((f"{HERE}:as_list", "entropy"), logits, [0, 1, 2], [[1]] * 3)
    assert [values[f"{HERE}:as_list"] for values in found.values()] == [0.0, 1.0, 2.0]
    assert all(len(values) == 2 for values in found.values())


@pytest.mark.parametrize("name", ["raises", "one_too_few", "infinite"])
def test_a_function_that_fails_costs_its_own_values_alone(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowValueStep, "_logged_at", -math.inf)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            found = values_of((f"{HERE}:{name}", "entropy"), torch.eye(3), [0, 1, 2], [[1]] * 3)
            assert [set(values) for values in found.values()] == [{"entropy"}] * 3
    assert len(caplog.records) == (name != "infinite")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:head", "cannot be imported"),
        (f"{HERE}:no_such_head", "cannot be imported"),
        (f"{HERE}:not_a_function", "is no function, it is 3"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_function(name)
