"""Images and videos in bodies, as all APIs take them: which parts bring them, and where they stand.

What reads and fetches them is brought by a part and loaded with the first image. Knows no
protocol's own shapes.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from aioserve.config import ImageConfig
from aioserve.engine import Conversation, EngineClient, Prompt
from aioserve.errors import RequestError
from aioserve.support.parts import load

Part = dict[str, Any]  # of a message, as chat templates know it
Content = str | list[Part]


def text_part(text: str) -> Part:
    """Return a part of a message that is text."""
    return {"type": "text", "text": text}


def content_of(parts: Sequence[Part]) -> Content:
    """Text where there is no image: all templates know that."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def joined(first: Content, second: Content) -> Content:
    """Return the contents of two messages as one: a line each where a text meets a text."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n".join(filter(None, (first, second)))
    before, after = (
        [text_part(content)] * bool(content) if isinstance(content, str) else content
        for content in (first, second)
    )
    is_text = bool(before) and bool(after) and before[-1]["type"] == after[0]["type"] == "text"
    return [*before, *([text_part("\n")] * is_text), *after]


class MediaParts(Protocol):
    """The images and videos of one body, in the order in which its prompt shows them."""

    sources: list[Any]

    def add(self, path: str, url: str) -> Part:
        """Return the image that is at `url`, or in it. Raises `RequestError` that names `path`."""

    def add_base64(self, path: str, media_type: str, data: str) -> Part:
        """Add, as `add`, what is in the fields `media_type` and `data` of `path`."""

    def add_video(self, path: str, url: str, fps: float | None, fps_path: str) -> Part:
        """Return the video whose frames are in `url`, `fps` of them in a second. Raises
        `RequestError` that names `path` or `fps_path`.
        """

    def rename(self, error: RequestError) -> None:
        """Let an error of the engine name the part of the body, where it names an image."""


class MediaLoader(Protocol):
    """A loader of the images and videos of bodies."""

    async def show(self, conversation: Conversation, media: Any) -> Prompt:
        """Return the conversation with its images, whose headers are known to be good and within
        limits. Raises `RequestError` that names the part, `EngineOverloadedError` if others' take
        too much.
        """

    async def close(self) -> None:
        """Stop fetching images and end the thread."""


class ImageParts:
    """The images and videos of one body: none until the first is added."""

    def __init__(self, config: ImageConfig, refusal: str, no_videos: str = "") -> None:
        """`refusal`: why there can be no images; empty if there can be. `no_videos`: the same of
        videos.
        """
        self._given = config, refusal, no_videos
        self._has_any = False

    @classmethod
    def of(cls, engine: EngineClient) -> "ImageParts":
        """Return an empty list of such parts, with the limits of this engine."""
        media = engine.media
        return cls(engine.config.images, media.refuses_images, media.refuses_videos)

    @cached_property
    def media(self) -> MediaParts:
        """The reader of the images and videos of the body: loaded with the first of them."""
        media: MediaParts = load("media", "parts")(*self._given)
        self._has_any = True
        return media

    def __bool__(self) -> bool:
        return self._has_any and bool(self.media.sources)

    def named(self) -> "ImageParts":
        """Name the part in what the engine says of an image inside the block."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self and isinstance(error, RequestError):
            self.media.rename(error)


class Shown(NamedTuple):
    """A conversation whose images are to be brought."""

    images: "Images"
    conversation: Conversation
    parts: ImageParts

    async def bring(self, engine: EngineClient) -> Prompt:
        """Prepare the prompt, as `Images.show`. Counts as a request that waits: raises
        `EngineOverloadedError` before any image is fetched or decoded.
        """
        async with engine.arriving():
            return await self.images.show(self.conversation, self.parts)


class Images:
    """The loader of the images of one application's requests, to be closed at its end."""

    def __init__(self, config: ImageConfig) -> None:
        self._config = config
        self._loader: MediaLoader | None = None

    async def show(self, conversation: Conversation, parts: ImageParts) -> Prompt:
        """Return the conversation with its images, as `MediaLoader.show`."""
        if not parts:
            return conversation
        if self._loader is None:
            make = await asyncio.to_thread(load, "media", "loader")
            self._loader = self._loader or make(self._config)
        assert self._loader is not None
        return await self._loader.show(conversation, parts.media)

    def shown(self, conversation: Conversation, parts: ImageParts) -> Conversation | Shown:
        """Return what `show` would make of it, to be brought when its request may run."""
        return Shown(self, conversation, parts) if parts else conversation

    async def close(self) -> None:
        """Stop fetching images, if any were."""
        if self._loader is not None:
            await self._loader.close()


IMAGES = web.AppKey("IMAGES", Images)
