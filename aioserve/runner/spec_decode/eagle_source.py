"""The directory of an EAGLE-3 head: how the head is loaded for the model that it is made for.

Knows files and which layers the head looks at; knows nothing about steps.
"""

import logging

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.models.long_rope import with_factors_chosen
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.draft_source import Draft, DraftPlace, DraftSource
from aioserve.runner.spec_decode.eagle import NUM_TAPS, EagleHead, read_eagle, tapped_layers
from aioserve.runner.spec_decode.head_drafter import draft_of_head

logger = logging.getLogger(__name__)


class EagleSource(DraftSource):
    """One layer that continues from what three layers of the served model thought."""

    def __init__(self, info: ModelInfo, target_info: ModelInfo) -> None:
        super().__init__(info)
        self.num_states = NUM_TAPS * target_info.hidden_size

    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        path, num_layers = self.info.source.path, target_info.hf_config.num_hidden_layers
        layers = tapped_layers(self.info.source.known_config, num_layers)
        if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(
                f"the EAGLE-3 head {path} looks at layers {layers}: three of the {num_layers} of "
                f"{target.name} are needed"
            )
        config, weights = read_eagle(path, target_info.hidden_size, target_info.vocab_size)
        taps = target.tap(layers)
        if taps is None or target.embedding is None:
            raise ConfigError(
                f"{target.name} does not tell of its layers, which an EAGLE-3 head needs: only "
                "fused models do (model.fused)"
            )
        head = EagleHead(
            with_factors_chosen(config, target_info.max_model_len),
            weights,
            target.embedding,
            target.kv_cache_spec.dtype,
            target_info.vocab_size,
            place.device,
            place.linear,
        )
        logger.info("drafts by an EAGLE-3 head, %.1fM parameters", head.num_parameters / 1e6)
        return draft_of_head(self.info, head, taps, target)
