"""A model and what `transformers` makes of it, for as long as its tests run."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real_models.reference import Reference
from tests.real_models.weights import MODELS, fetched

NAMES = ("smollm2", *MODELS)


class Model(NamedTuple):
    """One of `NAMES`."""

    name: str
    path: Path
    reference: Reference


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str) -> Path:
    return fetched(name)


@pytest.fixture(scope="module")
def model(name: str, path: Path) -> Model:
    return Model(name, path, Reference(path))
