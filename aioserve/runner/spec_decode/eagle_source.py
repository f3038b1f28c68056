"""The directory of an EAGLE-3 head: how the head is loaded for the model that it is made for.

Knows files and which layers the head looks at; knows nothing about steps.
"""

import logging

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.models.long_rope import with_factors_chosen
from aioserve.runner.served_model import ServedModel, Taps
from aioserve.runner.spec_decode.draft_source import Draft, DraftPlace, DraftSource
from aioserve.runner.spec_decode.eagle import NUM_TAPS, EagleHead, read_eagle, tapped_layers
from aioserve.runner.spec_decode.head_drafter import draft_of_head
from aioserve.runner.tensor_parallel.group import Ranks

logger = logging.getLogger(__name__)


class EagleSource(DraftSource):
    """One layer that continues from what three layers of the served model thought."""

    def __init__(self, info: ModelInfo, target_info: ModelInfo) -> None:
        super().__init__(info)
        self.num_states = NUM_TAPS * target_info.hidden_size
        self._num_layers = int(target_info.hf_config.num_hidden_layers)
        self._layers = tapped_layers(info.source.known_config, self._num_layers)
        self._taps: Taps | None = None

    def meet(self, target: ServedModel, ranks: Ranks) -> None:
        # A model that is not fused is run for it, and that takes all ranks.
        if self._num_layers > max(self._layers):
            self._taps = target.tap(self._layers)

    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        path, num_layers, layers = self.info.source.path, self._num_layers, self._layers
        if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(
                f"the EAGLE-3 head {path} looks at layers {layers}: three of the {num_layers} of "
                f"{target.name} are needed"
            )
        config, weights = read_eagle(path, target_info.hidden_size, target_info.vocab_size)
        taps = self._taps or target.tap(layers)
        if taps is None or target.embedding is None:
            raise ConfigError(
                f"{target.name} does not tell what enters its layers, which an EAGLE-3 head needs"
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
