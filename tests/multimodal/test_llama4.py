"""The processor of Llama 4: all that the one of `transformers` makes of an image by torchvision."""

import base64
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.multimodal.pictures import picture
from tests.seeing_models import Seeing
from tests.slow import examples

pytest.importorskip("PIL")

from aioserve.features.multimodal.processors import Llama4ImageProcessor

THEIRS = "transformers.models.llama4.image_processing_llama4"
#: What `Llama4ImageProcessor` of transformers 5.23.0 makes of `picture`, with torchvision 0.28.0
#: and torch 2.13.0 on a CPU with AVX-512: pixels in base64, of values 0 to 255.
GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("llama4_pixels.json").read_text())
SMALL: dict[str, Any] = {"size": {"height": 8, "width": 8}, "max_patches": 6}
OPTIONS: list[dict[str, Any]] = [
    SMALL,
    {"size": {"height": 28, "width": 28}},
    {"size": {"height": 20, "width": 20}, "resize_to_max_canvas": True},
    {"size": {"height": 28, "width": 28}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3},
]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of `transformers` for sizes: what torchvision makes of pixels is left out."""
    importlib.import_module("transformers.image_processing_backends")  # which looks for it
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].functional = ModuleType("functional")  # type: ignore[attr-defined]
    known = sys.modules.pop(THEIRS, None)
    module: Any = importlib.import_module(THEIRS)
    monkeypatch.setattr(module, "pad_to_best_fit", _padded)

    class Sized(module.Llama4ImageProcessor):  # type: ignore[misc]
        """Makes every image as light as can be, and what is around it dark."""

        def resize(self, image: Any, size: Any, **_: Any) -> Any:
            return torch.ones(*image.shape[:2], size.height, size.width)

        def rescale_and_normalize(self, images: Any, *_: Any) -> Any:
            return images

    yield Sized
    del sys.modules[THEIRS]
    if known is not None:
        sys.modules[THEIRS] = known


def _padded(images: Any, size: Any) -> Any:
    height, width = images.shape[-2:]
    bars = (0, int(size[1]) - width, 0, int(size[0]) - height)
    return torch.nn.functional.pad(images, bars, value=-1)


@pytest.mark.parametrize("options", OPTIONS)
def test_tiles_and_sizes_are_those_of_transformers(theirs: Any, options: dict[str, Any]) -> None:
    ours, reference = Llama4ImageProcessor(**options), theirs(**options)
    num_shapes = examples(60, slow=200)
    shapes = np.random.default_rng(0).integers(1, 400, (num_shapes, 2)).tolist()
    shapes += [[1, 1], [1, 200], [200, 1], [28, 28], [28, 56], [336, 336], [335, 337]]
    for height, width in shapes:
        light = picture(width, height).point(lambda _: 255)
        found = ours([light], return_tensors="pt")
        expected = reference([light], return_tensors="pt")
        assert found["aspect_ratios"].tolist() == expected["aspect_ratios"].tolist()
        assert torch.equal(found["pixel_values"] > 0, expected["pixel_values"] > 0)


def test_pixels_are_those_of_torchvision() -> None:
    """On any CPU: the one on which they were noted rounds to the same, others may to the next."""
    is_same = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for name, told in GOLDEN.items():
        width, height = map(int, name.split("x"))
        expected = np.frombuffer(base64.b64decode(told), np.uint8)
        made = Llama4ImageProcessor(**SMALL)([picture(width, height)], return_tensors="np")
        found = np.round((made["pixel_values"] + 1) * 127.5).flatten()
        assert np.abs(found - expected).max() <= (0 if is_same else 1)


@pytest.mark.parametrize("options", [*OPTIONS, {}])
def test_an_image_becomes_what_transformers_makes_of_it(options: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    reference = importlib.import_module(THEIRS).Llama4ImageProcessor(**options)
    ours = Llama4ImageProcessor(**options)
    for width, height in [(70, 40), (8, 8), (3, 90), (33, 31), (200, 16), (1, 1), (700, 500)]:
        given = [picture(width, height)]
        found = ours(given, return_tensors="pt")
        expected = reference(given, return_tensors="pt")
        assert torch.equal(found["pixel_values"], expected["pixel_values"].float())
        assert torch.equal(found["aspect_ratios"], expected["aspect_ratios"])


def test_the_tokens_of_an_image_are_known_by_its_size(tmp_path: Path) -> None:
    processor = Seeing("llama4", tmp_path).processor
    sizes = [(70, 40), (8, 8), (3, 90), (33, 31), (200, 16), (32, 32)]
    made = [processor(images=[picture(*size)], text=["<|image|>"]) for size in sizes]
    counts = [len(one["input_ids"][0]) for one in made]
    told = processor._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in sizes])
    assert told.num_image_tokens == counts
    assert len(set(counts)) > 2


@pytest.mark.parametrize(
    "options",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"resample": 3},
        {"size": {"height": 8, "width": 9}},
    ],
)
def test_what_is_not_served_of_its_options_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        Llama4ImageProcessor(**options)
