"""What the processor that comes with a model makes of images: the arrays that the encoder reads.

An image is prepared alone, so that what is made of it depends on nothing else in the prompt. Knows
processors of `transformers`; knows no scheduler and no encoder. Used off the event loop.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from aioserve.errors import ConfigError, RequestError, one_line
from aioserve.model_info import ModelInfo
from aioserve.multimodal.families import Family
from aioserve.multimodal.given import as_rgb, size_of
from aioserve.multimodal.prepared import Mark, Prepared, PreparedInput

MISSING_PILLOW = "images need Pillow, which is not installed: pip install 'aioserve[images]'"


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
        self.mark = Mark("image", self._processor.image_token, info.whole_config.image_token_id)
        if tokenizer.chat_template is None:  # older ones lie with the processor alone
            tokenizer.chat_template = self._processor.chat_template

    def least_tokens(self, images: Sequence[Any]) -> int:
        """How many tokens these stand for, as far as can be said before they are prepared. Raises
        `RequestError` for what is no image.
        """
        sizes = [size_of(image, f"images[{i}]") for i, image in enumerate(images)]
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

    def _prepare(self, image: Any, i: int, others: list[Any]) -> Prepared:
        """`others` are images that make it prepared as one of several; each stands for as much."""
        shown = [as_rgb(image, f"images[{i}]"), *others]
        try:
            made = self._processor(
                images=[shown] if others else shown,
                text=[self.mark.placeholder * len(shown)],
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
        num_rows = int((np.asarray(made["input_ids"]) == self.mark.token_id).sum()) // len(shown)
        if not num_rows:
            raise RequestError("the image stands for no token", f"images[{i}]")
        prepared = PreparedInput.of(self._family.model_type, num_rows, arrays)
        return Prepared(replaced["replacement"], [prepared])


def _nothing() -> Any:
    """An image of one pixel."""
    from PIL import Image

    return Image.new("RGB", (1, 1))


def load_processor(family: Family, info: ModelInfo, tokenizer: Any) -> Any:
    """As `AutoProcessor` would, but for its processor of videos, which would need torchvision."""
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
