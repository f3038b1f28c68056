"""One call, from its beginning to any of its ends, in front of replicas that are told what to do.

Needs Ray's names and none of its processes. For `make test-dist`.
"""

import asyncio
import pickle
import time
import warnings
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioserve.engine.stream import RequestStream
from aioserve.errors import EngineDeadError, EngineOverloadedError
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.ray.route import Route
from aioserve.routing import Dispatcher, Refuse, RoutedRequest, Wait, load_router

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason='pip install "aioserve[ray]"')
    from aioserve.ray import call
    from aioserve.ray.call import Call, TimeLeft

pytestmark = pytest.mark.dist

Behaviour = Callable[["Sent"], AsyncIterator[Any]]


class Sent:
    """What a replica was sent, as a response of Ray's."""

    def __init__(self, method: str, arguments: dict[str, Any], behave: Behaviour) -> None:
        self.method = method
        self.route: Route = arguments.pop("route")
        self.arguments = arguments
        self.is_cancelled = False
        self.is_aborted = asyncio.Event()
        self._outputs = behave(self)

    def __await__(self) -> Any:
        return anext(self).__await__()

    def __aiter__(self) -> "Sent":
        return self

    async def __anext__(self) -> Any:
        return await anext(self._outputs)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Sends to a replica of its own each time; the last behaviour is that of all that follow."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = behaviours
        self.sent: list[Sent] = []
        self.dispatcher = Dispatcher(load_router("round_robin"), clock=time.monotonic)
        self.aborts: list[Sent] = []

    def options(self, method_name: str, stream: bool = False) -> Any:
        def remote(*_: str, **arguments: Any) -> Sent:
            if method_name == "abort":
                self.aborts.append(Sent(method_name, arguments, self._abort))
                return self.aborts[-1]
            behave = self._behaviours[min(len(self.sent), len(self._behaviours) - 1)]
            sent = Sent(method_name, arguments, behave)
            self.dispatcher.join(name := f"replica {len(self.sent)}")
            sent.route.assign(self.dispatcher.assign(sent.route.request, name))
            self.sent.append(sent)
            return sent

        remote.remote = remote  # type: ignore[attr-defined]
        return remote

    async def _abort(self, order: Sent) -> AsyncIterator[bool]:
        for sent in self.sent:
            if sent.route.replica == order.route.only:
                sent.is_aborted.set()
        yield True


async def serves(sent: Sent) -> AsyncIterator[Any]:
    yield 3
    for text in "ab":
        yield RequestOutput(request_id="x", text=text)
    yield RequestOutput(request_id="x", finish_reason=FinishReason.LENGTH)


async def hangs(sent: Sent) -> AsyncIterator[Any]:
    """Accepts it, and says nothing before it is aborted."""
    yield 3
    await sent.is_aborted.wait()
    yield RequestOutput(request_id="x", text="ab", finish_reason=FinishReason.ABORT)


async def is_deaf(sent: Sent) -> AsyncIterator[Any]:
    yield 3
    await asyncio.Event().wait()


async def never_accepts(sent: Sent) -> AsyncIterator[Any]:
    while not sent.is_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    raise RuntimeError("cancelled")
    yield


async def is_dead(sent: Sent) -> AsyncIterator[Any]:
    raise EngineDeadError("the device is gone")
    yield


async def dies_before_it_speaks(sent: Sent) -> AsyncIterator[Any]:
    yield 3
    raise EngineDeadError("the device is gone")


async def is_full(sent: Sent) -> AsyncIterator[Any]:
    raise EngineOverloadedError("too many")
    yield


async def is_turned_away(sent: Sent) -> AsyncIterator[Any]:
    """The router refuses it before any replica has it."""
    sent.route.answered(Refuse("the fleet is full", retry_after=7.0))
    while not sent.is_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    raise RuntimeError("cancelled")
    yield


async def is_to_wait(sent: Sent) -> AsyncIterator[Any]:
    """The router lets it wait before any replica has it."""
    sent.route.answered(Wait(0.02))
    while not sent.is_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    raise RuntimeError("cancelled")
    yield


async def waits_long(sent: Sent) -> AsyncIterator[Any]:
    sent.route.answered(Wait(50.0))
    while not sent.is_cancelled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    raise RuntimeError("cancelled")
    yield


class Caller:
    """A call, and what comes of it."""

    def __init__(self, *behaviours: Behaviour, seconds: float | None = None) -> None:
        self.handle = Handle(*behaviours)
        self.num_ends = 0
        self.stream = RequestStream("x", 1, abort=lambda: self.call.drop())
        left = None if seconds is None else TimeLeft(time.monotonic() + seconds)
        self.call = Call(
            self.handle,  # type: ignore[arg-type]
            {"timeout": left},
            RoutedRequest(num_tokens=100),
            self.stream,
            1,
            self._on_end,
        )

    def _on_end(self) -> None:
        self.num_ends += 1

    async def read(self) -> RequestOutput:
        """All of it as one, when it is over and nothing is left of it."""
        whole = await anext(self.stream)
        async for output in self.stream:
            whole.merge(output)
        await self.is_over()
        return whole

    async def is_over(self) -> None:
        while not self.num_ends:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert self.num_ends == 1
        for sent in self.handle.sent:
            assert sent.route.replica is not None
            assert self.handle.dispatcher.work_of(sent.route.replica) == 0


async def test_outputs_come_and_the_replica_has_no_work_left() -> None:
    caller = Caller(serves)
    await caller.call.begin()
    assert (await caller.read()).text == "ab"
    assert not caller.handle.sent[0].is_cancelled


async def test_what_is_dropped_before_its_first_turn_is_cancelled_and_over() -> None:
    caller = Caller(serves)
    await caller.call.begin()
    caller.stream.close()
    await caller.is_over()
    assert caller.handle.sent[0].is_cancelled


@pytest.mark.parametrize("first", [is_dead, dies_before_it_speaks])
async def test_another_replica_gets_what_one_with_a_dead_engine_had(first: Behaviour) -> None:
    caller = Caller(first, serves)
    await caller.call.begin()
    assert (await caller.read()).text == "ab"
    one, other = caller.handle.sent
    assert other.route.avoid == {one.route.replica}


async def test_what_no_replica_survives_is_given_up() -> None:
    caller = Caller(is_dead)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await caller.call.begin()
    assert len(caller.handle.sent) == 3


async def test_a_refusal_is_raised_as_it_is() -> None:
    with pytest.raises(EngineOverloadedError, match="too many"):
        await Caller(is_full).call.begin()


async def test_the_caller_hears_why_the_router_refuses() -> None:
    with pytest.raises(EngineOverloadedError, match="the fleet is full") as raised:
        await Caller(is_turned_away).call.begin()
    assert raised.value.retry_after == 7.0


async def test_a_call_that_is_to_wait_is_sent_anew_and_no_replica_is_avoided() -> None:
    caller = Caller(is_to_wait, is_to_wait, is_to_wait, is_to_wait, serves)
    await caller.call.begin()
    assert (await caller.read()).text == "ab"
    assert len(caller.handle.sent) == 5
    assert not caller.handle.sent[-1].route.avoid
    assert not caller.handle.sent[-1].route.request.num_attempts


async def test_a_call_that_waits_too_long_in_all_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "MAX_WAIT_SECONDS", 0.05)
    with pytest.raises(EngineOverloadedError, match=r"no replica was chosen within 0\.05 s"):
        await Caller(is_to_wait).call.begin()


async def test_a_call_that_waits_ends_when_its_caller_leaves_or_its_time_is_over() -> None:
    caller = Caller(waits_long)
    begun = asyncio.create_task(caller.call.begin())
    while not (caller.handle.sent and caller.handle.sent[0].is_cancelled):  # noqa: ASYNC110
        await asyncio.sleep(0)
    caller.call.let_go()
    async with asyncio.timeout(20):
        await begun
    assert (await caller.read()).finish_reason is FinishReason.ABORT
    late = Caller(waits_long, seconds=0.05)
    await late.call.begin()
    assert (await late.read()).finish_reason is FinishReason.TIMEOUT


async def test_an_abort_brings_what_the_replica_has() -> None:
    caller = Caller(hangs)
    await caller.call.begin()
    assert caller.call.abort()
    assert not caller.call.abort()  # its end is on the way
    output = await caller.read()
    assert (output.text, output.finish_reason) == ("ab", FinishReason.ABORT)


async def test_an_abort_that_no_replica_hears_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call, "ABORT_SECONDS", 0.01)
    caller = Caller(is_deaf)
    await caller.call.begin()
    assert caller.call.abort()
    assert (await caller.read()).finish_reason is FinishReason.ABORT
    assert caller.handle.sent[0].is_cancelled


async def test_an_abort_ends_what_no_replica_has_accepted_yet() -> None:
    caller = Caller(never_accepts)
    begun = asyncio.create_task(caller.call.begin())
    await asyncio.sleep(0)
    caller.call.let_go()
    await begun
    assert (await caller.read()).finish_reason is FinishReason.ABORT


async def test_time_passes_while_a_replica_is_waited_for() -> None:
    caller = Caller(never_accepts, seconds=0.05)
    await caller.call.begin()
    assert (await caller.read()).finish_reason is FinishReason.TIMEOUT
    assert caller.handle.sent[0].is_cancelled


def test_a_replica_gets_the_time_that_is_left_when_it_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = TimeLeft(100.0)
    for now, expected in ((0.0, 100.0), (40.0, 60.0), (101.0, 1e-3)):
        monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert pickle.loads(pickle.dumps(left)) == expected
