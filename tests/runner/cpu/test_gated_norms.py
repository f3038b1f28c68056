"""Gated norms of architectures by the kernel, against their own code, and those that it leaves."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from aioserve.features.states.cpu_steps import with_own_norms
from aioserve.kernels import usable_variants

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)


def served(norm: nn.Module, width: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The module as it was and with the kernel, whose weights are numbers at random."""
    torch.manual_seed(0)
    norm.weight = nn.Parameter(torch.randn(width).to(dtype))
    before = copy.deepcopy(norm)
    layer = nn.ModuleList([norm])
    with_own_norms(layer)
    return before, layer[0]


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
@pytest.mark.parametrize(
    "norm",
    [
        Qwen3_5RMSNormGated(64),
        GraniteMoeHybridRMSNormGated(64, group_size=32),
        FalconH1RMSNormGated(64, n_groups=2, norm_before_gate=False),
        FalconH1RMSNormGated(64, n_groups=1, norm_before_gate=True),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_the_kernel_gives_what_the_module_gives(
    norm: nn.Module, dtype: torch.dtype, rtol: float
) -> None:
    before, own = served(copy.deepcopy(norm), 64, dtype)
    assert type(own) is not type(before)
    x, gate = (torch.randn(2, 9, 64).to(dtype) for _ in range(2))
    for part in (slice(None), slice(3, 4)):
        torch.testing.assert_close(
            own(x[:, part], gate[:, part]), before(x[:, part], gate[:, part]), rtol=rtol, atol=1e-5
        )
    torch.testing.assert_close(copy.deepcopy(own).float()(x.float(), gate.float()).to(dtype),
                               before(x, gate), rtol=rtol, atol=1e-5)  # fmt: skip


def test_a_norm_that_does_something_else_keeps_its_own_code() -> None:
    """Kimi's gate is a sigmoid."""
    before, own = served(KimiLinearRMSNormGated(64), 64, torch.float32)
    assert type(own) is type(before)


def test_a_norm_of_numbers_that_are_no_multiple_of_16_keeps_its_own_code() -> None:
    before, own = served(Qwen3_5RMSNormGated(24), 24, torch.float32)
    assert type(own) is type(before)


def test_a_norm_without_a_gate_is_computed_by_its_own_code() -> None:
    before, own = served(GraniteMoeHybridRMSNormGated(64, group_size=32), 64, torch.float32)
    x = torch.randn(3, 64)
    assert torch.equal(own(x), before(x))
