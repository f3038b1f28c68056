"""Every variant of the kernels, and plain torch, serves every element type: tokens of a whole
model, against `transformers` in the same type.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from aioserve.kernels import KernelsUnavailableError, load_kernels
from tests.models import VOCAB_SIZE
from tests.runner.driver import Driver
from tests.slow import mostly_slow
from tests.variants import DTYPES

# With norms of heads, with biases, with a window; and one that is not fused, with a soft cap.
KINDS = ["qwen3", "qwen2", "mistral", "gemma2"]

# Every second pair, as on a chessboard.
FEW = [pair for i, pair in enumerate(itertools.product(DTYPES, KINDS)) if (i + i // 4) % 2 == 0]


@pytest.mark.parametrize(("dtype", "kind"), mostly_slow(itertools.product(DTYPES, KINDS), but=FEW))
def test_chunks_decodes_and_preemptions_give_the_tokens_of_the_modules(
    variant: str,
    dtype: str,
    kind: str,
    make_driver: Callable[..., Driver],
    generate_reference: Callable[..., Any],
) -> None:
    driver, chance = make_driver(kind, dtype=dtype), random.Random(0)
    description = driver.runner._backend.description
    assert variant == "off" or f"compiled kernels, {variant}" in description
    for name, length in {"a": 1, "b": 33, "c": 130}.items():
        driver.add(name, [chance.randrange(VOCAB_SIZE) for _ in range(length)])
    driver.step({"a": 1, "b": 5, "c": 70})
    driver.step({"c": 60, "a": 1, "b": 28})
    driver.generate("b", 4)
    driver.preempt("b")
    for _ in range(8):
        driver.step()
    assert min(len(sequence.output) for sequence in driver.sequences.values()) > 8
    for sequence in driver.sequences.values():
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        output = sequence.output
        assert output == generate_reference(kind, prompt, len(output), dtype)
        wrong = [*output[:-1], (output[-1] + 1) % VOCAB_SIZE]
        assert wrong != generate_reference(kind, prompt, len(output), dtype)


def test_the_variant_that_is_asked_for_is_the_one_that_runs(variant: str) -> None:
    if variant == "off":
        with pytest.raises(KernelsUnavailableError):
            load_kernels()
    else:
        assert load_kernels().variant == variant
