"""Every variant of the kernels that this CPU runs, and every element type."""

import pytest
import torch

from aioserve.kernels import Kernels, usable_variants
from tests.slow import mostly_slow

USABLE = usable_variants()


# In `make test`, the best and the least.
@pytest.fixture(scope="module", params=mostly_slow(USABLE, but={*USABLE[:1], *USABLE[-1:]}))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype
