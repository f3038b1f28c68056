"""Images that are encoded in pieces: the same rows, however often a layer is stopped."""

from pathlib import Path

import pytest
import torch

from aioserve.config import ModelConfig
from aioserve.features.multimodal.cpu_encoder_attention import use_kernels
from aioserve.features.multimodal.prompt import ImageProcessor
from aioserve.features.multimodal.vision_language import load_parts
from aioserve.kernels import usable_variants
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import family_of
from aioserve.runner.cpu.models import CpuPlace
from tests.multimodal.pictures import picture
from tests.multimodal.test_vision_language import cut_layers
from tests.seeing_models import make_seeing_model

NUM_STEPS = 40


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "idefics3", "pixtral"])
def test_a_step_of_an_image_is_a_part_of_a_layer(
    kind: str, with_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_kernels and not usable_variants():
        pytest.skip("the kernels were not built")
    cut_layers(monkeypatch)
    info = ModelInfo(ModelConfig(model=str(make_seeing_model(kind, tmp_path))))
    family = family_of(info)
    assert family is not None
    _, encoder = load_parts(info, torch.float32, None, CpuPlace())
    assert encoder is not None
    if with_kernels:
        use_kernels(encoder)
    [made] = ImageProcessor(family, info, info.tokenizer).prepare([picture(90, 60)])
    [given] = made.inputs
    arguments = {name: torch.from_numpy(array) for name, array in given.arrays.items()}
    work: list[int] = []  # products so far

    def encode() -> torch.Tensor:
        found = encoder._module.get_image_features(**arguments, return_dict=True).pooler_output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])

    def count(*_: object) -> None:
        work.append(1)

    with torch.inference_mode():
        expected = encode()
    pieces, product = encoder._pieces, torch.nn.functional.linear
    monkeypatch.setattr(
        "aioserve.features.multimodal.encoding_pieces.F.linear",
        lambda *args: (count(), product(*args))[1],
    )
    reached = []
    for step in range(NUM_STEPS):
        pieces.advance("one", encode, step / NUM_STEPS)
        reached.append(len(work))
    assert reached[0] < reached[-1] / NUM_STEPS + 2  # it has begun
    stops = len(set(reached))
    assert stops > 2 * len(pieces._costs._products), "several in each layer"
    rows = pieces.take("one")
    assert rows is not None
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    assert "one" not in pieces
