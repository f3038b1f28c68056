"""Products of which this rank has a share, and the others the rest.

Code that multiplies by itself takes them apart. Knows nothing about layers.
"""

from collections.abc import Callable

from torch import Tensor

from aioserve.runner.fused.ops import Experts, Linear, Routes
from aioserve.runner.tensor_parallel.group import Ranks


class AllReduceLinear:
    """A product with a share of the inputs: the sums of all ranks are added up."""

    def __init__(self, own: Linear, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.own(x))

    def join(self, own: Tensor) -> Tensor:
        """The sum of what the product gives on each rank."""
        self.ranks.add_up(own)
        return own


class GatherToRank0:
    """A product with a share of the `width` outputs: the first rank gets all, the others zeros."""

    def __init__(self, own: Linear, ranks: Ranks, width: int) -> None:
        self.own, self.ranks, self.width = own, ranks, width

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.own(x))

    def join(self, own: Tensor) -> Tensor:
        """All outputs, on the first rank, of the `own` ones that the product gives on each."""
        return self.ranks.join_at_first(own, self.width)


class AllReduceExperts(Experts):
    """A layer of experts with a share of the numbers inside each: sums are added up."""

    def __init__(self, own: Experts, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks

    def route(self, x: Tensor) -> Routes:
        return self.own.route(x)

    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        out = self.own.mix(x, routes)
        self.ranks.add_up(out)
        return out


def own_experts(experts: object) -> object:
    """The layer of experts that this rank computes, if `experts` is one."""
    return experts.own if isinstance(experts, AllReduceExperts) else experts


def with_added(linear: Linear, x: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    """`linear(x)`, where `add` adds something to what this rank has of it, before the parts of all
    ranks are put together.
    """
    out = own_product(linear)(x)
    add(out)
    return linear.join(out) if isinstance(linear, AllReduceLinear | GatherToRank0) else out


def own_product(linear: Linear) -> Linear:
    """The product that this rank multiplies with."""
    return linear.own if isinstance(linear, AllReduceLinear | GatherToRank0) else linear
