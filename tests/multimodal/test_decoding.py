"""Bytes to pictures: as `transformers` loads them, and what is refused."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from aioserve.errors import RequestError
from aioserve.features.multimodal.decoding import (
    FORMATS,
    EncodedImage,
    decode,
    decode_base64,
    read_header,
)
from tests.multimodal.pictures import bomb, encoded, picture


def as_transformers(data: bytes):
    """What `load_image` of `transformers` and an image processor make of it."""
    from transformers.image_transforms import convert_to_rgb
    from transformers.image_utils import load_image

    return convert_to_rgb(load_image(Image.open(io.BytesIO(data))), return_numpy=True)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(), "JPEG", exif=exif)


def moving(kind: str) -> bytes:
    frames = [picture(seed=i) for i in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=20)


def transparent_palette() -> bytes:
    return encoded(picture(mode="RGBA").quantize(16), "PNG", transparency=3)


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(encoded(kind=kind), id=kind) for kind in FORMATS),
        *(
            pytest.param(encoded(picture(mode=mode)), id=mode)
            for mode in ("RGBA", "L", "LA", "P", "1")
        ),
        pytest.param(encoded(picture(mode="CMYK"), "JPEG"), id="CMYK"),
        pytest.param(transparent_palette(), id="transparent palette"),
        pytest.param(encoded(transparency=picture().getpixel((0, 0))), id="transparent color"),
        *(pytest.param(oriented(k), id=f"orientation {k}") for k in range(1, 9)),
        *(pytest.param(moving(kind), id=f"moving {kind}") for kind in ("GIF", "WEBP", "PNG")),
    ],
)
def test_a_picture_is_what_transformers_makes_of_it(data):
    decoded = decode(data)
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), as_transformers(data))


def test_sixteen_bits_keep_their_upper_eight():
    deep = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    decoded = np.asarray(decode(encoded(Image.fromarray(deep))))
    np.testing.assert_array_equal(decoded[0, :, 0], [0, 0, 1, 128, 255])


def test_a_header_tells_the_size_of_a_bomb_without_a_pixel():
    assert read_header(bomb(9_000, 9_000)).num_pixels == 81_000_000
    with pytest.raises(RequestError, match="too large"):
        read_header(bomb())


@pytest.mark.parametrize("data", [b"", b"not an image", b"<svg/>", encoded(kind="TIFF")])
def test_other_bytes_are_no_image(data):
    with pytest.raises(RequestError, match="no image of PNG, JPEG, WEBP, GIF, BMP"):
        read_header(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_is_cut_off_is_refused(kind):
    whole = encoded(picture(200, 200), kind)
    with pytest.raises(RequestError, match="image"):
        decode(whole[: len(whole) // 2])


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_image_is_an_array_that_is_decoded_when_it_is_looked_at(orientation):
    data = oriented(orientation)
    image = EncodedImage(data, "images[1]")
    assert image.shape == ((24, 32, 3) if orientation == 1 else (32, 24, 3))
    assert np.asarray(image).shape == image.shape
    np.testing.assert_array_equal(np.asarray(image), as_transformers(data))
    broken = EncodedImage(data[:-200], "images[1]")
    assert broken.shape == image.shape
    with pytest.raises(RequestError, match="cannot be decoded") as raised:
        np.asarray(broken)
    assert raised.value.param == "images[1]"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 3 * 2**17 - 1, 3 * 2**17, 3 * 2**17 + 1, 10**6])
def test_base64_of_any_length_is_decoded_in_pieces(size):
    data = np.random.default_rng(size).bytes(size)
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "text",
    [
        *("AAA", "A===", "AAAA*AAA", "AA==AAAA", "AAÄA", "AA\nAA", "AA-_", "A" * 2**19 + "AAA"),
        "A" * (2**19 - 2) + "==" + "AAAA",  # padding at the end of a piece, not of all
    ],
)
def test_what_is_no_base64_is_refused(text):
    with pytest.raises(RequestError, match="not valid base64"):
        decode_base64(text)


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_anywhere_is_shown_or_refused(kind):
    """No parser's own error comes through, nor a picture of another size than its header tells."""
    whole, random = encoded(picture(40, 30), kind), np.random.default_rng(0)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for place in random.integers(0, len(damaged), 4):
            damaged[place] = random.integers(0, 256)
        try:
            header = read_header(bytes(damaged))
            if header.num_pixels < 10**6:
                assert decode(bytes(damaged)).size == header
        except RequestError:
            num_refused += 1
    assert num_refused
