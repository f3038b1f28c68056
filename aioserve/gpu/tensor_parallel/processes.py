"""The processes of the other ranks: started, told, watched and ended by the first one.

Begins with what the first rank tells them between two steps, and what they answer, as MessagePack.
Each step goes to all: the same `SchedulerOutput` that a runner of one process gets; then the
tokens that the first rank has sampled, as only that does. Free of torch.
"""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import msgspec
import numpy as np

from aioserve.config import CacheConfig, EngineConfig, ModelConfig
from aioserve.errors import AioserveError, RunnerDeadError
from aioserve.kv_cache import Ahead, StatePool, StateSlots, WindowBlocks, WindowPool
from aioserve.model_source.vision_families import GRID, TURN
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
    """The order to make room for KV blocks in host memory: at most `num_bytes` for all ranks
    together. `of_first` has, by pool, the bytes of a block that only the first rank stores.
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
    """The order to drop an adapter: no request of it comes any more."""

    adapter_id: str


class Answer(msgspec.Struct, frozen=True):
    """A message of a rank: that it comes to the meeting, that it has loaded, or why it ends."""

    has_loaded: bool = False
    error: str | None = None


Message: TypeAlias = (
    Start | Step | Sampled | Load | Free | MakeHostBlocks | ReadAdapter | UseAdapter | DropAdapter
)


class EncoderPlan(TypedDict, total=False):
    """The plan that the resource for encoder inputs tells."""

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
    """Return a message as bytes; of a step, what the other ranks can do without is left out: they
    choose no token.
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
    """Return the message that `encode` was given."""
    message = _decode(data)
    if isinstance(message, Step):
        parts = message.step.parts
        for name in parts.keys() & _PLANS:  # a message says fields of a struct, and not which
            parts[name] = msgspec.convert(parts[name], _PLANS[name])
    return message


def decode_answer(data: bytes) -> Answer:
    """Return the answer that `encode_answer` was given."""
    return msgspec.msgpack.decode(data, type=Answer)


def _for_others(request: NewRequestData) -> NewRequestData:
    """Return how a token is chosen is nothing to them, nor has MessagePack every number that
    clients may send for it.
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
    """Return the first rank alone encodes; where the rows of an image are say its grid and its
    time.
    """
    told = {name: array for name, array in (item.arrays or {}).items() if name in (GRID, TURN)}
    return msgspec.structs.replace(item, arrays=told)


# The processes of the other ranks: started, told, watched and ended by the first one. A rank reads
# what it is told from a socket, and ends when its standard input does: whatever becomes of this
# process, none outlives it. Knows processes and messages; free of torch.


CLOSE_SECONDS = 5.0  # for ranks to give back what they have, before they are killed
REASON_SECONDS = 2.0  # to learn which rank it was that left


class OtherRanks:
    """All ranks but the first. Used on one thread at a time, but for `on_end`."""

    #: Module that the other processes run.
    program = "aioserve.gpu.tensor_parallel.rank_process"

    def __init__(
        self, module: str, config: EngineConfig, on_end: Callable[[RunnerDeadError], None]
    ) -> None:
        """Runs `module` for each, with the number of its socket. `on_end` is called, on a thread of
        its own, if one ends that was not told to.
        """
        self._size = config.runner.tensor_parallel_size
        self._timeout = config.runner.rank_timeout
        self._on_end = on_end
        self._is_closing = False
        self._news = threading.Condition()
        self._here: set[int] = set()
        self._loaded: set[int] = set()
        self._ended: dict[int, str] = {}  # and why
        self.kv_file = memory_file() if config.cache.kv_connector != "none" else -1
        self._folder = Path(tempfile.mkdtemp(prefix="aioserve-ranks-"))
        self.meeting = self._folder / "store"
        self._sockets: list[socket.socket] = []
        self._connections: list[Connection] = []  # on these
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        try:
            for rank in range(1, self._size):
                self._start(module, config, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, config: EngineConfig, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # Else a rank that reads nothing would hold this process up as soon as its socket is full.
        seconds, rest = divmod(self._timeout, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sockets.append(ours)
        self._connections.append(Connection(os.dup(ours.fileno())))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", self.program, module, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno(), *([self.kv_file] if self.kv_file >= 0 else [])],
                start_new_session=True,  # Ctrl-C is for the first rank, which drains before its end
                env={**os.environ, "TQDM_DISABLE": "1"},  # one bar is enough
            )
        self._processes.append(process)
        watcher = threading.Thread(
            target=self._watch, args=(rank, process), name=f"aioserve-rank-{rank}", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()
        self._send(rank, encode(Start(config, rank, str(self.meeting), self.kv_file)))

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks, in the order of their ranks."""
        return [process.pid for process in self._processes]

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks. Raises `RunnerDeadError` if one is not there."""
        data = encode(message)
        for rank in range(1, self._size):
            self._send(rank, data)

    def wait_here(self) -> None:
        """Returns when all ranks come to the meeting, where it goes unnoticed if a rank has ended.
        Raises `RunnerDeadError` if one ends before.
        """
        self._wait(self._here)

    def wait_loaded(self) -> None:
        """Returns when all have. Raises `RunnerDeadError` if one ends before."""
        self._wait(self._loaded)
        self._leave_folder()

    def _wait(self, ranks: set[int]) -> None:
        """Wait until all ranks have come."""
        with self._news:
            self._news.wait_for(lambda: len(ranks) == self._size - 1 or self._ended)
            if self._ended:
                raise self._death()

    def why(self, error: Exception) -> Exception:
        """Return the cause of an `error` of the first rank: another rank that has ended, or the
        error itself.
        """
        with self._news:
            is_theirs = self._news.wait_for(lambda: self._ended, REASON_SECONDS)
            return self._death() if is_theirs else error

    def close(self) -> None:
        """End all ranks. Idempotent; waits for them, and kills those that take too long."""
        self._is_closing = True
        for ours in self._sockets:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes the readers, at both ends
        give_up = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for watcher in self._watchers:
            watcher.join()
        for connection, ours in zip(self._connections, self._sockets, strict=True):
            connection.close()
            ours.close()
        if self.kv_file >= 0:
            os.close(self.kv_file)
            self.kv_file = -1
        self._leave_folder()

    def _leave_folder(self) -> None:
        """Delete the folder of the ranks' meeting point, once no rank comes there any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._connections[rank - 1].send_bytes(data)
        except OSError as error:
            what = f"rank {rank} does not listen: {error}"
            if isinstance(error, BlockingIOError):
                what = f"rank {rank} has not listened for {self._timeout:g} s (runner.rank_timeout)"
            raise self.why(RunnerDeadError(what)) from error

    def _death(self) -> RunnerDeadError:
        rank, why = next(iter(self._ended.items()))
        return RunnerDeadError(f"rank {rank} of {self._size}: {why}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread of its own, until the process ends."""
        connection, error = self._connections[rank - 1], None
        with contextlib.suppress(EOFError, OSError):
            while (error := (answer := decode_answer(connection.recv_bytes())).error) is None:
                with self._news:
                    (self._loaded if answer.has_loaded else self._here).add(rank)
                    self._news.notify_all()
        code = process.wait()
        with self._news:
            self._ended[rank] = error or f"process {process.pid} has ended, {_in_words(code)}"
            death = self._death()
            self._news.notify_all()
        if not self._is_closing:
            self._on_end(death)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def memory_file() -> int:
    """Return a file without a name, in memory where the system has such files; its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("aioserve-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class FirstRank:
    """The other end, in a process that `OtherRanks` has started."""

    def __init__(self, file: int) -> None:
        """From now on this process ends with its parent, and is deaf to what is meant for that."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        self._connection = Connection(file)

    def hear(self, decode: Callable[[bytes], Message]) -> Message:
        """Return the next message. Raises `EOFError` when there will be none."""
        try:
            return decode(self._connection.recv_bytes())
        except OSError:
            raise EOFError from None

    def answer(self, answer: Answer) -> None:
        """Send an answer to the first rank; it is dropped if that has ended."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(answer))


def _end_with_parent() -> None:
    """End with the parent: whatever ends it closes its end of our standard input."""
    while os.read(0, 1):
        pass
    os._exit(1)


def in_a_line(error: BaseException) -> str:
    """Return an error in one line; with its kind, unless it was raised on purpose."""
    text = " ".join(str(error).split())
    return text if isinstance(error, AioserveError) else f"{type(error).__name__}: {text}"
