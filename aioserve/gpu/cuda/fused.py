"""A fused decoder's operations on a device: cuBLAS for the products, Triton for the rest.

Knows the seams of `runner.fused`, and last, the modules whose latent states are attended to; knows
no other model class.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aioserve.gpu.cuda.attention import DeviceStep, TorchDeviceAttention
from aioserve.gpu.cuda.plan import Layout, Limits, plan_step
from aioserve.model_source.quantized_weight import attached
from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, ModelInputs, StepInputs
from aioserve.runner.attention.bridge import LatentForm, attend_in_latents
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.fused.decoder import Place
from aioserve.runner.fused.ops import Activation, AttentionLayer, Ops, RMSNorm, TorchOps
from aioserve.runner.ranks import Ranks


class TritonOps(TorchOps):
    """Norms, gates and rotary embeddings, each as one Triton kernel; products are torch's."""

    def __init__(self) -> None:
        from aioserve.gpu.cuda import triton_kernels

        self._kernels = triton_kernels

    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        assert isinstance(attention, DeviceStep)
        self._step = attention
        self._positions = inputs.positions

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.rms_norm(x, norm.weight, norm.eps, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.add_rms_norm(x, residual, norm.weight, norm.eps, out)

    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        if activation == "gelu":
            super().gate(x, activation, out)
        else:
            self._kernels.gate_and_mul(x, out, is_silu=activation == "silu")

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        step, norms = self._step, layer.head_norms
        self._kernels.rope_store(
            qkv,
            layer.cos_sin,
            self._positions,
            step.slots_of(layer.index),
            step.cache.keys[layer.index],
            step.cache.values[layer.index],
            layer.num_heads,
            None if norms is None else (norms[0].weight, norms[1].weight),
            0.0 if norms is None else norms[0].eps,
        )
        query = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_heads]
        return step.attend(layer.index, query, layer.options).view(len(qkv), -1)


class CudaPlace(Place):
    """A device with, or without, Triton."""

    is_card = True

    def __init__(
        self, device: torch.device, *, has_triton: bool, ranks: Ranks | None = None
    ) -> None:
        self.device, self.ranks = device, ranks
        self._has_triton = has_triton

    def keep_latents(self, module: nn.Module) -> int:
        # With ranks, each would keep the states of all heads.
        return keep_latents(module) if self.ranks is None else 0

    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        return TritonOps() if self._has_triton else TorchOps()

    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        num_rows = len(step.rows)
        limits = Limits(num_rows, len(step.input_ids), num_blocks, block_size, num_blocks)
        layout, columns = Layout(limits), SamplingColumns(num_rows, 1)
        words = np.zeros(layout.size, dtype=np.int32)
        sampling = columns.select(step.rows[step.sampling], step.seq_lens[step.sampling])
        plan = plan_step(step, sampling, layout, words)
        arrays = layout.split(torch.from_numpy(words).to(self.device))
        attention = TorchDeviceAttention(spec, limits, self.device)
        return plan.model_inputs(arrays), attention.begin(plan, arrays)


# Latent attention on what is stored of a token in common for all heads, not on K and V of each.
# Modules of `transformers` make keys and values of every head out of one latent state of a token,
# each by a product (MLA of DeepSeek-V2, arXiv 2405.04434, section 2.1). A query can take the
# product of its head's keys in their place, and what a head has found, that of its values: then all
# heads look at the latent state itself, which alone is stored. Of DeepSeek-V3 those are 576 numbers
# per token and layer, in the place of 40,960. Knows modules; knows nothing about pages.


_NUM_STATES = 8  # of noise, from which a module and its `Heads` each make keys and values
#: How far these may be from each other, as a share: rounding, of two-byte types in a product.
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
