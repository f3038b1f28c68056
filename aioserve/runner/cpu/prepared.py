"""Models as the kernels want them, kept in files, which the next start reads.

It need not prove and lay out the same weights again, nor import `transformers`, which takes
seconds. A file belongs to one model with its settings, to the files that it was made of and to the
code that made it: if one differs, the model is loaded anew. Knows the parts of a fused
decoder; knows nothing of how they were found.
"""

import logging
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError, one_line
from aioserve.kernels import Kernels, load_kernels
from aioserve.kernels.library import cpu_flags, extension
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import KVCacheSpec
from aioserve.runner.cpu.fused import CompiledOps, WholeDecoder
from aioserve.runner.cpu.kv_memory import map_memory
from aioserve.runner.cpu.products import BlockEmbedding, BlockLinear, Blocks, PanelLinear, Panels
from aioserve.runner.fused.decoder import DecoderLayer, GatedMLP
from aioserve.runner.fused.model import FusedModel, ModelFacts
from aioserve.runner.fused.ops import Activation, AttentionLayer, Linear, PlainEmbedding, RMSNorm
from aioserve.runner.served_model import ServedModel
from aioserve.support.kept_files import (
    code_digest,
    digest,
    identities,
    identity,
    is_own,
    make_room,
    note_read,
    user_cache,
    write_whole,
)

logger = logging.getLogger(__name__)

MOST_BYTES = 2 << 30  # of one model; a larger one takes longer to write than it saves
MOST_BYTES_IN_ALL = 4 << 30  # what was read longest ago goes first

_MAGIC = b"aioserve prepared model 1\n"
_SUFFIX = ".model"
_ALIGNMENT = 64  # bytes: a line of the CPU's cache
# What decides how weights are read and lie.
_CODE = ("runner", "kernels", "model_source", "features/gguf", "features/quantized")

Product = Panels | Blocks


class LayerState(msgspec.Struct, frozen=True):
    """A `DecoderLayer` with the weights of its products."""

    input_norm: RMSNorm
    qkv: Product
    attention: AttentionLayer
    output: Product
    post_norm: RMSNorm
    gate_up: Product
    activation: Activation
    intermediate_size: int
    down: Product


class ModelState(msgspec.Struct, frozen=True):
    """A `FusedModel` of dense layers. The embedding is a table of its own, or that of blocks in
    `packed_embedding`, or, without either, that of the head.
    """

    facts: ModelFacts
    table: Tensor | None
    packed_embedding: Blocks | None
    dtype: torch.dtype  # of the rows of the embedding
    layers: list[LayerState]
    norm: RMSNorm
    head: Product


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a tensor in a file, behind the head."""

    begin: int  # bytes
    dtype: str
    shape: list[int]


class _Head(msgspec.Struct, frozen=True):
    """The head of a file, which stands before its tensors."""

    key: str
    spec: KVCacheSpec
    num_bytes: int  # of all tensors
    places: list[_Place]
    state: bytes  # of a `ModelState`, in which tensors are numbers of `places`


class _NotKeptError(Exception):
    """The model has parts that are not written: experts, an image encoder, other products."""


class PreparedModel:
    """The file for one model with its settings, there or not."""

    def __init__(self, info: ModelInfo, config: ModelConfig) -> None:
        """`config` are the settings with their compute type. Raises `OSError` if the model's files
        cannot be looked at, `RuntimeError` if the user has no home, and `KernelsUnavailableError`.
        """
        path = info.source.path
        what: list[Any] = [str(path.absolute()), config.dtype, config.quantization]
        what += [config.quantization_group_size, config.activations, info.max_model_len]
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        self._key = digest([*what, identities(files), _made_by()])
        # One for each model with its settings: a new one takes the old one's place.
        self.path = user_cache("prepared") / f"{digest(what)[:24]}{_SUFFIX}"

    def read(self, check: Callable[[int, KVCacheSpec], None]) -> FusedModel | None:
        """Return the model, if it is there. What cannot be read is not there. `check` is told what
        the weights will take, in bytes, and how K and V are kept; what it raises is raised.
        """
        begin = time.perf_counter()
        try:
            with self.path.open("rb") as file:
                if not is_own(file):
                    return None
                found = _read_head(file)
                if found is None or found.key != self._key:
                    return None
                check(found.num_bytes, found.spec)
                weights = _memory(found.num_bytes)
                if file.readinto(weights.numpy().data) != found.num_bytes:
                    return None
            note_read(self.path)
            model = _restored(found, weights)
        except ConfigError:
            raise
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a file, the model's own are there
            logger.info("%s is not used: %s", self.path, one_line(error))
            return None
        seconds = time.perf_counter() - begin
        logger.info("%s: as it was laid out in %s, %.1f s", model.name, self.path, seconds)
        return model

    def keep(self, model: ServedModel) -> None:
        """Write the model for the next start, if it is of a kind that can be kept. What cannot be
        written is not kept, and neither are weights that are not finite, of which each start says
        so. Raises nothing: the model is loaded, and serves.
        """
        try:
            self._keep(model)
        except _NotKeptError:
            pass
        except Exception as error:
            logger.info("%s is not kept for the next start: %s", model.name, one_line(error))

    def _keep(self, model: ServedModel) -> None:
        state = _state_of(model)
        tensors: list[Tensor] = []
        numbers: dict[int, int] = {}

        def encode(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return _named(value)
            if id(value) not in numbers:
                numbers[id(value)] = len(tensors)
                tensors.append(value)
            return numbers[id(value)]

        packed = msgspec.msgpack.encode(state, enc_hook=encode)
        if not all(map(_is_sound, tensors)):
            return
        places, end = [], 0
        for tensor in tensors:
            places.append(_Place(end, _named(tensor.dtype), list(tensor.shape)))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > MOST_BYTES:
            return
        told = _Head(self._key, model.kv_cache_spec, end, places, packed)
        head = msgspec.msgpack.encode(told, enc_hook=_named)
        self._write(head, tensors)

    def _write(self, head: bytes, tensors: list[Tensor]) -> None:
        def write(file: IO[bytes]) -> None:
            file.write(_MAGIC + len(head).to_bytes(8, "little") + head)
            for tensor in tensors:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                file.write(data.numpy().data)
                file.write(bytes(-len(data) % _ALIGNMENT))

        write_whole(self.path, write)
        make_room(self.path.parent, _SUFFIX, MOST_BYTES_IN_ALL)


def _state_of(model: ServedModel) -> ModelState:
    """Return the parts of a model that are written. Raises `_NotKeptError` if it has others."""
    if not isinstance(model, FusedModel) or model.image_encoder is not None:
        raise _NotKeptError
    decoder = model.decoder
    if type(decoder) is not WholeDecoder:
        raise _NotKeptError
    head, embedding = _product(decoder.head), decoder.embedding
    packed = embedding.linear.state if isinstance(embedding, BlockEmbedding) else None
    return ModelState(
        facts=model.facts,
        table=embedding.table if isinstance(embedding, PlainEmbedding) else None,
        packed_embedding=None if packed is head else packed,
        dtype=embedding.dtype,
        layers=[_layer_state(layer) for layer in decoder.layers],
        norm=decoder.norm,
        head=head,
    )


def _product(linear: Linear) -> Product:
    if not isinstance(linear, PanelLinear | BlockLinear):
        raise _NotKeptError
    return linear.state


def _layer_state(layer: DecoderLayer) -> LayerState:
    mlp = layer.mlp
    if not isinstance(mlp, GatedMLP):
        raise _NotKeptError
    return LayerState(
        input_norm=layer.input_norm,
        qkv=_product(layer.qkv),
        attention=layer.attention,
        output=_product(layer.output),
        post_norm=layer.post_norm,
        gate_up=_product(mlp.gate_up),
        activation=mlp.activation,
        intermediate_size=mlp.intermediate_size,
        down=_product(mlp.down),
    )


def _restored(head: _Head, data: Tensor) -> FusedModel:
    """Return the model again, over the bytes of its tensors."""
    tensors = []
    for place in head.places:
        dtype = _type_of(torch.dtype, place.dtype)
        size = dtype.itemsize
        for dim in place.shape:
            size *= dim
        raw = data[place.begin : place.begin + size]
        tensors.append(raw.view(dtype).view(place.shape))

    def decode(kind: type, value: Any) -> Any:
        return tensors[value] if kind is Tensor else _type_of(kind, value)

    state = msgspec.msgpack.decode(head.state, type=ModelState, dec_hook=decode)
    kernels = load_kernels()
    ops = CompiledOps(kernels)
    end = _linear(kernels, state.head)
    if state.table is not None:
        embedding: Any = PlainEmbedding(state.table)
    elif state.packed_embedding is not None:
        embedding = BlockEmbedding(BlockLinear(kernels, state.packed_embedding), state.dtype)
    else:
        assert isinstance(end, BlockLinear), "tied"
        embedding = BlockEmbedding(end, state.dtype)
    layers = [_layer(kernels, layer) for layer in state.layers]
    decoder = WholeDecoder(embedding, layers, state.norm, end, ops)
    return FusedModel(state.facts, decoder, ops.is_compiled, torch.device("cpu"))


def _layer(kernels: Kernels, state: LayerState) -> DecoderLayer:
    return DecoderLayer(
        input_norm=state.input_norm,
        qkv=_linear(kernels, state.qkv),
        attention=state.attention,
        output=_linear(kernels, state.output),
        post_norm=state.post_norm,
        mlp=GatedMLP(
            gate_up=_linear(kernels, state.gate_up),
            activation=state.activation,
            intermediate_size=state.intermediate_size,
            down=_linear(kernels, state.down),
        ),
    )


def _linear(kernels: Kernels, product: Product) -> PanelLinear | BlockLinear:
    if isinstance(product, Panels):
        return PanelLinear(kernels, product)
    return BlockLinear(kernels, product)


def _memory(num_bytes: int) -> Tensor:
    """Room for the weights, where they can be read fast."""
    if sys.platform == "linux" and num_bytes:
        return torch.frombuffer(map_memory(num_bytes), dtype=torch.uint8)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _read_head(file: Any) -> _Head | None:
    """Return the head of a file; None if it is no such file. The tensors follow."""
    if file.read(len(_MAGIC)) != _MAGIC:
        return None
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_BYTES:
        return None
    return msgspec.msgpack.decode(file.read(length), type=_Head, dec_hook=_type_of)


def _named(dtype: Any) -> str:
    """Return a type of numbers as it is written."""
    if not isinstance(dtype, torch.dtype):
        raise NotImplementedError(f"{type(dtype).__name__} in a prepared model")
    return str(dtype).removeprefix("torch.")


def _type_of(kind: type, name: str) -> torch.dtype:
    """Return the type of numbers that was written by this name."""
    dtype = getattr(torch, name, None)
    if kind is not torch.dtype or not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no type {name}")
    return dtype


def _is_sound(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)  # NaN if there is any
    return bool(least.isfinite() & most.isfinite())


@cache
def _made_by() -> list[Any]:
    """Return what decides how a model is read and laid out: our code, torch's and the CPU."""
    variant = load_kernels().variant
    library = (variant, *identity(extension(variant)))
    packages = [version("torch"), version("transformers")]
    return [code_digest(_CODE), library, packages, sorted(cpu_flags())]
