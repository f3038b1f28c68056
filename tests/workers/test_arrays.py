"""What encoders read, on its way from a worker to the engine: beside the message, and uncopied."""

import asyncio

import numpy as np
import zmq

from aioserve.engine.stream import Origin
from aioserve.fleet.workers.messages import (
    Add,
    Drop,
    Line,
    ToEngine,
    arrays_of,
    decode_spec,
    decoder,
    encode_spec,
    encoder,
)
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.request import EncoderInput, RequestSpec


def spec_of(*arrays, **fields) -> RequestSpec:
    items = [EncoderInput(4 * i, 3, f"hash {i}", own) for i, own in enumerate(arrays)]
    return RequestSpec("x", list(range(50)), SamplingParams(**fields), encoder_inputs=items)


def said(number: int, spec: RequestSpec) -> tuple[Add, list]:
    forms, memory = arrays_of(spec)
    return Add(number, *encode_spec(spec.without_arrays()), "", None, Origin(), forms), memory


ARRAYS = {
    "pixels": np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32),
    "mask": np.array([[True, False], [False, True]]),
    "grid": np.array([[1, 2, 4]], dtype=np.int64),
    "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,  # not as it lies in memory
    "none": np.zeros((0, 3), np.float32),
}
HUGE = StructuredOutputs(json={"type": "integer", "maximum": 2**64})  # this spec goes as JSON


async def test_arrays_cross_a_socket_as_they_are(tmp_path):
    """Those of several requests in one message, some of which have none."""
    specs = [
        spec_of(ARRAYS, None, {"mask": ARRAYS["mask"]}),
        spec_of(),
        spec_of({"grid": ARRAYS["grid"]}, structured_outputs=HUGE),
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    came: asyncio.Future = asyncio.get_running_loop().create_future()
    address = f"ipc://{tmp_path}/x"

    def take(*message):
        came.set_result(message)

    here = Line(context, address, listens=True, on_message=take, on_room=lambda: None)
    there = Line(context, address, listens=False, on_message=take, on_room=lambda: None)
    try:
        pairs = [said(number, spec) for number, spec in enumerate(specs)]
        assert [add.is_json for add, _ in pairs] == [False, False, True]
        message = encoder.encode(ToEngine([*(add for add, _ in pairs), Drop("y")]))
        assert there.send(message, [memory for _, own in pairs for memory in own])
        got, attached = await came
    finally:
        here.close()
        there.close()
        context.term()
    *adds, drop = decoder(ToEngine).decode(got).messages
    assert drop == Drop("y")
    arrays = iter(attached)
    for add, spec in zip(adds, specs, strict=True):
        back = decode_spec(add, [next(arrays) for _ in add.arrays])
        assert back.encoder_inputs == spec.encoder_inputs
        assert back.prompt_token_ids == spec.prompt_token_ids
        assert back.sampling_params == spec.sampling_params
        for item, original in zip(back.encoder_inputs, spec.encoder_inputs, strict=True):
            assert (item.arrays is None) == (original.arrays is None)
            for name, array in (original.arrays or {}).items():
                np.testing.assert_array_equal(item.arrays[name], array)
                assert item.arrays[name].dtype == array.dtype
    assert next(arrays, None) is None
