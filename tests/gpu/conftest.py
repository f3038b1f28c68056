"""A card to test on: a stand-in everywhere, and a real one where there is one, with -m gpu."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

STAND_IN, CARD = "stand-in", "card"
PLACES = [
    STAND_IN,
    pytest.param(
        CARD,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card"),
        ],
    ),
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the sound stand-in: what it changes when it is made is changed back."""
    from aioserve.gpu.cuda import flashinfer_attention
    from tests.runner.cuda.card_stand_ins import StandIn

    threads = torch.get_num_threads()
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    yield StandIn
    torch.set_num_threads(threads)


@pytest.fixture(params=PLACES)
def card(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What `benchmarks/card_stages.py` calls a card."""
    if request.param == STAND_IN:
        yield request.getfixturevalue("stand_in")()
        return
    from card_stages import Card

    yield Card()
    torch.cuda.empty_cache()
