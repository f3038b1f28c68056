"""Loads a vision model as two parts: its text model, and what sees.

Knows how `transformers` makes such a model; what serves the text model is decided by the loader.
"""

import torch

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.model_source.quantized import quantize_experts, quantize_linears
from aioserve.model_source.source import Rounding
from aioserve.multimodal.families import family_of
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION
from aioserve.runner.multimodal.image_encoder import ImageEncoder, num_deep_rows
from aioserve.runner.multimodal.shared_encoder import SharedImageEncoder
from aioserve.runner.multimodal.vision_language import TextPart, take_text_part
from aioserve.runner.tensor_parallel.group import Ranks
from aioserve.runner.tensor_parallel.shard import shard


def load_parts(
    info: ModelInfo, dtype: torch.dtype, rounding: Rounding | None, ranks: Ranks | None
) -> tuple[TextPart, ImageEncoder]:
    """On a CPU, the text model of the vision model of `info`, quantized as `rounding` says, and its
    image encoder, which is not. With `ranks`, the share that one of them has of the text model; an
    encoder is not shared out. Raises `ConfigError`.
    """
    family = family_of(info)
    assert family is not None, "the model sees"
    device = torch.device("cpu")
    whole = info.source.load_seeing_module(dtype, device, ATTN_IMPLEMENTATION)
    text = take_text_part(whole, family.blank)
    num_deep = num_deep_rows(info.whole_config)
    if num_deep >= info.hf_config.num_hidden_layers:
        raise ConfigError(
            f"{info.config.model} adds rows of images behind {num_deep} layers, and has "
            f"{info.hf_config.num_hidden_layers}"
        )
    if rounding is not None:
        quantize_linears(text, rounding)
        quantize_experts(text, rounding.inner)
    names = ("image_token_id", *(("video_token_id",) if family.videos else ()))
    token_ids = [getattr(info.whole_config, name) for name in names]
    if ranks is None:
        return text, ImageEncoder(whole, family, token_ids)
    shard(text, ranks, dtype)
    return text, SharedImageEncoder(whole, family, token_ids, ranks)
