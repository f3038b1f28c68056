"""The MTP layer of a served model: found in the model's own checkpoint, and loaded beside it.

Knows names of weights and settings; what the layer computes is known to `mtp`.
"""

import logging

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.loader import quiet_transformers
from aioserve.runner.models.long_rope import with_factors_chosen
from aioserve.runner.served_model import ServedModel, Taps
from aioserve.runner.spec_decode.draft_source import Draft, DraftPlace, DraftSource
from aioserve.runner.spec_decode.head_drafter import draft_of_head
from aioserve.runner.spec_decode.mtp import LAYOUTS, MtpHead, load_body, one_layer_config
from aioserve.runner.spec_decode.shared_head import whole_head
from aioserve.runner.spec_decode.telling_model import TellingModel
from aioserve.runner.tensor_parallel.group import Ranks

logger = logging.getLogger(__name__)


class MtpSource(DraftSource):
    """The first MTP layer of a checkpoint; of several the others are not read."""

    has_files = False  # they are those of the model

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        """Raises `ConfigError` if there is no such layer."""
        super().__init__(info)
        self.num_states = info.hidden_size
        num_layers = info.hf_config.num_hidden_layers
        with info.source.open_weights() as weights:
            found = [(layout, layout.weights(weights, num_layers)) for layout in LAYOUTS]
        self._layout, self._names = next(
            ((layout, names) for layout, names in found if names), (LAYOUTS[0], {})
        )
        if not self._names:
            names = " or ".join(
                layout.prefix.format(n=num_layers) + layout.projection for layout in LAYOUTS
            )
            raise ConfigError(
                f"speculation.speculative_method is {config.speculation.speculative_method}, but "
                f"{info.source.path} has no MTP layer (no {names}): take ngram, or a draft model"
            )
        if type(info.hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"{info.source.path} has an MTP layer of a family that is not in transformers: "
                "take ngram, or a draft model"
            )
        self._hf_config = one_layer_config(with_factors_chosen(info.hf_config, info.max_model_len))
        self._head: Tensor | None = None  # of several ranks, which share it by tokens: all of it

    @property
    def hf_config(self) -> object:
        return self._hf_config

    @torch.inference_mode()
    def meet(self, target: ServedModel, ranks: Ranks) -> None:
        if not ranks.least(target.halves is not None):
            return  # told when it is loaded
        assert target.halves is not None, "so all ranks say"
        head = whole_head(target.halves, target.kv_cache_spec.dtype, self.num_states, ranks)
        with ranks.together():
            if ranks.is_first and head is None:
                raise ConfigError(f"the head of {target.name} does more than multiply, and ranks "
                                  "share it: leave speculation.speculative_method out")  # fmt: skip
        self._head = head

    def follow(self, target: ServedModel) -> ServedModel:
        assert target.halves is not None, "the first rank has them"
        return TellingModel(target, target.halves, Taps(()))

    @torch.inference_mode()
    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        halves, embedding = target.halves, target.embedding
        if halves is None or embedding is None:
            raise ConfigError(
                f"{target.name}, does not tell of its hidden states, which an MTP layer needs: "
                "leave speculation.speculative_method out, or take ngram"
            )
        layout, path = self._layout, self.info.source.path
        if len(self._names.keys() & layout) < 3:
            raise ConfigError(f"the MTP layer in {path} lacks one of its norms")
        with self.info.source.open_weights() as stored, quiet_transformers():
            weights = {own: stored[name]() for own, name in self._names.items()}
            dtype = target.kv_cache_spec.dtype
            parts = {name: weights.pop(name).to(place.device, dtype) for name in layout[1:4]}
            size = target_info.hidden_size
            for name, part in parts.items():
                shape = [size, 2 * size] if name == layout.projection else [size]
                if list(part.shape) != shape:
                    raise ConfigError(
                        f"the MTP layer in {path} has a {name} of {list(part.shape)}, not {shape}"
                    )
            try:
                body = load_body(self._hf_config, weights, dtype).to(place.device)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        telling = TellingModel(target, halves, Taps(()))
        logits = halves.logits if self._head is None else place.linear(self._head)
        head = MtpHead(body, layout, parts, embedding, logits)
        logger.info("drafts by its MTP layer, %.1fM parameters", head.num_parameters / 1e6)
        return draft_of_head(self.info, head, telling.taps, telling)
