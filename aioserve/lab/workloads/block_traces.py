"""Traces whose prompts are named block by block: Mooncake's, Qwen-Bailian's, and Weka's of agents.

Equal names are equal blocks of tokens, so prefixes are shared as they were. The last two say which
request came after which, and when is left to the simulation.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.engine.delivery.request_log import Count
from aioserve.errors import ConfigError
from aioserve.lab.workloads.trace_lines import Seconds, json_lines
from aioserve.lab.workloads.workload import Piece, WorkloadRequest, text_name

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
BAILIAN_BLOCK = 16
ROOT = -1  # the parent of a request that begins a conversation


class MooncakeLine(msgspec.Struct):
    """A line of the Mooncake traces; equal `hash_ids` mean equal blocks of 512 prompt tokens."""

    timestamp: Seconds  # milliseconds
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class BailianLine(msgspec.Struct):
    """A line of the Qwen-Bailian traces; equal `hash_ids` mean equal blocks of 16 prompt tokens."""

    chat_id: int
    parent_chat_id: int  # -1: it begins a conversation
    timestamp: Seconds
    input_length: Count
    output_length: Annotated[int, Meta(ge=0)]
    type: str  # text, search, image, file
    turn: int
    hash_ids: list[int]


class WekaCall(msgspec.Struct):
    """One call of a model by an agent, or the calls of a helper that it started."""

    type: str  # "s" streams, "n" does not; "subagent" has calls of its own in `requests`
    t: Seconds = 0.0  # since the session began
    prompt_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    api_time: Seconds = 0.0  # that the call took
    think_time: Seconds | None = None  # from the end of the call before to this one
    requests: "list[WekaCall]" = []


class WekaSession(msgspec.Struct):
    """One session of a coding agent, as the traces of Weka's kv-cache-tester have it."""

    id: str
    requests: list[WekaCall]
    block_size: Annotated[int, Meta(ge=1)] = 64
    hash_id_scope: str = "local"  # "global": equal ids are equal blocks in all sessions


def read_mooncake(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a Mooncake trace, which come when they came."""
    for where, line in json_lines(path, lines, MooncakeLine):
        blocks, rest = divmod(line.input_length, MOONCAKE_BLOCK)
        if len(line.hash_ids) != blocks + (rest > 0):
            raise ConfigError(
                f"{where}: {line.input_length} tokens are {blocks + (rest > 0)} blocks of "
                f"{MOONCAKE_BLOCK}, but there are {len(line.hash_ids)} hash_ids"
            )
        pieces = _pieces(("mooncake", seed), line.hash_ids, MOONCAKE_BLOCK, line.input_length, "")
        # The first block is a prompt of the system, the same for all: the next one is theirs.
        session = pieces[min(1, len(pieces) - 1)].text if pieces else -1
        yield WorkloadRequest(line.timestamp / 1e3, pieces, line.output_length, session=session)


def read_bailian(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a Qwen-Bailian trace; their type is their class and a hint. A turn comes after
    the end of its parent, by the time between the two arrivals: when replies ended is not told.
    """
    found = sorted(json_lines(path, lines, BailianLine), key=lambda pair: pair[1].timestamp)
    places: dict[int, int] = {}
    root: list[int] = []  # of each, where its conversation began
    for place, (where, line) in enumerate(found):
        if line.chat_id in places:
            raise ConfigError(f"{where}: chat_id {line.chat_id} is there twice")
        _check_blocks(where, line.hash_ids, BAILIAN_BLOCK, line.input_length)
        parent = places.get(line.parent_chat_id, ROOT)
        before = 0.0 if parent < 0 else found[parent][1].timestamp
        root.append(place if parent < 0 else root[parent])
        places[line.chat_id] = place
        yield WorkloadRequest(
            line.timestamp - before,
            _pieces(("bailian", seed), line.hash_ids, BAILIAN_BLOCK, line.input_length, where),
            max(line.output_length, 1),
            kind=line.type,
            hints={"type": line.type},
            follows=parent,
            session=root[place],
        )


def read_weka(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of sessions of agents, a program each, all of which begin at once: a call comes
    after the one before, a helper's first call after the one that started it, and the call after
    the helpers when all of them have ended. Pauses are those of the trace.
    """
    place = 0
    for number, (where, session) in enumerate(json_lines(path, lines, WekaSession)):
        for request in _Session(session, where, seed, place, number).requests():
            yield request
            place += 1


class _Session:
    """One session, whose requests stand from `begin` on in the workload."""

    def __init__(
        self, session: WekaSession, where: str, seed: int, begin: int, number: int
    ) -> None:
        self._session, self._where, self._begin, self._number = session, where, begin, number
        scope = "" if session.hash_id_scope == "global" else f"{number} {session.id}"
        self._names = ("weka", seed, scope)
        self._made: list[WorkloadRequest] = []
        self._ends: list[float] = []  # of the calls, as they were recorded

    def requests(self) -> list[WorkloadRequest]:
        """The requests in the order of the file. Raises `ConfigError`."""
        last: tuple[int, ...] = ()
        joined: tuple[int, ...] = ()  # last calls of helpers that nobody has waited for yet
        for call in self._session.requests:
            if call.type != "subagent":
                last, joined = self._call(call, "agent", last + joined), ()
                continue
            own = last
            for inner in call.requests:
                if inner.type == "subagent":
                    raise ConfigError(f"{self._where}: a helper starts a helper: not supported")
                own = self._call(inner, "helper", own)
            joined += own if call.requests else ()
        return self._made

    def _call(self, call: WekaCall, kind: str, after: tuple[int, ...]) -> tuple[int, ...]:
        place = len(self._made)
        where = f"{self._where}: call {place + 1}"
        if call.prompt_tokens < 1 or call.output_tokens < 0:
            raise ConfigError(
                f"{where}: expected at least 1 token in and 0 out, got {call.prompt_tokens} and "
                f"{call.output_tokens}"
            )
        size = self._session.block_size
        _check_blocks(where, call.hash_ids, size, call.prompt_tokens)
        pause = call.t
        if after:
            pause = max(0.0, call.t - max(self._ends[i] for i in after))
            if call.think_time is not None and len(after) == 1:
                pause = call.think_time
        waits_for = [self._begin + i for i in after]
        self._made.append(
            WorkloadRequest(
                pause,
                _pieces(self._names, call.hash_ids, size, call.prompt_tokens, where),
                max(call.output_tokens, 1),
                follows=waits_for[0] if waits_for else -1,
                after=tuple(waits_for[1:]),
                kind=kind,
                session=self._number,
                program=self._number,
            )
        )
        self._ends.append(call.t + call.api_time)
        return (place,)


def _check_blocks(where: str, hash_ids: Sequence[int], size: int, length: int) -> None:
    if len(hash_ids) > -(-length // size):
        raise ConfigError(
            f"{where}: {length} tokens are {-(-length // size)} blocks of {size}, but there are "
            f"{len(hash_ids)} hash_ids"
        )


def _pieces(
    names: tuple[str | int, ...], hash_ids: Sequence[int], size: int, length: int, rest: str
) -> tuple[Piece, ...]:
    """A prompt of `length` tokens: a piece for each block, the last of which may be shorter; what
    has no block is a text of its own, named by `rest`.
    """
    pieces = [
        Piece(text_name(*names, name), min(size, length - i * size))
        for i, name in enumerate(hash_ids)
    ]
    if (left := length - size * len(hash_ids)) > 0:
        pieces.append(Piece(text_name(*names, rest), left))
    return tuple(pieces)
