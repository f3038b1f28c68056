"""What the images and frames of one request may take together: bytes, pixels, fetches at once.

Knows sizes and limits; knows no part of a body.
"""

import asyncio

from aioserve.config import ImageConfig
from aioserve.errors import RequestError
from aioserve.multimodal.decoding import Header
from aioserve.multimodal.fetching import AT_ONCE_FOR_REQUEST


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
