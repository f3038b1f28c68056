"""Attention over pages that lie on a device: the seam, and the one in plain torch.

The plain one reads the arrays that flashinfer reads, so that a test of it tests them; it serves
cards and models that flashinfer does not. Knows plans and pages; knows nothing about requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from aioserve.gpu.cuda.plan import Limits, Sections, StepPlan
from aioserve.runner.attention.backend import AttentionOptions, KVCacheSpec, LayerAttention

GATHER_ELEMENTS = 1 << 26  # keys, or scores, at a time: 256 MiB, a guess
FP8_MAX = 448.0  # of float8_e4m3fn, which has no infinity to saturate to


class SeenAhead(NamedTuple):
    """The `ImageEnds` of a step, on the device and in the order of its plan."""

    ends: Tensor  # T, behind the last position that each token sees
    only_in_windows: bool

    def in_layer(self, window: int | None) -> bool:
        """Return whether tokens see ahead in a layer of that sliding window."""
        return window is not None or not self.only_in_windows


class DeviceStep(LayerAttention):
    """The attention of one step, over its T tokens, padding included; used when the device gets
    there.
    """

    def __init__(self, cache: "PagedCache", plan: StepPlan, arrays: Sections[Tensor]) -> None:
        self.cache = cache
        self.arrays = arrays
        self.num_tokens = plan.num_tokens
        self._slots: dict[bool, Tensor] = {}  # of layers with pages of their own for windows or not

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        self.store(layer, key, value)
        return self.attend(layer, query, options)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write K and V of the step, [T, Hkv, D], into the cache."""
        self.cache.store(layer, self.slots_of(layer), key, value)

    def slots_of(self, layer: int) -> Tensor:
        """Return where K and V of the step go in the cache of a layer, int64 [T]. Layers ask in the
        order in which they run.
        """
        in_windows = layer in self.cache.window_layers
        if layer in self.cache.first_layers:  # the others use what it has made
            slots = self.arrays.pages(in_windows=in_windows).slots
            self._slots[in_windows] = slots[: self.num_tokens].long()
        return self._slots[in_windows]

    @abstractmethod
    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """`forward`, once K and V of the step are stored."""


class DeviceAttention(ABC):
    """An attention backend on a device, which owns the KV cache and begins each step."""

    cache: "PagedCache"

    @abstractmethod
    def begin(
        self, plan: StepPlan, arrays: Sections[Tensor], ahead: SeenAhead | None = None
    ) -> DeviceStep:
        """Return what the host has to do for a step; `arrays` are staged, and not to be read
        here. `ahead`: of a step with images whose tokens see each other.
        """


class PagedCache:
    """K and V of every layer, [num_pages + 1, page_size, num_kv_heads, head_dim] each; layers with
    a sliding window may have another number of pages.

    V of a latent layer is a view of its K. Heads that are stored may be narrower than those of the
    cache, whose other numbers stay 0.
    """

    def __init__(
        self, spec: KVCacheSpec, limits: Limits, device: torch.device, *, keep_finite: bool
    ) -> None:
        """`keep_finite`: the kernel that reads also multiplies, by 0, what stale pages hold."""

        windows, num_layers = limits.windows, len(spec.layers)
        #: Layers whose pages are of the pool of windows.
        self.window_layers = frozenset[int]() if windows is None else windows.layers

        def allocate(layer: int, num_kv_heads: int, head_dim: int) -> Tensor:
            num_pages = limits.num_pages
            if windows is not None and layer in windows.layers:
                num_pages = windows.num_pages
            shape = (num_pages + 1, limits.page_size, num_kv_heads, head_dim)
            return torch.zeros(shape, dtype=spec.dtype, device=device)

        pools = [self.window_layers, frozenset(range(num_layers)) - self.window_layers]
        #: The first layer of each pool.
        self.first_layers = {min(layers) for layers in pools if layers}
        self._dtype = spec.dtype
        self.is_finite = keep_finite
        self._is_latent = [s.is_latent for s in spec.layers]
        layers = list(enumerate(spec.layers))
        self.keys = [allocate(layer, s.num_kv_heads, s.key_head_dim) for layer, s in layers]
        self.values = [
            self.keys[layer][..., : s.value_head_dim]
            if s.is_latent
            else allocate(layer, s.num_kv_heads, s.value_head_dim)
            for layer, s in layers
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is allocated of the main pool, each once: K of all its layers, then V of those
        that are not latent.
        """
        return self._of(n for n in range(len(self.keys)) if n not in self.window_layers)

    @property
    def window_tensors(self) -> list[Tensor]:
        """All memory of the window pool: K of its layers, then V of those that are not latent."""
        return self._of(sorted(self.window_layers))

    def _of(self, layers: Iterable[int]) -> list[Tensor]:
        layers = list(layers)
        keys = [self.keys[layer] for layer in layers]
        return [*keys, *(self.values[layer] for layer in layers if not self._is_latent[layer])]

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [T, Hkv, D] to `slots` (int64 [T])."""
        parts = [(self.keys[layer], key), (self.values[layer], value)]
        for cache, states in parts[:1] if self._is_latent[layer] else parts:
            if self.is_finite:
                states = torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)
            flat = cache.view(-1, *cache.shape[2:])
            if self._dtype == torch.float8_e4m3fn:
                states = states.clamp(-FP8_MAX, FP8_MAX).to(self._dtype).view(torch.uint8)
                flat = flat.view(torch.uint8)
            flat[..., : states.shape[2]].index_copy_(0, slots, states)


class TorchDeviceAttention(DeviceAttention):
    """Attention that gathers the pages of a row and multiplies: right everywhere, fast nowhere."""

    def __init__(self, spec: KVCacheSpec, limits: Limits, device: torch.device) -> None:
        self.cache = PagedCache(spec, limits, device, keep_finite=True)

    def begin(
        self, plan: StepPlan, arrays: Sections[Tensor], ahead: SeenAhead | None = None
    ) -> DeviceStep:
        return GatheredStep(self.cache, plan, arrays, ahead)


class GatheredStep(DeviceStep):
    """The attention of one step in plain torch."""

    def __init__(
        self,
        cache: PagedCache,
        plan: StepPlan,
        arrays: Sections[Tensor],
        ahead: SeenAhead | None = None,
    ) -> None:
        super().__init__(cache, plan, arrays)
        self._ahead = ahead
        # lists, because the host's side of the arena changes before the device gets here
        rows = plan.num_padded_rows
        self._token_bounds: list[int] = plan.host.qo_indptr[: rows + 1].tolist()
        self._num_decodes = rows if plan.is_decode else plan.num_decodes
        self._seq_lens: list[int] = plan.host.seq_lens[:rows].tolist()
        #: By pool, where the pages of rows begin among all, and at which positions.
        self._bounds: dict[bool, tuple[list[int], list[int]]] = {}
        for in_windows in (False, True) if cache.window_layers else (False,):
            pages = plan.host.pages(in_windows=in_windows)
            firsts = (plan.host.seq_lens[:rows] - pages.seq_lens[:rows]).tolist()
            self._bounds[in_windows] = pages.kv_indptr[: rows + 1].tolist(), firsts

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        out = query.new_empty(*query.shape[:2], self.cache.values[layer].shape[3])
        self.attend_into(out, layer, query, options)
        return out

    def attend_into(
        self,
        out: Tensor,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        *,
        decodes: bool = True,
    ) -> None:
        """Write what `attend` returns into `out`, of prompts alone without `decodes`. Heads may be
        narrower than those of the cache.
        """
        caches = self.cache.keys[layer], self.cache.values[layer]
        kv_width = caches[0].shape[2] * caches[0].shape[3]
        sees_ahead = self._ahead is not None and self._ahead.in_layer(options.sliding_window)
        first, in_windows = 0 if decodes else self._num_decodes, layer in self.cache.window_layers
        pieces = self._pieces(query.shape[1], kv_width, first, in_windows)
        for tokens, pages, begin, position in pieces:
            rows = len(pages)
            keys, values = (cache[pages].view(rows, -1, *cache.shape[2:]) for cache in caches)
            keys, values = keys[..., : query.shape[2]], values[..., : out.shape[2]]
            key_position = begin + torch.arange(keys.shape[1], device=query.device)
            hidden = key_position > position
            if self._ahead is not None and sees_ahead:
                hidden = key_position >= self._ahead.ends[tokens].view(position.shape)
            if options.sliding_window is not None:
                hidden |= key_position <= position - options.sliding_window
            if options.chunk is not None:
                hidden |= key_position < position // options.chunk * options.chunk
            if not self.cache.is_finite:
                values = values.masked_fill(hidden.all(dim=1)[:, :, None, None], 0)
            states = query[tokens].view(rows, -1, *query.shape[1:])
            attended = multiply(states, keys, values, hidden, options)
            out[tokens] = attended.reshape(-1, *out.shape[1:])

    def _pieces(
        self, num_heads: int, kv_width: int, first: int, in_windows: bool
    ) -> list[tuple[slice, Tensor, int | Tensor, Tensor]]:
        """Return tokens, the pages [rows, width] that they look at, the position at which these
        begin [rows, 1, 1], and those of the tokens [rows, Q, 1], of the rows from the `first` on:
        some decodes, or some tokens of one prompt.
        """
        pieces: list[tuple[slice, Tensor, int | Tensor, Tensor]] = []
        bounds, firsts = self._bounds[in_windows]
        arrays = self.arrays.pages(in_windows=in_windows)
        indices, lengths = arrays.kv_indices, self.arrays.seq_lens[:, None, None]
        page_size = self.cache.keys[0].shape[1]
        begin = first
        while begin < self._num_decodes:
            width, end = 0, begin
            while end < self._num_decodes:
                widest = max(width, bounds[end + 1] - bounds[end])
                if end > begin and widest * page_size * kv_width * (end + 1 - begin) > (
                    GATHER_ELEMENTS
                ):
                    break
                width, end = widest, end + 1
            starts = arrays.kv_indptr[begin:end, None]
            # what lies beyond a row's own pages is masked: any page will do there
            column = starts + torch.arange(width, device=indices.device)
            pages = indices[column.clamp(max=bounds[-1] - 1)]
            first_position: int | Tensor = 0
            if in_windows:
                first_position = (lengths - arrays.seq_lens[:, None, None])[begin:end]
            pieces.append((slice(begin, end), pages, first_position, lengths[begin:end] - 1))
            begin = end
        for row in range(self._num_decodes, len(bounds) - 1):
            pages = indices[None, bounds[row] : bounds[row + 1]]
            size = max(1, GATHER_ELEMENTS // (num_heads * page_size * pages.shape[1]))
            first, last = self._token_bounds[row], self._token_bounds[row + 1]
            position = torch.arange(last - first, device=indices.device)[None, :, None]
            position = position + (self._seq_lens[row] - (last - first))
            for token in range(first, last, size):
                tokens = slice(token, min(token + size, last))
                own = position[:, token - first : tokens.stop - first]
                pieces.append((tokens, pages, firsts[row], own))
        return pieces


def multiply(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """[N, Q, Hq, D] on [N, L, Hkv, D] where not `hidden` [N, Q, L]: [N, Q, Hq, Dv], computed in
    float32, as fused attention is.
    """
    size, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    grouped = query.view(size, num_queries, num_kv_heads, -1, head_dim)
    scores = torch.einsum("nqhgd,nlhd->nhgql", grouped.float(), key.float()) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if options.sinks is not None:  # one more logit, whose share is dropped
        sink = options.sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    attended = torch.einsum("nhgql,nlhd->nqhgd", probs, value.float())
    return attended.reshape(size, num_queries, num_heads, -1).to(query.dtype)
