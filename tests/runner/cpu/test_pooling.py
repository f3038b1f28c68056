"""Vectors of prompts against `last_hidden_state` of transformers, however a step is composed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aioserve.outputs import Vector
from aioserve.params import PoolingParams
from aioserve.runner.loader import named_dtype
from tests.greedy import GreedyReference
from tests.models import EACH_KIND_ONCE, KINDS_AND_FUSED
from tests.runner.driver import Generate, MakeDriver, random_prompt
from tests.slow import mostly_slow
from tests.variants import DTYPE

# How far a vector may be, as a share of its length. Measured here: 2.4e-6, 0.037 and 0.008.
MOST = {"float32": 1e-5, "bfloat16": 0.08, "float16": 0.02}
MEAN, LAST = PoolingParams(pooling="mean"), PoolingParams(pooling="last")


def pooled(states: torch.Tensor, params: PoolingParams) -> Vector:
    vector = states.mean(0) if params.pooling == "mean" else states[-1]
    vector = vector[: params.dimensions]
    return (F.normalize(vector, dim=0) if params.normalize else vector).numpy()


def difference(found: Vector, expected: Vector) -> float:
    assert found.dtype == np.float32
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("kind", "fused"), mostly_slow(KINDS_AND_FUSED, but=EACH_KIND_ONCE))
def test_vectors_are_those_of_transformers_beside_requests_that_say_what_they_would_alone(
    kind: str,
    fused: bool,
    make_driver: MakeDriver,
    model_path: Callable[[str], Path],
    generate_reference: Generate,
) -> None:
    driver = make_driver(kind, fused=fused)
    raw = PoolingParams(pooling="mean", normalize=False)
    for name, length, params in (
        ("one", 1, MEAN),
        ("mean", 130, MEAN),
        ("raw", 40, raw),
        ("last", 61, LAST),
        ("cut", 9, PoolingParams(pooling="last", dimensions=16)),
    ):
        driver.add(name, random_prompt(length), pooling=params)
    driver.add("says", random_prompt(50))
    driver.step({"mean": 7, "says": 50, "last": 60})
    driver.step({"raw": 40, "says": 1, "one": 1, "mean": 64})
    driver.preempt("mean")
    driver.step({"last": 1})  # nobody samples
    driver.step({"mean": 100, "says": 1, "cut": 8})
    driver.step({"mean": 30, "cut": 1, "says": 1})
    reference = GreedyReference(model_path(kind), named_dtype(DTYPE))
    says = driver.sequences.pop("says")
    assert says.output == generate_reference(kind, says.token_ids[:50], 4)
    if DTYPE != "float32" and kind in ("mixtral", "gpt_oss"):
        return  # which experts a token goes to may be chance: see tests.greedy
    for sequence in driver.sequences.values():
        assert sequence.pooling is not None
        assert sequence.vector is not None
        assert sequence.output == []
        expected = pooled(reference.states(sequence.token_ids), sequence.pooling)
        assert difference(sequence.vector, expected) < MOST[DTYPE]


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_a_mean_does_not_depend_on_where_its_prompt_is_cut(
    chunk: int, make_driver: MakeDriver
) -> None:
    driver = make_driver()
    driver.add("whole", random_prompt(33), pooling=MEAN)
    driver.add("cut", random_prompt(33), pooling=MEAN)
    driver.step({"whole": 33})
    while driver.sequences["cut"].lacking:
        driver.step({"cut": min(chunk, driver.sequences["cut"].lacking)})
    vectors = [driver.sequences[name].vector for name in ("whole", "cut")]
    assert difference(*vectors) < MOST[DTYPE]


def test_the_head_is_not_asked_for_rows_that_are_pooled(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    model, asked = driver.runner._model, []
    logits = model.logits

    def note(hidden: torch.Tensor, adapters: None) -> torch.Tensor:
        asked.append(len(hidden))  # none: it is told how many columns nobody has
        return logits(hidden, adapters)

    monkeypatch.setattr(model, "logits", note)
    driver.add("mean", random_prompt(20), pooling=MEAN)
    driver.add("says", random_prompt(5))
    driver.step({"mean": 10})
    driver.step({"mean": 10, "says": 5})
    assert asked == [0, 1]
    assert driver.sequences["mean"].vector is not None


def test_who_left_half_computed_leaves_nothing_to_the_next_in_its_row(
    make_driver: MakeDriver,
) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(20), pooling=MEAN)
    driver.step({"a": 10})
    driver.finish("a")
    driver.add("b", random_prompt(21), pooling=MEAN)
    driver.step({"b": 21})
    driver.add("alone", random_prompt(21), pooling=MEAN)
    driver.step({"alone": 21})
    np.testing.assert_allclose(
        driver.sequences["b"].vector, driver.sequences["alone"].vector, atol=MOST[DTYPE]
    )
