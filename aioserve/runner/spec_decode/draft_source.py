"""What makes drafts beside a served model: as it lies on disk, and once it is loaded.

The seam between settings and ways of drafting with a model. Knows sizes; knows nothing about steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.model_info import ModelInfo
from aioserve.runner.attention.backend import AttentionCall, KVCacheSpec
from aioserve.runner.fused.ops import Linear
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.draft_length import ModelDraftLength
from aioserve.runner.spec_decode.model_drafter import DraftRunner, Forward, ModelDrafter

if TYPE_CHECKING:
    from aioserve.runner.tensor_parallel.group import Ranks


class Draft(NamedTuple):
    """A drafter that is loaded; its KV cache is not made yet."""

    info: ModelInfo
    target: ServedModel  # the served model, as it is to be run while this drafts for it
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


class DraftPlace(NamedTuple):
    """The side on which a drafter is loaded: how models and products get there."""

    load: Callable[[ModelInfo], ServedModel]
    linear: Callable[[Tensor], Linear]  # the product with a weight
    device: torch.device


class DraftSource(ABC):
    """What will make drafts, found on disk before weights are read."""

    has_files = True  # whether its weights lie apart from those of the served model
    num_states = 0  # numbers of the served model's states that are kept for each of its tokens

    def __init__(self, info: ModelInfo) -> None:
        """`info`: the model in whose directory it lies."""
        self.info, self.config = info, info.config

    @property
    def hf_config(self) -> Any:
        """The configuration of the layers that draft."""
        return self.info.hf_config

    def meet(self, target: ServedModel, ranks: "Ranks") -> None:  # noqa: B027 - most need nothing
        """On all ranks, before the first one, which drafts, loads what it does so with: get what
        that needs of the others.
        """

    def follow(self, target: ServedModel) -> ServedModel:
        """The served model as the ranks run it that do not draft."""
        return target

    @abstractmethod
    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        """Read its weights. Raises `ConfigError` if it does not fit `target`."""
