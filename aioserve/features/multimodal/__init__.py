"""Images and videos in prompts: which models see, and what becomes of either on its way to one.

Importing it loads neither torch nor Pillow. Knows nothing about scheduling, nor how a
model computes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.errors import RequestError

if TYPE_CHECKING:
    from aioserve.engine.prompt import Conversation

__all__ = ["MultimodalPrompt", "Video"]

MIN_FPS, MAX_FPS = 0.001, 1000.0  # frames per second of a video


class Video(msgspec.Struct, frozen=True):
    """The frames of a video that a model is shown, all of one size, and how many there are of them
    in a second of it.

    Frames are images as those of a `MultimodalPrompt`, or one numpy array or torch tensor [frames,
    height, width, 3] of uint8. All of them are shown. Without `fps` they are as many in a second as
    the model's own processor would take (2, where it states nothing). Raises `RequestError`.
    """

    frames: Sequence[Any]
    fps: float | None = None  # frames per second of the video

    def __post_init__(self) -> None:
        fps = self.fps
        is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
        if fps is not None and not (is_number and MIN_FPS <= fps <= MAX_FPS):
            raise RequestError(
                f"fps must be a number from {MIN_FPS:g} to {MAX_FPS:g}, got {fps!r}", param="fps"
            )


class MultimodalPrompt(msgspec.Struct, frozen=True):
    """A prompt and the images and videos that it mentions, each in that order.

    In messages and conversations, the content of a message may be a list of parts as chat templates
    know them, `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`. In a
    text, the model's own placeholders stand for them, as its processor knows them ("<image>").

    Images are those of PIL, or numpy arrays or torch tensors [height, width, 3] of uint8; videos
    are `Video`s. An invalid one raises `RequestError` whose `param` is `images[i]` or `videos[i]`.
    """

    prompt: "str | Sequence[Mapping[str, Any]] | Conversation"
    images: Sequence[Any] = ()
    videos: Sequence[Video] = ()
