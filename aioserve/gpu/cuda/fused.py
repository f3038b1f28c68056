"""A fused decoder's operations on a device: cuBLAS for the products, Triton for the rest.

Knows the seams of `runner.fused`; knows nothing about model classes.
"""

import numpy as np
import torch
from torch import Tensor, nn

from aioserve.gpu.cuda import latents
from aioserve.gpu.cuda.attention import DeviceStep, TorchDeviceAttention
from aioserve.gpu.cuda.plan import Layout, Limits, plan_step
from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, ModelInputs, StepInputs
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
        return latents.keep_latents(module) if self.ranks is None else 0

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
        size = plan.num_tokens
        inputs = ModelInputs(
            input_ids=arrays.input_ids[:size].long(),
            positions=arrays.positions[:size].long(),
            slots=arrays.slots[:size].long(),
            logits_rows=arrays.logits_rows[: plan.num_sampling].long(),
        )
        attention = TorchDeviceAttention(spec, limits, self.device)
        return inputs, attention.begin(plan, arrays)
