"""Where a fused decoder takes adapters: its modules are gone, their names mean parts of products.

Knows names as `transformers` gives them to what `recognize` finds. Knows nothing about files.
"""

import re

import torch

from aioserve.runner.adapters import AdapterSites, Site
from aioserve.runner.fused.decoder import (
    HEAD,
    DecoderLayer,
    FusedDecoder,
    GatedMLP,
    GatherToRank0,
    LayerProduct,
    own_product,
)
from aioserve.runner.tensor_parallel.group import Ranks

_LAYER = re.compile(r"(?:\w+\.)*layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj")
_TABLE = re.compile(r"(?:\w+\.)*embed_tokens")
_SEES = re.compile(r"(?:^|\.)(?:vision|visual)")  # of a model's parts, those that read images


def fused_sites(decoder: FusedDecoder, dtype: torch.dtype, device: torch.device) -> AdapterSites:
    """All linear layers but those of experts, the embedding and the head."""
    (tokens, hidden), head = decoder.embedding.shape, decoder.head
    ranks, of_head = None, slice(None)
    if isinstance(head, GatherToRank0):
        ranks, of_head = head.ranks, head.ranks.padded_share(head.width)
    sites = [_layer_sites(i, layer, hidden, ranks) for i, layer in enumerate(decoder.layers)]

    def find(name: str) -> Site | None:
        if name == "lm_head":
            return Site(HEAD, 0, tokens, hidden, outputs=of_head)
        match = None if _SEES.search(name) else _LAYER.fullmatch(name)
        if match is None or int(match[1]) >= len(sites):
            return None
        return sites[int(match[1])].get(match[2])

    return AdapterSites(
        find,
        dtype=dtype,
        device=device,
        table_shape=decoder.embedding.shape,
        rows_of_table=decoder.embedding,
        head=own_product(head),
        is_table=lambda name: _TABLE.fullmatch(name) is not None,
        make_product=decoder.ops.low_rank_product,
        make_table=decoder.ops.low_rank_table,
    )


def _layer_sites(
    index: int, layer: DecoderLayer, hidden: int, ranks: Ranks | None
) -> dict[str, Site]:
    attention, mlp = layer.attention, layer.mlp
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim

    def wide(product: LayerProduct, begin: int, count: int) -> Site:
        """A module of which this rank has `count` outputs."""
        whole, own = _whole(count, ranks)
        return Site((index, product), begin, whole, hidden, outputs=own)

    def narrow(product: LayerProduct, count: int) -> Site:
        """A module of which this rank has `count` inputs."""
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


def _whole(count: int, ranks: Ranks | None) -> tuple[int, slice]:
    """How many there are on all ranks, and which of them are here."""
    if ranks is None:
        return count, slice(None)
    return count * ranks.size, ranks.share(count * ranks.size)
