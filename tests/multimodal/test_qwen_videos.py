"""Videos of the Qwen families, prepared to the bit as the video processors of `transformers` do.

Those need torchvision. What they made is kept here in numbers, by `python -m
tests.multimodal.test_qwen_videos` where there is one.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve.config import ModelConfig
from aioserve.engine.prompt import Video
from aioserve.features.multimodal.prompt import VideoProcessor
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import GRID, TURN, family_of
from tests.seeing_models import VIDEO, make_seeing_model, picture

pytest.importorskip("PIL")

KEPT = Path(__file__).with_suffix(".json")
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: Width, height, frames and frames per second.
VIDEOS = [(70, 40, 5, 2.0), (30, 30, 2, 24.0), (25, 90, 7, 0.7), (64, 64, 4, 3.0), (9, 11, 8, 30.0)]
_SIZES = {
    "qwen2_vl": {"min_pixels": 16 * 16, "max_pixels": 48 * 48, "max_video_tokens": 60},
    "qwen3_vl": {
        "size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 6 * 48 * 48},
        "max_video_tokens": 12,
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}
_SIZES["qwen2_5_vl"] = _SIZES["qwen2_vl"]


def settings() -> list[tuple[str, bool]]:
    """Of each family, with frames of at most their share of the pixels, and without."""
    return [(kind, is_capped) for kind in KINDS for is_capped in (False, True)]


def make(kind: str, is_capped: bool, path: Path) -> tuple[VideoProcessor, Any]:
    """What prepares videos of such a model, and the tokenizer."""
    from transformers import AutoTokenizer

    make_seeing_model(kind, path)
    stated = {"patch_size": 4, "cap_pixels_per_frame": is_capped, **_SIZES[kind]}
    (path / "video_preprocessor_config.json").write_text(json.dumps(stated))
    info, tokenizer = ModelInfo(ModelConfig(model=str(path))), AutoTokenizer.from_pretrained(path)
    family = family_of(info)
    assert family is not None, "it sees"
    return VideoProcessor(family, info, tokenizer), tokenizer


def frames_of(width: int, height: int, num_frames: int) -> np.ndarray:
    return np.stack([np.asarray(picture(i, width, height)) for i in range(num_frames)])


def told(ids: list[int], grid: list[int], pixels: np.ndarray, seconds: float | None) -> Any:
    """In numbers what became of a video: some of its pixels, all over it."""
    some = pixels.reshape(-1)[:: pixels.size // 7]
    return {
        "ids": ids,
        "grid": grid,
        "pixels": [round(float(value), 4) for value in some],
        "mean": round(float(pixels.mean(dtype=np.float64)), 5),
        "seconds": seconds,
    }


@pytest.mark.parametrize(("kind", "is_capped"), settings())
def test_a_video_becomes_what_transformers_makes_of_it(
    kind: str, is_capped: bool, tmp_path: Path
) -> None:
    ours, tokenizer = make(kind, is_capped, tmp_path)
    expected = json.loads(KEPT.read_text())[f"{kind}, capped: {is_capped}"]
    for (width, height, num_frames, fps), known in zip(VIDEOS, expected, strict=True):
        video = Video(frames_of(width, height, num_frames), fps)
        [prepared] = ours.prepare([video])
        arrays = [one.arrays for one in prepared.inputs]
        ids = tokenizer(VIDEO.replace("<|video_pad|>", prepared.text))["input_ids"]
        grid = [len(arrays), *arrays[0][GRID][0, 1:].tolist()]
        pixels = np.concatenate([each["pixel_values"] for each in arrays])
        found = told(ids, grid, pixels, known["seconds"])
        # On other CPUs torch resizes in another way: by one of 255 at most.
        assert found.pop("pixels") == pytest.approx(known.pop("pixels"), abs=0.02)
        assert found.pop("mean") == pytest.approx(known.pop("mean"), abs=0.002)
        assert found == known
        assert ours.least_tokens([video]) == ids.count(ours.mark.token_id)
        times = [each[TURN][0, 0] for each in arrays if TURN in each]
        step = {"qwen2_vl": 1, "qwen2_5_vl": 4 * (known["seconds"] or 0), "qwen3_vl": 0}[kind]
        assert times == [int(i * step) for i in range(len(times))]


def write() -> None:
    """Keep what `transformers` makes of these videos, where it has torchvision."""
    from tempfile import TemporaryDirectory

    from transformers import AutoImageProcessor, AutoVideoProcessor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    classes = (Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor)
    kept: dict[str, Any] = {}
    for kind, is_capped in settings():
        with TemporaryDirectory() as place:
            ours, tokenizer = make(kind, is_capped, Path(place))
            images = AutoImageProcessor.from_pretrained(place, backend="pil")
            videos = AutoVideoProcessor.from_pretrained(place)
            theirs = classes[KINDS.index(kind)](images, tokenizer, videos)
        for width, height, num_frames, fps in VIDEOS:
            frames = frames_of(width, height, num_frames)
            known = {"total_num_frames": num_frames, "fps": fps}
            made = theirs(
                text=[VIDEO],
                videos=[frames],
                video_metadata=[{**known, "frames_indices": list(range(num_frames))}],
                do_sample_frames=False,
                return_tensors="np",
            )
            pixels, [ids], [grid] = (
                np.asarray(made[name])
                for name in ("pixel_values_videos", "input_ids", "video_grid_thw")
            )
            arrays = [one.arrays for one in ours.prepare([Video(frames, fps)])[0].inputs]
            np.testing.assert_array_equal(
                np.concatenate([each["pixel_values"] for each in arrays]), pixels
            )
            seconds = made.get("second_per_grid_ts")
            kept.setdefault(f"{kind}, capped: {is_capped}", []).append(
                told(
                    ids.tolist(),
                    grid.tolist(),
                    pixels,
                    None if seconds is None else float(np.float32(seconds[0])),
                )
            )
    KEPT.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    write()
