"""Which models see, by the `model_type` of their configurations, and what is special about each.

Data, and nothing that computes. What a family's processor makes of an image, and what its encoder
makes of that, is the business of `transformers`.
"""

from functools import reduce

import msgspec

from aioserve.model_source.info import ModelInfo

GRID = "image_grid_thw"  # patches of an image in time, height and width: [1, 3]
#: Of frames of a video whose tokens turn by time: by how much their time is behind the beginning of
#: the video, and the position behind that at which text goes on, 0 but for the last: [1, 2].
TURN = "video_turn"


class Family(msgspec.Struct, frozen=True):
    """Models that take images in the same way."""

    model_type: str
    #: What the encoder reads of an image, as arguments of `get_image_features`.
    arrays: tuple[str, ...]
    #: Whether its tokens turn by time, height and width, and text goes on behind the largest.
    axes: bool = False
    #: Whether its tokens see each other in both directions: all of them run in one step.
    together: bool = False
    #: Whether they do so in layers with a sliding window alone.
    together_in_windows: bool = False
    #: Whether an image is prepared in another way where its prompt has others.
    beside: bool = False
    #: Whether the encoder gets one image at a time: of several, each would attend to all, masked.
    apart: bool = False
    #: The module whose output [n, hidden] is [1, n, hidden] here: what follows, in transformers
    #: 5.23.0, drops a first dimension of one, which is that of an image of one token.
    unsqueezed: str = ""
    #: Names in the configuration of marks that are embedded as padding, in replies as well.
    blank: tuple[str, ...] = ()
    #: A name in the configuration and its value, of models of this type that belong here; None: of
    #: those that belong nowhere before.
    only: tuple[str, str] | None = None
    #: The name of our class that is the processor, where that of `transformers` cannot be had
    #: without torchvision.
    processor: str = ""
    #: The name of our class that is the image processor, for the same reason.
    image_processor: str = ""
    #: The module of the model that makes rows of the encoder's output, where `get_image_features`
    #: does not.
    projector: str = ""
    #: The name of our class that prepares videos (`FamilyVideos`), each as
    #: several inputs that the encoder reads as images; empty: videos are not read.
    videos: str = ""


_SIZED = ("pixel_values", "image_sizes")
_PLACED = ("pixel_values", "image_position_ids")
_BLANK = ("image_token_id", "video_token_id", "audio_token_id")
_FAMILIES = [
    Family("idefics3", ("pixel_values", "pixel_attention_mask")),
    Family("smolvlm", ("pixel_values", "pixel_attention_mask")),
    Family("gemma3", ("pixel_values",), together=True),
    Family(
        "gemma4",
        _PLACED,
        together=True,
        together_in_windows=True,
        blank=_BLANK,
        only=("text_config.use_bidirectional_attention", "vision"),
    ),
    Family("gemma4", _PLACED, blank=_BLANK),
    Family("internvl", ("pixel_values",)),
    Family(
        "llava",
        _SIZED,
        apart=True,
        only=("vision_config.model_type", "pixtral"),
        processor="PixtralProcessor",
    ),
    Family("llava", ("pixel_values",)),
    Family(
        "llama4",
        ("pixel_values",),
        processor="Llama4TileProcessor",
        image_processor="Llama4ImageProcessor",
        projector="multi_modal_projector",
    ),
    Family("llava_next", _SIZED),
    Family("llava_onevision", (*_SIZED, "batch_num_images"), beside=True),
    Family(
        "mistral3",
        _SIZED,
        apart=True,
        processor="PixtralProcessor",
        unsqueezed="model.multi_modal_projector",
    ),
    Family("qwen2_vl", ("pixel_values", GRID), axes=True, videos="Qwen2Videos"),
    Family("qwen2_5_vl", ("pixel_values", GRID), axes=True, videos="Qwen25Videos"),
    Family("qwen3_vl", ("pixel_values", GRID), axes=True, videos="Qwen3Videos"),
    Family("qwen3_vl_moe", ("pixel_values", GRID), axes=True, videos="Qwen3Videos"),
]
#: By `model_type`, in the order in which a model may belong to them.
FAMILIES = {
    known.model_type: tuple(f for f in _FAMILIES if f.model_type == known.model_type)
    for known in _FAMILIES
}


def family_of(info: ModelInfo) -> Family | None:
    """None for a model that reads text alone, as far as is known here."""
    for family in FAMILIES.get(info.source.model_type, ()):
        if getattr(info.whole_config, "vision_config", None) is None:
            return None
        if family.only is None:
            return family
        name, value = family.only
        found = reduce(
            lambda part, own: getattr(part, own, None), name.split("."), info.whole_config
        )
        if found == value:
            return family
    return None
