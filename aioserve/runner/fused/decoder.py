"""The forward pass of a Llama-like decoder: a loop over layers of fused weights.

Before it, products of which this rank has a share; behind it, the place where a model computes.
Knows the seams of `ops`; knows nothing about requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    RowStates,
    StepInputs,
)
from aioserve.runner.fused.ops import (
    Activation,
    AttentionLayer,
    Embedding,
    Experts,
    Linear,
    Ops,
    RMSNorm,
    Routes,
    TorchOps,
)
from aioserve.runner.served_model import Taps

if TYPE_CHECKING:
    from aioserve.runner.adapters import TokenAdapters
    from aioserve.runner.ranks import Ranks


class AllReduceLinear:
    """A product with a share of the inputs: the sums of all ranks are added up."""

    def __init__(self, own: Linear, ranks: "Ranks") -> None:
        self.own, self.ranks = own, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.own(x))

    def join(self, own: Tensor) -> Tensor:
        """Return the sum of what the product gives on each rank."""
        self.ranks.add_up(own)
        return own


class GatherToRank0:
    """A product with a share of the `width` outputs: the first rank gets all, the others zeros."""

    def __init__(self, own: Linear, ranks: "Ranks", width: int) -> None:
        self.own, self.ranks, self.width = own, ranks, width

    def __call__(self, x: Tensor) -> Tensor:
        return self.join(self.own(x))

    def join(self, own: Tensor) -> Tensor:
        """Return all outputs, on the first rank, of the `own` ones that the product gives on
        each.
        """
        return self.ranks.join_at_first(own, self.width)


class AllReduceExperts(Experts):
    """A layer of experts with a share of the numbers inside each: sums are added up."""

    def __init__(self, own: Experts, ranks: "Ranks") -> None:
        self.own, self.ranks = own, ranks

    def route(self, x: Tensor) -> Routes:
        return self.own.route(x)

    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        out = self.own.mix(x, routes)
        self.ranks.add_up(out)
        return out


def own_experts(experts: object) -> object:
    """Return the layer of experts that this rank computes, if `experts` is one."""
    return experts.own if isinstance(experts, AllReduceExperts) else experts


def with_added(linear: Linear, x: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    """`linear(x)`, where `add` adds something to what this rank has of it, before the parts of all
    ranks are put together.
    """
    out = own_product(linear)(x)
    add(out)
    return linear.join(out) if isinstance(linear, AllReduceLinear | GatherToRank0) else out


def own_product(linear: Linear) -> Linear:
    """Return the product that this rank multiplies with."""
    return linear.own if isinstance(linear, AllReduceLinear | GatherToRank0) else linear


# The forward pass of a Llama-like decoder: a loop over layers of fused weights. Few operations and
# fewer allocations: on a small model the calls cost as much as the arithmetic. Knows nothing about
# `transformers`, blocks or requests.


#: What adapters know the products by: a layer's by its number and name, and the head's.
HEAD = "head"
LayerProduct = Literal["qkv", "output", "gate_up", "down"]

#: What a head writes, whatever the type of the model. Its sums are float32 anyway; rounded to
#: bfloat16, near logits become equal, and the first of them is taken in place of the largest.
LOGITS_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """A gated feed-forward layer: down(gate(gate_up(x)))."""

    gate_up: Linear
    activation: Activation
    intermediate_size: int
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += output(attend(qkv(input_norm(x)))), then x += mlp(post_norm(x))."""

    input_norm: RMSNorm
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    post_norm: RMSNorm
    mlp: GatedMLP | Experts

    def start(self, x: Tensor, ops: Ops, adapters: "TokenAdapters | None" = None) -> "Activations":
        """Return the state in which `x` [T, hidden] enters this layer; `x` itself will change."""
        state = Activations(x, torch.empty_like(x), adapters)
        ops.rms_norm(x, self.input_norm, out=state.normed)
        return state

    def attend(self, state: "Activations", ops: Ops) -> Tensor:
        """Return the attention of the tokens to their past, [T, Hq * head_dim]."""
        qkv = self._multiply("qkv", self.qkv, state.normed, state.adapters)
        return ops.attend(self.attention, qkv)

    def feed_forward(
        self, attended: Tensor, state: "Activations", next_norm: RMSNorm, ops: Ops
    ) -> None:
        """All that follows attention, the norm of the next layer included."""
        adapters, mlp = state.adapters, self.mlp
        attended = self._multiply("output", self.output, attended, adapters)
        ops.add_rms_norm(attended, state.residual, self.post_norm, out=state.normed)
        if isinstance(mlp, GatedMLP):
            wide = self._multiply("gate_up", mlp.gate_up, state.normed, adapters)
            gated = wide.new_empty(len(wide), mlp.intermediate_size)
            ops.gate(wide, mlp.activation, out=gated)
            narrow = self._multiply("down", mlp.down, gated, adapters)
        else:
            narrow = mlp.mix(state.normed, mlp.route(state.normed))
        ops.add_rms_norm(narrow, state.residual, next_norm, out=state.normed)

    def _multiply(
        self, product: LayerProduct, linear: Linear, x: Tensor, adapters: "TokenAdapters | None"
    ) -> Tensor:
        if adapters is None:
            return linear(x)
        place = (self.attention.index, product)
        return with_added(linear, x, lambda out: adapters.add(place, x, out))


@dataclass(frozen=True, slots=True)
class Activations:
    """The tensors that layers hand on, and buffers that all of them use; T rows each."""

    residual: Tensor  # [T, hidden]
    normed: Tensor  # [T, hidden], the residual after the norm that comes next
    adapters: "TokenAdapters | None" = None

    def take(self, tokens: Tensor, adapters: "TokenAdapters | None") -> "Activations":
        """Go on with these tokens only, which have these `adapters`."""
        size = len(tokens)
        return Activations(self.residual[tokens], self.normed[:size], adapters)


class FusedDecoder:
    """Embedding, layers, last norm and LM head, over the operations of one machine."""

    #: As `ServedModel` has it. Products of a library may depend on how many rows there are.
    alone_below: float = 0

    def __init__(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [norm]
        self.norm, self.head = norm, head
        self.ops = ops
        self.taps: Taps | None = None  # as `ServedModel.tap`

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """Return the logits [S, V] of the rows that sample, as `ServedModel.forward` describes
        them.
        """
        return self.logits(self.hidden(inputs, attention), inputs.logits_adapters)

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """Return what the head takes, [S, hidden], after the last norm; `logits_rows` ascend."""
        ops, last, num_sampling = self.ops, self.layers[-1], len(inputs.logits_rows)
        ops.begin(inputs, attention)
        x = self.embedded(inputs)
        state = self.layers[0].start(x, ops, inputs.adapters)
        wanted = () if self.taps is None else self.taps.layers
        tapped: dict[int, Tensor] = {}
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            if layer.attention.index in wanted:
                tapped[layer.attention.index] = state.residual.clone()
            attended = layer.attend(state, ops)
            if layer is last and num_sampling < len(x):
                # no layer attends any more: only the tokens that sample matter from here on
                if not num_sampling:
                    break
                attended = attended[inputs.logits_rows]
                state = state.take(inputs.logits_rows, inputs.logits_adapters)
            layer.feed_forward(attended, state, next_norm, ops)
            if inputs.given is not None and layer.attention.index < len(inputs.given.deep):
                # never behind the last layer, which does not have all tokens
                state.residual[inputs.given.places] += inputs.given.deep[layer.attention.index]
                ops.rms_norm(state.residual, next_norm, out=state.normed)
        if self.taps is not None:
            self.taps.keep(inputs.slots, torch.stack([tapped[index] for index in wanted]))
        return state.normed if num_sampling else x[:0]

    def embedded(self, inputs: ModelInputs) -> Tensor:
        """[T, hidden]: what enters the first layer."""
        x = self.embedding(inputs.input_ids)
        if inputs.adapters is not None:
            inputs.adapters.embed(inputs.input_ids, x)
        if inputs.given is not None:
            x[inputs.given.places] = inputs.given.rows
        return x

    def logits(self, hidden: Tensor, adapters: "TokenAdapters | None" = None) -> Tensor:
        """Return the logits [N, V] of any rows of `hidden`, which have these LoRA `adapters`."""
        if not len(hidden):
            return hidden.new_empty(0, self.embedding.shape[0], dtype=LOGITS_DTYPE)
        if adapters is None:
            return self.head(hidden)
        return with_added(self.head, hidden, lambda out: adapters.add(HEAD, hidden, out))


# Where a model computes, as far as fusing it has to know: its device, operations, attention.
# `cpu.models` has one and `cuda.fused` the other. Knows nothing about model classes.


class Place(ABC):
    """A kind of machine that runs fused decoders: it makes operations, caches and decoders."""

    device: torch.device
    ranks: "Ranks | None" = None  # the processes with the rest of the weights; None: all are here
    multiplies_blocks = False  # whether quantized weights are served as they are stored
    is_card = False  # whether work is queued, on memory of its own

    def available_memory(self) -> int | None:
        """Return bytes that weights could take yet, as far as that is known."""
        return None

    @abstractmethod
    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        """Return the fastest operations here, for rows of these sizes and the attention of
        `spec`.
        """

    def create_products(self) -> Ops:
        """Return the fastest products here, of operations whose others are not asked for."""
        return TorchOps()

    @abstractmethod
    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        """Return one step on a KV cache of its own, made for it."""

    def own_forward(
        self, module: nn.Module, known: Callable[[], Tensor | None]
    ) -> Callable[..., Any]:
        """Return the forward pass of a layer with states, of whose pieces these are `known`, by the
        steps that are fastest here.
        """
        return MethodType(type(module).forward, module)

    def keep_latents(self, module: nn.Module) -> int:
        """Have attention modules within `module` that expand latent states attend to these states,
        where that is faster here. Returns how many do.
        """
        return 0

    def create_row_states(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> RowStates | None:
        """Return a KV cache for models that read whole rows of it; None if there is none here."""
        return None

    def create_whole_decoder(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> FusedDecoder | None:
        """Return a decoder that does the same in one call; None if there is none here for these
        layers.
        """
        return None
