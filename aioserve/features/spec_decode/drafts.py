"""Which model makes drafts: the settings' choice, found before weights are read.

Each way of drafting with a model is one entry of `_METHODS`. Knows settings and what lies on disk.
"""

from collections.abc import Callable

import msgspec

from aioserve.config import EngineConfig
from aioserve.features.spec_decode.eagle import EagleSource, is_eagle
from aioserve.features.spec_decode.model_drafter import Draft, DraftCheckpoint, DraftSource
from aioserve.features.spec_decode.mtp import MtpSource
from aioserve.model_source.info import ModelInfo
from aioserve.runner.batch.drafter import DraftPlace
from aioserve.runner.ranks import Ranks
from aioserve.runner.served_model import ServedModel


def find_draft(config: EngineConfig, info: ModelInfo) -> DraftSource | None:
    """Return what makes drafts for the model of `info`, if a model is to. Raises `ConfigError`."""
    find = _METHODS.get(config.speculation.speculative_method)
    return None if find is None else find(config, info)


def load_draft(
    source: DraftSource | None,
    model: ServedModel,
    info: ModelInfo,
    place: DraftPlace,
    ranks: Ranks | None,
) -> tuple[ServedModel, Draft | None]:
    """Return the served `model` of `info` as it is to be run, and what makes drafts for it: on the
    first of several ranks, whole. Raises `ConfigError` if it does not fit.
    """
    if source is None:
        return model, None
    if ranks is None:
        return model, source.load(model, info, place)
    source.meet(model, ranks)
    with ranks.together():
        draft = source.load(model, info, place) if ranks.is_first else None
    return (model if ranks.is_first else source.follow(model)), draft


def _find_named(config: EngineConfig, info: ModelInfo) -> DraftSource:
    """Return what `speculation.draft_model` names: a smaller model, or an EAGLE-3 head."""
    name = config.speculation.draft_model
    assert name is not None, "EngineConfig.check_effects"
    settings = msgspec.structs.replace(config.model, model=name, revision=None, max_model_len=None)
    settings = msgspec.structs.replace(settings, activations=None)  # guesses of an exact model
    if name.endswith(".gguf"):  # served in the types that it has
        settings = msgspec.structs.replace(settings, quantization=None)
    own_length = ModelInfo(settings).max_model_len
    length = min(own_length, info.max_model_len)
    draft = ModelInfo(msgspec.structs.replace(settings, max_model_len=length))
    if is_eagle(draft.source.known_config):
        return EagleSource(draft, info)  # it has no tokenizer; what else must fit is seen later
    return DraftCheckpoint(draft, info)


_METHODS: dict[str, Callable[[EngineConfig, ModelInfo], DraftSource]] = {
    "draft": _find_named,
    "mtp": MtpSource,
}
