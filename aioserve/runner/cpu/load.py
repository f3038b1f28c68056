"""From settings to a `StepExecutor` on this CPU: what fits, in which type, on how many threads.

Runs on the thread that computes. The choices are made, and told, here; how weights are read and how
a step is done is known elsewhere.
"""

import logging
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aioserve.config import EngineConfig
from aioserve.kernels import KernelsUnavailableError, compute_thread_ids
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import KVCacheSpec
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.attention import create_attention_backend
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.kv_memory import (
    CPU_TYPES,
    MIB,
    AttentionBackend,
    check_memory,
    choose_num_kv_blocks,
)
from aioserve.runner.cpu.machine import ComputeThreads
from aioserve.runner.cpu.prepared import PreparedModel
from aioserve.runner.load_plan import LoadPlan, plan_load
from aioserve.runner.served_model import ServedModel

if TYPE_CHECKING:
    from aioserve.runner.batch.drafter import LoadedDraft
    from aioserve.runner.interface import OutputCompiler
    from aioserve.runner.ranks import Ranks

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_on_cpu(
    config: EngineConfig,
    info: ModelInfo,
    grammars: "OutputCompiler | None" = None,
    ranks: "Ranks | None" = None,
) -> StepExecutor:
    """Load the weights and allocate the KV cache. With `ranks`, the share of one of them, on its
    share of the threads. Raises `ConfigError`.
    """
    num_threads = config.runner.threads or machine.default_num_threads()
    num_threads = max(1, num_threads // (1 if ranks is None else ranks.size))
    is_fixed = config.runner.threads is not None or num_threads == 1
    with ExitStack() as undo:
        threads = ComputeThreads(num_threads, _fix_threads if is_fixed else _start_threads)
        undo.callback(threads.close)
        machine.keep_freed_memory()
        model, draft, num_encoder_bytes = _models(config, info, ranks)
        machine.give_back_freed_memory()
        plan = plan_load(CPU_TYPES, config, info, model, draft, ranks)
        plan = replace(plan, num_other_bytes=num_encoder_bytes * plan.num_ranks)
        plan = _with_blocks(_with_others(plan))
        backend = _make_backend(plan)
        undo.callback(backend.close)
        parts = plan.make_parts(grammars, partial(_make_draft_runner, plan))
        executor = StepExecutor(plan, backend, threads, parts)
        undo.pop_all()
    num_tokens = plan.num_blocks * config.cache.block_size
    logger.info(
        "%s: %s; attention: %s%s; KV pool: %d blocks, %d tokens, up to %.0f MiB as it fills; "
        "%d threads%s%s",
        model.name,
        plan.description,
        backend.description,
        ", int8 cache" if plan.specs[0].dtype is torch.int8 else "",
        plan.num_blocks,
        num_tokens,
        num_tokens * plan.bytes_per_token / MIB,
        num_threads,
        "" if is_fixed else ", fewer while steps wait for a core",
        "" if ranks is None else f"; so on each of {ranks.size} ranks",
    )
    return executor


def _make_backend(plan: LoadPlan) -> AttentionBackend:
    """Return the KV cache of the model, and what computes attention on it."""
    spec, block_size = plan.specs[0], plan.config.cache.block_size
    if plan.model.reads_rows:
        from aioserve.runner.cpu.torch_attention import PagedRows

        return PagedRows(spec, plan.num_blocks, block_size)
    in_bytes = plan.config.model.activations == "int8"
    return create_attention_backend(
        spec, plan.num_blocks, block_size, plan.window_layers, in_bytes=in_bytes
    )


def _make_draft_runner(plan: LoadPlan) -> Any:
    """Return what runs the passes of a drafting model."""
    from aioserve.runner.batch.drafter import DRAFTERS

    block_size = plan.config.cache.block_size
    backend = create_attention_backend(plan.specs[1], plan.num_blocks, block_size)
    return DRAFTERS["cpu passes"](backend, block_size)


def _with_others(plan: LoadPlan) -> LoadPlan:
    """Return the plan with what the model keeps beside KV blocks of all its layers: states, and
    blocks of layers with a sliding window. Raises `ConfigError`.
    """
    cache = plan.config.cache
    windows = [call.options.sliding_window for call in plan.model.attention_calls]
    is_set = cache.num_state_slots is not None or cache.num_window_blocks is not None
    if not is_set and plan.model.states is None and not any(windows):
        return plan
    from aioserve.support.parts import load

    planned: LoadPlan = load("states on a cpu", "memory")(plan)
    return planned


def _with_blocks(plan: LoadPlan) -> LoadPlan:
    """Return the plan with as many KV blocks as fit. Raises `ConfigError` if not one does."""
    in_all = plan.bytes_per_token * plan.num_ranks  # one pool: each has its heads of every block
    others, max_model_len = plan.num_other_bytes, plan.info.max_model_len
    weights = plan.model.num_parameters * plan.model.kv_cache_spec.dtype.itemsize
    num_blocks = plan.chosen_by_first(
        lambda: choose_num_kv_blocks(plan.config, in_all, max_model_len, others, weights)
    )
    return replace(plan, num_blocks=num_blocks)


def _models(
    config: EngineConfig, info: ModelInfo, ranks: "Ranks | None"
) -> "tuple[ServedModel, LoadedDraft | None, int]":
    """Return the model as an earlier start has prepared it, or as its files have it; what makes
    guesses for it; and the bytes that outputs of its image encoder may take. Raises `ConfigError`.
    """
    prepared: PreparedModel | None = None
    is_alone = ranks is None and not config.speculation.drafts_by_model
    if is_alone and config.model.fused and config.model.keep_prepared:
        with suppress(OSError, RuntimeError, KernelsUnavailableError):
            prepared = PreparedModel(info, CPU_TYPES.resolve(config.model))
    if prepared is not None:

        def check(num_bytes: int, spec: KVCacheSpec) -> None:
            size = CPU_TYPES.keep(spec, config).bytes_per_token
            check_memory(config, num_bytes, size, info.max_model_len)

        if (model := prepared.read(check)) is not None:
            return model, None, 0
    from aioserve.runner.cpu.models import load_models  # it brings `transformers`

    loaded = load_models(config, info, ranks)
    if prepared is not None:
        prepared.keep(loaded[0])
    return loaded


def _start_threads(count: int) -> list[int]:
    torch.set_num_threads(count)
    return compute_thread_ids(count)


def _fix_threads(count: int) -> tuple[int, ...]:
    torch.set_num_threads(count)
    return ()
