"""What a model gets when it is loaded: decided by the same rules for the CPU and for CUDA.

A side states its types, finds how many KV blocks fit, and carries the plan out. Knows settings,
models and sizes; knows no device. Begins with the parts that the batch of a runner has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import SCALE_BYTES, KVCacheSpec, WindowLayers
from aioserve.runner.batch.input_batch import BatchPart, LaterPart
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.served_model import ServedModel
from aioserve.support.parts import Brought

if TYPE_CHECKING:
    from aioserve.kv_cache import WindowSpec
    from aioserve.runner.batch.drafter import Drafter, DraftRows, LoadedDraft
    from aioserve.runner.batch.masks import BoundRows
    from aioserve.runner.interface import OutputCompiler
    from aioserve.runner.ranks import Ranks


#: Choices of `cache.kv_cache_dtype` besides "auto": the side that serves each, and the type.
_KV_TYPES = {"int8": ("the CPU", torch.int8), "fp8": ("CUDA", torch.float8_e4m3fn)}


# The parts of a batch: a new part gets its line here. A part that not every request needs is made,
# and its module loaded, when the first request asks for it; a part of few models, when such a model
# is served.


#: What parts of aioserve bring for the batch, by the names of what it is about.
PARTS = Brought[Callable[..., Any]]("batch parts")

_GRAMMAR, _BUDGET = "sampling_params.structured_outputs", "sampling_params.thinking_budget"


class BatchParts:
    """The parts of one batch; `all` in the order in which they are called."""

    def __init__(
        self,
        model: ServedModel,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        grammars: "OutputCompiler | None" = None,
        eos_token_ids: Sequence[int] = (),
        drafter: "Drafter | None" = None,
        most_with_drafts: float = math.inf,
        windows: "WindowSpec | None" = None,
    ) -> None:
        """Without `grammars`, no request may ask for structured outputs or thinking budgets. With
        guesses of `drafter` a step of as many rows as the last one has fewer than
        `most_with_drafts` tokens, or as many without them.
        """
        self.sizes = max_num_seqs, max_model_len, block_size  # as `InputBatch` takes them
        self.sampling = SamplingColumns(max_num_seqs, vocab_size)
        self.drafter, self._most_with_drafts = drafter, most_with_drafts
        self._compiler, self._vocab_size, self._eos_token_ids = grammars, vocab_size, eos_token_ids
        parts: list[BatchPart[Any] | LaterPart | None] = [
            self.sampling,
            LaterPart(("sampling_params.prompt_logprobs",), _prompt_rows),
            LaterPart(("pooling_params",), _pooled_rows),
            LaterPart(("adapter_id",), lambda: self.adapters),
            model.image_encoder,
        ]
        if model.states is not None:
            parts.append(PARTS["states"](max_num_seqs, model.states.take_back))
        if windows is not None:
            parts.append(PARTS["windows"](max_num_seqs, max_model_len, block_size))
        # A budget's matcher stands among those of grammars.
        parts.append(LaterPart((_GRAMMAR, _BUDGET), lambda: self.grammars))
        parts.append(LaterPart((_BUDGET,), self._thinking_rows))
        parts.append(None if drafter is None else self.drafts)
        self.all = tuple(part for part in parts if part is not None)

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that are guessed for a row; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.length.max_tokens

    @property
    def has_matchers(self) -> bool:
        """Whether a row has a grammar or a thinking budget."""
        return "grammars" in self.__dict__ and bool(self.grammars.rows)

    @cached_property
    def grammars(self) -> "BoundRows":
        """The part that masks logits of rows with a grammar or a thinking budget, by matchers."""
        made: BoundRows = PARTS["grammars"](self._compiler, self._vocab_size, self._eos_token_ids)
        return made

    @cached_property
    def adapters(self) -> BatchPart[Any]:
        """Loaded LoRA adapters, and those of rows."""
        made: BatchPart[Any] = PARTS["adapters"]()
        return made

    @cached_property
    def drafts(self) -> "DraftRows":
        """The part that guesses tokens, by the drafter or where a grammar leaves no choice."""
        from aioserve.runner.batch.drafter import DraftRows

        def grammars() -> "BoundRows | None":
            return self.grammars if self.has_matchers else None

        return DraftRows(self.drafter, self.sampling, grammars, self._most_with_drafts)

    def _thinking_rows(self) -> BatchPart[Any]:
        made: BatchPart[Any] = PARTS["thinking"](self._compiler, self.grammars)
        return made


def _prompt_rows() -> BatchPart[Any]:
    from aioserve.runner.batch.prompt_rows import PromptRows

    return PromptRows()


def _pooled_rows() -> BatchPart[Any]:
    from aioserve.runner.batch.prompt_rows import PooledRows

    return PooledRows()


# The plan.


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
        speculation, most = self.config.speculation, math.inf
        if not speculation.drafts_surely:  # then they are to change no bit
            is_ahead = self.config.scheduler.pipeline_depth == 2
            most = 0 if is_ahead or self.model.states is not None else self.model.alone_below
        if self.ranks is None or self.ranks.is_first:  # guesses reach the others with the steps
            if speculation.drafts_by_ngrams and most:
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
            most_with_drafts=most,
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
