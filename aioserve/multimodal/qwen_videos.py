"""Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, prepared as `transformers` does without sampling.

The video processors of `transformers` need torchvision, for what torch does as well: pixels are the
same to the bit. The encoders of these families see `temporal_patch_size` frames at once, and no
others beside them, so each such group is an input of its own. Imported once a model needs it, as it
brings `transformers`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resized_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resized_video
from transformers.video_processing_utils import VideoProcessorMixin

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.multimodal.families import GRID, TURN
from aioserve.multimodal.given import VideoSize
from aioserve.multimodal.video_settings import VideoSettings

_FPS = 2.0  # what the models were trained with, and what is sampled for them by default


class Qwen2Videos:
    """Those of Qwen2-VL: a group of frames is one step of time."""

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
        """The tokens of a video that the encoder has rows for. Raises `ValueError`."""
        height, width = self._resized(size)
        num_groups = -(-size.num_frames // self._settings.temporal_patch_size)
        return num_groups * (height // self._settings.side) * (width // self._settings.side)

    def arrays(
        self, frames: Iterator[np.ndarray], size: VideoSize, fps: float | None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """The rows, patches, grid and place in time of each group of frames, in order. One that
        is not full repeats the last frame.
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
        """A mark for each row."""
        return self.placeholder * sum(num_rows)

    def _sized(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """With the size under its newer names."""
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
        """By how much each group turns more than the first."""
        return np.arange(num_groups)

    def _normalized(self, frame: np.ndarray, height: int, width: int) -> np.ndarray:
        """[3, height, width] of float32."""
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
    """Those of Qwen2.5-VL: steps of time are as long as the time between groups of frames."""

    def _times(self, num_groups: int, fps: float | None) -> np.ndarray:
        own, rate = self._settings, self._vision.tokens_per_second
        seconds = np.float32(own.temporal_patch_size / (fps or own.fps or _FPS))
        times = np.arange(num_groups, dtype=np.float32) * (np.float32(rate) * seconds)
        return times.astype(np.int64)


class Qwen3Videos(Qwen2Videos):
    """Those of Qwen3-VL: a text before each group of frames says when it is."""

    processor = "Qwen3VLVideoProcessor"
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "patch_size": 16,
        "max_video_tokens": 768,
    }

    def text(self, num_rows: Sequence[int], size: VideoSize, fps: float | None) -> str:
        """The mean time of the frames of each group, and a mark for each row between two others."""
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
