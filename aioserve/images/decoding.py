"""Encoded images to images of PIL, checked by what their headers say before a pixel is decoded.

What can be wrong with the bytes of an image is refused here, by `RequestError` that says what. It
blocks and is meant for threads. Knows nothing about where bytes come from, nor what models want.
"""

import binascii
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from aioserve.errors import RequestError

if TYPE_CHECKING:
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
    """What an image says of itself."""

    width: int  # in pixels, as they are stored
    height: int

    @property
    def num_pixels(self) -> int:
        """Of the picture that is shown."""
        return self.width * self.height


def read_header(data: bytes) -> Header:
    """Raises `RequestError` for what is no image, or one of a format that is not served."""
    with _opened(data) as image:
        return Header(*image.size)


def decode(data: bytes) -> "Image":
    """The (first) picture, upright, as RGB: what `transformers.image_utils.load_image` makes of it,
    and of 16 bits the upper 8. Raises `RequestError` for one that is damaged or cut off.
    """
    from PIL import Image, ImageOps

    try:
        with _opened(data) as image:
            image.load()
            upright: Image.Image = image
            if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
                upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # else all but the darkest would be white
                upright = _upper_bits(upright)
            return upright.convert("RGB")
    except RequestError:
        raise
    except Image.DecompressionBombError as error:
        raise RequestError(f"the image is too large: {error}") from error
    except Exception as error:  # damaged files make Pillow raise what its parsers meet
        raise RequestError(f"the image cannot be decoded: {_said(error)}") from error


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
        raise RequestError(f"the image is not valid base64: {_said(error)}") from error
    return b"".join(pieces)


class EncodedImages(Sequence[Any]):
    """Images that are decoded when they are looked at, in the thread that does: of all requests
    that wait to be processed, only their bytes are in memory.
    """

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    @overload
    def __getitem__(self, index: int) -> "Image": ...
    @overload
    def __getitem__(self, index: slice) -> "EncodedImages": ...
    def __getitem__(self, index: int | slice) -> "Image | EncodedImages":
        """Raises `RequestError` that names `images[index]`."""
        if isinstance(index, slice):
            return EncodedImages(self._encoded[index])
        try:
            return decode(self._encoded[index])
        except RequestError as error:
            error.param = f"images[{index}]"
            raise

    def __iter__(self) -> Iterator["Image"]:
        return (self[index] for index in range(len(self)))


def _opened(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except UnidentifiedImageError as error:
        raise RequestError(f"these bytes are no image of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"the image is too large: {error}") from error
    except Exception as error:
        raise RequestError(f"the image cannot be read: {_said(error)}") from error


def _upper_bits(image: "Image") -> "Image":
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))


def _said(error: Exception) -> str:
    """In so many words, whatever file names or data it quotes."""
    return str(error)[:200] or type(error).__name__
