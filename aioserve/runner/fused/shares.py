"""Products of which this rank has a share, and the others the rest.

Code that multiplies by itself takes them apart. Knows nothing about layers.
"""

from torch import Tensor

from aioserve.runner.fused.ops import Linear
from aioserve.runner.tensor_parallel.group import Ranks


class AllReduceLinear:
    """A product with a share of the inputs: the sums of all ranks are added up."""

    def __init__(self, own: Linear, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks

    def __call__(self, x: Tensor) -> Tensor:
        out = self.own(x)
        self.ranks.add_up(out)
        return out


class GatherToRank0:
    """A product with a share of the `width` outputs: the first rank gets all, the others zeros."""

    def __init__(self, own: Linear, ranks: Ranks, width: int) -> None:
        self.own, self.ranks, self.width = own, ranks, width

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.own(x))

    def join(self, own: Tensor) -> Tensor:
        """All outputs, on the first rank, of the `own` ones that the product gives on each."""
        return self.ranks.join_at_first(own, self.width)


def own_product(linear: Linear) -> Linear:
    """The product that this rank multiplies with."""
    return linear.own if isinstance(linear, AllReduceLinear | GatherToRank0) else linear
