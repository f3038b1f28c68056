"""The operations of a fused decoder: the seam between its loop and a kind of machine.

`TorchOps` runs wherever torch runs and is what others are compared with. Knows tensors and the
attention backend; knows nothing about model classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.runner.attention.backend import AttentionOptions, LayerAttention, ModelInputs

if TYPE_CHECKING:
    from aioserve.model_source.quantized_weight import QuantizedWeight

Activation = Literal["silu", "gelu", "gelu_tanh"]
Linear = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]

# Numbers of a weight that `WideLinear` converts at a time: 2 MiB of float32, which stay in a cache.
_WIDE_NUMBERS = 1 << 19


class NotFusedError(Exception):
    """The model stays with the modules of `transformers`; the message says why."""


class Embedding(Protocol):
    """Rows of a table by token id: [T] -> [T, hidden]."""

    shape: tuple[int, int]  # tokens, hidden
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor: ...


class PlainEmbedding:
    """An embedding that reads rows of a table as it is."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.dtype = table, table.dtype
        self.shape = (table.shape[0], table.shape[1])

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table)


class RMSNorm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) in float32, rounded, times the weight: as Llama does."""

    weight: Tensor  # [hidden], or [head_dim] for a norm of heads
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of one layer, but for its products with weights."""

    index: int  # in the KV cache
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # float32 [max_model_len, head_dim]: for each position head_dim / 2 cosines, then as many
    # sines, any scaling included; element i of a head turns with element i + head_dim / 2
    cos_sin: Tensor
    head_norms: tuple[RMSNorm, RMSNorm] | None  # of queries and of keys, before the turn; one eps
    options: AttentionOptions


class ExpertWeights(NamedTuple):
    """gate_up [2 * inner, hidden], gates first, and down [hidden, inner]; biases or None."""

    gate_up: "Tensor | QuantizedWeight"
    gate_up_bias: Tensor | None
    down: "Tensor | QuantizedWeight"
    down_bias: Tensor | None


class Router(NamedTuple):
    """A token takes the `top_k` experts with the largest logits, `weight` [experts, hidden] times
    the token plus `bias`. Its shares are the softmax of these, or, `of_all`, of all logits.
    """

    weight: Tensor
    bias: Tensor | None
    top_k: int
    of_all: bool


class ExpertActivation(NamedTuple):
    """One of `Activation`; or, with a `limit`, gate * sigmoid(alpha * gate) * (up + 1) of gates of
    at most `limit` and ups between -`limit` and `limit` (gpt-oss).
    """

    name: Activation | None
    alpha: float = 0.0
    limit: float = 0.0


class Routes(NamedTuple):
    """Experts that tokens take: their numbers, int32 [T, k], and their shares, float32 [T, k]."""

    chosen: Tensor
    shares: Tensor


class Experts(ABC):
    """Products of which each token takes some."""

    @abstractmethod
    def route(self, x: Tensor) -> Routes:
        """Choose the experts of each of the T tokens of `x` [T, hidden], and their shares."""

    @abstractmethod
    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        """[T, hidden]: what the chosen experts make of `x`, times their shares, added up."""


class Mixture(Protocol):
    """A mixture of experts that is given the routes by another module."""

    @property
    def products(self) -> Sequence[Linear]:
        """The products of all experts; after a change of one, `update` lets the kernels know."""

    def update(self) -> None: ...

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """[T, hidden]: what the chosen experts make of `x`, times their shares, added up."""


class Ops(ABC):
    """One thread, one step at a time: `begin`, then the operations of all layers in order."""

    is_compiled = False  # whether our own kernels do all of them
    #: What computes the additions of LoRA adapters beside these: as in `AdapterSites`.
    low_rank: Literal["torch", "kernels"] = "torch"

    @abstractmethod
    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """x @ weight.T + bias, for `weight` [out, in]; a copy in another layout may be made. Its
        results are of `out_dtype`: the type of the weight (None), or float32.
        """

    def quantized_linear(
        self,
        weights: "Sequence[QuantizedWeight]",
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear | None:
        """Return the same for weights one below the other in their formats, and `x` of `dtype`;
        None where nothing multiplies with these.
        """
        return None

    def quantized_embedding(self, head: Linear, dtype: torch.dtype) -> Embedding | None:
        """Return the weight of such a product as a table; None if it is another's product."""
        return None

    def experts(
        self, router: Router, activation: ExpertActivation, weights: Iterable[ExpertWeights]
    ) -> Experts:
        """Return a layer of experts. Raises `NotFusedError` where none of these operations compute
        it.
        """
        raise NotFusedError("its experts are served by the kernels of a CPU alone")

    def mixture(
        self, activation: ExpertActivation, weights: Iterable[ExpertWeights], dtype: torch.dtype
    ) -> Mixture | None:
        """Experts without their router, for rows of `dtype`; None where nothing computes these."""
        return None

    @abstractmethod
    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        """Derive what all layers of a step share. `attention` is that of the step of `inputs`."""

    @abstractmethod
    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> None:
        """Normalize each row of `x` [T, hidden] into `out`."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm, out: Tensor) -> None:
        """Add `x` to `residual` in place, then normalize that into `out`; all [T, hidden]."""

    @abstractmethod
    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        """Write activation(x[:, :I]) * x[:, I:] into `out` [T, I]."""

    @abstractmethod
    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """Normalize and rotate heads, store K and V, attend: [T, (Hq + 2 Hkv) D] -> [T, Hq D].

        `qkv` may be overwritten.
        """


class PlainLinear:
    """x @ weight.T + bias on the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class WideLinear:
    """x @ weight.T + bias in float32, on a weight of a two-byte type that stays as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            out = torch.mm(x, self._weight.T, out_dtype=torch.float32)
            return out if self._bias is None else out.add_(self._bias)
        # torch has no such product on a CPU: a piece of the weight is made wide at a time.
        out = x.new_empty(len(x), len(self._weight), dtype=torch.float32)
        wide = x.float()
        size = max(1, _WIDE_NUMBERS // self._weight.shape[1])
        for begin in range(0, len(self._weight), size):
            piece = slice(begin, begin + size)
            bias = None if self._bias is None else self._bias[piece]
            out[:, piece] = F.linear(wide, self._weight[piece].float(), bias)
        return out


class TorchOps(Ops):
    """Plain torch operations, in the arithmetic of `transformers`."""

    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if out_dtype not in (None, weight.dtype):
            return WideLinear(weight, bias)
        return PlainLinear(weight, bias)

    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        self._attention = attention
        self._positions = inputs.positions
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}  # by the table they come from

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> None:
        torch.mul(_normalize(x, norm.eps), norm.weight, out=out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self.rms_norm(residual.add_(x), norm, out)

    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        if activation == "silu":
            activated = F.silu(gate)
        else:
            activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        torch.mul(activated, up, out=out)

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        first_value = layer.num_heads + layer.num_kv_heads
        query, key = heads[:, : layer.num_heads], heads[:, layer.num_heads : first_value]
        if layer.head_norms is not None:
            query_norm, key_norm = layer.head_norms
            query = _normalize(query, query_norm.eps) * query_norm.weight
            key = _normalize(key, key_norm.eps) * key_norm.weight
        cos, sin = self._angles(layer.cos_sin, qkv.dtype)
        attended = self._attention.forward(
            layer.index,
            _rotate(query, cos, sin),
            _rotate(key, cos, sin),
            heads[:, first_value:],
            layer.options,
        )
        return attended.view(len(qkv), -1)

    def _angles(self, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles [T, 1, D / 2] of the tokens of this step, gathered for the first layer only."""
        angles = self._gathered.get(id(cos_sin))
        if angles is None:
            cos, sin = cos_sin.index_select(0, self._positions).to(dtype)[:, None].chunk(2, dim=-1)
            angles = self._gathered[id(cos_sin)] = (cos, sin)
        return angles


def _normalize(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
