"""Processors that `transformers` has only with torchvision: Pixtral, Llama 4, videos of Qwen-VL.

Each gives what torchvision makes of an image or video, to the bit. Imported once a model needs it,
as it brings `transformers` and torch. Of the videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL the
encoders see `temporal_patch_size` frames at once, and no others beside them, so each such group is
an input of its own.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import Llama4Processor
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resized_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resized_video
from transformers.processing_utils import ImagesKwargs, MultiModalData, ProcessorMixin
from transformers.video_processing_utils import VideoProcessorMixin

from aioserve.errors import ConfigError
from aioserve.features.multimodal.prompt import VideoSettings, VideoSize
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import GRID, TURN


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """An image stands for a mark for each patch, one behind each line of patches, and one for the
    end in the place of the last of those.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",  # noqa: S107
        image_break_token: str = "[IMG_BREAK]",  # noqa: S107
        image_end_token: str = "[IMG_END]",  # noqa: S107
        **_: Any,
    ) -> None:
        """`spatial_merge_size` x `spatial_merge_size` patches are a token."""
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.side = patch_size * spatial_merge_size  # of a token, in pixels
        image_processor.patch_size = {"height": self.side, "width": self.side}
        self.image_token, self.image_break_token = image_token, image_break_token
        self.image_end_token = image_end_token
        marks = [image_token, image_break_token, image_end_token]
        self.image_token_ids = tokenizer.convert_tokens_to_ids(marks)
        self.image_token_id = self.image_token_ids[0]

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_: Any) -> str:
        """Return the text for which an image stands."""
        height, width = (int(n) // self.side for n in image_inputs["image_sizes"][image_idx])
        lines = [self.image_token * width] * height
        return self.image_break_token.join(lines) + self.image_end_token

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[tuple[int, int]], **_: Any
    ) -> MultiModalData:
        """Return the number of tokens for each image, by `image_sizes`: height and width in
        pixels.
        """
        longest, counts = self.image_processor.size["longest_edge"], []
        for size in image_sizes:
            height, width = get_resize_output_image_size(
                np.broadcast_to(np.uint8(0), (*size, 3)), (longest, longest), (self.side, self.side)
            )
            counts.append((width // self.side + 1) * (height // self.side))
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))


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
        """Return how many tiles, down and across, an image of that size is cut into."""
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
        """Return the number of tokens for each image, by `image_sizes`: height and width in
        pixels.
        """
        side = self.image_processor.side
        of_tile, counts = (side // self.patch_size) ** 2 // self.downsample_ratio, []
        for size in image_sizes:
            down, across = self.image_processor.tiles_of(size)
            tiles = down * across
            marks = 3 + (tiles if tiles > 1 else 0)  # one behind each tile, and around the whole
            counts.append(of_tile * (tiles + (tiles > 1)) + marks)
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))


def _layouts(max_tiles: int) -> list[Size]:
    """Return all numbers of tiles down and across; those of one shape beside each other."""
    found: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for down in range(1, count + 1):
            if count % down == 0:
                found.setdefault(down / (count // down), []).append((down, count // down))
    return [layout for layouts in found.values() for layout in layouts]


def _resized(image: Tensor, size: Size) -> np.ndarray:
    """Resize an image [3, height, width] of uint8 as torchvision does on this CPU."""
    if image.shape[1:] == size:
        return image.numpy()
    is_native = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    whole = image if is_native or platform.machine() in ("aarch64", "arm64") else image.float()
    made = interpolate(whole[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    return (made if made.dtype is torch.uint8 else made.round().to(torch.uint8)).numpy()


_FPS = 2.0  # what the models were trained with, and what is sampled for them by default


class Qwen2Videos:
    """Videos of Qwen2-VL: a group of frames is one step of time."""

    processor: ClassVar[str] = "Qwen2VLVideoProcessor"  # whose work this is
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "patch_size": 14,
        "max_video_tokens": 128_000,
    }

    def __init__(self, info: ModelInfo, tokenizer: Any) -> None:
        stated, _ = VideoProcessorMixin.get_video_processor_dict(
            info.source.path, local_files_only=True
        )
        name = stated.get("video_processor_type", self.processor)
        if name != self.processor:
            raise ConfigError(f"it is a {name}, and no {self.processor}")
        given = {key: value for key, value in stated.items() if value is not None}
        self._settings = msgspec.convert({**self.defaults, **self._sized(given)}, VideoSettings)
        self._vision = info.whole_config.vision_config
        self._tokenizer = tokenizer
        self.placeholder: str = getattr(tokenizer, "video_token", "<|video_pad|>")

    def num_tokens(self, size: VideoSize) -> int:
        """Return the tokens of a video that the encoder has rows for. Raises `ValueError`."""
        height, width = self._resized(size)
        num_groups = -(-size.num_frames // self._settings.temporal_patch_size)
        return num_groups * (height // self._settings.side) * (width // self._settings.side)

    def arrays(
        self, frames: Iterator[np.ndarray], size: VideoSize, fps: float | None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield the rows, patches, grid and place in time of each group of frames, in order. One
        that is not full repeats the last frame.
        """
        own = self._settings
        height, width = self._resized(size)
        grid = np.array([[1, height // own.patch_size, width // own.patch_size]], np.int64)
        num_rows = int(grid.prod()) // own.merge_size**2
        num_groups = -(-size.num_frames // own.temporal_patch_size)
        turns = self._turns(num_groups, max(height, width) // own.side, fps)
        for number in range(num_groups):
            left = size.num_frames - number * own.temporal_patch_size
            group = [next(frames) for _ in range(min(left, own.temporal_patch_size))]
            group += group[-1:] * (own.temporal_patch_size - len(group))
            pixels = np.stack([self._normalized(frame, height, width) for frame in group])
            arrays = {"pixel_values": self._patches(pixels), GRID: grid}
            yield num_rows, arrays | ({} if turns is None else {TURN: turns[number : number + 1]})

    def text(self, num_rows: Sequence[int], size: VideoSize, fps: float | None) -> str:
        """Return a mark for each row."""
        return self.placeholder * sum(num_rows)

    def _sized(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with the size under its newer names."""
        size = {**self.defaults["size"], **stated.get("size", {})}
        for name, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            size[name] = stated.get(older, size[name])
        return {**stated, "size": size}

    def _resized(self, size: VideoSize) -> tuple[int, int]:
        """Height and width of each frame for the encoder."""
        own, most = self._settings, self._settings.size.longest_edge
        if own.cap_pixels_per_frame:
            in_all = int(own.max_video_tokens * own.side**2 * 0.9)
            share = min(most, in_all * own.temporal_patch_size // size.num_frames)
            most = max(share, int(own.size.shortest_edge * 1.05))
        height, width = resized_frame(
            size.height, size.width, own.side, own.size.shortest_edge, most
        )
        return height, width

    def _turns(self, num_groups: int, extent: int, fps: float | None) -> np.ndarray | None:
        """[groups, 2], as `families.TURN`; text goes on `extent` behind the beginning."""
        turns = np.zeros((num_groups, 2), np.int64)
        turns[:, 0] = self._times(num_groups, fps)
        turns[-1, 1] = extent
        return turns

    def _times(self, num_groups: int, fps: float | None) -> np.ndarray:
        """Return by how much each group turns more than the first."""
        return np.arange(num_groups)

    def _normalized(self, frame: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the frame resized and normalized, as float32 [3, height, width]."""
        import torch
        from torch.nn.functional import interpolate

        pixels = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None].contiguous()
        if frame.shape[:2] != (height, width):
            pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        mean, std = (
            torch.tensor(values) * (1.0 / self._settings.rescale_factor)
            for values in (self._settings.image_mean, self._settings.image_std)
        )
        found: np.ndarray = (
            pixels[0].float().sub_(mean[:, None, None]).div_(std[:, None, None]).numpy()
        )
        return found

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        """[patches, values] of one group of frames [frames, 3, height, width]."""
        own = self._settings
        num_frames, channels, height, width = pixels.shape
        patch, merged = own.patch_size, own.merge_size
        tall, wide = height // own.side, width // own.side
        parts = pixels.reshape(num_frames, channels, tall, merged, patch, wide, merged, patch)
        parts = parts.transpose(2, 5, 3, 6, 1, 0, 4, 7)
        return np.ascontiguousarray(parts.reshape(tall * wide * merged**2, -1))


class Qwen25Videos(Qwen2Videos):
    """Videos of Qwen2.5-VL: steps of time are as long as the time between groups of frames."""

    def _times(self, num_groups: int, fps: float | None) -> np.ndarray:
        own, rate = self._settings, self._vision.tokens_per_second
        seconds = np.float32(own.temporal_patch_size / (fps or own.fps or _FPS))
        times = np.arange(num_groups, dtype=np.float32) * (np.float32(rate) * seconds)
        return times.astype(np.int64)


class Qwen3Videos(Qwen2Videos):
    """Videos of Qwen3-VL: a text before each group of frames says when it is."""

    processor = "Qwen3VLVideoProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "patch_size": 16,
        "max_video_tokens": 768,
    }

    def text(self, num_rows: Sequence[int], size: VideoSize, fps: float | None) -> str:
        """Return the mean time of the frames of each group, and a mark for each row between two
        others.
        """
        own = self._settings
        times = np.minimum(np.arange(len(num_rows) * own.temporal_patch_size), size.num_frames - 1)
        times = times / (fps or own.fps or _FPS)
        first, last = (
            times[:: own.temporal_patch_size],
            times[own.temporal_patch_size - 1 :: own.temporal_patch_size],
        )
        begin = getattr(self._tokenizer, "vision_start_token", "<|vision_start|>")
        end = getattr(self._tokenizer, "vision_end_token", "<|vision_end|>")
        return "".join(
            f"<{time:.1f} seconds>{begin}{self.placeholder * count}{end}"
            for time, count in zip((first + last) / 2, num_rows, strict=True)
        )

    def _sized(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        return dict(stated)

    def _resized(self, size: VideoSize) -> tuple[int, int]:
        own, most = self._settings, self._settings.size.longest_edge
        least_frames = own.temporal_patch_size
        if size.num_frames < least_frames:
            raise ValueError(f"a video for this model must have {least_frames} frames or more")
        if own.cap_pixels_per_frame:
            share = min(own.max_video_tokens * own.side**2, most // size.num_frames)
            most = max(share, int(own.size.shortest_edge * 1.05)) * size.num_frames
        height, width = resized_video(*size, least_frames, own.side, own.size.shortest_edge, most)
        return height, width

    def _turns(self, num_groups: int, extent: int, fps: float | None) -> np.ndarray | None:
        return None  # each group turns as an image does
