"""What the files of a model say of its video processor, as far as videos are prepared by it.

Declares and checks; prepares nothing.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError

_BICUBIC = 3  # the number that Pillow has for it
_Positive = Annotated[int, Meta(ge=1)]


class _Pixels(msgspec.Struct, frozen=True):
    """Pixels of a frame, or of all frames together: the least and the most."""

    shortest_edge: _Positive
    longest_edge: _Positive


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Those fields of a video processor's file that are read."""

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
