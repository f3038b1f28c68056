"""Models whose attention is their own: modules of `transformers`, one request of a step at a time.

What such a model keeps per token lies in the paged cache, and its own code is given all of a
request's in one piece. Slower than `AnyModel` where there are many requests; knows what
`transformers` calls a cache, nothing about blocks.
"""

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from aioserve.errors import one_line
from aioserve.runner.adapters import AdapterSites
from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    LayerSpec,
    ModelInputs,
    Row,
    RowStates,
    StepInputs,
)
from aioserve.runner.attention.bridge import UnsupportedModelError
from aioserve.runner.fused.decoder import Place
from aioserve.runner.served_model import ServedModel

# The steps that are compared with passes over whole prompts: tokens of each of two rows.
_STEPS = ((11, 5), (1, 4), (12, 1))
_BLOCK_SIZE = 8
# How far logits may be from those of a pass over the whole prompt, as a share. In float32 for every
# token; else for half of them, as the experts of a token can be chance.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


class _Place(NamedTuple):
    """The places of a layer's K and V, and of the keys of its indexer, in the paged cache."""

    states: int | None
    index_keys: int | None


class RowByRowModel(ServedModel):
    """Modules of `transformers`, unchanged, their attention included."""

    reads_rows = True
    attention_calls = ()

    def __init__(self, module: nn.Module, vocab_size: int) -> None:
        """Raises `UnsupportedModelError` if its cache is not one of tokens."""
        self.module = module
        self.name = f"{type(module).__name__}, one request at a time"
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self._takes = inspect.signature(module.forward).parameters
        if "past_key_values" not in self._takes:
            raise UnsupportedModelError("it keeps nothing from one pass to the next")
        weight = next(module.parameters())
        self._device, self._vocab_size = weight.device, vocab_size
        self.kv_cache_spec, self._places = self._find_places(weight.dtype)
        self.adapter_sites = AdapterSites(
            find=lambda _: None,
            dtype=weight.dtype,
            device=weight.device,
            table_shape=None,
            rows_of_table=lambda ids: ids,
            head=lambda hidden: hidden,
            is_table=lambda _: False,
        )

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        assert isinstance(attention, RowStates), "chosen by `reads_rows`"
        logits: Tensor | None = None
        for index, row in enumerate(attention.rows):
            here = (inputs.logits_rows >= row.begin) & (inputs.logits_rows < row.end)
            found = self._pass(
                inputs.input_ids[row.begin : row.end],
                inputs.positions[row.begin : row.end],
                inputs.logits_rows[here] - row.begin,
                self._cache(attention, index, row),
            )
            if logits is None:
                logits = found.new_empty(len(inputs.logits_rows), found.shape[1])
            logits[here] = found
        assert logits is not None, "a step has rows"
        return logits

    def prove(self, place: Place) -> None:
        """Raises `UnsupportedModelError` unless prompts in pieces, side by side, give the logits of
        passes over all of them.
        """
        steps = _random_steps(self._vocab_size)
        num_blocks = steps[0].block_table.size
        states = place.create_row_states(self.kv_cache_spec, num_blocks, _BLOCK_SIZE)
        if states is None:
            raise UnsupportedModelError("its own attention is served on a CPU, in one process")
        found: list[list[Tensor]] = [[], []]
        for step in steps:
            states.prepare(step)
            inputs = ModelInputs.of(step)
            for index, row in enumerate(states.rows):
                found[index].append(
                    self._pass(
                        inputs.input_ids[row.begin : row.end],
                        inputs.positions[row.begin : row.end],
                        torch.arange(row.end - row.begin),
                        self._cache(states, index, row),
                    )
                )
        errors = []
        for index, parts in enumerate(found):
            ids = np.concatenate([_of_row(step, step.input_ids, index) for step in steps])
            whole = self._pass(
                torch.from_numpy(ids), torch.arange(len(ids)), torch.arange(len(ids)), None
            )
            difference = (torch.cat(parts).double() - whole.double()).norm(dim=1)
            errors.append(difference / whole.double().norm(dim=1))
        error = torch.cat(errors)
        dtype = self.kv_cache_spec.dtype  # that of the model: logits are float32 in any type
        worst = float(error.max() if dtype is torch.float32 else error.median())
        if not worst <= _TOLERANCE[dtype]:
            raise UnsupportedModelError(
                f"a prompt in pieces gives it other logits: they differ by {worst:.1%}"
            )

    def _pass(self, ids: Tensor, positions: Tensor, wanted: Tensor, cache: Cache | None) -> Tensor:
        """Logits [W, V] of these of the T tokens of one request."""
        arguments: dict[str, Any] = {"input_ids": ids[None], "use_cache": cache is not None}
        if cache is not None:
            arguments["past_key_values"] = cache
        if "position_ids" in self._takes:
            arguments["position_ids"] = positions[None]
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = wanted if len(wanted) else 1  # one at least is made
        logits: Tensor = self.module(**arguments).logits[0]
        if "logits_to_keep" in self._takes:
            return logits[: len(wanted)]
        return logits[wanted]

    def _cache(self, states: RowStates, index: int, row: Row) -> Cache:
        num_seen = row.seq_len - (row.end - row.begin)
        return Cache(layers=[_PagedLayer(states, index, place, num_seen) for place in self._places])

    @torch.inference_mode()
    def _find_places(self, dtype: torch.dtype) -> tuple[KVCacheSpec, list[_Place]]:
        """Find where layers keep K and V, by what a few tokens put into a cache."""
        num_tokens = 4
        ids = torch.arange(num_tokens, device=self._device) + self._vocab_size // 2
        cache = Cache(layer_class_to_replicate=_NotedLayer)
        try:
            self._pass(
                ids % self._vocab_size,
                torch.arange(num_tokens, device=self._device),
                ids[:1] * 0,
                cache,
            )
        except Exception as error:  # code of any kind of model
            raise UnsupportedModelError(f"its forward pass fails: {one_line(error)}") from error
        layers: list[LayerSpec] = []

        def place(*sizes: tuple[int, int]) -> int | None:
            if not sizes:
                return None
            [(key, value)] = set(sizes)
            layers.append(LayerSpec(1, key, value))
            return len(layers) - 1

        places = []
        for layer in cache.layers:
            if layer.get_seq_length() not in (0, num_tokens) or len(layer.sizes) > 1:
                raise UnsupportedModelError("it keeps something other than K and V of its tokens")
            places.append(_Place(place(*layer.sizes), place(*layer.index_sizes)))
        if not layers:
            raise UnsupportedModelError("it puts nothing into a cache")
        return KVCacheSpec(tuple(layers), dtype), places


class _NotedLayer(DynamicLayer):
    """A layer of a cache that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []
        self.index_sizes: list[tuple[int, int]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sizes.append((_width(key_states), _width(value_states)))
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states)
        return found

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Note the width of an indexer's `keys` [1, T, n], and return them as they are."""
        self.index_sizes.append((keys.shape[2] // 2, keys.shape[2] - keys.shape[2] // 2))
        return keys


class _PagedLayer(DynamicLayer):
    """K and V of one request in one layer."""

    def __init__(self, states: RowStates, row: int, place: _Place, num_seen: int) -> None:
        super().__init__()
        self._states, self._row, self._place = states, row, place
        self._num_seen, self.is_initialized = num_seen, num_seen > 0

    def get_seq_length(self) -> int:
        return self._num_seen

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, H, T, n] each; H and n may differ."""
        assert self._place.states is not None, "the same calls as when places were found"
        given = (key_states, value_states)
        self._num_seen += key_states.shape[2]
        flat = (states[0].transpose(0, 1).flatten(1) for states in given)
        found = self._states.extend(self._place.states, self._row, *flat)
        key, value = (
            flat.view(len(flat), like.shape[1], like.shape[3]).transpose(0, 1)[None].to(like.dtype)
            for flat, like in zip(found, given, strict=True)
        )
        return key, value

    def update_indexer(self, keys: Tensor) -> Tensor:
        """[1, T, n], in halves, as there is a place for two."""
        assert self._place.index_keys is not None, "the same calls as when places were found"
        half = keys.shape[2] // 2
        found = self._states.extend(
            self._place.index_keys, self._row, keys[0, :, :half], keys[0, :, half:]
        )
        return torch.cat(found, dim=1)[None].to(keys.dtype)


def _width(states: Tensor) -> int:
    return states.shape[1] * states.shape[3]


def _random_steps(vocab_size: int) -> list[StepInputs]:
    """Return steps of two rows whose blocks lie between each other's."""
    random = np.random.default_rng(0)
    steps, seen = [], np.zeros(2, dtype=np.int64)
    width = -(-max(map(sum, zip(*_STEPS, strict=True))) // _BLOCK_SIZE)
    table = np.arange(2 * width, dtype=np.int32).reshape(width, 2).T[:, ::-1].copy()
    for lengths in map(np.array, _STEPS):
        row = np.repeat(np.arange(2), lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(len(row)) - starts[row] + seen[row]
        block, offset = np.divmod(positions, _BLOCK_SIZE)
        seen = seen + lengths
        steps.append(
            StepInputs(
                req_ids=["0", "1"],
                rows=np.arange(2),
                input_ids=random.integers(0, vocab_size, len(row)),
                positions=positions,
                slot_mapping=table[row, block].astype(np.int64) * _BLOCK_SIZE + offset,
                query_start_loc=starts,
                seq_lens=seen,
                block_table=table,
                sampling=np.arange(2),
                logits_indices=starts[1:] - 1,
            )
        )
    return steps


def _of_row(step: StepInputs, packed: Any, row: int) -> Any:
    return packed[step.query_start_loc[row] : step.query_start_loc[row + 1]]
