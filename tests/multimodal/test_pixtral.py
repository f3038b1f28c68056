"""The processor of Pixtral and Mistral 3: all that the one of `transformers` makes of an image."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.seeing_models import Seeing, picture

pytest.importorskip("PIL")

THEIRS = "transformers.models.pixtral.processing_pixtral"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of `transformers`, whose module asks for a torchvision that it does not use."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        importlib.import_module("transformers.image_processing_backends")  # which looks for it
        names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[names[-1]].functional = ModuleType("functional")  # type: ignore[attr-defined]
    yield importlib.import_module(THEIRS).PixtralProcessor
    for name in (THEIRS, "transformers.models.pixtral.image_processing_pixtral"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["pixtral", "mistral3"])
def test_an_image_becomes_what_transformers_makes_of_it(
    kind: str, theirs: Any, tmp_path: Path
) -> None:
    ours = Seeing(kind, tmp_path).processor
    own = json.loads((tmp_path / "processor_config.json").read_text())
    sizes = {name: own[name] for name in ("patch_size", "spatial_merge_size") if name in own}
    image_processor = type(ours.image_processor).from_pretrained(tmp_path)
    reference = theirs(image_processor, ours.tokenizer, **sizes)
    shapes = [(70, 40), (8, 8), (3, 90), (33, 31), (200, 16), (16, 17)]
    for width, height in shapes:
        given = {"images": [picture(1, width, height)], "text": ["See [IMG]!"]}
        found, expected = (
            one(**given, return_tensors="np", return_mm_token_type_ids=True)
            for one in (ours, reference)
        )
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
    told = [
        one._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in shapes]).num_image_tokens
        for one in (ours, reference)
    ]
    assert told[0] == told[1]
