"""Where a fused decoder takes adapters: its modules are gone, their names mean parts of products.

Knows names as `transformers` gives them to what `recognize` finds. Knows nothing about files.
"""

import re

import torch

from aioserve.runner.fused.decoder import HEAD, DecoderLayer, FusedDecoder, GatedMLP
from aioserve.runner.lora.adapter_sites import AdapterSites, Site

_LAYER = re.compile(r"(?:\w+\.)*layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj")
_TABLE = re.compile(r"(?:\w+\.)*embed_tokens")
_SEES = re.compile(r"(?:^|\.)(?:vision|visual)")  # of a model's parts, those that read images


def fused_sites(decoder: FusedDecoder, dtype: torch.dtype, device: torch.device) -> AdapterSites:
    """All linear layers but those of experts, the embedding and the head."""
    tokens, hidden = decoder.embedding.shape
    sites = [_layer_sites(index, layer, hidden) for index, layer in enumerate(decoder.layers)]

    def find(name: str) -> Site | None:
        if name == "lm_head":
            return Site(HEAD, 0, tokens, hidden)
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
        head=decoder.logits,
        is_table=lambda name: _TABLE.fullmatch(name) is not None,
        make_product=decoder.ops.low_rank_product,
        make_table=decoder.ops.low_rank_table,
    )


def _layer_sites(index: int, layer: DecoderLayer, hidden: int) -> dict[str, Site]:
    attention, mlp = layer.attention, layer.mlp
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    sites = {
        "q": Site((index, "qkv"), 0, queries, hidden),
        "k": Site((index, "qkv"), queries, keys, hidden),
        "v": Site((index, "qkv"), queries + keys, keys, hidden),
        "o": Site((index, "output"), 0, hidden, queries),
    }
    if isinstance(mlp, GatedMLP):
        wide = mlp.intermediate_size
        sites |= {
            "gate": Site((index, "gate_up"), 0, wide, hidden),
            "up": Site((index, "gate_up"), wide, wide, hidden),
            "down": Site((index, "down"), 0, hidden, wide),
        }
    return sites
