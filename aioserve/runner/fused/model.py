"""A model on fused weights, as the runner asks it; and where it takes adapters.

Its modules are gone: the names that `transformers` gives them mean parts of products. Knows
nothing about files or requests.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from aioserve.runner.attention.backend import (
    AttentionCall,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
)
from aioserve.runner.fused.decoder import (
    HEAD,
    DecoderLayer,
    FusedDecoder,
    GatedMLP,
    GatherToRank0,
    LayerProduct,
    own_product,
)
from aioserve.runner.served_model import Halves, ServedModel, Taps

if TYPE_CHECKING:  # what few models need, or what brings `transformers`
    from aioserve.runner.adapters import AdapterSites, Site, TokenAdapters
    from aioserve.runner.batch.input_batch import EncoderPart
    from aioserve.runner.fused.recognize import MRoPERows
    from aioserve.runner.ranks import Ranks

_LAYER = re.compile(r"(?:\w+\.)*layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj")
_TABLE = re.compile(r"(?:\w+\.)*embed_tokens")
_SEES = re.compile(r"(?:^|\.)(?:vision|visual)")  # of a model's parts, those that read images


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts that a fused model tells of itself, as `ServedModel` has them."""

    name: str
    num_parameters: int
    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]


class FusedModel(ServedModel, Halves):
    """A model whose modules are gone; their weights are fused and laid out for this machine."""

    def __init__(
        self,
        facts: ModelFacts,
        decoder: FusedDecoder,
        is_compiled: bool,
        device: torch.device,
        own_turns: "MRoPERows | None" = None,
        image_encoder: "EncoderPart | None" = None,
    ) -> None:
        self.facts = facts
        self._own_turns = own_turns
        self.name = facts.name
        self.num_parameters = facts.num_parameters
        self.kv_cache_spec = facts.kv_cache_spec
        self.attention_calls = facts.attention_calls
        self.decoder, self.embedding = decoder, decoder.embedding
        self.is_compiled = self.is_stored = is_compiled
        self.image_encoder = image_encoder
        self._device = device

    @cached_property
    def adapter_sites(self) -> "AdapterSites":  # type: ignore[override]
        return fused_sites(self.decoder, self.kv_cache_spec.dtype, self._device)

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.decoder.forward(self._turned(inputs), attention)

    def tap(self, layers: Sequence[int]) -> Taps:
        self.decoder.taps = Taps(tuple(layers))
        return self.decoder.taps

    @property
    def alone_below(self) -> float:  # type: ignore[override]
        return self.decoder.alone_below

    @property
    def halves(self) -> Halves:
        return self

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.decoder.hidden(self._turned(inputs), attention)

    def _turned(self, inputs: ModelInputs) -> ModelInputs:
        if (given := inputs.given) is None or given.axes is None:
            return inputs
        assert self._own_turns is not None, "fused for that"
        positions = inputs.positions.clone()
        positions[given.places] = self._own_turns.place(given.axes)
        return inputs._replace(positions=positions)

    def logits(self, hidden: Tensor, adapters: "TokenAdapters | None" = None) -> Tensor:
        return self.decoder.logits(hidden, adapters)


def fused_sites(decoder: FusedDecoder, dtype: torch.dtype, device: torch.device) -> "AdapterSites":
    """Return all linear layers but those of experts, the embedding and the head."""
    from aioserve.runner.adapters import AdapterSites, Site

    (tokens, hidden), head = decoder.embedding.shape, decoder.head
    ranks, of_head = None, slice(None)
    if isinstance(head, GatherToRank0):
        ranks, of_head = head.ranks, head.ranks.padded_share(head.width)
    sites = [_layer_sites(i, layer, hidden, ranks) for i, layer in enumerate(decoder.layers)]

    def find(name: str) -> "Site | None":
        if name == "lm_head":
            return Site(HEAD, 0, tokens, hidden, outputs=of_head)
        match = None if _SEES.search(name) else _LAYER.fullmatch(name)
        if match is None or int(match[1]) >= len(sites):
            return None
        return sites[int(match[1])].get(match[2])

    return AdapterSites(
        find=find,
        dtype=dtype,
        device=device,
        table_shape=decoder.embedding.shape,
        rows_of_table=decoder.embedding,
        head=own_product(head),
        is_table=lambda name: _TABLE.fullmatch(name) is not None,
        products=decoder.ops.low_rank,
    )


def _layer_sites(
    index: int, layer: DecoderLayer, hidden: int, ranks: "Ranks | None"
) -> "dict[str, Site]":
    from aioserve.runner.adapters import Site

    attention, mlp = layer.attention, layer.mlp
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim

    def wide(product: LayerProduct, begin: int, count: int) -> "Site":
        """Return a module of which this rank has `count` outputs."""
        whole, own = _whole(count, ranks)
        return Site((index, product), begin, whole, hidden, outputs=own)

    def narrow(product: LayerProduct, count: int) -> "Site":
        """Return a module of which this rank has `count` inputs."""
        whole, own = _whole(count, ranks)
        return Site((index, product), 0, hidden, whole, inputs=own)

    sites = {
        "q": wide("qkv", 0, queries),
        "k": wide("qkv", queries, keys),
        "v": wide("qkv", queries + keys, keys),
        "o": narrow("output", queries),
    }
    if isinstance(mlp, GatedMLP):
        inner = mlp.intermediate_size
        sites |= {
            "gate": wide("gate_up", 0, inner),
            "up": wide("gate_up", inner, inner),
            "down": narrow("down", inner),
        }
    return sites


def _whole(count: int, ranks: "Ranks | None") -> tuple[int, slice]:
    """Return how many there are on all ranks, and which of them are here."""
    if ranks is None:
        return count, slice(None)
    return count * ranks.size, ranks.share(count * ranks.size)
