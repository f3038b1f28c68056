"""Which kernels and which element types tests run on: all, unless the environment names one.

`make test-isa` names one of each in turn (tests/isa.py). Knows names; knows no models.
"""

import os

import pytest

from aioserve.kernels import usable_variants
from tests.slow import mostly_slow

#: Variants of the kernels to run, best first, and plain torch.
VARIANTS = [os.environ.get("AIOSERVE_KERNELS") or "", *usable_variants(), "off"]
VARIANTS = VARIANTS[:1] if VARIANTS[0] else VARIANTS[1:]

#: The same as parameters: `make test` runs the best, the least and plain torch.
EVERY_VARIANT = mostly_slow(VARIANTS, but={VARIANTS[0], *VARIANTS[-2:]})

#: The element type of models in tests that are not about one.
DTYPE = os.environ.get("AIOSERVE_TEST_DTYPE", "float32")

#: On tests of what plain torch does not do.
needs_kernels = pytest.mark.skipif(VARIANTS == ["off"], reason="plain torch does not do that")

DTYPES = ["float32", "bfloat16", "float16"]
