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
        self._dtypes = {"q_data_type": query_dtype, "kv_data_type": spec.dtype}
        self._kinds = [
            _kind(call, layer.num_kv_heads, layer.key_head_dim, max_model_len)
            for call, layer in zip(calls, spec.layers, strict=True)
        ]
        # one for all: they are used one after another, on one stream
        self._workspace = torch.zeros(
            WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device
        )
        kinds = list(dict.fromkeys(self._kinds))
        self._prefill = {
            kind: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, kv_layout="NHD", backend="fa2"
            )
            for kind in kinds
        }
        # by captured size; 0 is for any number of rows, without a graph
        self._decode = {
            0: {kind: self._decode_wrapper(flashinfer, kind) for kind in kinds},
            **{
                size: {kind: self._decode_wrapper(flashinfer, kind, size) for kind in kinds}
                for size in capture_sizes
            },
        }

    def _decode_wrapper(self, flashinfer: Any, kind: LayerKind, size: int = 0) -> Any:
        arguments: dict[str, Any] = {}
        if size:
            arguments = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._arrays.kv_indptr[: size + 1],
                "paged_kv_indices_buffer": self._arrays.kv_indices,
                "paged_kv_last_page_len_buffer": self._arrays.last_page_len[:size],
            }
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="NHD",
            use_tensor_cores=kind.num_heads // kind.num_kv_heads >= TENSOR_CORE_GROUP,
            **arguments,
        )

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
            num_qo_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            page_size=self._limits.page_size,
            **self._common(kind),
        )

    def _plan_prefill(self, wrapper: Any, kind: LayerKind, plan: StepPlan) -> None:
        host, first = plan.host, plan.num_decodes
        num_prefills = plan.num_rows - first
        wrapper.plan(
            qo_indptr=torch.from_numpy(host.prefill_qo_indptr[: num_prefills + 1]),
            paged_kv_indptr=torch.from_numpy(host.prefill_kv_indptr[: num_prefills + 1]),
            paged_kv_indices=self._arrays.kv_indices[
                plan.num_decode_page_entries : plan.num_page_entries
            ],
            paged_kv_last_page_len=torch.from_numpy(host.last_page_len[first : plan.num_rows]),
            num_qo_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim_qk=kind.head_dim,
            page_size=self._limits.page_size,
            causal=True,
            **self._common(kind),
        )

    def _common(self, kind: LayerKind) -> dict[str, Any]:
        return {
            "sm_scale": kind.scaling,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.softcap,
            "non_blocking": True,
            **self._dtypes,
        }


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


def _kind(call: AttentionCall, num_kv_heads: int, head_dim: int, max_model_len: int) -> LayerKind:
    options = call.options
    window = options.sliding_window
    if window is None or window >= max_model_len:
        window = 0  # no request is long enough to feel it
    return LayerKind(
        call.num_heads, num_kv_heads, head_dim, options.scaling, window - 1, options.softcap or 0.0
    )
