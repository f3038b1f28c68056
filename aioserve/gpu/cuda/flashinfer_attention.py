"""Attention by flashinfer: planned once a step, run in every layer.

A plan is data for one wrapper, not code: a CUDA graph that was captured with a wrapper runs with
whatever that wrapper was planned with last. flashinfer is imported when attention is made.
Keyword calls fit 0.6.12 to 0.7.2; those for sinks and latent attention are of 0.7.

Heads of a size without kernels are stored wider, with zeros behind them, which change no product: a
decode of heads of 96 then reads a third more of the cache. Plain torch moves seven times as much:
it gathers pages (reads and writes them), and makes them float32 (reads, writes, and reads those).
"""

import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.gpu.cuda.attention import (
    DeviceAttention,
    DeviceStep,
    GatheredStep,
    PagedCache,
    SeenAhead,
)
from aioserve.gpu.cuda.device import Device, Event
from aioserve.gpu.cuda.plan import Limits, Sections, StepPlan
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerSpec,
)
from aioserve.support.progress import stage

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256, 512)
WORKSPACE_BYTES = 256 << 20  # what vLLM gives it
INT_WORKSPACE_BYTES = 8 << 20  # of each wrapper, by its source
TENSOR_CORE_GROUP = 4  # query heads per KV head from which mini-sglang decodes on tensor cores
#: Of latent attention, by its source: multiples of what its kernels are made for, the most query
#: heads that one tile has, and the tiles of 128 rows in a step, but for those that splits add.
LATENT_MULTIPLE, ROPE_MULTIPLE, LATENT_HEADS, LATENT_TILES = 128, 64, 128, 15_000
LATENT_BACKEND = "fa2"  # a guess, as for prompts: "fa3" is for compute capability 9.0 alone


class LayerKind(NamedTuple):
    """The kind of a layer, on which a plan depends; layers of one kind share it. Heads and their
    sizes are those of the kernels, which may be more than the model has.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys and values; in latent attention, of values
    scaling: float
    window_left: int  # -1: all
    softcap: float  # 0: none
    has_sinks: bool = False
    rope_dim: int | None = None  # what keys have besides values, in latent attention
    in_windows: bool = False  # whether their pages are of the pool of windows


def why_not(
    spec: KVCacheSpec, calls: Sequence[AttentionCall], query_dtype: torch.dtype, num_tokens: int = 1
) -> str | None:
    """Return what a model has that this backend does not serve, in steps of up to `num_tokens`;
    None if it serves it.
    """
    if query_dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query_dtype).removeprefix('torch.')} queries"
    for layer, call in zip(spec.layers, calls, strict=True):
        options = call.options
        if options.chunk is not None:
            return "attention in chunks, for which it has no kernel"
        if layer.is_latent:
            obstacle = _why_not_latent(layer, call, num_tokens)
        elif max(layer.key_head_dim, layer.value_head_dim) > HEAD_DIMS[-1]:
            dims = f"{layer.key_head_dim} and {layer.value_head_dim}"
            obstacle = f"head sizes {dims} of keys and values (its kernels have {HEAD_DIMS})"
        elif options.sinks is not None and options.softcap is not None:
            obstacle = "attention sinks beside soft caps, for which it has no kernel"
        else:
            continue
        if obstacle is not None:
            return obstacle
    return None


def _why_not_latent(layer: LayerSpec, call: AttentionCall, num_tokens: int) -> str | None:
    options, size = call.options, layer.value_head_dim
    if size % LATENT_MULTIPLE:
        return f"latent states of {size} (its kernels have multiples of {LATENT_MULTIPLE})"
    if call.num_heads > LATENT_HEADS:
        return f"latent attention of {call.num_heads} heads (its kernels have up to {LATENT_HEADS})"
    if (options.sinks, options.softcap, options.sliding_window) != (None, None, None):
        return "latent attention with windows, soft caps or sinks, for which it has no kernel"
    most = LATENT_TILES * LATENT_HEADS // _latent_heads(call.num_heads)
    if num_tokens > most:
        return (
            f"latent attention of {call.num_heads} heads in steps of {num_tokens} tokens (at most "
            f"{most}: lower scheduler.max_num_batched_tokens)"
        )
    return None


def stored_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the cache in which flashinfer has K and V of `spec`, which `why_not` lets it serve."""
    return KVCacheSpec(tuple(map(_stored, spec.layers)), spec.dtype)


def _stored(layer: LayerSpec) -> LayerSpec:
    if layer.is_latent:
        value = layer.value_head_dim
        rope = -(-(layer.key_head_dim - value) // ROPE_MULTIPLE) * ROPE_MULTIPLE
        return LayerSpec(1, value + rope, value, is_latent=True)
    widest = max(layer.key_head_dim, layer.value_head_dim)
    dim = next(dim for dim in HEAD_DIMS if dim >= widest)
    return LayerSpec(layer.num_kv_heads, dim, dim)


def _latent_heads(num_heads: int) -> int:
    """Return how many heads the kernel is given. It cuts tokens and heads into tiles of 64 or 128,
    and refuses plans in which a token's heads would be cut apart.
    """
    return 1 << (num_heads - 1).bit_length()


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
    """Plan and run a decode and a prompt of one token for each kind of layer, so that flashinfer
    loads its kernels, or compiles them first, which takes minutes. Raises what flashinfer raises if
    it cannot, most often because there is no CUDA toolkit, or if the card cannot run one.
    """
    place = device.torch_device
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=place)
    bounds, one = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    indices = torch.zeros(1, dtype=torch.int32, device=place)
    rows, dtypes = _Rows(bounds, bounds, indices, one, one), (query_dtype, spec.dtype)
    kinds = dict.fromkeys(_kinds(spec, calls, max_model_len))
    steps = [(kind, is_decode) for kind in kinds for is_decode in (True, False)]
    for kind, is_decode in stage(steps, "Compiling attention kernels", "kernel"):
        wrapper = _make_wrapper(flashinfer, workspace, kind, dtypes, is_decode)
        wrapper.plan(rows, 1)
        device.launch(partial(_run_one, wrapper, kind, dtypes, place))
    device.record().wait()


def _run_one(
    wrapper: "_Wrapper",
    kind: LayerKind,
    dtypes: tuple[torch.dtype, torch.dtype],
    place: torch.device,
) -> None:
    """Run one token of a `kind` on a cache of one page of one token."""
    key_dim = kind.head_dim + (kind.rope_dim or 0)
    query = torch.zeros(1, kind.num_heads, key_dim, dtype=dtypes[0], device=place)
    keys = torch.zeros(1, 1, kind.num_kv_heads, key_dim, dtype=dtypes[1], device=place)
    sinks = torch.zeros(kind.num_heads, device=place) if kind.has_sinks else None
    out = query.new_empty(1, kind.num_heads, kind.head_dim)
    wrapper.run(query, (keys, torch.zeros_like(keys)), sinks, out)


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
        self.cache = PagedCache(stored_spec(spec), limits, device.torch_device, keep_finite=False)
        self._device = device
        self._limits = limits
        self._arrays = arrays
        self._guard: Event | None = None
        windows = frozenset[int]() if limits.windows is None else limits.windows.layers
        self._kinds = _kinds(spec, calls, max_model_len, windows)
        self._value_dims = [layer.value_head_dim for layer in spec.layers]
        sinks = [call.options.sinks for call in calls]
        self._sinks = [None if own is None else own.float().contiguous() for own in sinks]
        dtypes = query_dtype, spec.dtype
        # one for all: they are used one after another, on one stream
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
        kinds = list(dict.fromkeys(self._kinds))
        self._pools = sorted({kind.in_windows for kind in kinds})

        def make(is_decode: bool, size: int = 0) -> dict[LayerKind, _Wrapper]:
            made = {}
            for kind in kinds:
                graph = _decodes(arrays, size, kind) if size else None
                made[kind] = _make_wrapper(flashinfer, workspace, kind, dtypes, is_decode, graph)
            return made

        self._prefill = make(is_decode=False)
        # by captured size; 0 is for any number of rows, without a graph
        self._decode = {size: make(is_decode=True, size=size) for size in (0, *capture_sizes)}

    def begin(
        self, plan: StepPlan, arrays: Sections[Tensor], ahead: SeenAhead | None = None
    ) -> DeviceStep:
        # A wrapper has one pinned buffer, and the copy from it may still wait behind the last step.
        if self._guard is not None:
            self._guard.wait()
        size = plan.num_padded_rows if plan.is_decode else plan.num_decodes
        captured = plan.is_decode and size in self._decode
        decode = self._decode[size if captured else 0]
        for in_windows in self._pools:
            if size:
                self._plan(decode, self._decode_rows(plan, size, in_windows), in_windows)
            if not plan.is_decode:
                self._plan(self._prefill, self._prompt_rows(plan, in_windows), in_windows)
        self._guard = self._device.record()
        return _PlannedStep(self, decode, size, plan, ahead)

    def _plan(self, wrappers: "dict[LayerKind, _Wrapper]", rows: "_Rows", in_windows: bool) -> None:
        for kind, wrapper in wrappers.items():
            if kind.in_windows is in_windows:
                wrapper.plan(rows, self._limits.page_size)

    # Lengths from the host, page indices on the device: anything else would wait for the device.

    def _decode_rows(self, plan: StepPlan, size: int, in_windows: bool) -> "_Rows":
        host, end = plan.host, plan.page_entries(in_windows=in_windows)[0]
        pages = host.pages(in_windows=in_windows)
        return _Rows(
            torch.from_numpy(host.qo_indptr[: size + 1]),
            torch.from_numpy(pages.kv_indptr[: size + 1]),
            self._arrays.pages(in_windows=in_windows).kv_indices[:end],
            torch.from_numpy(host.last_page_len[:size]),
            torch.from_numpy(pages.seq_lens[:size]),
        )

    def _prompt_rows(self, plan: StepPlan, in_windows: bool) -> "_Rows":
        host, first = plan.host, plan.num_decodes
        num_prefills = plan.num_rows - first
        pages, entries = host.pages(in_windows=in_windows), plan.page_entries(in_windows=in_windows)
        return _Rows(
            torch.from_numpy(host.prefill_qo_indptr[: num_prefills + 1]),
            torch.from_numpy(pages.prefill_kv_indptr[: num_prefills + 1]),
            self._arrays.pages(in_windows=in_windows).kv_indices[slice(*entries)],
            torch.from_numpy(host.last_page_len[first : plan.num_rows]),
            torch.from_numpy(pages.seq_lens[first : plan.num_rows]),
        )


class _PlannedStep(DeviceStep):
    def __init__(
        self,
        owner: FlashInferAttention,
        decode: "dict[LayerKind, _Wrapper]",
        num_decodes: int,
        plan: StepPlan,
        ahead: SeenAhead | None,
    ) -> None:
        super().__init__(owner.cache, plan, owner._arrays)
        self._ahead = ahead
        if ahead is not None:  # causal kernels do not look ahead
            self._gathered = GatheredStep(owner.cache, plan, owner._arrays, ahead)
        self._prefill, self._decode = owner._prefill, decode
        self._kinds, self._sinks = owner._kinds, owner._sinks
        self._value_dims = owner._value_dims
        self._num_decodes = num_decodes

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Compute attention as planned; the arguments were known then."""
        size, kind, sinks = self._num_decodes, self._kinds[layer], self._sinks[layer]
        cache = self.cache.keys[layer], self.cache.values[layer]
        num_heads, value_dim = query.shape[1], self._value_dims[layer]
        more_heads, more_dims = kind.num_heads - num_heads, cache[0].shape[3] - query.shape[2]
        own_query = query = query.contiguous()
        if more_heads or more_dims:
            query = F.pad(query, (0, more_dims, 0, more_heads))
        out = query.new_empty(*query.shape[:2], kind.head_dim)
        found = out[:, :num_heads, :value_dim]
        if size:
            self._decode[kind].run(query[:size], cache, sinks, out[:size])
        if self._ahead is not None and self._ahead.in_layer(options.sliding_window):
            self._gathered.attend_into(found, layer, own_query, options, decodes=False)
        elif size < self.num_tokens:
            self._prefill[kind].run(query[size:], cache, sinks, out[size:])
        return found.contiguous()


# Wrappers of flashinfer, behind one call to plan and one to run.


class _Rows(NamedTuple):
    """The rows that a plan is for, B of them: int32, on the host but for `kv_indices`. Of a
    captured size, where on the device they are staged.
    """

    qo_indptr: Tensor  # B + 1
    kv_indptr: Tensor  # B + 1
    kv_indices: Tensor  # pages
    last_page_len: Tensor  # B
    seq_lens: Tensor  # B


def _decodes(arrays: Sections[Tensor], size: int, kind: LayerKind) -> _Rows:
    pages = arrays.pages(in_windows=kind.in_windows)
    return _Rows(
        arrays.qo_indptr[: size + 1],
        pages.kv_indptr[: size + 1],
        pages.kv_indices,
        arrays.last_page_len[:size],
        pages.seq_lens[:size],
    )


class _Wrapper(Protocol):
    def plan(self, rows: _Rows, page_size: int) -> None: ...

    def run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], sinks: Tensor | None, out: Tensor
    ) -> None: ...


def _make_wrapper(
    flashinfer: Any,
    workspace: Tensor,
    kind: LayerKind,
    dtypes: tuple[torch.dtype, torch.dtype],
    is_decode: bool,
    graph: _Rows | None = None,
) -> _Wrapper:
    """Return what plans and runs layers of a `kind`, whose queries and cache have these `dtypes`.
    `graph`: of the size that is captured with it.
    """
    if kind.rope_dim is not None:
        return _Latents(flashinfer, workspace, kind, kind.rope_dim, dtypes, graph)
    if is_decode and not kind.has_sinks:
        return _Decodes(flashinfer, workspace, kind, dtypes, graph)
    return _Prompts(flashinfer, workspace, kind, dtypes, graph)


class _Decodes:
    """Rows of one token each."""

    def __init__(
        self,
        flashinfer: Any,
        workspace: Tensor,
        kind: LayerKind,
        dtypes: tuple[torch.dtype, torch.dtype],
        graph: _Rows | None,
    ) -> None:
        buffers: dict[str, Any] = {}
        if graph is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": graph.kv_indptr,
                "paged_kv_indices_buffer": graph.kv_indices,
                "paged_kv_last_page_len_buffer": graph.last_page_len,
            }
        group = kind.num_heads // kind.num_kv_heads
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", use_tensor_cores=group >= TENSOR_CORE_GROUP, **buffers
        )
        self._settings = _settings(kind, dtypes) | {"head_dim": kind.head_dim}

    def plan(self, rows: _Rows, page_size: int) -> None:
        self._wrapper.plan(
            indptr=rows.kv_indptr,
            indices=rows.kv_indices,
            last_page_len=rows.last_page_len,
            page_size=page_size,
            **self._settings,
        )

    def run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], sinks: Tensor | None, out: Tensor
    ) -> None:
        self._wrapper.run(query, cache, out=out)


class _Prompts:
    """Rows of any number of tokens. With sinks, decodes as well: their kernel is a variant of this
    one, of flashinfer's own, which gives each head a logit that carries no value.
    """

    def __init__(
        self,
        flashinfer: Any,
        workspace: Tensor,
        kind: LayerKind,
        dtypes: tuple[torch.dtype, torch.dtype],
        graph: _Rows | None,
    ) -> None:
        more: dict[str, Any] = {}
        if graph is not None:
            more = {
                "use_cuda_graph": True,
                "qo_indptr_buf": graph.qo_indptr,
                "paged_kv_indptr_buf": graph.kv_indptr,
                "paged_kv_indices_buf": graph.kv_indices,
                "paged_kv_last_page_len_buf": graph.last_page_len,
            }
        if kind.has_sinks:
            more |= _sink_variant(flashinfer, kind, dtypes)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout="NHD", backend="fa2", **more
        )
        self._scaling = kind.scaling
        self._settings = _settings(kind, dtypes) | {"head_dim_qk": kind.head_dim, "causal": True}

    def plan(self, rows: _Rows, page_size: int) -> None:
        self._wrapper.plan(
            qo_indptr=rows.qo_indptr,
            paged_kv_indptr=rows.kv_indptr,
            paged_kv_indices=rows.kv_indices,
            paged_kv_last_page_len=rows.last_page_len,
            page_size=page_size,
            **self._settings,
        )

    def run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], sinks: Tensor | None, out: Tensor
    ) -> None:
        own = () if sinks is None else (sinks, self._scaling)
        self._wrapper.run(query, cache, *own, out=out)


def _sink_variant(
    flashinfer: Any, kind: LayerKind, dtypes: tuple[torch.dtype, torch.dtype]
) -> dict[str, Any]:
    """Return what makes a wrapper one with sinks, as `BatchAttentionWithAttentionSinkWrapper` has
    it; but under the name of the kernels that `flashinfer-jit-cache` brings, which, unlike that
    wrapper's, differs for other heads and types.
    """
    query, kept = dtypes
    jit, dim, has_window = flashinfer.jit.attention, kind.head_dim, kind.window_left >= 0
    name = jit.get_batch_prefill_attention_sink_uri(
        "fa2", query, kept, query, torch.int32, dim, dim, 0, has_window
    )
    arguments = [name, query, kept, query, torch.int32, dim, dim, ["sink"], ["float"]]
    arguments += [["sm_scale"], ["double"], "AttentionSink"]
    arguments.append(jit.variants.attention_sink_decl["fa2"])
    return {
        "jit_args": arguments,
        "jit_kwargs": {
            "use_sliding_window": has_window,
            "paged_kv_stride_mode": "independent",
            "module_surface": "full",
        },
    }


class _Latents:
    """Rows of any number of tokens, of layers that keep latent states."""

    def __init__(
        self,
        flashinfer: Any,
        workspace: Tensor,
        kind: LayerKind,
        rope_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        graph: _Rows | None,
    ) -> None:
        buffers: dict[str, Any] = {}
        if graph is not None:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr": graph.qo_indptr,
                "kv_indptr": graph.kv_indptr,
                "kv_indices": graph.kv_indices,
                "kv_len_arr": graph.seq_lens,
            }
        self._metadata = flashinfer.mla.MLAPlanMetadata.csr
        self._wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            workspace, backend=LATENT_BACKEND, **buffers
        )
        self._settings: dict[str, Any] = {
            "num_heads": kind.num_heads,
            "head_dim_ckv": kind.head_dim,
            "head_dim_kpe": rope_dim,
            "causal": True,
            "sm_scale": kind.scaling,
            "q_data_type": dtypes[0],
            "kv_data_type": dtypes[1],
        }
        self._scales: dict[str, float] = {}
        if dtypes[1] == torch.float8_e4m3fn:
            self._settings["scale_mode"] = "kv-per-tensor"
            self._scales = {"ckv_scale": 1.0, "kpe_scale": 1.0}

    def plan(self, rows: _Rows, page_size: int) -> None:
        metadata = self._metadata(rows.qo_indptr, rows.kv_indptr, rows.kv_indices, rows.seq_lens)
        self._wrapper.plan(metadata=metadata, page_size=page_size, **self._settings)

    def run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], sinks: Tensor | None, out: Tensor
    ) -> None:
        keys = cache[0].squeeze(2)  # of one head; values are their beginning
        self._wrapper.run(query=query, kv_cache=keys, out=out, **self._scales)


def _settings(kind: LayerKind, dtypes: tuple[torch.dtype, torch.dtype]) -> dict[str, Any]:
    """Return what a plan is told of layers of one kind, but for the size of heads."""
    return {
        "num_qo_heads": kind.num_heads,
        "num_kv_heads": kind.num_kv_heads,
        "sm_scale": kind.scaling,
        "window_left": kind.window_left,
        "logits_soft_cap": kind.softcap,
        "non_blocking": True,
        "q_data_type": dtypes[0],
        "kv_data_type": dtypes[1],
    }


def _kinds(
    spec: KVCacheSpec,
    calls: Sequence[AttentionCall],
    max_model_len: int,
    windows: Collection[int] = (),
) -> list[LayerKind]:
    """Return the kind of each layer; those of `windows` have pages of their own."""
    kinds = map(partial(_kind, max_model_len=max_model_len), calls, map(_stored, spec.layers))
    return [kind._replace(in_windows=layer in windows) for layer, kind in enumerate(kinds)]


def _kind(call: AttentionCall, layer: LayerSpec, max_model_len: int) -> LayerKind:
    options, num_heads, rope_dim = call.options, call.num_heads, None
    window = options.sliding_window
    if window is None or window >= max_model_len:
        window = 0  # no request is long enough to feel it
    if layer.is_latent:
        num_heads = _latent_heads(num_heads)
        rope_dim = layer.key_head_dim - layer.value_head_dim
    return LayerKind(
        num_heads,
        layer.num_kv_heads,
        layer.value_head_dim,
        options.scaling,
        window - 1,
        options.softcap or 0.0,
        options.sinks is not None,
        rope_dim,
    )
