"""Attention by flashinfer: planned once a step, run in every layer.

A plan is data for one wrapper, not code: a CUDA graph that was captured with a wrapper runs with
whatever that wrapper was planned with last. flashinfer is imported when one of these is made;
keyword calls fit 0.6.12 to 0.7.2.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioserve.gpu.cuda.attention import DeviceAttention, DeviceStep, PagedCache
from aioserve.gpu.cuda.device import Device, Event
from aioserve.gpu.cuda.plan import Limits, Sections, StepPlan
from aioserve.runner.attention.backend import AttentionCall, AttentionOptions, KVCacheSpec
from aioserve.support.progress import stage

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 << 20  # what vLLM gives it
INT_WORKSPACE_BYTES = 8 << 20  # of each wrapper, by its source
TENSOR_CORE_GROUP = 4  # query heads per KV head from which mini-sglang decodes on tensor cores


class LayerKind(NamedTuple):
    """The kind of a layer, on which a plan depends; layers of one kind share it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window_left: int  # -1: all
    softcap: float  # 0: none


def why_not(
    spec: KVCacheSpec, calls: Sequence[AttentionCall], query_dtype: torch.dtype
) -> str | None:
    """Return what a model has that this backend does not serve; None if it serves it."""
    for layer, call in zip(spec.layers, calls, strict=True):
        if layer.key_head_dim not in HEAD_DIMS or layer.value_head_dim != layer.key_head_dim:
            dims = f"{layer.key_head_dim} and {layer.value_head_dim}"
            return f"head sizes {dims} of keys and values (it has {HEAD_DIMS})"
        if call.options.sinks is not None:
            return "attention sinks"
        if call.options.chunk is not None:
            return "attention in chunks"
    if query_dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query_dtype).removeprefix('torch.')} queries"
    return None


def workspace_bytes(calls: Sequence[AttentionCall], num_sizes: int) -> int:
    """Return bytes of device memory that the wrappers for `num_sizes` captured sizes take."""
    num_kinds = len({(call.num_heads, call.options[:3]) for call in calls})
    return WORKSPACE_BYTES + num_kinds * (num_sizes + 2) * INT_WORKSPACE_BYTES


def have_kernels(
    flashinfer: Any,
    spec: KVCacheSpec,
    calls: Sequence[AttentionCall],
    query_dtype: torch.dtype,
    device: Device,
    max_model_len: int,
) -> None:
    """Plan a decode and a prompt of one token for each kind of layer, so that flashinfer loads its
    kernels, or compiles them first, which takes minutes. Raises what flashinfer raises if it
    cannot: most often because there is no CUDA toolkit.
    """
    place = device.torch_device
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=place)
    indices = torch.zeros(1, dtype=torch.int32, device=place)
    bounds, last = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    kinds = dict.fromkeys(_kinds(spec, calls, max_model_len))
    steps = [(kind, is_decode) for kind in kinds for is_decode in (True, False)]
    for kind, is_decode in stage(steps, "Compiling attention kernels", "kernel"):
        settings = _settings(kind, query_dtype, spec.dtype)
        if is_decode:
            _decode_wrapper(flashinfer, workspace, kind).plan(
                indptr=bounds, indices=indices, last_page_len=last, page_size=1, **settings
            )
        else:
            settings["head_dim_qk"] = settings.pop("head_dim")
            _prefill_wrapper(flashinfer, workspace).plan(
                qo_indptr=bounds,
                paged_kv_indptr=bounds,
                paged_kv_indices=indices,
                paged_kv_last_page_len=last,
                page_size=1,
                causal=True,
                **settings,
            )
    device.record().wait()


class FlashInferAttention(DeviceAttention):
    """Decodes through one wrapper, prompts through another; a wrapper per captured size besides."""

    def __init__(
        self,
        flashinfer: Any,
        spec: KVCacheSpec,
        calls: Sequence[AttentionCall],
        limits: Limits,
        device: Device,
        query_dtype: torch.dtype,
        *,
        max_model_len: int,
        capture_sizes: Sequence[int],
        arrays: Sections[Tensor],
    ) -> None:
        """`flashinfer` is the module; `arrays` is where all plans of all steps will be staged."""
        self.cache = PagedCache(spec, limits, device.torch_device, keep_finite=False)
        self._device = device
        self._limits = limits
        self._arrays = arrays
        self._guard: Event | None = None
        self._dtypes = query_dtype, spec.dtype
        self._kinds = _kinds(spec, calls, max_model_len)
        # one for all: they are used one after another, on one stream
        self._workspace = torch.zeros(
            WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device
        )
        kinds = list(dict.fromkeys(self._kinds))
        self._prefill = {kind: _prefill_wrapper(flashinfer, self._workspace) for kind in kinds}
        # by captured size; 0 is for any number of rows, without a graph
        self._decode = {
            0: {kind: _decode_wrapper(flashinfer, self._workspace, kind) for kind in kinds},
            **{
                size: {
                    kind: _decode_wrapper(
                        flashinfer,
                        self._workspace,
                        kind,
                        use_cuda_graph=True,
                        paged_kv_indptr_buffer=arrays.kv_indptr[: size + 1],
                        paged_kv_indices_buffer=arrays.kv_indices,
                        paged_kv_last_page_len_buffer=arrays.last_page_len[:size],
                    )
                    for kind in kinds
                }
                for size in capture_sizes
            },
        }

    def begin(self, plan: StepPlan, arrays: Sections[Tensor]) -> DeviceStep:
        # A wrapper has one pinned buffer, and the copy from it may still wait behind the last step.
        if self._guard is not None:
            self._guard.wait()
        size = plan.num_padded_rows if plan.is_decode else plan.num_decodes
        captured = plan.is_decode and size in self._decode
        decode = self._decode[size if captured else 0]
        for kind in self._prefill:
            if size:
                self._plan_decode(decode[kind], kind, plan, size)
            if not plan.is_decode:
                self._plan_prefill(self._prefill[kind], kind, plan)
        self._guard = self._device.record()
        return _PlannedStep(self, decode, size, plan)

    def _plan_decode(self, wrapper: Any, kind: LayerKind, plan: StepPlan, size: int) -> None:
        # lengths from the host, page indices on the device: anything else would wait for the device
        host = plan.host
        wrapper.plan(
            indptr=torch.from_numpy(host.kv_indptr[: size + 1]),
            indices=self._arrays.kv_indices[: plan.num_decode_page_entries],
            last_page_len=torch.from_numpy(host.last_page_len[:size]),
            page_size=self._limits.page_size,
            **_settings(kind, *self._dtypes),
        )

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: StepPlan) -> None:
        host, first = plan.host, plan.num_decodes
        settings = _settings(kind, *self._dtypes)
        settings["head_dim_qk"] = settings.pop("head_dim")
        num_prefills = plan.num_rows - first
        wrapper.plan(
            qo_indptr=torch.from_numpy(host.prefill_qo_indptr[: num_prefills + 1]),
            paged_kv_indptr=torch.from_numpy(host.prefill_kv_indptr[: num_prefills + 1]),
            paged_kv_indices=self._arrays.kv_indices[
                plan.num_decode_page_entries : plan.num_page_entries
            ],
            paged_kv_last_page_len=torch.from_numpy(host.last_page_len[first : plan.num_rows]),
            page_size=self._limits.page_size,
            causal=True,
            **settings,
        )


class _PlannedStep(DeviceStep):
    def __init__(
        self,
        owner: FlashInferAttention,
        decode: dict[LayerKind, Any],
        num_decodes: int,
        plan: StepPlan,
    ) -> None:
        super().__init__(owner.cache, plan, owner._arrays)
        self._prefill, self._decode = owner._prefill, decode
        self._kinds = owner._kinds
        self._num_decodes = num_decodes

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Compute attention as planned; the arguments were known then."""
        size, kind = self._num_decodes, self._kinds[layer]
        cache = self.cache.keys[layer], self.cache.values[layer]
        query = query.contiguous()
        out = torch.empty_like(query)
        if size:
            self._decode[kind].run(query[:size], cache, out=out[:size])
        if size < self.num_tokens:
            self._prefill[kind].run(query[size:], cache, out=out[size:])
        return out


def _decode_wrapper(flashinfer: Any, workspace: Tensor, kind: LayerKind, **graph: Any) -> Any:
    group = kind.num_heads // kind.num_kv_heads
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout="NHD", use_tensor_cores=group >= TENSOR_CORE_GROUP, **graph
    )


def _prefill_wrapper(flashinfer: Any, workspace: Tensor) -> Any:
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend="fa2")


def _settings(kind: LayerKind, query_dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Any]:
    """Return what a plan is told of layers of one kind."""
    return {
        "num_qo_heads": kind.num_heads,
        "num_kv_heads": kind.num_kv_heads,
        "head_dim": kind.head_dim,
        "sm_scale": kind.scaling,
        "window_left": kind.window_left,
        "logits_soft_cap": kind.softcap,
        "non_blocking": True,
        "q_data_type": query_dtype,
        "kv_data_type": kv_dtype,
    }


def _kinds(
    spec: KVCacheSpec, calls: Sequence[AttentionCall], max_model_len: int
) -> list[LayerKind]:
    """Return the kind of each layer."""
    return [
        _kind(call, layer.num_kv_heads, layer.key_head_dim, max_model_len)
        for call, layer in zip(calls, spec.layers, strict=True)
    ]


def _kind(call: AttentionCall, num_kv_heads: int, head_dim: int, max_model_len: int) -> LayerKind:
    options = call.options
    window = options.sliding_window
    if window is None or window >= max_model_len:
        window = 0  # no request is long enough to feel it
    return LayerKind(
        call.num_heads, num_kv_heads, head_dim, options.scaling, window - 1, options.softcap or 0.0
    )
