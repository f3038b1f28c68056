"""What is made of videos for a model that reads them: the arrays that the encoder reads.

A video is prepared alone, some frames at a time, by what the model's files say of its video
processor. The classes that do so for a family are named in `families`. Knows no scheduler and no
encoder. Used off the event loop.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from aioserve.engine.prompt import Video
from aioserve.errors import ConfigError, RequestError, one_line
from aioserve.features.multimodal.prompt import (
    Mark,
    Prepared,
    PreparedInput,
    VideoSize,
    frame_as_rgb,
    video_size_of,
)
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import Family

_BICUBIC = 3  # the number that Pillow has for it
_Positive = Annotated[int, Meta(ge=1)]


class _Pixels(msgspec.Struct, frozen=True):
    """Pixels of a frame, or of all frames together: the least and the most."""

    shortest_edge: _Positive
    longest_edge: _Positive


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a video processor's file that are read."""

    size: _Pixels
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    patch_size: _Positive
    temporal_patch_size: _Positive = 2
    merge_size: _Positive = 2
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: Annotated[float, Meta(gt=0)] = 1 / 255
    resample: int = _BICUBIC
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: _Positive
    fps: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        is_usual = self.do_resize and self.do_rescale and self.do_normalize
        if not is_usual or self.resample != _BICUBIC:
            raise ConfigError("only videos that are resized (bicubic) and normalized are prepared")

    @property
    def side(self) -> int:
        """Pixels that a token is wide and high."""
        return self.patch_size * self.merge_size


class FamilyVideos(Protocol):
    """The class of a family's videos, made of the `ModelInfo` of a model and its tokenizer."""

    placeholder: str  # of a video in a text

    def num_tokens(self, size: VideoSize) -> int:
        """Return the tokens of a video that the encoder has rows for. Raises `ValueError` for a
        size that is not served.
        """
        ...

    def arrays(
        self, frames: Iterator[np.ndarray], size: VideoSize, fps: float | None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """For each input of the encoder, in order, its rows and what the encoder reads. `frames`
        are [height, width, 3] of uint8.
        """
        ...

    def text(self, num_rows: Sequence[int], size: VideoSize, fps: float | None) -> str:
        """Return the text that a video stands for whose inputs have these rows."""
        ...


class VideoProcessor:
    """A processor that prepares the videos of one model."""

    def __init__(self, family: Family, info: ModelInfo, tokenizer: Any) -> None:
        """For a family that reads videos. Raises `ConfigError`."""
        self._family = family
        try:
            own = getattr(import_module("aioserve.features.multimodal.processors"), family.videos)
            self._own: FamilyVideos = own(info, tokenizer)
        except Exception as error:  # whatever the files provoke
            raise ConfigError(
                f"cannot read the video processor of {info.source.path}: {one_line(error)}"
            ) from error
        self.mark = Mark("video", self._own.placeholder, info.whole_config.video_token_id)

    def least_tokens(self, videos: Sequence[Any]) -> int:
        """Return how many tokens these stand for at least. Raises `RequestError` for what is no
        video.
        """
        sizes = [video_size_of(video, f"videos[{i}]") for i, video in enumerate(videos)]
        return sum(self._num_tokens(size, i) for i, size in enumerate(sizes))

    def prepare(self, videos: Sequence[Any]) -> list[Prepared]:
        """Return what becomes of each. Raises `RequestError` that names one."""
        return [self._prepare(video, f"videos[{i}]") for i, video in enumerate(videos)]

    def _num_tokens(self, size: VideoSize, i: int) -> int:
        try:
            return self._own.num_tokens(size)
        except ValueError as error:
            raise RequestError(str(error), f"videos[{i}]") from error

    def _prepare(self, video: Video, name: str) -> Prepared:
        size = video_size_of(video, name)
        frames = (frame_as_rgb(video, i, name) for i in range(size.num_frames))
        try:
            inputs = [
                PreparedInput.of(self._family.model_type, num_rows, arrays)
                for num_rows, arrays in self._own.arrays(frames, size, video.fps)
            ]
            text = self._own.text([own.num_rows for own in inputs], size, video.fps)
        except RequestError:
            raise
        except Exception as error:  # what torch and transformers make of any size
            raise RequestError(f"the video cannot be prepared: {one_line(error)}", name) from error
        return Prepared(text, inputs)
