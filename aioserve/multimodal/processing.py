"""From a text that mentions images to token ids, and to what the model's encoder is given.

An image is prepared by the processor that comes with the model, alone, so that what is made of it
depends on nothing else in the prompt. Knows processors of `transformers`; knows no scheduler and no
encoder. Used off the event loop.
"""

import hashlib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from aioserve.errors import ConfigError, RequestError, one_line
from aioserve.model_info import ModelInfo
from aioserve.multimodal.decoding import on_white
from aioserve.multimodal.families import Family
from aioserve.request import EncoderInput

MISSING_PILLOW = "images need Pillow, which is not installed: pip install 'aioserve[images]'"


# Of the longer side to the shorter: some processors make the shorter one as long as they like it,
# and what that makes of the longer one would fill any memory.
MAX_RATIO = 200


class Prepared(NamedTuple):
    """What became of one image."""

    text: str  # what stands in its place in the prompt
    num_rows: int  # how many of its tokens the encoder has a row for
    arrays: dict[str, np.ndarray]
    content_hash: str


class ImageProcessor:
    """The processor of one model."""

    def __init__(self, family: Family, info: ModelInfo, tokenizer: Any) -> None:
        """`tokenizer` is the model's; its processor may teach it tokens. Raises `ConfigError`."""
        if find_spec("PIL") is None:
            raise ConfigError(MISSING_PILLOW)
        self._family = family
        try:
            self._processor = load_processor(family, info, tokenizer)
        except Exception as error:  # transformers raises whatever the files provoke
            raise ConfigError(
                f"cannot read the image processor of {info.source.path}: {one_line(error)}"
            ) from error
        self.placeholder: str = self._processor.image_token  # in a text, one for each image
        self.token_id: int = info.whole_config.image_token_id
        if tokenizer.chat_template is None:  # older ones lie with the processor alone
            tokenizer.chat_template = self._processor.chat_template

    def least_tokens(self, images: Sequence[Any]) -> int:
        """How many tokens these stand for, as far as can be said before they are prepared. Raises
        `RequestError` for what is no image.
        """
        sizes = [_size(image, i) for i, image in enumerate(images)]
        if self._family.beside and len(images) > 1:  # fewer than it would be told
            return len(images)
        try:
            told = self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens
        except Exception:  # of a size that it cannot do: `prepare` of that image will say so
            return len(images)
        return sum(told)

    def prepare(self, images: Sequence[Any]) -> list[Prepared]:
        """What the processor makes of each. Raises `RequestError` that names one."""
        others = [_nothing()] if self._family.beside and len(images) > 1 else []
        return [self._prepare(image, i, others) for i, image in enumerate(images)]

    def expand(self, text: str, prepared: Sequence[Prepared]) -> str:
        """The text with all that images stand for."""
        pieces = text.split(self.placeholder)
        expanded = pieces[0]
        for own, piece in zip(prepared, pieces[1:], strict=True):
            expanded += own.text + piece
        return expanded

    def check_count(self, text: str, images: Sequence[Any]) -> None:
        """Raises `RequestError` unless `text` mentions that many images."""
        mentioned = text.count(self.placeholder)
        if mentioned != len(images):
            raise RequestError(
                f"the prompt mentions {mentioned} images ({self.placeholder!r}), and {len(images)} "
                "come with it",
                param="prompt",
            )

    def place(self, token_ids: list[int], prepared: Sequence[Prepared]) -> list[EncoderInput]:
        """Where in the tokens of such a text the images are."""
        places = np.flatnonzero(np.asarray(token_ids) == self.token_id)
        if len(places) != sum(own.num_rows for own in prepared):
            raise RequestError(
                f"the prompt has {len(places)} tokens of images, but its images are "
                f"{sum(own.num_rows for own in prepared)}",
                param="prompt",
            )
        items, first = [], 0
        for own in prepared:
            begin, end = int(places[first]), int(places[first + own.num_rows - 1]) + 1
            items.append(
                EncoderInput(
                    begin, end - begin, own.content_hash, own.arrays, self._family.together
                )
            )
            first += own.num_rows
        return items

    def _prepare(self, image: Any, i: int, others: list[Any]) -> Prepared:
        """`others` are images that make it prepared as one of several; each stands for as much."""
        shown = [_as_rgb(image, i), *others]
        try:
            made = self._processor(
                images=[shown] if others else shown,
                text=[self.placeholder * len(shown)],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
            arrays = {name: made[name] for name in self._family.arrays}
            if others:
                arrays = {name: array[:1] for name, array in arrays.items()}
            arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            replaced = made["text_replacement_offsets"][0][0]
        except RequestError:
            raise
        except Exception as error:  # Pillow and transformers raise what they like
            raise RequestError(
                f"the image cannot be prepared: {one_line(error)}", f"images[{i}]"
            ) from error
        num_rows = int((np.asarray(made["input_ids"]) == self.token_id).sum()) // len(shown)
        if not num_rows:
            raise RequestError("the image stands for no token", f"images[{i}]")
        return Prepared(replaced["replacement"], num_rows, arrays, self._hash(arrays))

    def _hash(self, arrays: dict[str, np.ndarray]) -> str:
        digest = hashlib.sha256(self._family.model_type.encode())
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.data)
        return digest.hexdigest()[:32]


def load_processor(family: Family, info: ModelInfo, tokenizer: Any) -> Any:
    """As `AutoProcessor` would, but for what is read of videos, which would need torchvision."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    path = info.source.path
    if family.image_processor:
        image_processor = _own(family.image_processor).from_pretrained(path, local_files_only=True)
    else:
        image_processor = transformers.AutoImageProcessor.from_pretrained(
            path, backend="pil", local_files_only=True
        )
    if family.processor:
        cls = _own(family.processor)
    else:
        cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[family.model_type])
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    names = [name for name in cls.get_attributes() if name in parts]

    class WithoutOthers(transformers.ProcessorMixin):  # type: ignore[misc]
        """Stands behind `cls`, which may hand on by name what it was not given."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = {name: value for name, value in kwargs.items() if value is not None}
            super().__init__(*args, **given)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return names

    own: Any = type(cls.__name__, (cls, WithoutOthers), {})
    stated, _ = cls.get_processor_dict(path, local_files_only=True)
    given = [parts.get(name) for name in cls.get_attributes()]
    return own.from_args_and_dict(given, stated)


def _own(name: str) -> Any:
    """A class of this package, by its module and name."""
    module, _, own = name.partition(":")
    return getattr(import_module(module), own)


def _size(image: Any, i: int) -> tuple[int, int]:
    """Height and width. Raises `RequestError` for what is no image."""
    from PIL import Image

    if isinstance(image, Image.Image):
        width, height = image.size
    else:
        shape = tuple(getattr(image, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or not str(image.dtype).endswith("uint8"):
            raise RequestError(
                "an image must be one of PIL, or an array [height, width, 3] of uint8, got "
                f"{type(image).__name__}{f' {list(shape)}' if shape else ''}",
                param=f"images[{i}]",
            )
        height, width = shape[:2]
    if not (height and width):
        raise RequestError(f"an image of {width} x {height} has no pixels", param=f"images[{i}]")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"an image of {width} x {height} is too narrow: one side may be {MAX_RATIO} times as "
            "long as the other",
            param=f"images[{i}]",
        )
    return height, width


def _nothing() -> Any:
    """An image of one pixel."""
    from PIL import Image

    return Image.new("RGB", (1, 1))


def _as_rgb(image: Any, i: int) -> Any:
    """The image as one of PIL, in RGB."""
    from PIL import Image

    _size(image, i)
    if not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    return on_white(image)
