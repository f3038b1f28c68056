"""The processor of Llama 4, as `transformers` has it, without torchvision.

An image is cut into tiles, and seen once more as a whole. Equal to what torchvision makes of it, as
torch resizes for both. Imported once a model needs it, as it brings `transformers` and torch.
"""

import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import Llama4Processor
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling
from transformers.processing_utils import ImagesKwargs, MultiModalData

Size = tuple[int, int]  # height and width

_SERVED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": PILImageResampling.BILINEAR,
}


class TileOptions(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    """The options of the image processor, by the names in its file."""

    max_patches: int  # tiles of an image at most
    resize_to_max_canvas: bool  # whether an image is enlarged as far as the tiles go


class Llama4ImageProcessor(PilBackend):  # type: ignore[misc]
    """Makes of each image its tiles, line by line, and behind several of them the whole image."""

    resample = PILImageResampling.BILINEAR
    image_mean = image_std = (0.5, 0.5, 0.5)
    size = {"height": 336, "width": 336}  # noqa: RUF012
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False
    valid_kwargs = TileOptions

    def __init__(self, **options: Any) -> None:
        """Raises `ValueError` for options that are not served."""
        super().__init__(**options)
        for name, served in _SERVED.items():
            if getattr(self, name) != served:
                raise ValueError(f"{name} must be {served!r}, got {getattr(self, name)!r}")
        self.side = self.size["height"]  # of a tile, in pixels
        if self.side != self.size["width"]:
            raise ValueError(f"size must be that of a square, got {self.size!r}")

    def tiles_of(self, size: Size) -> Size:
        """How many tiles, down and across, an image of that size is cut into."""
        height, width = self._canvas(size).tolist()
        return height // self.side, width // self.side

    def preprocess(
        self, images: Sequence[Any], return_tensors: Any = None, **_: Any
    ) -> BatchFeature:
        """`pixel_values`, [n, 3, side, side] of all tiles of all images, and `aspect_ratios`, the
        numbers of tiles down and across of each image.
        """
        arrays = [self.process_image(image, do_convert_rgb=True) for image in images]
        data = {
            "pixel_values": np.concatenate([self._tiles(array) for array in arrays]),
            "aspect_ratios": [self.tiles_of(array.shape[1:]) for array in arrays],
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _tiles(self, image: np.ndarray) -> np.ndarray:
        """[n, 3, side, side] of an image [3, height, width] of uint8."""
        side, canvas = self.side, self._canvas(image.shape[1:])
        pixels = torch.from_numpy(np.array(image, order="C"))
        small = _resized(pixels, self._size_on(image.shape[1:], canvas))
        height, width = canvas.tolist()
        padded = np.zeros((3, height, width), np.uint8)
        padded[:, : small.shape[1], : small.shape[2]] = small
        lines = padded.reshape(3, height // side, side, width // side, side)
        tiles = lines.transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, _resized(pixels, (side, side))[None]))
        return self._levels()[np.arange(3)[:, None, None], tiles]

    def _levels(self) -> np.ndarray:
        """[3, 256]: what becomes of each value of each color, in bfloat16 as in the original."""
        levels = torch.arange(256).to(torch.bfloat16).expand(3, -1) * self.rescale_factor
        of_color = (
            torch.tensor(given).to(levels.dtype) for given in (self.image_mean, self.image_std)
        )
        mean, std = (given.reshape(-1, 1) for given in of_color)
        found: np.ndarray = ((levels - mean) / std).float().numpy()
        return found

    def _canvas(self, size: Size) -> Tensor:
        """Height and width of the tiles together that fit best: those that it is enlarged on least,
        else reduced on least, and of these the smallest.
        """
        canvases = torch.tensor(_layouts(self.max_patches)) * self.side
        scales = (canvases / torch.tensor(size)).amin(1)
        enlarged = scales[scales >= 1]
        if not len(enlarged):
            scale = scales.max()
        else:
            scale = enlarged.max() if self.resize_to_max_canvas else enlarged.min()
        fitting = canvases[scales == scale]
        return fitting[fitting.prod(1).argmin()]

    def _size_on(self, size: Size, canvas: Tensor) -> Size:
        """Height and width of the image on its canvas, in its own shape; smaller ones are enlarged
        to one tile at most.
        """
        # What torch computes is in float32, which may round to another pixel: so it is where
        # `transformers` has a number of torch, and not where it has one of Python.
        limits: list[Any] = list(canvas)
        if not self.resize_to_max_canvas:
            sides = zip(size, canvas, strict=True)
            limits = [min(max(own, self.side), limit) for own, limit in sides]
        down, across = (limit / own for limit, own in zip(limits, size, strict=True))
        if across < down:
            height, width = min(math.floor(size[0] * across), limits[0]), limits[1]
        else:
            height, width = limits[0], min(math.floor(size[1] * down), limits[1])
        return max(int(height), 1), max(int(width), 1)


class Llama4TileProcessor(Llama4Processor):  # type: ignore[misc]
    """The processor of `transformers`, which knows besides how many tokens an image stands for."""

    def _get_num_multimodal_tokens(self, image_sizes: Sequence[Size], **_: Any) -> MultiModalData:
        """The number of tokens for each image, by `image_sizes`: height and width in pixels."""
        side = self.image_processor.side
        of_tile, counts = (side // self.patch_size) ** 2 // self.downsample_ratio, []
        for size in image_sizes:
            down, across = self.image_processor.tiles_of(size)
            tiles = down * across
            marks = 3 + (tiles if tiles > 1 else 0)  # one behind each tile, and around the whole
            counts.append(of_tile * (tiles + (tiles > 1)) + marks)
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))


def _layouts(max_tiles: int) -> list[Size]:
    """All numbers of tiles down and across; those of one shape beside each other."""
    found: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for down in range(1, count + 1):
            if count % down == 0:
                found.setdefault(down / (count // down), []).append((down, count // down))
    return [layout for layouts in found.values() for layout in layouts]


def _resized(image: Tensor, size: Size) -> np.ndarray:
    """As torchvision resizes an image [3, height, width] of uint8 on this CPU."""
    if image.shape[1:] == size:
        return image.numpy()
    is_native = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    whole = image if is_native or platform.machine() in ("aarch64", "arm64") else image.float()
    made = interpolate(whole[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    return (made if made.dtype is torch.uint8 else made.round().to(torch.uint8)).numpy()
