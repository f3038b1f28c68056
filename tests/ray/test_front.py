"""The ingress' half of an engine, in front of a handle that leads nowhere. For `make test-dist`."""

import asyncio
import warnings
from typing import Any

import msgspec
import pytest

from aioserve.config import CacheConfig, EngineConfig, ModelConfig
from aioserve.errors import ConfigError, RequestError, RequestIdInUseError
from aioserve.kv_cache.hashing import hash_blocks
from aioserve.operations import ShowMetrics
from aioserve.outputs import FinishReason
from aioserve.request import Request, RequestSpec
from aioserve.runner.info import RunnerInfo
from aioserve.sampling_params import SamplingParams
from aioserve.version import __version__

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason='pip install "aioserve[ray]"')
    from aioserve.ray import front as ray_front
    from aioserve.ray.front import RayFront
    from aioserve.ray.replica import ReplicaInfo

pytestmark = pytest.mark.dist

INFO = ReplicaInfo(
    version=__version__,
    max_model_len=200_000,
    adapters={},
    adapter_ids={},
    runner_info=RunnerInfo(num_kv_blocks=1),
    started_at=1,
)
PARAMS = SamplingParams(max_tokens=1)


class Handle:
    """Accepts nothing, and never says so."""

    def __init__(self, info: ReplicaInfo = INFO) -> None:
        self._info = info
        self.routed: list[Any] = []

    @property
    def describe(self) -> Any:
        class Describe:
            remote = staticmethod(lambda: asyncio.sleep(0, self._info))

        return Describe

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, **arguments: Any) -> "Handle":
        self.routed.append(arguments["route"].request)
        self._is_cancelled = asyncio.Event()
        return self

    async def __anext__(self) -> Any:
        await self._is_cancelled.wait()
        raise RuntimeError("cancelled")

    def cancel(self) -> None:
        self._is_cancelled.set()


async def started(handle: Handle, **options: Any) -> RayFront:
    config = EngineConfig(model=ModelConfig(model="embedded"), cache=CacheConfig(block_size=16))
    given: dict[str, Any] = {"hashes": True, "seed": 0} | options
    front = RayFront(config, handle, **given)  # type: ignore[arg-type]
    await front.start()
    return front


async def test_blocks_of_a_long_prompt_are_hashed_in_pieces() -> None:
    handle = Handle()
    front = await started(handle)
    token_ids = list(range(2000)) * 50
    adding = asyncio.create_task(front.add_request(token_ids, PARAMS, request_id="x"))
    turns = 0
    while not handle.routed:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100_000 / 16 / ray_front.BLOCKS_AT_ONCE
    request = Request(RequestSpec("", token_ids, PARAMS))
    hash_blocks(request, 100_000 // 16, 16)
    assert handle.routed[0].block_hashes == tuple(request.block_hashes)
    assert front.abort("x")
    async with await adding as stream:
        assert (await anext(stream)).finish_reason is FinishReason.ABORT


async def test_a_router_that_wants_no_hashes_gets_none() -> None:
    handle = Handle()
    front = await started(handle, hashes=False)
    adding = asyncio.create_task(front.add_request([1] * 64, PARAMS, request_id="x", user="ann"))
    while not handle.routed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (handle.routed[0].block_hashes, handle.routed[0].session) == ((), "ann")
    with pytest.raises(RequestIdInUseError):
        await front.add_request([1], PARAMS, request_id="x")
    adding.cancel()
    await asyncio.wait([adding])
    assert not front._calls
    assert not front.abort("x")


async def test_replicas_of_another_version_are_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"the replicas run aioserve 0\.0\.1, the ingress"):
        await started(Handle(msgspec.structs.replace(INFO, version="0.0.1")))


async def test_what_an_operator_asks_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match=r"ShowMetrics is not served .* docs/ray.md"):
        await (await started(Handle())).ask(ShowMetrics())
