"""The fast tier: models with the structure of Llama, run through our own loop on fused weights.

`fuse` turns a loaded model into a `FusedModel` if it can prove that both compute the same. Knows
`transformers` modules and the attention seam; knows nothing about files or requests.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.quantized import attached, stands_in, unpacked, unpacked_in_turn
from aioserve.runner.adapters import TokenAdapters
from aioserve.runner.attention.backend import (
    AttentionCall,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
)
from aioserve.runner.fused.adapters import fused_sites
from aioserve.runner.fused.decoder import (
    LOGITS_DTYPE,
    AllReduceExperts,
    AllReduceLinear,
    DecoderLayer,
    FusedDecoder,
    GatedMLP,
    GatherToRank0,
    Place,
)
from aioserve.runner.fused.ops import Embedding, Experts, Linear, NotFusedError, Ops, PlainEmbedding
from aioserve.runner.fused.proof import Proof
from aioserve.runner.fused.recognize import (
    DecoderParts,
    ExpertParts,
    GatedParts,
    LayerParts,
    MRoPERows,
    find_parts,
)
from aioserve.runner.served_model import Halves, ServedModel, Taps
from aioserve.runner.tensor_parallel.group import Ranks
from aioserve.support.progress import stage

if TYPE_CHECKING:  # it brings `transformers`, which takes seconds
    from aioserve.runner.attention.bridge import AttentionProbe
    from aioserve.runner.multimodal.image_encoder import ImageEncoder

logger = logging.getLogger(__name__)

__all__ = ["FusedModel", "NotFusedError", "Place", "fuse"]


class ModelFacts(msgspec.Struct, frozen=True):
    """What a fused model says of itself, as `ServedModel` has it."""

    name: str
    num_parameters: int
    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]


class FusedModel(ServedModel, Halves):
    """A model whose modules are gone; their weights are fused and laid out for this machine."""

    def __init__(
        self,
        facts: ModelFacts,
        decoder: FusedDecoder,
        is_compiled: bool,
        device: torch.device,
        own_turns: MRoPERows | None = None,
        image_encoder: "ImageEncoder | None" = None,
    ) -> None:
        self.facts = facts
        self._own_turns = own_turns
        self.name = facts.name
        self.num_parameters = facts.num_parameters
        self.kv_cache_spec = facts.kv_cache_spec
        self.attention_calls = facts.attention_calls
        self.decoder, self.embedding = decoder, decoder.embedding
        self.is_compiled = self.is_stored = is_compiled
        self.image_encoder = image_encoder
        self.adapter_sites = fused_sites(decoder, facts.kv_cache_spec.dtype, device)

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.decoder.forward(self._turned(inputs), attention)

    def tap(self, layers: Sequence[int]) -> Taps:
        self.decoder.taps = Taps(tuple(layers))
        return self.decoder.taps

    @property
    def halves(self) -> Halves:
        return self

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.decoder.hidden(self._turned(inputs), attention)

    def _turned(self, inputs: ModelInputs) -> ModelInputs:
        if (given := inputs.given) is None or given.axes is None:
            return inputs
        assert self._own_turns is not None, "fused for that"
        positions = inputs.positions.clone()
        positions[given.places] = self._own_turns.place(given.axes)
        return inputs._replace(positions=positions)

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        return self.decoder.logits(hidden, adapters)


@torch.inference_mode()
def fuse(
    original: ServedModel,
    module: nn.Module,
    probe: "AttentionProbe",
    max_model_len: int,
    place: Place,
    num_mrope_tokens: int = 0,
) -> FusedModel:
    """The same model on fused weights; `module`, which `original` runs, is used up.

    Up to `num_mrope_tokens` tokens of a step may turn by axes (M-RoPE).
    Raises `NotFusedError`, with `module` intact, unless every layer gives the same results, and
    `ConfigError` for a setting that is wrong, or if a part of `module` is gone by then.
    """
    try:
        parts = find_parts(module, probe, max_model_len, num_mrope_tokens)
        ops = place.create_ops(original.kv_cache_spec, parts.row_sizes)
        with unpacked_in_turn(module):
            proof = Proof(original, parts, max_model_len, place)
        embedding, head, small = _prove(parts, proof, ops, place.ranks)
    except (ConfigError, NotFusedError):
        raise
    except Exception as error:  # code of any kind of model, on weights of any kind
        raise NotFusedError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    layers = []
    for index, layer in enumerate(stage(parts.layers, "Laying out weights", "layer")):
        found = small.pop(index, None) or _fuse_layer(layer, ops, place.ranks)
        layers.append(found)
        _let_go(layer)
    decoder = FusedDecoder(embedding, layers, parts.norm, head, ops)
    whole = place.create_whole_decoder(embedding, layers, parts.norm, head, ops)
    if whole is not None:
        difference = proof.difference(whole, decoder)
        if difference is None:
            decoder = whole
        else:
            logger.warning(
                "%s: the compiled loop over layers is not used: %s", original.name, difference
            )
    facts = ModelFacts(
        f"{original.name}, fused",
        original.num_parameters,
        original.kv_cache_spec,
        original.attention_calls,
    )
    encoder = original.image_encoder
    return FusedModel(facts, decoder, ops.is_compiled, place.device, parts.own_turns, encoder)


def _prove(
    parts: DecoderParts, proof: Proof, ops: Ops, ranks: Ranks | None
) -> tuple[Embedding, Linear, dict[int, DecoderLayer]]:
    """Embedding, head, and quantized layers of the fused model. Raises `NotFusedError`."""
    head = _fuse_linears((parts.head,), ops, LOGITS_DTYPE)
    table = parts.embedding.weight
    embedding = None
    if parts.head.weight is table:  # tied: one copy for both
        embedding = ops.quantized_embedding(head, table.dtype)
    elif (stored := attached(table)) is not None:
        alone = ops.quantized_linear([stored], None, table.dtype)
        embedding = alone and ops.quantized_embedding(alone, table.dtype)
    if embedding is None:
        embedding = PlainEmbedding(unpacked(table).clone())  # the file it is mapped to can go
    if ranks is not None:
        head = GatherToRank0(head, ranks, parts.embedding.num_embeddings)
    proof.check_embedding(embedding)
    proof.check_head(parts.norm, head, ops)
    # one layer at a time, and all of them again later: there may not be memory for all layers
    # beside the originals, and the originals are needed until the last one is proved; but quantized
    # layers, which take long to make, are kept, and what they were made of goes
    small: dict[int, DecoderLayer] = {}
    next_norms = [layer.input_norm for layer in parts.layers[1:]] + [parts.norm]
    layers = stage(parts.layers, "Checking fused layers", "layer")
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        fused = _fuse_layer(layer, ops, ranks)
        try:
            proof.check_layer(index, fused, next_norm, ops)
        except Exception as error:
            if not small:
                raise
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{reason}, but layers before it are: set model.fused to False"
            ) from None
        if ops.is_compiled and all(map(_is_small, _modules(layer))):
            small[index] = fused
            _let_go(layer)
    return embedding, head, small


def _let_go(layer: LayerParts) -> None:
    """Free the weights of a layer's modules: a fused copy has them now."""
    for module in _modules(layer):
        for name, _ in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            delattr(module, name)


def _modules(layer: LayerParts) -> list[nn.Module]:
    """The modules with the weights of a layer's products."""
    mlp = layer.mlp
    own = (*mlp.gate_up, mlp.down) if isinstance(mlp, GatedParts) else (mlp.experts,)
    return [*layer.qkv, layer.output, *own]


def _is_small(module: nn.Module) -> bool:
    """Whether all matrices of a module are quantized, and have no numbers beside them."""
    matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return bool(matrices) and all(map(stands_in, matrices))


def _fuse_layer(parts: LayerParts, ops: Ops, ranks: Ranks | None) -> DecoderLayer:
    output = _fuse_linears((parts.output,), ops)
    if ranks is not None:
        output = AllReduceLinear(output, ranks)
    return DecoderLayer(
        input_norm=parts.input_norm,
        qkv=_fuse_linears(parts.qkv, ops),
        attention=parts.attention,
        output=output,
        post_norm=parts.post_norm,
        mlp=_fuse_mlp(parts.mlp, ops, ranks),
    )


def _fuse_mlp(parts: GatedParts | ExpertParts, ops: Ops, ranks: Ranks | None) -> GatedMLP | Experts:
    if isinstance(parts, ExpertParts):
        experts = ops.experts(parts.router, parts.activation, parts.weights())
        return experts if ranks is None else AllReduceExperts(experts, ranks)
    down = _fuse_linears((parts.down,), ops)
    return GatedMLP(
        gate_up=_fuse_linears(parts.gate_up, ops),
        activation=parts.activation,
        intermediate_size=parts.inner_size,
        down=down if ranks is None else AllReduceLinear(down, ranks),
    )


def _fuse_linears(
    linears: tuple[nn.Linear, ...], ops: Ops, out_dtype: torch.dtype | None = None
) -> Linear:
    """One product instead of several with the same input, as `Ops.linear` has it."""
    biases, first = None, linears[0].weight
    if any(linear.bias is not None for linear in linears):
        biases = torch.cat(
            [
                first.new_zeros(linear.out_features) if linear.bias is None else linear.bias.data
                for linear in linears
            ]
        )
    stored = [weight for linear in linears if (weight := attached(linear.weight)) is not None]
    if len(stored) == len(linears):
        product = ops.quantized_linear(stored, biases, first.dtype, out_dtype)
        if product is not None:
            return product
    weights = torch.cat([unpacked(linear.weight) for linear in linears])
    return ops.linear(weights, biases, out_dtype)
