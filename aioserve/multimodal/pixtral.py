"""The processor of Pixtral and Mistral 3, as `transformers` has it, without torchvision.

The module of `transformers` that has it imports torchvision for a function that the one for Pillow
has as well. Imported once a model needs it, as it brings `transformers`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.processing_utils import MultiModalData, ProcessorMixin


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
        """The text for which an image stands."""
        height, width = (int(n) // self.side for n in image_inputs["image_sizes"][image_idx])
        lines = [self.image_token * width] * height
        return self.image_break_token.join(lines) + self.image_end_token

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[tuple[int, int]], **_: Any
    ) -> MultiModalData:
        """The number of tokens for each image, by `image_sizes`: height and width in pixels."""
        longest, counts = self.image_processor.size["longest_edge"], []
        for size in image_sizes:
            height, width = get_resize_output_image_size(
                np.broadcast_to(np.uint8(0), (*size, 3)), (longest, longest), (self.side, self.side)
            )
            counts.append((width // self.side + 1) * (height // self.side))
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))
