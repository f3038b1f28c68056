"""Layers of experts on every variant that this CPU runs, against plain torch, row by row."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.cpu.experts import CompiledExperts
from aioserve.runner.fused.ops import ExpertActivation, ExpertWeights, Router, Routes

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

SILU, CLAMPED = ExpertActivation("silu"), ExpertActivation(None, alpha=1.702, limit=2.0)
# Of the norm: sums in float32 in another order; two roundings between them, and one at the end.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}


class Layer:
    """One of random weights: by the kernels, and in plain torch."""

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        experts: int = 5,
        top_k: int = 2,
        hidden: int = 80,
        inner: int = 48,
        activation: ExpertActivation = SILU,
        of_all: bool = False,
        has_bias: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(experts + top_k)
        self.dtype, self.hidden, self.activation = dtype, hidden, activation
        self.router = Router(
            self.draw(experts, hidden) / hidden**0.5,
            self.draw(experts) if has_bias else None,
            top_k,
            of_all,
        )
        self.weights = [
            ExpertWeights(
                self.draw(2 * inner, hidden) / hidden**0.5,
                self.draw(2 * inner) if has_bias else None,
                self.draw(hidden, inner) / inner**0.5,
                self.draw(hidden) if has_bias else None,
            )
            for _ in range(experts)
        ]
        self.compiled = CompiledExperts(kernels, self.router, activation, self.weights)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.compiled.mix(x, self.compiled.route(x))

    def plain(self, x: Tensor, routes: Routes) -> Tensor:
        """Float64 [T, hidden], whoever chose the experts."""
        out = torch.zeros(len(x), self.hidden, dtype=torch.float64)
        for number, own in enumerate(self.weights):
            rows, picks = torch.where(routes.chosen == number)
            up_bias, down_bias = (
                None if bias is None else bias.double()
                for bias in (own.gate_up_bias, own.down_bias)
            )
            gates, ups = F.linear(x[rows].double(), own.gate_up.double(), up_bias).chunk(2, dim=-1)
            made = F.linear(self._gate(gates, ups), own.down.double(), down_bias)
            out[rows] += routes.shares[rows, picks, None].double() * made
        return out

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.activation.name == "silu":
            return F.silu(gate) * up
        if self.activation.name == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        _, alpha, limit = self.activation
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)


CASES: dict[str, Callable[[Kernels, torch.dtype], Layer]] = {
    "two of five": lambda k, t: Layer(k, t),
    "one": lambda k, t: Layer(k, t, top_k=1, of_all=True),
    "all": lambda k, t: Layer(k, t, top_k=5, of_all=True),
    "many, narrow": lambda k, t: Layer(k, t, experts=33, top_k=20, hidden=16, inner=16),
    "clamped, biases": lambda k, t: Layer(k, t, activation=CLAMPED, has_bias=True),
    "gelu, wider than panels": lambda k, t: Layer(
        k, t, inner=208, activation=ExpertActivation("gelu_tanh")
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_become_what_their_experts_make_of_them(
    kernels: Kernels, dtype: torch.dtype, case: str
) -> None:
    layer = CASES[case](kernels, dtype)
    for rows in (1, 7, 41):
        x = layer.draw(rows, layer.hidden)
        routes = layer.compiled.route(x)
        found, expected = layer.compiled.mix(x, routes).double(), layer.plain(x, routes)
        assert float((found - expected).norm()) <= TOLERANCE[dtype] * float(expected.norm()), rows


@pytest.mark.parametrize("case", CASES)
def test_the_largest_logits_are_chosen_and_shared_by_softmax(kernels: Kernels, case: str) -> None:
    layer = CASES[case](kernels, torch.float32)
    router, x = layer.router, layer.draw(40, layer.hidden)
    logits = F.linear(x.double(), router.weight.double())
    if router.bias is not None:
        logits += router.bias
    routes = layer.compiled.route(x)
    top = logits.topk(router.top_k)
    assert torch.equal(routes.chosen.long(), top.indices)
    shares = logits.softmax(-1).gather(1, top.indices) if router.of_all else top.values.softmax(-1)
    torch.testing.assert_close(routes.shares.double(), shares, rtol=1e-5, atol=1e-7)


def test_of_equal_logits_the_first_are_chosen(kernels: Kernels) -> None:
    layer = Layer(kernels, torch.float32, experts=20, top_k=3)
    layer.router.weight.zero_()
    equal = CompiledExperts(kernels, layer.router, SILU, layer.weights)
    routes = equal.route(layer.draw(2, layer.hidden))
    assert routes.chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(routes.shares, torch.full((2, 3), 1 / 3))


def test_all_rows_may_take_one_expert_and_none_the_others(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    layer = Layer(kernels, dtype, top_k=1)
    x = layer.draw(45, layer.hidden)  # more than widen their weights in registers
    routes = Routes(torch.full((45, 1), 3, dtype=torch.int32), torch.ones(45, 1))
    found, expected = layer.compiled.mix(x, routes).double(), layer.plain(x, routes)
    assert float((found - expected).norm()) <= TOLERANCE[dtype] * float(expected.norm())


def test_a_row_gets_the_same_bits_beside_any_others_and_with_any_number_of_threads(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    layer = Layer(kernels, dtype, experts=4, hidden=512, inner=208)  # on more than one thread
    x, threads = layer.draw(100, 512), torch.get_num_threads()
    expected = torch.cat([layer(row[None]) for row in x])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in (2, 13, 100):
                assert torch.equal(layer(x[100 - rows :]), expected[100 - rows :]), rows
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_stays_in_its_row(kernels: Kernels, dtype: torch.dtype) -> None:
    layer = Layer(kernels, dtype)
    x = layer.draw(6, layer.hidden)
    right = layer(x)
    x[2, 5], x[4, 0] = float("nan"), float("inf")
    found, others = layer(x), [0, 1, 3, 5]
    assert bool(found[[2, 4]].isnan().all())
    assert torch.equal(found[others], right[others])
