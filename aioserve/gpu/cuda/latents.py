"""Latent attention on what is stored of a token in common for all heads, not on K and V of each.

Modules of `transformers` make keys and values of every head out of one latent state of a token,
each by a product (MLA of DeepSeek-V2, arXiv 2405.04434, section 2.1). A query can take the product
of its head's keys in their place, and what a head has found, that of its values: then all heads
look at the latent state itself, which alone is stored. Of DeepSeek-V3 those are 576 numbers per
token and layer, in the place of 40,960. Knows modules; knows nothing about pages.
"""

from typing import Any

import torch
from torch import Tensor, nn

from aioserve.model_source.quantized_weight import attached
from aioserve.runner.attention.bridge import LatentForm, attend_in_latents

_NUM_STATES = 8  # of noise, on which both are compared
#: How far they may be from each other, as a share: rounding, of two-byte types in a product.
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_OF_HALVES = 0.02


def keep_latents(module: nn.Module) -> int:
    """Have the attention modules within `module` that expand latent states attend to these states;
    but for those whose keys and values are no products of theirs. Returns how many do.
    """
    found = 0
    for part in module.modules():
        if (heads := _heads_of(part)) is not None and _is_same(part, heads):
            part.expand_kv = _join  # type: ignore[assignment]
            attend_in_latents(part, heads)
            found += 1
    return found


class Heads(LatentForm):
    """The products that make keys and values of H heads out of latent states of R numbers."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """`keys` [H, K, R], for the first K numbers of a head's keys, which have more; `values` [H,
        V, R].
        """
        self.keys, self.values = keys, values

    def turn_query(self, query: Tensor) -> Tensor:
        """[1, H, T, K + P] to [1, H, T, R + P]."""
        size = self.keys.shape[1]
        states = torch.bmm(query[0, ..., :size], self.keys)
        return torch.cat([states, query[0, ..., size:]], dim=-1)[None]

    def turn_back(self, attended: Tensor) -> Tensor:
        """[1, T, H, R] to [1, T, H, V]."""
        values = torch.bmm(attended[0].transpose(0, 1), self.values.transpose(1, 2))
        return values.transpose(0, 1)[None].contiguous()


def _join(states: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return as K the latent states [1, 1, T, R] with the `turned` parts of keys [1, 1, T, P]
    behind them, and as V the states.
    """
    return torch.cat([states, turned], dim=-1), states


def _heads_of(part: Any) -> Heads | None:
    """Return the products by which a module expands latent states; None if it has none."""
    product = getattr(part, "kv_b_proj", None)
    if not hasattr(part, "expand_kv") or type(product) is not nn.Linear:
        return None
    bias: Tensor | None = product.bias
    weight = product.weight
    if bias is not None or weight.is_meta or attached(weight) is not None:
        return None
    key_size, value_size = part.qk_nope_head_dim, part.v_head_dim
    heads = weight.data.view(-1, key_size + value_size, weight.shape[1])
    return Heads(heads[:, :key_size], heads[:, key_size:])


@torch.inference_mode()
def _is_same(part: Any, heads: Heads) -> bool:
    """Return whether the module makes the same keys and values of noise."""
    weight = part.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)

    def noise(size: int) -> Tensor:
        made = torch.randn(1, 1, _NUM_STATES, size, generator=generator)
        return made.to(weight.device, weight.dtype)

    states, turned = noise(weight.shape[1]), noise(part.qk_rope_head_dim)
    own = states[0].float()
    num_heads = len(heads.keys)
    expected = (
        torch.cat(
            [own @ heads.keys.float().mT, turned[0].float().expand(num_heads, -1, -1)], dim=-1
        ),
        own @ heads.values.float().mT,
    )
    tolerance = _TOLERANCE.get(weight.dtype, _TOLERANCE_OF_HALVES)
    return all(
        one.shape == found[0].shape
        and bool((found[0].float() - one).norm() <= tolerance * one.norm())
        for one, found in zip(expected, part.expand_kv(states, turned), strict=True)
    )
