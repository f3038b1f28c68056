"""A smaller model that makes drafts: whether its vocabulary fits, and how it is loaded.

Knows tokenizers and settings; knows nothing about steps.
"""

import json
import logging
from functools import partial
from typing import Any

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.draft_source import Draft, DraftPlace, DraftSource
from aioserve.runner.spec_decode.model_drafter import DraftModel

logger = logging.getLogger(__name__)


class DraftCheckpoint(DraftSource):
    """A whole model of its own."""

    def __init__(self, info: ModelInfo, target_info: ModelInfo) -> None:
        """Raises `ConfigError` if texts mean other tokens to it."""
        super().__init__(info)
        if (why_not := _difference(target_info, info)) is not None:
            raise ConfigError(
                f"speculation.draft_model {info.config.model} has another vocabulary than "
                f"{target_info.config.model}: {why_not}"
            )

    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        model = place.load(self.info)
        if model.reads_rows or model.states is not None:
            why = "" if model.states is None else ", whose layers have states"
            raise ConfigError(f"{model.name}{why}, cannot make drafts: take another draft model")
        logger.info("drafts by %s, %.1fM parameters", model.name, model.num_parameters / 1e6)
        make = partial(DraftModel, model, self.info.vocab_size, target_info.vocab_size)
        spec, calls = model.kv_cache_spec, model.attention_calls
        return Draft(self.info, target, spec, calls, 0, model.forward, make)


def _difference(info: ModelInfo, draft: ModelInfo) -> str | None:
    """Why texts mean other tokens to `draft`; None if they do not. One may have more tokens than
    the other as long as neither tokenizer knows these: models are padded to round sizes.
    """
    is_padded = draft.vocab_size != info.vocab_size
    sizes = f"{draft.vocab_size:,} tokens, not {info.vocab_size:,}"
    if info.config.skip_tokenizer_init:
        return f"{sizes}, and without a tokenizer it is unknown which" if is_padded else None
    ours = info.tokenizer.get_vocab()
    try:
        theirs = draft.tokenizer.get_vocab()
    except ConfigError:
        if is_padded:
            return sizes
        raise
    if ours != theirs:
        token = min(ours.items() ^ theirs.items())[0]
        place = f"{token!r} is {theirs.get(token)} in it, and {ours.get(token)} here"
        return f"{sizes}; {place}" if is_padded else place
    if is_padded and max(ours.values()) >= min(draft.vocab_size, info.vocab_size):
        return sizes
    if _merges(info.tokenizer) != _merges(draft.tokenizer):
        return "its tokenizer joins other pieces"
    return None


def _merges(tokenizer: Any) -> object:
    """Which tokens a tokenizer makes of two, in their order, as far as it does so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str())["model"].get("merges")
