"""Makes a model with the structure of Llama run on fused weights, if both compute the same.

`Proof` shows layer by layer that fused layers compute what the modules they were made from
compute; `fuse` makes them. Knows `transformers` modules and the attention seam; knows nothing
about files or requests.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.quantized_weight import attached, stands_in, unpacked, unpacked_in_turn
from aioserve.runner.attention.backend import StepInputs
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
from aioserve.runner.fused.model import FusedModel, ModelFacts
from aioserve.runner.fused.ops import (
    Embedding,
    Experts,
    Linear,
    NotFusedError,
    Ops,
    PlainEmbedding,
    RMSNorm,
    Routes,
)
from aioserve.runner.fused.recognize import (
    DecoderParts,
    ExpertParts,
    GatedParts,
    LayerParts,
    find_parts,
)
from aioserve.runner.ranks import Ranks
from aioserve.runner.served_model import ServedModel
from aioserve.support.progress import stage

if TYPE_CHECKING:
    from aioserve.runner.attention.bridge import AttentionProbe


_LENGTHS = (21, 1, 9)  # tokens of the rows: a chunk, a decode, a shorter chunk
_BLOCK_SIZE = 16
_BLOCKS_PER_ROW = -(-max(_LENGTHS) // _BLOCK_SIZE)

# How far a layer may be from the original: a share of what it adds to its input, and one rounding
# of the sum. Sums in another order make 1e-6 of it in float32, roundings 0.01 in bfloat16
# (measured); a forgotten factor, norm or bias 0.1 and more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.04}

_NO_SHARE = 1e-6  # of an expert's output in the sum: this much more or less is nothing


class Proof:
    """One run of the original on a step of random tokens, to compare with."""

    def __init__(
        self,
        original: ServedModel,
        parts: DecoderParts,
        max_model_len: int,
        place: Place,
    ) -> None:
        """Raises `NotFusedError` if there is nothing to compare with."""
        self._ranks = place.ranks
        step = _random_step(parts.embedding.num_embeddings, max_model_len)
        self._inputs, self._attention = place.begin_alone(
            original.kv_cache_spec, len(_LENGTHS) * _BLOCKS_PER_ROW, _BLOCK_SIZE, step
        )
        routers = {
            index: layer.mlp.router_module
            for index, layer in enumerate(parts.layers)
            if isinstance(layer.mlp, ExpertParts)
        }
        layers = [layer.module for layer in parts.layers]
        with _states(layers) as self._states, _routes(routers) as self._routes:
            self._logits = original.forward(self._inputs, self._attention)
        if not all(bool(x.isfinite().all()) for x in (*self._states, self._logits)):
            raise NotFusedError("it computes infinities or what is not a number")

    def check_embedding(self, embedding: Embedding) -> None:
        """Raises `NotFusedError` if the first layer is given anything but its rows."""
        rows = embedding(self._inputs.input_ids)
        if not torch.equal(rows, self._states[0]):
            raise NotFusedError("its embedding is not a plain one")

    def check_layer(self, index: int, layer: DecoderLayer, next_norm: RMSNorm, ops: Ops) -> None:
        """Raises `NotFusedError` if `layer` is not layer `index` of the original."""
        before, after, mlp = self._states[index], self._states[index + 1], layer.mlp
        if not isinstance(mlp, GatedMLP):
            logits, routes = self._routes[index]
            mlp = _Routed(mlp, routes)
            layer = replace(layer, mlp=mlp)
        ops.begin(self._inputs, self._attention)
        state = layer.start(before.clone(), ops)
        layer.feed_forward(layer.attend(state, ops), state, next_norm, ops)
        error = _norm(state.residual - after) - torch.finfo(after.dtype).eps * _norm(after)
        self._judge(f"layer {index}", error, _norm(after - before))
        if isinstance(mlp, _Routed):
            self._check_routes(f"the router of layer {index}", logits, routes, mlp.own)

    def _check_routes(self, what: str, logits: Tensor, expected: Routes, found: Routes) -> None:
        """Of near ties, which roundings decide, either may be chosen: so numbers are compared in
        order of size, by the original's `logits` [T, experts] and as shares.
        """
        top, own = (
            logits.gather(1, routes.chosen.long()).sort().values for routes in (expected, found)
        )
        size = _norm(logits - logits.mean(1, keepdim=True))
        self._judge(what, _norm(top - own), size)
        # as logarithms, which are as far apart as logits
        top, own = ((routes.shares + _NO_SHARE).log().sort().values for routes in (expected, found))
        self._judge(what, _norm(top - own), size)

    def check_head(self, norm: RMSNorm, head: Linear, ops: Ops) -> None:
        """Raises `NotFusedError` if `norm` and `head` are not all that follows the layers."""
        last = self._states[-1][self._inputs.logits_rows]
        normed = torch.empty_like(last)
        ops.rms_norm(last, norm, out=normed)
        self._judge("the head", _norm(head(normed) - self._logits), _norm(self._logits))

    def difference(self, one: FusedDecoder, other: FusedDecoder) -> str | None:
        """Return why `one` cannot take the place of `other`, which is proved: None if it gives the
        same logits, to the bit.
        """
        expected = other.forward(self._inputs, self._attention)
        try:
            found = one.forward(self._inputs, self._attention)
        except Exception as error:  # the other one serves
            return f"{type(error).__name__}: {error}"
        return None if torch.equal(found, expected) else "its logits are others"

    def _judge(self, what: str, error: float, size: float) -> None:
        """`error` and `size` are norms; a layer that adds nothing is of size 0."""
        if self._ranks is not None:  # all go on in the same way
            error, size = self._ranks.told_by_first((error, size))
        if not error <= _TOLERANCE[self._logits.dtype] * size:  # NaN is an error, too
            share = f"{error / size:.1%}" if size else f"{error:.2g} where it adds nothing"
            raise NotFusedError(f"{what} is not that of Llama: its results differ by {share}")


def _norm(x: Tensor) -> float:
    return float(x.double().norm())  # squares of large numbers are beyond float32


class _Routed(Experts):
    """Goes where the original went, and notes where it would have gone itself."""

    def __init__(self, experts: Experts, routes: Routes) -> None:
        self._experts, self._routes = experts, routes

    def route(self, x: Tensor) -> Routes:
        self.own = self._experts.route(x)
        return self._routes

    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        return self._experts.mix(x, routes)


@contextmanager
def _routes(routers: dict[int, nn.Module]) -> Iterator[dict[int, tuple[Tensor, Routes]]]:
    """Logits [T, experts] of routers by their layers, and what these chose."""
    found: dict[int, tuple[Tensor, Routes]] = {}

    def note(layer: int, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, shares, chosen = output
        found[layer] = logits.float(), Routes(chosen.to(torch.int32), shares.float())

    handles = [
        router.register_forward_hook(lambda *args, layer=layer: note(layer, args[2]))
        for layer, router in routers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _states(layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Hidden states [T, hidden] before the first of `layers` and after each of them."""
    states: list[Tensor] = []

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not states:
            states.append((args[0] if args else kwargs["hidden_states"])[0])
        states.append((output if isinstance(output, Tensor) else output[0])[0])

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _random_step(vocab_size: int, max_model_len: int) -> StepInputs:
    """Positions are from the whole range, as rotary embeddings only look at differences."""
    random = np.random.default_rng(0)
    lengths = np.array(_LENGTHS)
    row = np.repeat(np.arange(len(lengths)), lengths)
    query_start_loc = np.concatenate(([0], np.cumsum(lengths)))
    block, offset = np.divmod(np.arange(len(row)) - query_start_loc[row], _BLOCK_SIZE)
    blocks = np.arange(len(lengths) * _BLOCKS_PER_ROW, dtype=np.int32)
    block_table = blocks.reshape(len(lengths), _BLOCKS_PER_ROW)
    return StepInputs(
        req_ids=[str(number) for number in range(len(lengths))],
        rows=np.arange(len(lengths)),
        input_ids=random.integers(0, vocab_size, len(row)),
        positions=random.integers(0, max_model_len, len(row)),
        slot_mapping=block_table[row, block].astype(np.int64) * _BLOCK_SIZE + offset,
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        block_table=block_table,
        sampling=np.arange(len(lengths)),
        logits_indices=query_start_loc[1:] - 1,
    )


# The fast tier: models with the structure of Llama, run through our own loop on fused weights.
# `fuse` turns a loaded model into a `FusedModel` if it can prove that both compute the same. Knows
# `transformers` modules and the attention seam; knows nothing about files or requests.


logger = logging.getLogger(__name__)


@torch.inference_mode()
def fuse(
    original: ServedModel,
    module: nn.Module,
    probe: "AttentionProbe",
    max_model_len: int,
    place: Place,
    num_mrope_tokens: int = 0,
) -> FusedModel:
    """Return the same model on fused weights; `module`, which `original` runs, is used up.

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
    """Return the modules with the weights of a layer's products."""
    mlp = layer.mlp
    own = (*mlp.gate_up, mlp.down) if isinstance(mlp, GatedParts) else (mlp.experts,)
    return [*layer.qkv, layer.output, *own]


def _is_small(module: nn.Module) -> bool:
    """Return whether all matrices of a module are quantized, and have no numbers beside them."""
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
    """Return one product instead of several with the same input, as `Ops.linear` has it."""
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
