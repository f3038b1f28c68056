"""From settings to a `StepExecutor` on this CPU: what fits, in which type, on how many threads.

Runs on the thread that computes. The choices are made, and told, here; how weights are read and how
a step is done is known elsewhere.
"""

import logging
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import torch

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.grammars import GrammarCompiler
from aioserve.kernels import KernelsUnavailableError, compute_thread_ids
from aioserve.kv_cache import WindowSpec
from aioserve.model_info import ModelInfo
from aioserve.runner.attention.backend import KVCacheSpec, WindowLayers
from aioserve.runner.batch_parts import BatchParts
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.compiled_attention import create_attention_backend
from aioserve.runner.cpu.compute_threads import ComputeThreads
from aioserve.runner.cpu.compute_type import with_dtype, with_kv_dtype
from aioserve.runner.cpu.drafts import CpuDraftRunner
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.memory import (
    MIB,
    check_memory,
    choose_num_kv_blocks,
    choose_num_state_slots,
)
from aioserve.runner.cpu.prepared import PreparedModel
from aioserve.runner.cpu.rows import PagedRows
from aioserve.runner.cpu.windows import find_window_layers, make_window_spec
from aioserve.runner.drafter import Drafter
from aioserve.runner.ngram import ngram_drafter
from aioserve.runner.served_model import ServedModel
from aioserve.runner.tensor_parallel.group import Ranks

if TYPE_CHECKING:
    from aioserve.runner.drafts import Draft

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_on_cpu(
    config: EngineConfig,
    info: ModelInfo,
    grammars: GrammarCompiler | None = None,
    ranks: Ranks | None = None,
) -> StepExecutor:
    """Load the weights and allocate the KV cache. With `ranks`, the share of one of them, on its
    share of the threads. Raises `ConfigError`.
    """
    num_ranks = 1 if ranks is None else ranks.size
    num_threads = config.runner.threads or machine.default_num_threads()
    num_threads = max(1, num_threads // num_ranks)
    is_fixed = config.runner.threads is not None or num_threads == 1
    with ExitStack() as undo:
        threads = ComputeThreads(num_threads, _fix_threads if is_fixed else _start_threads)
        undo.callback(threads.close)
        machine.keep_freed_memory()
        model, draft, num_encoder_bytes = _models(config, info, ranks)
        machine.give_back_freed_memory()
        if model.reads_rows and config.cache.kv_cache_dtype != "auto":
            raise ConfigError(
                f"cache.kv_cache_dtype is {config.cache.kv_cache_dtype}, which is not served for "
                f"{model.name}: leave it out"
            )
        spec, block_size = with_kv_dtype(model.kv_cache_spec, config), config.cache.block_size
        bytes_per_token = spec.bytes_per_token
        if draft is not None:
            draft_spec = with_kv_dtype(draft.spec, config)
            bytes_per_token += draft_spec.bytes_per_token + draft.state_bytes
        num_other_bytes = _make_state_slots(config, model, bytes_per_token)
        found = find_window_layers(config, model, info.max_model_len, ranks)
        window_spec: WindowSpec | None = None
        window_layers: WindowLayers | None = None
        if found:
            others = bytes_per_token - spec.part(found).bytes_per_token
            made = make_window_spec(config, spec, found, info.max_model_len, others)
            if made is not None:
                window_spec, window_layers, num_other_bytes = made
                bytes_per_token = others
        num_blocks = 0
        if ranks is None or ranks.is_first:  # one pool, and each has its heads of every block
            in_all = bytes_per_token * num_ranks
            num_other_bytes += num_encoder_bytes
            num_blocks = choose_num_kv_blocks(config, in_all, info.max_model_len, num_other_bytes)
        if ranks is not None:
            num_blocks = int(ranks.told_by_first([num_blocks])[0])
        backend: AttentionBackend
        if model.reads_rows:
            backend = PagedRows(spec, num_blocks, block_size)
        else:
            backend = create_attention_backend(spec, num_blocks, block_size, window_layers)
        undo.callback(backend.close)
        drafter: Drafter | None
        if ranks is not None and not ranks.is_first:
            drafter = None  # its guesses come with the steps
        elif draft is None:
            drafter = ngram_drafter(config.speculation)
        else:
            draft_backend = create_attention_backend(draft_spec, num_blocks, block_size)
            drafter = draft.make_drafter(config, CpuDraftRunner(draft_backend, block_size))
        undo.pop_all()
    parts = BatchParts(
        model,
        config.scheduler.max_num_seqs,
        info.max_model_len,
        block_size,
        info.vocab_size,
        grammars=grammars,
        eos_token_ids=info.eos_token_ids,
        drafter=drafter,
        windows=window_spec,
    )
    executor = StepExecutor(
        model,
        backend,
        threads,
        parts,
        # A step planned ahead would not know which of them are right.
        # States cannot be taken back.
        takes_guesses=config.scheduler.depth == 1 and model.states is None,
        windows=window_spec,
        repeats_steps=ranks is None and model.states is None,
    )
    num_tokens = num_blocks * block_size
    logger.info(
        "%s: %s, %.1fM parameters; attention: %s%s; KV pool: %d blocks, %d tokens, up to %.0f MiB "
        "as it fills; %d threads%s%s",
        model.name,
        str(model.kv_cache_spec.dtype).removeprefix("torch."),
        model.num_parameters / 1e6,
        backend.description,
        ", int8 cache" if spec.dtype is torch.int8 else "",
        num_blocks,
        num_tokens,
        num_tokens * bytes_per_token / MIB,
        num_threads,
        "" if is_fixed else ", fewer while steps wait for a core",
        "" if ranks is None else f"; so on each of {num_ranks} ranks",
    )
    return executor


def _models(
    config: EngineConfig, info: ModelInfo, ranks: Ranks | None
) -> "tuple[ServedModel, Draft | None, int]":
    """The model as an earlier start has prepared it, or as its files have it; what makes guesses
    for it; and the bytes that outputs of its image encoder may take. Raises `ConfigError`.
    """
    prepared: PreparedModel | None = None
    is_alone = ranks is None and config.speculation.speculative_method != "draft"
    if is_alone and config.model.fused and config.model.keep_prepared:
        with suppress(OSError, RuntimeError, KernelsUnavailableError):
            prepared = PreparedModel(info, with_dtype(config.model))
    if prepared is not None:

        def check(num_bytes: int, spec: KVCacheSpec) -> None:
            size = with_kv_dtype(spec, config).bytes_per_token
            check_memory(config, num_bytes, size, info.max_model_len)

        if (model := prepared.read(check)) is not None:
            return model, None, 0
    from aioserve.runner.cpu.models import load_models  # it brings `transformers`

    loaded = load_models(config, info, ranks)
    if prepared is not None:
        prepared.keep(loaded[0])
    return loaded


def _make_state_slots(config: EngineConfig, model: ServedModel, bytes_per_token: int) -> int:
    """The memory of the states, if the model has any; returns its bytes. Raises `ConfigError`."""
    if model.states is None:
        if config.cache.num_state_slots is not None:
            raise ConfigError(
                f"cache.num_state_slots is {config.cache.num_state_slots}, but no layer of "
                f"{model.name} has a state: leave it out"
            )
        return 0
    size = model.states.bytes_per_slot
    num_slots = choose_num_state_slots(config, size, is_shared=bool(bytes_per_token))
    model.states.allocate(num_slots)
    logger.info(
        "%s: states of %.2f MiB a request; %d slots for them, up to %.0f MiB as they fill",
        model.name,
        size / MIB,
        num_slots,
        num_slots * size / MIB,
    )
    return num_slots * size


def _start_threads(count: int) -> list[int]:
    torch.set_num_threads(count)
    return compute_thread_ids(count)


def _fix_threads(count: int) -> tuple[int, ...]:
    torch.set_num_threads(count)
    return ()
