"""What `--draft-model` names: whether it fits the served model, and how it is loaded beside that.

Each side says how it loads and where it computes. Knows settings, tokenizers and what lies on disk;
knows nothing about steps.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.attention.backend import (
    AttentionCall,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
)
from aioserve.runner.fused.ops import Linear
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.draft_length import ModelDraftLength
from aioserve.runner.spec_decode.eagle import (
    NUM_TAPS,
    EagleHead,
    is_eagle,
    read_eagle,
    tapped_layers,
)
from aioserve.runner.spec_decode.eagle_drafter import EagleDrafter
from aioserve.runner.spec_decode.model_drafter import DraftModel, DraftRunner, Forward, ModelDrafter

logger = logging.getLogger(__name__)


class Draft(NamedTuple):
    """A drafter that is loaded; its KV cache is not made yet."""

    info: ModelInfo
    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]
    state_bytes: int  # for each token of the served model, besides K and V
    forward: Forward  # a pass of the draft model: to see what it takes
    make: Callable[..., ModelDrafter]

    def make_drafter(self, config: EngineConfig, runner: DraftRunner) -> ModelDrafter:
        """`runner` has a KV cache for `kv_cache_spec`."""
        return self.make(
            runner,
            ModelDraftLength(config.speculation.num_speculative_tokens),
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self.info.max_model_len,
            max_step_tokens=config.scheduler.step_budget(self.info.max_model_len),
        )


def find_draft(config: EngineConfig, info: ModelInfo) -> ModelInfo | None:
    """The model that makes guesses for that of `info`, if one is to. Raises `ConfigError`."""
    speculation = config.speculation
    if speculation.speculative_method != "draft":
        return None
    assert speculation.draft_model is not None, "EngineConfig.check_effects"
    settings = msgspec.structs.replace(
        config.model, model=speculation.draft_model, revision=None, max_model_len=None
    )
    if speculation.draft_model.endswith(".gguf"):  # served in the types that it has
        settings = msgspec.structs.replace(settings, quantization=None)
    own_length = ModelInfo(settings).max_model_len
    length = min(own_length, info.max_model_len)
    draft = ModelInfo(msgspec.structs.replace(settings, max_model_len=length))
    if is_eagle(draft.source.known_config):
        return draft  # which has no tokenizer; what else must fit is seen when it is read
    if (why_not := _difference(info, draft)) is not None:
        raise ConfigError(
            f"speculation.draft_model {speculation.draft_model} has another vocabulary than "
            f"{config.model.model}: {why_not}"
        )
    return draft


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


def load_draft(
    info: ModelInfo | None,
    target: ServedModel,
    target_info: ModelInfo,
    *,
    load: Callable[[ModelInfo], ServedModel],
    linear: Callable[[Tensor], Linear],
    device: torch.device,
) -> Draft | None:
    """The model of `info`, or the head for `target`, on the `device` of that; None without `info`.
    `load` is how models get there, `linear` the product with a weight there. Raises `ConfigError`.
    """
    if info is None:
        return None
    stated = info.source.known_config
    if not is_eagle(stated):
        model = load(info)
        if model.reads_rows:
            raise ConfigError(f"{model.name}, cannot make drafts: take another draft model")
        logger.info("drafts by %s, %.1fM parameters", model.name, model.num_parameters / 1e6)
        sizes = info.vocab_size, target_info.vocab_size
        make_model = partial(DraftModel, model, *sizes)
        calls = model.attention_calls
        return Draft(info, model.kv_cache_spec, calls, 0, model.forward, make_model)
    num_layers = len(target.attention_calls)
    layers = tapped_layers(stated, num_layers)
    if len(layers) != NUM_TAPS or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"the EAGLE-3 head {info.source.path} looks at layers {layers}: three of the "
            f"{num_layers} of {target.name} are needed"
        )
    config, weights = read_eagle(info.source.path, target_info.hidden_size, target_info.vocab_size)
    taps = target.tap(layers)
    if taps is None:
        raise ConfigError(
            f"{target.name} does not tell of its layers, which an EAGLE-3 head needs: only fused "
            "models do (model.fused)"
        )
    dtype = target.kv_cache_spec.dtype
    head = EagleHead(config, weights, taps.embedding, dtype, target_info.vocab_size, device, linear)
    logger.info("drafts by an EAGLE-3 head, %.1fM parameters", head.num_parameters / 1e6)
    state_bytes = NUM_TAPS * head.target_size * dtype.itemsize

    def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        shape = (len(inputs.slots), NUM_TAPS * head.target_size)
        states = head.combine(torch.zeros(shape, dtype=dtype, device=device))
        states = head.forward(inputs.input_ids, inputs.positions, states, attention)
        return head.logits(states[inputs.logits_rows])

    make_head = partial(EagleDrafter, head, taps)
    return Draft(info, head.kv_cache_spec, head.attention_calls, state_bytes, forward, make_head)
