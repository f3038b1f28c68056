"""Images and videos in bodies: which parts bring them, and how they come to the engine.

Knows limits, URLs, and the place of each part, which is what an error names. Knows no protocol's
own shapes, nor what a model makes of an image.
"""

import asyncio
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from aioserve.config import ImageConfig
from aioserve.engine import Conversation, Prompt
from aioserve.engine.prompt import MultimodalPrompt, Video
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.features.multimodal.decoding import MEDIA_TYPES, EncodedImage, Header, decode_base64
from aioserve.features.multimodal.fetching import AT_ONCE_FOR_REQUEST, ImageFetcher
from aioserve.server.images import Part


class Allowance:
    """The bytes and pixels that the images of one request may still take."""

    def __init__(self, config: ImageConfig) -> None:
        self._config = config
        self._bytes = config.max_image_mib * 2**20
        self._pixels = config.max_image_megapixels * 1_000_000
        self.fetches = asyncio.Semaphore(AT_ONCE_FOR_REQUEST)

    def take_bytes(self, count: int) -> None:
        """Raises `RequestError` if fewer than `count` bytes are left for the request."""
        self._bytes -= count
        if self._bytes < 0:
            raise RequestError(
                f"the images of this request are more than {self._config.max_image_mib} MiB "
                "together, by --max-image-mib"
            )

    def take_pixels(self, header: Header) -> None:
        """Raises `RequestError` if this image has more pixels than are left for the request."""
        self._pixels -= header.num_pixels
        if self._pixels < 0:
            raise RequestError(
                f"with {header.width} x {header.height} pixels of this one, the images of this "
                f"request are more than {self._config.max_image_megapixels} megapixels together, "
                "by --max-image-megapixels"
            )


# Videos in bodies: the frames that a data: URL holds, as vLLM has it. Files of videos are not read.
# Knows nothing of requests, nor what a model makes of frames.


MEDIA_TYPE = "video/jpeg"
FORM = f"data:{MEDIA_TYPE};base64,FRAME,FRAME,..."


def frames_of(path: str, url: str) -> str:
    """Return the frames in base64, with commas between. Raises `RequestError` that names `path`."""
    kind, _, frames = url.partition(",")
    if kind.lower() != f"data:{MEDIA_TYPE};base64":
        raise RequestError(
            f"{path} must hold the frames of the video, each an image in base64: {FORM}; files of "
            "videos are not read",
            path,
        )
    return frames


def num_frames_of(frames: str) -> int:
    """Return how many there are in what `frames_of` returns."""
    return frames.count(",") + 1


def read_frames(frames: str, name: str) -> Sequence[EncodedImage]:
    """Images whose headers are known to be good. `name` is what errors call their video. Raises
    `RequestError` that says which frame is wrong.
    """
    found = []
    for i, frame in enumerate(frames.split(",")):
        try:
            found.append(EncodedImage(decode_base64(frame), name))
        except RequestError as error:
            raise RequestError(f"frame {i}: {error}") from error
    return found


T = TypeVar("T")

# What the engine calls them.
_BY_ENGINE = re.compile(r"(image|video)s\[(\d+)\]")


class _Source(NamedTuple):
    path: str  # in the body
    url: str | None  # of http
    base64: str = ""  # of a video, that of each frame, with commas between
    kind: str = "image"
    fps: float | None = None  # frames per second of a video


class BodyMedia:
    """The images and videos of one body, in the order in which its prompt shows them."""

    def __init__(self, config: ImageConfig, refusal: str, no_videos: str = "") -> None:
        """`refusal`: why there can be no images; empty if there can be. `no_videos`: the same of
        videos.
        """
        self.sources: list[_Source] = []
        self._config = config
        self._refusals = {"image": refusal, "video": no_videos}
        self._num_frames = 0  # of all videos

    def add(self, path: str, url: str) -> Part:
        """Return the image that is at `url`, or in it. Raises `RequestError` that names `path`."""
        scheme, _, rest = url[:4096].partition(":")
        if scheme.lower() != "data":
            if scheme.lower() not in ("http", "https"):
                raise RequestError(f"{path} must be a data: URL or one of http or https", path)
            if not self._config.image_urls:
                raise RequestError(
                    f"{path}: this server fetches no images (see --image-urls): send a data: URL",
                    path,
                )
            return self._add(_Source(path, url))
        kind, comma, _ = rest.partition(",")
        media_type, *parameters = kind.lower().split(";")
        if not comma or "base64" not in parameters:
            raise RequestError(
                f"{path} must be a data: URL of base64: data:image/png;base64,...", path
            )
        self._check_type(path, media_type)
        return self._add(_Source(path, None, url[len(scheme) + len(kind) + 2 :]))

    def add_base64(self, path: str, media_type: str, data: str) -> Part:
        """Add, as `add`, what is in the fields `media_type` and `data` of `path`."""
        self._check_type(f"{path}.media_type", media_type.lower())
        return self._add(_Source(f"{path}.data", None, data))

    def add_video(self, path: str, url: str, fps: float | None, fps_path: str) -> Part:
        """Return the video whose frames are in `url`, `fps` of them in a second. Raises
        `RequestError` that names `path` or `fps_path`.
        """
        self._check_read("video", path)
        frames = frames_of(path, url)
        self._num_frames += num_frames_of(frames)
        if self._num_frames > self._config.max_video_frames:
            raise RequestError(
                f"{path}: the videos of this request have more than "
                f"{self._config.max_video_frames} frames together, by --max-video-frames",
                path,
            )
        try:
            Video((), fps)
        except RequestError as error:
            raise RequestError(f"{fps_path}: {error}", fps_path) from error
        self.sources.append(_Source(path, None, frames, "video", fps))
        return {"type": "video"}

    def rename(self, error: RequestError) -> None:
        """Let an error of the engine name the part of the body, where it names an image."""
        found = _BY_ENGINE.fullmatch(error.param or "")
        kind, i = (found[1], int(found[2])) if found is not None else ("", 0)
        paths = [source.path for source in self.sources if source.kind == kind]
        if found is not None and i < len(paths):
            path = paths[i]
            message = str(error).replace(found[0], path)
            error.args = (message if path in message else f"{path}: {message}",)
            error.param = path

    def _check_type(self, path: str, media_type: str) -> None:
        if media_type not in MEDIA_TYPES:
            known = ", ".join(sorted(MEDIA_TYPES))
            raise RequestError(
                f"{path}: images of type {media_type[:64]!r} are not supported, only {known}", path
            )

    def _check_read(self, kind: str, path: str) -> None:
        if self._refusals[kind]:
            raise RequestError(f"{path}: {self._refusals[kind]}", path)

    def _add(self, source: _Source) -> Part:
        self._check_read("image", source.path)
        if sum(other.kind == "image" for other in self.sources) == self._config.max_images:
            raise RequestError(
                f"{source.path} is one image too many: a request may have "
                f"{self._config.max_images}, by --max-images",
                source.path,
            )
        self.sources.append(source)
        return {"type": "image"}


class ImageLoader:
    """Brings them. Of one event loop, to be closed at its end."""

    def __init__(self, config: ImageConfig) -> None:
        self._config = config
        self._fetcher = ImageFetcher(config.image_domain)
        # One thread: what takes long is done where images are processed.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-images")
        self._num_bytes = 0  # of images as they were sent, until no request has them

    async def show(self, conversation: Conversation, images: BodyMedia) -> Prompt:
        """Return the conversation with its images, whose headers are known to be good and within
        limits. Raises `RequestError` that names the part, `EngineOverloadedError` if others' take
        too much.
        """
        sources = images.sources
        limit = self._config.image_memory_gib * 2**30
        if self._num_bytes > limit:
            raise EngineOverloadedError(
                f"images that wait to be prepared take {self._num_bytes / 2**20:.0f} MiB, more "
                f"than image_memory_gib ({self._config.image_memory_gib:g})"
            )
        allowance = Allowance(self._config)
        brought: dict[str, dict[int, Any]] = {"image": {}, "video": {}}

        async def bring(i: int, source: _Source) -> None:
            with _blamed(source):
                work = self._bring_frames if source.kind == "video" else self._bring
                brought[source.kind][i] = await work(f"{source.kind}s[{i}]", source, allowance)

        try:
            async with asyncio.TaskGroup() as group:
                for kind in brought:
                    those = [source for source in sources if source.kind == kind]
                    for i, source in enumerate(those):
                        group.create_task(bring(i, source))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        images.sources = [source._replace(base64="") for source in sources]  # only paths are left
        in_order = ([own[i] for i in range(len(own))] for own in brought.values())
        return MultimodalPrompt(conversation, *in_order)

    async def close(self) -> None:
        """Stop fetching images and end the thread."""
        await self._fetcher.close()
        self._executor.shutdown(wait=False)

    async def _bring(self, name: str, source: _Source, allowance: Allowance) -> EncodedImage:
        if source.url is not None:
            async with allowance.fetches:  # waiting here costs a request none of its time
                data = await self._fetcher.fetch(
                    source.url, allowance.take_bytes, self._config.image_timeout
                )
        else:
            allowance.take_bytes(len(source.base64) * 3 // 4)
            data = await self._in_thread(decode_base64, source.base64)
        image = await self._in_thread(EncodedImage, data, name)
        self._hold(image, allowance)
        return image

    async def _bring_frames(self, name: str, source: _Source, allowance: Allowance) -> Video:
        allowance.take_bytes(len(source.base64) * 3 // 4)
        frames = await self._in_thread(read_frames, source.base64, name)
        for frame in frames:
            self._hold(frame, allowance)
        return Video(frames, source.fps)

    def _hold(self, image: EncodedImage, allowance: Allowance) -> None:
        """Count the memory of an image until no request has it."""
        num_bytes = image.num_bytes  # beforehand: images end in other threads, too
        self._num_bytes += num_bytes
        weakref.finalize(image, self._release, num_bytes).atexit = False
        allowance.take_pixels(image.header)

    def _release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)


@contextmanager
def _blamed(source: _Source) -> Iterator[None]:
    """Blame the part for the errors inside the block."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{source.path}: {error}", source.path) from error
