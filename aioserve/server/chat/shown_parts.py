"""The parts of a chat message that show a model something: images and videos.

Knows which fields each has, and refuses what is missing, with its place. What is at a URL is known
to `server.images`.
"""

from typing import Any

from aioserve.errors import RequestError
from aioserve.server.images import ImageParts, Part
from aioserve.server.protocol import RequestPart


class ImageURL(RequestPart, kw_only=True, omit_defaults=True):
    """Where an image is, or all of it in a data: URL."""

    url: str
    detail: Any = None  # a hint: the model's own processor has the say


class VideoURL(RequestPart, kw_only=True, omit_defaults=True):
    """The frames of a video in a data: URL."""

    url: str


#: The types of such parts, and the fields that a part of each may have.
SHOWN = {"image_url": ("image_url",), "video_url": ("video_url", "fps")}


def shown_part(part: Any, place: str, images: ImageParts) -> Part:
    """A `ContentPart` of one of these types as chat templates know it; `images` takes note of what
    it shows. Raises `RequestError`.
    """
    source = getattr(part, part.type)
    if source is None:
        raise RequestError(f"{place}.{part.type} is missing", param=f"{place}.{part.type}")
    path = f"{place}.{part.type}.url"
    if part.type == "image_url":
        return images.add(path, source.url)
    return images.add_video(path, source.url, part.fps, f"{place}.fps")
