"""Images and videos as callers give them: their sizes, and their pixels as images of PIL.

Refuses what is no image and no video, by `RequestError` that names which. Knows no model.
"""

from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import RequestError
from aioserve.multimodal.decoding import on_white
from aioserve.multimodal.prompt import Video

# Of the longer side to the shorter: some processors make the shorter one as long as they like it,
# and what that makes of the longer one would fill any memory.
MAX_RATIO = 200


class VideoSize(NamedTuple):
    """How many frames a video has, and how many pixels each of them."""

    num_frames: int
    height: int
    width: int


def size_of(image: Any, name: str) -> tuple[int, int]:
    """Height and width. Raises `RequestError` for what is no image, with `name` as its `param`."""
    from PIL import Image

    if isinstance(image, Image.Image):
        width, height = image.size
    else:
        shape = tuple(getattr(image, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or not str(image.dtype).endswith("uint8"):
            raise RequestError(
                "an image must be one of PIL, or an array [height, width, 3] of uint8, got "
                f"{type(image).__name__}{f' {list(shape)}' if shape else ''}",
                param=name,
            )
        height, width = shape[:2]
    if not (height and width):
        raise RequestError(f"an image of {width} x {height} has no pixels", param=name)
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"an image of {width} x {height} is too narrow: one side may be {MAX_RATIO} times as "
            "long as the other",
            param=name,
        )
    return height, width


def as_rgb(image: Any, name: str) -> Any:
    """The image as one of PIL, in RGB, white where it is transparent. Raises as `size_of`."""
    from PIL import Image

    size_of(image, name)
    if not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    return on_white(image)


def video_size_of(video: Any, name: str) -> VideoSize:
    """Raises `RequestError` for what is no video, or one whose frames are of several sizes, with
    `name` as its `param`.
    """
    if not isinstance(video, Video):
        raise RequestError(f"a video must be a Video, got {type(video).__name__}", param=name)
    shape = tuple(getattr(video.frames, "shape", ()))
    try:
        num_frames = len(video.frames)
    except TypeError:
        num_frames = 0
    if not num_frames:
        raise RequestError("a video must have at least one frame", param=name)
    # The frames of one array are of one size.
    sizes = [_frame_size(video, i, name) for i in range(1 if shape else num_frames)]
    for i, size in enumerate(sizes):
        if size != sizes[0]:
            (height, width), (first_height, first_width) = size, sizes[0]
            raise RequestError(
                f"the frames of a video must be of one size: frame {i} is of {width} x {height}, "
                f"and frame 0 of {first_width} x {first_height}",
                param=name,
            )
    return VideoSize(num_frames, *sizes[0])


def frame_as_rgb(video: Video, i: int, name: str) -> np.ndarray:
    """Frame `i` of a video that has this frame: [height, width, 3] of uint8."""
    try:
        return np.asarray(as_rgb(video.frames[i], name))
    except RequestError as error:
        raise RequestError(f"frame {i}: {error}", param=name) from error


def _frame_size(video: Video, i: int, name: str) -> tuple[int, int]:
    try:
        return size_of(video.frames[i], name)
    except RequestError as error:
        raise RequestError(f"frame {i}: {error}", param=name) from error
