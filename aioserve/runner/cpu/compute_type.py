"""The types in which a model computes on this CPU, and in which its K and V are kept."""

from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.runner.cpu import machine
from aioserve.runner.load_plan import SideTypes


def _is_bfloat16_fast() -> bool:
    """Whether a model that our kernels serve computes fast in bfloat16."""
    try:
        return machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        return False


CPU_TYPES = SideTypes("int8", "float32", _is_bfloat16_fast)
