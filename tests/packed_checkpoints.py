"""Tiny quantized checkpoints, each written by the definition of its format, number by number.

Shares no code with what reads them: codes go into their words one after another, as the packers of
AutoGPTQ (`QuantLinear.pack`), AutoAWQ (`WQLinear_GEMM.from_linear`), compressed-tensors
(`pack_to_int32`) and transformers (`finegrained_fp8`, `mxfp4`) put them. Beside each lies a
directory of the numbers that they mean, in float32.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
#: Of a weight's shape and a source of chance: what is stored of it, and what it means.
Writer = Callable[[tuple[int, int], np.random.Generator], tuple[Tensors, np.ndarray]]

SCALE = 0.04  # of codes of 4 bits: about as large as the weights of `tests.models`


def write_checkpoint(
    directory: Path,
    path: Path,
    config: Mapping[str, Any],
    write: Writer,
    pattern: str = "*.layers.*_proj.weight",
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """The model of `directory` in `path`, with random matrices in its layers; `path`/unpacked has
    their numbers. `change` may edit the tensors before they are written.
    """
    random = np.random.default_rng(0)
    weights = load_file(directory / "model.safetensors")
    stored, plain = dict(weights), dict(weights)
    for name, weight in weights.items():
        if fnmatch(name, pattern):
            parts, numbers = write(tuple(weight.shape), random)
            del stored[name]
            prefix = name.removesuffix(".weight")
            stored |= {prefix + part: tensor.contiguous() for part, tensor in parts.items()}
            plain[name] = torch.from_numpy(numbers.astype(np.float32)).contiguous()
    if change is not None:
        change(stored)
    unpacked = path / "unpacked"
    unpacked.mkdir(parents=True)
    shutil.copy(directory / "config.json", unpacked)
    save_file(plain, unpacked / "model.safetensors", {"format": "pt"})
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    described["quantization_config"] = dict(config)
    (path / "config.json").write_text(json.dumps(described))
    return path


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] as int32 [..., n * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    found = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), dtype=np.uint32)
    for i in range(codes.shape[-1]):
        found[..., i // per_word] |= codes[..., i].astype(np.uint32) << np.uint32(
            bits * (i % per_word)
        )
    return found.view(np.int32)


def _integers(
    shape: tuple[int, int], bits: int, group: int, is_symmetric: bool, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], float16 scales [out, G], zeros [out, G]."""
    codes = random.integers(0, 1 << bits, shape)
    size = (shape[0], shape[1] // group)
    scales = random.uniform(0.5, 1.5, size) * SCALE * 16 / (1 << bits)
    middle = 1 << bits - 1
    spread = np.zeros(size, int) if is_symmetric else random.integers(1 - middle, middle, size)
    return codes, scales.astype(np.float16), middle + spread // 4


def gptq(
    bits: int,
    group: int,
    *,
    is_symmetric: bool = False,
    zeros_are_less: int = 1,
    is_ordered: bool = False,
) -> Writer:
    """With `is_ordered`, inputs of a group lie anywhere, as with desc_act."""

    def write(shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, scales, zeros = _integers(shape, bits, group, is_symmetric, random)
        group_of = np.arange(shape[1]) // group
        if is_ordered:
            group_of = random.permutation(group_of)
        parts = {
            ".qweight": words(codes, bits).T,  # words go along the inputs
            ".qzeros": words(zeros.T - zeros_are_less, bits),
            ".scales": scales.T,
            ".g_idx": group_of.astype(np.int32),
        }
        # one word holds neighbouring inputs: [in / n, out]
        tensors = {name: torch.from_numpy(np.ascontiguousarray(p)) for name, p in parts.items()}
        return tensors, (codes - zeros[:, group_of]) * scales[:, group_of].astype(np.float64)

    return write


def awq(group: int) -> Writer:
    def interleaved(numbers: np.ndarray) -> np.ndarray:
        """[n, out] as words [n, out / 8]."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        found = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
        for word in range(found.shape[1]):
            for place, column in enumerate(order):
                number = numbers[:, word * 8 + column].astype(np.uint32)
                found[:, word] |= number << np.uint32(4 * place)
        return found.view(np.int32)

    def write(shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        codes, scales, zeros = _integers(shape, 4, group, False, random)
        parts = {".qweight": interleaved(codes.T), ".qzeros": interleaved(zeros.T)}
        parts[".scales"] = scales.T
        tensors = {name: torch.from_numpy(np.ascontiguousarray(p)) for name, p in parts.items()}
        group_of = np.arange(shape[1]) // group
        return tensors, (codes - zeros[:, group_of]) * scales[:, group_of].astype(np.float64)

    return write


def compressed_integers(
    bits: int, group: int | None, *, is_symmetric: bool = True, is_packed: bool = True
) -> Writer:
    """Without `group`, all inputs of an output share a scale."""

    def write(shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        size, middle = group or shape[1], 1 << bits - 1
        codes, scales, zeros = _integers(shape, bits, size, is_symmetric, random)
        scales = torch.from_numpy(scales).bfloat16()
        parts = {".weight_scale": scales}
        if is_packed:
            parts[".weight_packed"] = torch.from_numpy(words(codes, bits))
            parts[".weight_shape"] = torch.tensor(shape)
        else:
            parts[".weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        if not is_symmetric:
            packed = words(zeros.T, bits).T
            parts[".weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed))
        group_of = np.arange(shape[1]) // size
        scales = scales.double().numpy()
        return parts, (codes - zeros[:, group_of]) * scales[:, group_of]

    return write


def float8(block: tuple[int, int] | None, name: str) -> Writer:
    """`name` of the scales, one for each block; without `block` there is one for all."""

    def write(shape: tuple[int, int], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        numbers = torch.from_numpy(random.normal(0, 4, shape)).to(torch.float8_e4m3fn)
        size = (
            shape if block is None else tuple(min(pair) for pair in zip(block, shape, strict=True))
        )
        counts = [-(-n // b) for n, b in zip(shape, size, strict=True)]
        scales = random.uniform(0.5, 1.5, counts).astype(np.float32) * np.float32(SCALE)
        outputs, inputs = (np.arange(n) // b for n, b in zip(shape, size, strict=True))
        whole = scales[outputs][:, inputs]
        stored = torch.from_numpy(scales)
        parts = {".weight": numbers, f".{name}": stored if block else stored.reshape(())}
        return parts, (numbers.float().numpy() * whole).astype(np.float32)

    return write


def mxfp4(shape: tuple[int, ...], random: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Of experts [experts, in, out]; a number is sign, two bits of exponent, one of fraction."""
    experts, inputs, outputs = shape
    codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32))
    powers = random.integers(122, 125, codes.shape[:-1])  # 2^-5 to 2^-3
    exponent, fraction = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, fraction / 2, 2.0 ** (exponent - 1) * (1 + fraction / 2))
    numbers = np.where(codes & 8, -size, size) * 2.0 ** (powers - 127)[..., None]
    data = codes[..., ::2] | codes[..., 1::2] << 4
    parts = {
        "_blocks": torch.from_numpy(data.astype(np.uint8)),
        "_scales": torch.from_numpy(powers.astype(np.uint8)),
    }
    return parts, numbers.reshape(experts, outputs, inputs).transpose(0, 2, 1)
