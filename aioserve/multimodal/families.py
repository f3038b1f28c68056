"""Which models see, by the `model_type` of their configurations, and what is special about each.

Data, and nothing that computes. What a family's processor makes of an image, and what its encoder
makes of that, is the business of `transformers`.
"""

import msgspec

from aioserve.model_info import ModelInfo

GRID = "image_grid_thw"  # patches of an image in time, height and width: [1, 3]


class Family(msgspec.Struct, frozen=True):
    """Models that take images in the same way."""

    model_type: str
    #: What the encoder reads of an image, as arguments of `get_image_features`.
    arrays: tuple[str, ...]
    #: Whether its tokens turn by time, height and width, and text goes on behind the largest.
    axes: bool = False
    #: Whether its tokens see each other in both directions: all of them run in one step.
    together: bool = False


_FAMILIES = [
    Family("idefics3", ("pixel_values", "pixel_attention_mask")),
    Family("smolvlm", ("pixel_values", "pixel_attention_mask")),
    Family("gemma3", ("pixel_values",), together=True),
    Family("internvl", ("pixel_values",)),
    Family("llava", ("pixel_values",)),
    Family("llava_next", ("pixel_values", "image_sizes")),
    Family("qwen2_vl", ("pixel_values", GRID), axes=True),
    Family("qwen2_5_vl", ("pixel_values", GRID), axes=True),
    Family("qwen3_vl", ("pixel_values", GRID), axes=True),
    Family("qwen3_vl_moe", ("pixel_values", GRID), axes=True),
]
FAMILIES = {family.model_type: family for family in _FAMILIES}


def family_of(info: ModelInfo) -> Family | None:
    """None for a model that reads text alone, as far as is known here."""
    return FAMILIES.get(info.source.model_type)
