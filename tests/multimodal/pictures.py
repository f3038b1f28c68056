"""Small pictures in the formats of clients, and files that are none."""

import base64
import io
import struct
import zlib
from typing import Any


def picture(width: int = 32, height: int = 24, mode: str = "RGB", seed: int = 0) -> Any:
    """An image of PIL with noise in it."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Any = None, kind: str = "PNG", **options: Any) -> bytes:
    """As a file of that format."""
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes | None = None, media_type: str = "image/png") -> str:
    """As clients send it."""
    return f"data:{media_type};base64,{base64.b64encode(data or encoded()).decode()}"


def bomb(width: int = 50_000, height: int = 50_000) -> bytes:
    """A few bytes of PNG that say they are a picture of that size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")
