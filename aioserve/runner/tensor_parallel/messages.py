"""What the first rank tells the others between two steps, and what they answer, as MessagePack.

Each step goes to all: the same `SchedulerOutput` that a runner of one process gets. Then the tokens
that the first rank has sampled, as only that does. Free of torch.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict

import msgspec
import numpy as np

from aioserve.config import CacheConfig, EngineConfig, ModelConfig
from aioserve.kv_cache import Ahead, StatePool, StateSlots, WindowBlocks, WindowPool
from aioserve.multimodal.families import GRID, TURN
from aioserve.params import SamplingParams
from aioserve.request import ROW_VALUES, EncoderInput
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: load your share. It answers with `Answer`, twice."""

    config: EngineConfig
    rank: int
    meeting: str  # as in `Ranks`
    kv_file: int = -1  # open in all ranks, for KV blocks in host memory; -1: there is none


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute this; if there are tokens in it, `Sampled` follows."""

    step: SchedulerOutput


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The tokens sampled for each of the S rows; None: the step has failed, drop it."""

    token_ids: list[int] | None


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load this model, which differs from the last one in its weights at most, with a KV cache of
    this size; then give the last one back, if that has not been done.
    """

    model: ModelConfig
    cache: CacheConfig


class Free(msgspec.Struct, frozen=True, tag=True):
    """Give back the memory of the KV cache, or of weights and all."""

    weights: bool


class MakeHostBlocks(msgspec.Struct, frozen=True, tag=True):
    """Make room for KV blocks in host memory: at most `num_bytes` for all ranks together, and of
    each pool's blocks so many bytes that the first rank has beside the others.
    """

    num_bytes: int
    of_first: dict[str, int]


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Begin to read the LoRA adapter at `path`, beside steps; `digest`: that of its files."""

    adapter_id: str
    path: str
    digest: str


class UseAdapter(msgspec.Struct, frozen=True, tag=True):
    """Requests of this adapter come from now on, unless a rank could not read it."""

    adapter_id: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """No request of this adapter comes any more."""

    adapter_id: str


class Answer(msgspec.Struct, frozen=True):
    """A message of a rank: that it comes to the meeting, that it has loaded, or why it ends."""

    has_loaded: bool = False
    error: str | None = None


Message: TypeAlias = (
    Start | Step | Sampled | Load | Free | MakeHostBlocks | ReadAdapter | UseAdapter | DropAdapter
)


class EncoderPlan(TypedDict, total=False):
    """What the resource for encoder inputs tells."""

    inputs: dict[str, list[int]]
    ahead: Ahead
    free: list[str]


#: What resources of several kinds tell the runner of a step, by their names.
_PLANS: dict[str, Any] = {
    StatePool.name: dict[str, StateSlots],
    WindowPool.name: dict[str, WindowBlocks],
    "encoder": EncoderPlan,
}

_ARRAY = 1  # of numpy: its dtype, its shape and its bytes


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} has no form in a message")
    parts = (value.dtype.str, value.shape, value.tobytes())
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))


def _decode_array(code: int, data: memoryview) -> Any:
    assert code == _ARRAY
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, dtype).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
_decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(
    Message, ext_hook=_decode_array
).decode


def encode(message: Message | Answer) -> bytes:
    """A message as bytes; of a step, what the other ranks can do without is left out: they choose
    no token.
    """
    if isinstance(message, Step) and ROW_VALUES in message.step.parts:
        parts = {name: part for name, part in message.step.parts.items() if name != ROW_VALUES}
        message = Step(msgspec.structs.replace(message.step, parts=parts))
    if isinstance(message, Step) and (ahead := Ahead.of(message.step.parts)) is not None:
        bare = msgspec.structs.replace(ahead, item=_without_pixels(ahead.item))
        plan = {**message.step.parts["encoder"], "ahead": bare}
        parts = {**message.step.parts, "encoder": plan}
        message = Step(msgspec.structs.replace(message.step, parts=parts))
    if isinstance(message, Step) and message.step.scheduled_new_reqs:
        plain = [_for_others(request) for request in message.step.scheduled_new_reqs]
        message = Step(msgspec.structs.replace(message.step, scheduled_new_reqs=plain))
    return _encode(message)


def decode(data: bytes) -> Message:
    """The message that `encode` was given."""
    message = _decode(data)
    if isinstance(message, Step):
        parts = message.step.parts
        for name in parts.keys() & _PLANS:  # a message says fields of a struct, and not which
            parts[name] = msgspec.convert(parts[name], _PLANS[name])
    return message


def decode_answer(data: bytes) -> Answer:
    """The answer that `encode_answer` was given."""
    return msgspec.msgpack.decode(data, type=Answer)


def _for_others(request: NewRequestData) -> NewRequestData:
    """How a token is chosen is nothing to them, nor has MessagePack every number that clients may
    send for it.
    """
    params = SamplingParams(
        temperature=0, prompt_logprobs=request.sampling_params.prompt_logprobs, detokenize=False
    )
    return msgspec.structs.replace(
        request,
        sampling_params=params,
        stop_token_ids=frozenset(),
        cache_salt="",
        encoder_inputs=tuple(map(_without_pixels, request.encoder_inputs)),
    )


def _without_pixels(item: EncoderInput) -> EncoderInput:
    """The first rank alone encodes; where the rows of an image are say its grid and its time."""
    told = {name: array for name, array in (item.arrays or {}).items() if name in (GRID, TURN)}
    return msgspec.structs.replace(item, arrays=told)
