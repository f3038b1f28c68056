"""What the runner says of a prompt's own tokens, against plain `transformers`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aioserve.outputs import TokenLogprobs
from aioserve.params import SamplingParams
from aioserve.runner.batch import prompt_rows
from aioserve.runner.loader import named_dtype
from tests.models import EACH_KIND_ONCE, KINDS_AND_FUSED, VOCAB_SIZE
from tests.runner.driver import Driver
from tests.slow import mostly_slow
from tests.variants import DTYPES

MakeDriver = Callable[..., Driver]
ModelPath = Callable[[str], Path]

ASKING = SamplingParams(temperature=0, prompt_logprobs=3)
# Of a log probability. Measured on all kinds of models, as is and fused: 5e-5, 0.12 and 0.019;
# `transformers` in the same type is as far from itself in float32.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.04}


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed * 1000 + length)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


@torch.inference_mode()
def reference(path: Path, prompt: list[int], dtype: str = "float32") -> Tensor:
    """Log probabilities [T, V] of what follows each token of `prompt`."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=named_dtype(dtype)).eval()
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.float().log_softmax(-1)


def check(
    found: list[TokenLogprobs], expected: Tensor, prompt: list[int], dtype: str = "float32"
) -> None:
    assert len(found) == len(prompt) - 1
    tolerance = TOLERANCE[dtype]
    for entry, row, token_id in zip(found, expected, prompt[1:], strict=False):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=tolerance)
        nearly_as_likely = (row - row[token_id]).abs() < 2 * tolerance
        assert abs(entry.rank - 1 - int((row > row[token_id]).sum())) < nearly_as_likely.sum()
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=tolerance)
        assert entry.top_logprobs == pytest.approx(row[entry.top_token_ids].tolist(), abs=tolerance)


@pytest.mark.parametrize(("kind", "fused"), mostly_slow(KINDS_AND_FUSED, but=EACH_KIND_ONCE))
def test_prompt_logprobs_are_those_of_transformers(
    kind: str, fused: bool, make_driver: MakeDriver, model_path: ModelPath
) -> None:
    driver, prompt = make_driver(kind, fused=fused, dtype="float32"), random_prompt(40)
    driver.add("a", prompt, ASKING)
    driver.add("b", random_prompt(9))
    assert not driver.step({"a": 7, "b": 3}).prompt_logprobs
    result = driver.step()
    assert list(result.prompt_logprobs) == ["a"]
    check(result.prompt_logprobs["a"], reference(model_path(kind), prompt), prompt)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_in_every_type_tells_prompts(
    dtype: str, variant: str, make_driver: MakeDriver, model_path: ModelPath
) -> None:
    driver, prompt = make_driver("llama", dtype=dtype), random_prompt(33)
    driver.add("a", prompt, ASKING)
    found = driver.step().prompt_logprobs["a"]
    check(found, reference(model_path("llama"), prompt, dtype), prompt, dtype)


def test_pieces_neighbours_and_preemptions_change_nothing(
    make_driver: MakeDriver, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of prompts, and those in which logits are made; tokens are those without asking."""
    sizes = {"a": 1, "b": 2, "c": 60, "d": 25}
    prompts = {name: random_prompt(size) for name, size in sizes.items()}
    quiet = make_driver("llama", dtype="float32")
    for name, prompt in prompts.items():
        quiet.add(name, prompt)
    for _ in range(5):
        quiet.step()
    monkeypatch.setattr(prompt_rows, "PIECE_ELEMENTS", 3 * VOCAB_SIZE)
    driver, chance = make_driver("llama", dtype="float32"), random.Random(1)
    for name, prompt in prompts.items():
        driver.add(name, prompt, ASKING if name != "d" else quiet.sequences["d"].params)
    found: dict[str, list[TokenLogprobs]] = {}
    while min(len(sequence.output) for sequence in driver.sequences.values()) < 5:
        names = [n for n, s in driver.sequences.items() if len(s.output) < 5]
        result = driver.step(
            {n: chance.randint(1, min(9, driver.sequences[n].lacking)) for n in names}
        )
        assert not found.keys() & result.prompt_logprobs.keys()  # told once
        found |= result.prompt_logprobs
        if chance.random() < 0.3:
            driver.preempt(chance.choice(names))
    assert found.keys() == {"a", "b", "c"}
    for name, entries in found.items():
        check(entries, reference(model_path("llama"), prompts[name]), prompts[name])
    for name, sequence in driver.sequences.items():
        assert sequence.output == quiet.sequences[name].output
