"""Videos in bodies: the frames that a data: URL holds, as vLLM has it.

Files of videos are not read. Knows nothing of requests, nor what a model makes of frames.
"""

from collections.abc import Sequence

from aioserve.errors import RequestError
from aioserve.multimodal.decoding import EncodedImage, decode_base64

MEDIA_TYPE = "video/jpeg"
FORM = f"data:{MEDIA_TYPE};base64,FRAME,FRAME,..."


def frames_of(path: str, url: str) -> str:
    """The frames in base64, with commas between. Raises `RequestError` that names `path`."""
    kind, _, frames = url.partition(",")
    if kind.lower() != f"data:{MEDIA_TYPE};base64":
        raise RequestError(
            f"{path} must hold the frames of the video, each an image in base64: {FORM}; files of "
            "videos are not read",
            path,
        )
    return frames


def num_frames_of(frames: str) -> int:
    """How many there are in what `frames_of` returns."""
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
