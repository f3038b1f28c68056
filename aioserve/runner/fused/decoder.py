"""The forward pass of a Llama-like decoder: a loop over layers of fused weights.

Few operations and fewer allocations: on a small model the calls cost as much as the arithmetic.
Knows nothing about `transformers`, blocks or requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.fused.ops import Activation, AttentionLayer, Embedding, Linear, Ops, RMSNorm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += output(attend(qkv(input_norm(x)))), then x += down(gate(gate_up(post_norm(x))))."""

    input_norm: RMSNorm
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    post_norm: RMSNorm
    gate_up: Linear
    activation: Activation
    intermediate_size: int
    down: Linear

    def start(self, x: Tensor, ops: Ops) -> "Activations":
        """The state in which `x` [T, hidden] enters this layer; `x` itself will change."""
        state = Activations(x, torch.empty_like(x), x.new_empty(len(x), self.intermediate_size))
        ops.rms_norm(x, self.input_norm, out=state.normed)
        return state

    def attend(self, state: "Activations", ops: Ops) -> Tensor:
        """What the tokens see in their past, [T, Hq * head_dim]."""
        return ops.attend(self.attention, self.qkv(state.normed))

    def feed_forward(
        self, attended: Tensor, state: "Activations", next_norm: RMSNorm, ops: Ops
    ) -> None:
        """All that follows attention, the norm of the next layer included."""
        ops.add_rms_norm(self.output(attended), state.residual, self.post_norm, out=state.normed)
        ops.gate(self.gate_up(state.normed), self.activation, out=state.gated)
        ops.add_rms_norm(self.down(state.gated), state.residual, next_norm, out=state.normed)


@dataclass(frozen=True, slots=True)
class Activations:
    """What layers hand on, and buffers that all of them use; T rows each."""

    residual: Tensor  # [T, hidden]
    normed: Tensor  # [T, hidden], the residual after the norm that comes next
    gated: Tensor  # [T, intermediate_size], scratch

    def take(self, tokens: Tensor) -> "Activations":
        """Go on with these tokens only."""
        size = len(tokens)
        return Activations(self.residual[tokens], self.normed[:size], self.gated[:size])


class FusedDecoder:
    """Embedding, layers, last norm and LM head, over the operations of one machine."""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> None:
        self.embedding = embedding
        self._layers = layers
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [norm]
        self._head = head
        self._ops = ops

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """As `ServedModel.forward`."""
        return self.logits(self.hidden(inputs, attention))

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """As `ServedModel.hidden`."""
        ops, last, num_sampling = self._ops, self._layers[-1], len(inputs.logits_rows)
        ops.begin(inputs, attention)
        x = self.embedding(inputs.input_ids)
        state = self._layers[0].start(x, ops)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            attended = layer.attend(state, ops)
            if layer is last and num_sampling < len(x):
                # nobody attends any more: only the tokens that sample matter from here on
                if not num_sampling:
                    break
                attended = attended[inputs.logits_rows]
                state = state.take(inputs.logits_rows)
            layer.feed_forward(attended, state, next_norm, ops)
        else:
            return state.normed
        return x[:0]

    def logits(self, hidden: Tensor) -> Tensor:
        """As `ServedModel.logits`."""
        if not len(hidden):
            return hidden.new_empty(0, self.embedding.shape[0])
        return self._head(hidden)
