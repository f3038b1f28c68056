"""What a model gets when it is loaded: decided by the same rules for the CPU and for CUDA.

A side states its types, finds how many KV blocks fit, and carries the plan out. Knows settings,
models and sizes; knows no device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import SCALE_BYTES, KVCacheSpec, WindowLayers
from aioserve.runner.batch_parts import BatchParts
from aioserve.runner.served_model import ServedModel

if TYPE_CHECKING:
    from aioserve.kv_cache import WindowSpec
    from aioserve.runner.batch.drafter import Drafter, LoadedDraft
    from aioserve.runner.interface import OutputCompiler
    from aioserve.runner.ranks import Ranks

#: Choices of `cache.kv_cache_dtype` besides "auto": the side that serves each, and the type.
_KV_TYPES = {"int8": ("the CPU", torch.int8), "fp8": ("CUDA", torch.float8_e4m3fn)}


@dataclass(frozen=True, slots=True)
class SideTypes:
    """The types in which one side computes, and in which it keeps K and V."""

    kv_cache: str  # what `cache.kv_cache_dtype` may be there besides "auto"
    without_bfloat16: str  # what `model.dtype` "auto" means where bfloat16 is slow
    is_bfloat16_fast: Callable[[], bool]

    def resolve(self, config: ModelConfig) -> ModelConfig:
        """Return the model's settings with the dtype "auto" resolved."""
        if config.dtype != "auto":
            return config
        dtype = "bfloat16" if self.is_bfloat16_fast() else self.without_bfloat16
        return msgspec.structs.replace(config, dtype=dtype)

    def keep(self, spec: KVCacheSpec, config: EngineConfig) -> KVCacheSpec:
        """`spec` in the type in which K and V are kept. Raises `ConfigError` for a type of the
        other side, and for heads that the type does not fit.
        """
        wanted = config.cache.kv_cache_dtype
        if wanted == "auto":
            return spec
        side, dtype = _KV_TYPES[wanted]
        if wanted != self.kv_cache:
            raise ConfigError(
                f"cache.kv_cache_dtype is {wanted}, which is for {side}: give {self.kv_cache}, or "
                "leave it out"
            )
        dims = [dim for layer in spec.layers for dim in (layer.key_head_dim, layer.value_head_dim)]
        if dtype is torch.int8 and (odd := [dim for dim in dims if dim % SCALE_BYTES]):
            raise ConfigError(
                "cache.kv_cache_dtype is int8, which needs heads of a multiple of "
                f"{SCALE_BYTES}, but the model has heads of {odd[0]}: leave it out"
            )
        return KVCacheSpec(spec.layers, dtype)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A plan of what a model gets once it has its weights; of one rank, if there are several.
    `plan_load` makes it, and a side replaces what follows from its own memory: the fields that have
    a default.
    """

    config: EngineConfig
    info: ModelInfo
    model: ServedModel
    draft: "LoadedDraft | None"
    ranks: "Ranks | None"
    specs: Sequence[KVCacheSpec]  # of model and draft, in the type in which K and V are kept
    bytes_per_token: int  # of the KV pool
    num_other_bytes: int = 0  # of the memory for requests that states, windows and images take
    windows: "WindowSpec | None" = None  # of the layers in `window_layers`
    window_layers: WindowLayers | None = None
    num_blocks: int = 0  # of the KV pool

    @property
    def num_ranks(self) -> int:
        """How many ranks share the model: 1 if it is whole here."""
        return 1 if self.ranks is None else self.ranks.size

    def chosen_by_first(self, choose: Callable[[], int]) -> int:
        """Return what `choose` returns; of ranks, on the first one, which alone asks for free
        memory.
        """
        return choose() if self.ranks is None else self.ranks.chosen_by_first(choose)

    @property
    def description(self) -> str:
        """The type in which the model computes, and its size."""
        dtype = str(self.model.kv_cache_spec.dtype).removeprefix("torch.")
        return f"{dtype}, {self.model.num_parameters / 1e6:.1f}M parameters"

    def make_parts(
        self, grammars: "OutputCompiler | None", make_runner: "Callable[[], Any]"
    ) -> BatchParts:
        """Return the parts of the batch. `make_runner` is called for a draft: what runs its
        passes.
        """
        drafter: Drafter | None = None
        speculation = self.config.speculation
        if self.ranks is None or self.ranks.is_first:  # guesses reach the others with the steps
            if speculation.speculative_method == "ngram":
                from aioserve.runner.batch.drafter import DRAFTERS

                drafter = DRAFTERS["ngram"](speculation)
            if self.draft is not None:
                drafter = self.draft.make_drafter(self.config, make_runner())
        return BatchParts(
            self.model,
            self.config.scheduler.max_num_seqs,
            self.info.max_model_len,
            self.config.cache.block_size,
            self.info.vocab_size,
            grammars=grammars,
            eos_token_ids=self.info.eos_token_ids,
            drafter=drafter,
            windows=self.windows,
        )


def plan_load(
    types: SideTypes,
    config: EngineConfig,
    info: ModelInfo,
    model: ServedModel,
    draft: "LoadedDraft | None",
    ranks: "Ranks | None",
) -> LoadPlan:
    """Return the plan before memory is shared out. Raises `ConfigError` if K and V cannot be kept
    so.
    """
    if model.reads_rows and config.cache.kv_cache_dtype != "auto":
        raise ConfigError(
            f"cache.kv_cache_dtype is {config.cache.kv_cache_dtype}, which is not served for "
            f"{model.name}: leave it out"
        )
    specs = [types.keep(model.kv_cache_spec, config)]
    bytes_per_token = specs[0].bytes_per_token
    if draft is not None:
        specs.append(types.keep(draft.kv_cache_spec, config))
        bytes_per_token += specs[1].bytes_per_token + draft.state_bytes
        model = draft.target
    return LoadPlan(config, info, model, draft, ranks, specs, bytes_per_token)
