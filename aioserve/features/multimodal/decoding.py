"""Encoded images to images of PIL, checked by what their headers say before a pixel is decoded.

What can be wrong with the bytes of an image is refused here, by `RequestError` that says what. It
blocks and is meant for threads. Knows nothing about where bytes come from, nor what models want.
"""

import binascii
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

#: By the names that Pillow has for them: the media types that clients give them. Of those that
#: move, the first picture is shown.
FORMATS = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp"),
}
MEDIA_TYPES = frozenset(media_type for types in FORMATS.values() for media_type in types)

# Decoded in pieces, because the decoder keeps the GIL: a piece takes about a millisecond.
_BASE64_PIECE = 2**19
_EXIF_ORIENTATION = 0x0112


class Header(NamedTuple):
    """The header of an image, which says its size in pixels."""

    width: int  # of the picture when it is upright
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes) -> Header:
    """Raises `RequestError` for what is no image, or one of a format that is not served."""
    with _opened(data) as image:
        # What stands behind the pixels of a PNG is only read when the pixels are decoded.
        is_told = image.format != "PNG" or "exif" in image.info
        lies = is_told and _orientation(image) > 4
        return Header(*(reversed(image.size) if lies else image.size))


def decode(data: bytes) -> "Image":
    """Return the (first) picture, upright, as RGB: what `transformers.image_utils.load_image` and
    an image processor make of it, and of 16 bits the upper 8. Raises `RequestError` for one that is
    damaged or cut off.
    """
    from PIL import ImageOps

    with _opened(data) as image:
        image.load()
        upright: Image = image
        if _orientation(image) != 1:
            upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # else all but the darkest would be white
            upright = _upper_bits(upright)
        return on_white(upright.convert("RGB"))


def on_white(image: "Image") -> "Image":
    """Return the image as RGB, white where it is transparent, as `transformers` has it."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def decode_base64(text: str) -> bytes:
    """Raises `RequestError` for anything but the standard alphabet and its padding."""
    pieces = []
    try:
        for begin in range(0, len(text), _BASE64_PIECE):
            piece = text[begin : begin + _BASE64_PIECE]
            if "=" in piece and begin + len(piece) < len(text.rstrip("=")):
                raise binascii.Error("padding before the end")
            pieces.append(binascii.a2b_base64(piece.encode("ascii"), strict_mode=True))
    except (UnicodeEncodeError, binascii.Error) as error:
        raise RequestError(f"the image is not valid base64: {error}") from error
    return b"".join(pieces)


class EncodedImage:
    """An image that is decoded when its pixels are looked at, in the thread that does: of all
    requests that wait to be processed, only the bytes are in memory. For the rest an array
    [height, width, 3] of uint8.
    """

    dtype = "uint8"

    def __init__(self, data: bytes, name: str) -> None:
        """`name` is what errors call it. Raises `RequestError` as `read_header`."""
        self._data, self._name = data, name
        self.header = read_header(data)

    @property
    def num_bytes(self) -> int:
        """Size of the image as it was sent."""
        return len(self._data)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the image, from its header."""
        return self.header.height, self.header.width, 3

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray":
        """Raises `RequestError` as `decode`, with its name as `param`."""
        import numpy as np

        try:
            return np.asarray(decode(self._data), dtype=dtype)
        except RequestError as error:
            error.param = self._name
            raise


@contextmanager
def _opened(data: bytes) -> Iterator["Image"]:
    """Blame `data` for whatever Pillow raises inside the block."""
    from PIL import Image, UnidentifiedImageError

    _hush()
    try:
        with Image.open(io.BytesIO(data), formats=tuple(FORMATS)) as image:
            yield image
    except UnidentifiedImageError as error:
        raise RequestError(f"these bytes are no image of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"the image is too large: {error}") from error
    except Exception as error:  # damaged files make it raise what its parsers meet
        said = str(error)[:200] or type(error).__name__
        raise RequestError(f"the image cannot be decoded: {said}") from error


@cache
def _hush() -> None:
    """Ignore Pillow's warnings: strangers choose them, and could fill the log."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _orientation(image: "Image") -> int:
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))


def _upper_bits(image: "Image") -> "Image":
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
