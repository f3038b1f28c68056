"""Products with packed weights, and what happens where this CPU has none."""

from collections.abc import Iterator

import pytest
import torch

from aioserve.runner.cpu import onednn
from aioserve.runner.cpu.onednn import PackedLinear, pack_linear
from aioserve.runner.fused.ops import PlainLinear
from aioserve.runner.loader import named_dtype
from tests.variants import DTYPES


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    onednn._can_pack.cache_clear()
    yield
    onednn._can_pack.cache_clear()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_float64_packed_or_not(name: str, has_bias: bool) -> None:
    dtype, generator = named_dtype(name), torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, 60), (5, 60), (70,))
    )
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    found = pack_linear(weight, bias if has_bias else None)(x)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=8 * tolerance)


def test_a_type_without_packed_products_is_tried_once_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    weight, x = torch.eye(16, dtype=torch.float64), torch.ones(2, 16, dtype=torch.float64)
    for _ in range(3):
        product = pack_linear(weight, None)
        assert isinstance(product, PlainLinear)
        assert torch.equal(product(x), x)
    (line,) = caplog.messages
    assert line.startswith("torch.float64 weights are not packed, which costs some speed: ")


@pytest.mark.parametrize("name", DTYPES)
def test_a_cpu_that_onednn_refuses_gets_plain_products(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("path needs the cpu support avx_ne_convert")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    caplog.set_level("INFO")
    assert isinstance(pack_linear(torch.eye(16, dtype=named_dtype(name)), None), PlainLinear)
    assert "avx_ne_convert" in caplog.text


def test_wrong_results_are_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(pack_linear(torch.eye(16), None), PackedLinear):
        pytest.skip("this build of torch packs no weights")
    onednn._can_pack.cache_clear()
    call = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: call(self, x) * 1.001)
    caplog.set_level("INFO")
    assert isinstance(pack_linear(torch.eye(16), None), PlainLinear)
    assert "oneDNN's results are wrong" in caplog.text
