"""Rows quantized to int8 as the kernels quantize them, by torch: the reference of their tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BLOCK = 32  # inputs that share a scale


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes [rows, in / 32, 32], as float32 numbers, and the scales [rows, in / 32, 1]."""
    blocks = x.float().reshape(x.shape[0], -1, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True)
    seven_bits = torch.tensor(127.0)  # a float32 in both divisions
    bytes_ = torch.where(most == 0, 0, blocks * (seven_bits / most)).round()
    return bytes_, most / seven_bits


def int8_rows(x: Tensor) -> Tensor:
    """The numbers [rows, in] that rows stand for when they are quantized, in float64."""
    bytes_, scales = quantized_rows(x)
    return (bytes_.double() * scales.double()).view(x.shape)


@contextmanager
def int8_products(module: nn.Module) -> Iterator[None]:
    """Meanwhile every linear layer of a model quantizes its rows."""

    def quantize(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        rows = args[0].reshape(-1, args[0].shape[-1])
        return (int8_rows(rows).to(args[0].dtype).view(args[0].shape),)

    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    handles = [layer.register_forward_pre_hook(quantize) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
