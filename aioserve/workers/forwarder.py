"""The engine's side of one front end elsewhere: takes its requests, and sends what steps bring.

A front end that is slow gets fewer, longer messages; the engine never waits for it. Knows no HTTP,
no text, and no processes.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from aioserve.engine import AsyncEngine
from aioserve.engine.stream import Samples, SampleState, wants_only_end
from aioserve.errors import AioserveError, EngineDeadError
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.request import Request, RequestSpec
from aioserve.support.version import __version__
from aioserve.workers.line import Attachments, Calls, MakeLine
from aioserve.workers.messages import (
    NO_ANSWER,
    Abort,
    Add,
    Drop,
    Failed,
    Failure,
    Greeting,
    Hello,
    MessageToEngine,
    MessageToWorker,
    Reply,
    Stopped,
    ToEngine,
    ToWorker,
    decode_spec,
    decoder,
    encoder,
)

logger = logging.getLogger(__name__)

_to_engine = decoder(ToEngine)
_hello = decoder(Hello)


class Outbox:
    """What a worker has not been sent yet."""

    def __init__(self) -> None:
        self.messages: list[MessageToWorker] = []
        self.outputs: list[EngineCoreOutput] = []
        self.num_cached_tokens: dict[str, int] = {}
        self.since_first_token: dict[str, float] = {}
        self.vectors: dict[str, bytes] = {}
        self.failed: list[Failed] = []

    def __bool__(self) -> bool:
        return bool(self.messages or self.outputs or self.failed)

    def encode(self) -> bytes:
        return encoder.encode(
            ToWorker(
                *(self.messages, self.outputs, self.num_cached_tokens, self.since_first_token),
                *(self.vectors, self.failed),
            )
        )

    def clear(self) -> None:
        self.messages, self.outputs, self.failed = [], [], []
        self.num_cached_tokens, self.since_first_token, self.vectors = {}, {}, {}

    def merge(self) -> None:
        """One output per sample: what waits is bounded by what the samples may have."""
        merged: dict[str, EngineCoreOutput] = {}
        for output in self.outputs:
            before = merged.get(output.request_id)
            merged[output.request_id] = output if before is None else _merge(before, output)
        self.outputs = list(merged.values())

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop unsent output of requests that are over; other requests may get their ids."""
        gone = set(request_ids)
        if self.outputs:
            self.outputs = [output for output in self.outputs if output.request_id not in gone]
        for by_id in (self.num_cached_tokens, self.since_first_token, self.vectors):
            for request_id in gone & by_id.keys():
                del by_id[request_id]
        if self.failed:
            for failed in self.failed:
                failed.request_ids[:] = [i for i in failed.request_ids if i not in gone]


def _merge(before: EngineCoreOutput, newer: EngineCoreOutput) -> EngineCoreOutput:
    logprobs = before.new_logprobs
    if newer.new_logprobs is not None:
        logprobs = (logprobs or []) + newer.new_logprobs
    return msgspec.structs.replace(
        newer,
        new_token_ids=before.new_token_ids + newer.new_token_ids,
        new_logprobs=logprobs,
        prompt_logprobs=before.prompt_logprobs or newer.prompt_logprobs,
    )


class _ForwardedState(SampleState):
    """A sample that is read in a worker."""

    __slots__ = ("_worker", "hands_over")

    is_read_here = False

    def __init__(
        self, request: Request, samples: Samples, worker: "Forwarder", *, hands_over: bool
    ) -> None:
        waits = wants_only_end(request.sampling_params)
        super().__init__(request, samples, waits_for_end=waits)
        self._worker = worker
        self.hands_over = hands_over

    def deliver(self, output: EngineCoreOutput, now: float) -> FinishReason | None:
        outbox, request = self._worker.outbox, self.request
        num_told = len(request.spec.output_token_ids)  # by the engine that had it
        if not (self.num_output_tokens or num_told) and request.num_cached_tokens:
            outbox.num_cached_tokens[request.request_id] = request.num_cached_tokens
        if self.waits_for_end:
            own = request.output_token_ids[num_told:]
            output = msgspec.structs.replace(output, new_token_ids=own)
            if self.first_token_time is not None:
                outbox.since_first_token[request.request_id] = now - self.first_token_time
        if output.embedding is not None:
            outbox.vectors[request.request_id] = output.embedding.astype("<f4").tobytes()
            output = msgspec.structs.replace(output, embedding=None)
        self.num_output_tokens += len(output.new_token_ids)
        outbox.outputs.append(output)
        if output.finish_reason is not None:
            self._worker.on_end(self.samples)
        return output.finish_reason

    def fail(self, error: BaseException) -> None:
        self._worker.outbox.failed.append(Failed([self.request.request_id], Failure.of(error)))
        self._worker.on_end(self.samples)


class Forwarder(ABC):
    """One front end in one life, from before it is connected."""

    def __init__(self, engine: AsyncEngine, name: str, make_line: MakeLine) -> None:
        """Raises what `make_line` does, and `EngineDeadError` where there is no engine any more."""
        self.name = name
        self.outbox = Outbox()
        self._engine = engine
        self._client_index = engine.internals.connect(self._send)
        self._is_welcome = False
        self._is_sending_soon = False
        self._calls = Calls()
        self._samples: dict[str, Samples] = {}  # of requests that live, by their ids
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._claiming: set[str] = set()  # ids of requests that are being accepted
        try:
            self._line = make_line(self._on_message, self._send)
        except OSError:
            engine.internals.disconnect(self._client_index)
            raise

    @property
    def num_requests(self) -> int:
        """Requests that live, those that are being accepted included."""
        return len(self._samples) + len(self._adding)

    def close(self) -> int:
        """It is gone. Returns how many requests of it are dropped."""
        self._line.close()
        self._engine.internals.disconnect(self._client_index)
        num_requests = self.num_requests
        for task in self._adding.values():
            task.cancel()
        self._calls.fail(EngineDeadError(f"{self.name} has ended"))
        for samples in self._samples.values():
            self._engine.internals.drop(samples)
        self._samples.clear()
        return num_requests

    def on_end(self, samples: Samples) -> None:
        """A sample has ended, and has not been taken off the list of those that live."""
        if samples.num_live == 1:
            self._samples.pop(samples.request_id, None)
        self._send_soon()

    @abstractmethod
    def welcome(self) -> Any:
        """What a front end is told that has said hello: of the type that it expects."""

    @abstractmethod
    def refuse(self) -> None:
        """End a front end whose message cannot be read: it would wait for an answer for ever."""

    def received(self, spec: RequestSpec, add: Add) -> RequestSpec:
        """The request as the engine is to have it."""
        return msgspec.structs.replace(spec, client_index=self._client_index)

    @abstractmethod
    def take(self, said: MessageToEngine) -> None:
        """Take a message that is not about a request."""

    def _on_message(self, message: bytes, attached: Attachments) -> None:
        if not self._is_welcome:
            self._greet(_hello.decode(message))
            return
        arrays = iter(attached)
        try:
            messages = _to_engine.decode(message).messages
        except Exception:
            logger.critical("what %s says cannot be read: it is ended", self.name, exc_info=True)
            self.refuse()
            return
        for said in messages:
            own = list(islice(arrays, len(said.arrays))) if isinstance(said, Add) else ()
            try:
                self._take(said, own)
            except Exception:  # what comes after it is for others
                logger.exception("a message of %s failed", self.name)

    def _take(self, said: MessageToEngine, attached: Attachments) -> None:
        match said:
            case Add():
                self._add(said, attached)
            case Drop(request_id):
                self._drop(request_id)
            case Stopped(num_tokens):
                self._stop(num_tokens)
            case Abort(request_id):
                if request_id in self._adding:  # by the time of the call, that has begun
                    asyncio.get_running_loop().call_soon(self._abort, request_id)
                else:
                    self._abort(request_id)
            case Reply(call_id, answer, failure):
                error = None if failure is None else failure.to_error()
                self._calls.settle(call_id, bytes(answer), error)
            case _:
                self.take(said)

    def _greet(self, hello: Hello) -> None:
        if hello.version != __version__:
            refusal = f"it is version {hello.version}, the engine is {__version__}: start anew"
            self._line.send(encoder.encode(Greeting(refusal, NO_ANSWER)))
            return
        self._is_welcome = True
        told = msgspec.Raw(encoder.encode(self.welcome()))
        self._line.send(encoder.encode(Greeting("", told)))
        self._send_soon()

    def _add(self, add: Add, attached: Attachments) -> None:
        try:
            spec = decode_spec(add, attached)
        except Exception as error:
            self._say(Reply(add.call_id, NO_ANSWER, Failure.of(error)))
            return
        spec = self.received(spec, add)

        async def run() -> None:
            failure = None
            self._claiming.add(spec.request_id)  # the first that is done, or it is refused at once
            try:
                samples = await self._engine.internals.accept(
                    spec,
                    add.adapter,
                    add.timeout,
                    lambda request, samples: _ForwardedState(
                        request, samples, self, hands_over=add.hands_over
                    ),
                    add.origin,
                )
                if samples.num_live:
                    self._samples[spec.request_id] = samples
            except Exception as error:
                failure = Failure.of(error)
                if not isinstance(error, AioserveError):
                    logger.exception("%s could not be accepted", spec.request_id)
            finally:
                self._claiming.discard(spec.request_id)
            self._say(Reply(add.call_id, NO_ANSWER, failure))

        def forget(task: asyncio.Task[None]) -> None:
            if self._adding.get(spec.request_id) is task:
                del self._adding[spec.request_id]

        self._adding[spec.request_id] = task = asyncio.create_task(run())
        task.add_done_callback(forget)

    def _abort(self, request_id: str) -> None:
        """What another worker has by that id goes on."""
        if request_id in self._samples or request_id in self._claiming:
            self._engine.abort(request_id)

    def _drop(self, request_id: str) -> None:
        if (task := self._adding.get(request_id)) is not None:
            task.cancel()
        if (samples := self._samples.pop(request_id, None)) is not None:
            self.outbox.forget(samples.ids)
            self._engine.internals.drop(samples)

    def _stop(self, num_tokens: dict[str, int]) -> None:
        self.outbox.forget(num_tokens)
        own = set(self._samples)
        if not own.issuperset(num_tokens):  # one of several; or it has ended, and is another's now
            own.update(*(samples.ids for samples in self._samples.values()))
        owned = {i: count for i, count in num_tokens.items() if i in own}
        self._engine.internals.end_stopped(owned)
        for sample_id in num_tokens:
            # The id of its request, if that is for one sample; else one of several has ended.
            samples = self._samples.get(sample_id)
            if samples is None:
                self._samples = {i: own for i, own in self._samples.items() if own.num_live}
            elif not samples.num_live:
                del self._samples[sample_id]

    def _say(self, message: MessageToWorker) -> None:
        self.outbox.messages.append(message)
        self._send_soon()

    def _send_soon(self) -> None:
        """What comes in one turn of the loop goes in one message."""
        if not self._is_sending_soon:
            self._is_sending_soon = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """All that is there, if there is room; after each step with outputs of this client."""
        self._is_sending_soon = False
        if not (self.outbox and self._is_welcome):
            return
        if not self._line.is_full and self._line.send(self.outbox.encode()):
            self.outbox.clear()
        else:
            self.outbox.merge()
