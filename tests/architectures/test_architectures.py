"""Every text decoder of `transformers` is served as docs/architectures.md says, or refused so."""

from pathlib import Path

import pytest

from tests.architectures.page import PAGE, claims, render
from tests.architectures.tiny import cases
from tests.architectures.trial import REFUSED, try_case
from tests.architectures.varied import try_varied, vary

# In `make test`: each shows another way to be served, or to be refused.
QUICK = {"bloom", "gpt_oss", "llama4_text", "qwen3_moe", "rwkv"}
CASES = {case.name: case for case in cases()}


def test_the_page_lists_every_text_decoder() -> None:
    assert claims(PAGE.read_text()).keys() == CASES.keys() >= QUICK


def test_the_page_is_read_as_it_is_written() -> None:
    outcomes = claims(PAGE.read_text())
    assert claims(render(outcomes, "0")) == outcomes
    assert len({outcome.served for outcome in outcomes.values()}) == 4


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.architectures)
        for name in CASES
    ],
)
def test_an_architecture_is_served_as_the_page_says(name: str, tmp_path: Path) -> None:
    found, claimed = try_case(CASES[name], tmp_path), claims(PAGE.read_text())[name]
    assert found.served == claimed.served
    # what Python says of an error is not the same in every version
    assert found.reason.partition(" fails: ")[0] == claimed.reason.partition(" fails: ")[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.architectures) for name in CASES]
)
def test_a_model_varied_at_random_is_served_if_its_architecture_is(
    name: str, tmp_path: Path
) -> None:
    found = try_varied(vary(CASES[name], seed=0), tmp_path)
    assert not found.startswith("refused") or claims(PAGE.read_text())[name].served == REFUSED


def test_variation_finds_the_defaults_of_the_library() -> None:
    """Such as the one of Qwen2-MoE, in which it is published: `use_sliding_window` is false."""
    ways = [vary(CASES["qwen2_moe"], seed) for seed in range(20)]
    assert ways == [vary(CASES["qwen2_moe"], seed) for seed in range(20)]
    assert any(("use_sliding_window", False) in way.fields for way in ways)
    assert any(("sliding_window", 8) in way.fields for way in ways)
