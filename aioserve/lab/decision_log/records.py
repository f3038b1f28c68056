"""The format of a decision log: one record per call of the scheduler interface.

Plain data: what went in, what came out, and when. Knows nothing about files, policies or clocks.
Requests go by number, in the order in which they were accepted; by id once they have ended.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.kv_cache import KVCacheManager, WindowSpec, make_resources
from aioserve.request import RequestSpec
from aioserve.scheduler import SchedulerOutput

FORMAT_VERSION = 10  # raise it with every change of a record, or of what is in one
OLDEST_FORMAT = 8  # raise it, too, unless all that was added are fields with a default at the end
MAGIC = b"aioserve decision log "  # the first line of a file; the version follows

Name = int | str  # of a request
T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call. `time` is what the scheduler's clock said throughout it, in seconds."""

    MEASURED: ClassVar[tuple[str, ...]] = ()  # fields that differ from run to run

    time: float


class Header(Record, frozen=True, array_like=True, tag="H"):
    """The header, with what is needed to build the scheduler again. Always the first record."""

    version: str  # of aioserve
    unix_time: float  # at `time`
    scheduler: dict[str, Any]  # SchedulerConfig, with policy and options
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_watermark_blocks: int
    num_state_slots: int | None = None  # if the model's layers have states
    windows: WindowSpec | None = None  # if the model's layers have sliding windows
    num_there: int = 0  # requests that were there when the log began: the first that it tells of
    max_draft_tokens: int = 0  # that are guessed for a request after a step

    @property
    def config(self) -> SchedulerConfig:
        """Raises `msgspec.ValidationError` if this version does not know the settings."""
        return msgspec.convert(self.scheduler, SchedulerConfig)

    @property
    def watermark(self) -> float:
        """The share of the blocks that makes `num_watermark_blocks`, where it is rounded down."""
        return (self.num_watermark_blocks + 0.5) / self.num_kv_blocks

    def check_is_whole(self) -> None:
        """Raises `ConfigError` if there were requests before the first record."""
        if self.num_there:
            raise ConfigError(
                f"this decision log begins with {self.num_there} requests that were there before: "
                "`compare --replay` takes it, which leaves them out; nothing else does"
            )

    def make_kv_cache(self) -> KVCacheManager:
        """Return an empty one of the same geometry."""
        return KVCacheManager(
            self.num_kv_blocks,
            self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark=self.watermark,
            resources=make_resources(
                self.num_state_slots,
                self.windows,
                self.block_size,
                keeps_prefixes=self.enable_prefix_caching,
            ),
            max_draft_tokens=self.max_draft_tokens,
        )


class Added(Record, frozen=True, array_like=True, tag="A"):
    """`add_request`: everything a `Request` is made of."""

    spec: RequestSpec
    error: str | None  # why it was refused


class Planned(Record, frozen=True, array_like=True, tag="S"):
    """A call of `schedule`. Which requests run, with how many tokens, is left out if it can be."""

    MEASURED = ("took", "lag")

    error: str | None
    step_id: int
    requests: list[Name] | None  # in batch order; None: the same as in the last step
    num_tokens: list[int] | None  # of each; None: one each
    new: list[tuple[Name, int, list[int]]]  # requests that enter: tokens found in the cache, blocks
    new_block_ids: list[tuple[Name, list[int]]]  # of requests that ran already
    preempted: list[Name]  # they leave the batch
    finished: list[Name]
    drafts: list[tuple[Name, list[int]]]
    encoder_inputs: list[tuple[Name, list[int]]]
    freed_encoder_hashes: list[str]
    num_running: int  # after the step was planned
    num_waiting: int
    num_used_blocks: int
    took: float  # by the call, seconds
    lag: float  # by how much the event loop was late at worst since the last step, seconds
    draft_lengths: list[tuple[Name, int]] = []  # that the policy asks for after the step
    paused: list[Name] = []  # of the preempted, those that keep their blocks


class Updated(Record, frozen=True, array_like=True, tag="U"):
    """A call of `update_from_output`, which takes the result of a step."""

    MEASURED = ("took",)

    error: str | None
    step_id: int
    sampled_token_ids: list[list[int]]
    drafts: list[tuple[Name, list[int]]]  # proposed for the next step
    ended: list[tuple[Name, str]]  # requests that ended by it, with the finish reason
    took: float
    row_values: list[tuple[Name, dict[str, float]]] = []  # that the policy wants, by name
    sat_out: list[Name] = []  # requests whose token was not sampled yet


class Finished(Record, frozen=True, array_like=True, tag="F"):
    """A call of `finish_requests`, and which requests it ended."""

    asked: list[Name] | None  # None: all
    status: int  # RequestStatus
    ended: list[Name]
    error: str | None


class Expired(Record, frozen=True, array_like=True, tag="E"):
    """A call of `expire_requests`, and which requests it ended."""

    ended: list[Name]
    error: str | None


class Discarded(Record, frozen=True, array_like=True, tag="D"):
    """A call of `discard_step`, and which requests it ended."""

    last_step_id: int
    ended: list[Name]
    error: str | None


class Reset(Record, frozen=True, array_like=True, tag="R"):
    """A call of `reset_prefix_cache`, and whether the cache is empty now."""

    is_empty: bool | None
    error: str | None


class Switched(Record, frozen=True, array_like=True, tag="P"):
    """Another policy took over between two steps, or could not."""

    scheduler: dict[str, Any]  # SchedulerConfig
    error: str | None

    @property
    def config(self) -> SchedulerConfig:
        """Raises `msgspec.ValidationError` if this version does not know the settings."""
        return msgspec.convert(self.scheduler, SchedulerConfig)


class Closed(Record, frozen=True, array_like=True, tag="C"):
    """`shutdown`. A log without it was cut off, or is still being written."""


AnyRecord = (
    Header | Added | Planned | Updated | Finished | Expired | Discarded | Reset | Switched | Closed
)


class Shorthand:
    """The shorthand of records: numbers for ids, and nothing for what is as in the last step."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._num_added = 0
        self._ended: list[str] = []  # since the last step; the next one speaks of them
        self._last_req_ids: list[str] = []  # of the last step

    def add(self, request_id: str) -> None:
        """Give an accepted request a number."""
        self._numbers[request_id] = self._num_added
        self._num_added += 1

    def forget(self, request_ids: Iterable[str]) -> None:
        """They have ended: the next step may name them still, none after it does."""
        self._ended += request_ids

    def name(self, request_id: str) -> Name:
        """Return the number of the request, if it has one."""
        return self._numbers.get(request_id, request_id)

    def names(self, request_ids: Iterable[str]) -> list[Name]:
        """Numbers of these requests; the id of one that has none."""
        numbers = self._numbers
        return [numbers.get(request_id, request_id) for request_id in request_ids]

    def named(self, values: Mapping[str, T]) -> list[tuple[Name, T]]:
        """Return the values with requests' numbers instead of their ids."""
        return [(self.name(request_id), value) for request_id, value in values.items()]

    def planned(
        self,
        time: float,
        output: SchedulerOutput,
        counts: tuple[int, int, int],
        measured: tuple[float, float],
    ) -> Planned:
        """`counts` and `measured` are the last fields of the record."""
        tokens = output.num_scheduled_tokens
        req_ids = list(tokens)
        is_same = req_ids == self._last_req_ids
        self._last_req_ids = req_ids
        record = Planned(
            time,
            None,
            output.step_id,
            None if is_same else self.names(req_ids),
            None if output.total_num_scheduled_tokens == len(tokens) else list(tokens.values()),
            [
                (self.name(new.request_id), new.num_computed_tokens, new.block_ids)
                for new in output.scheduled_new_reqs
            ],
            self.named(output.scheduled_cached_reqs.new_block_ids),
            self.names(output.preempted_req_ids),
            self.names(output.finished_req_ids),
            self.named(output.scheduled_spec_decode_tokens),
            self.named(output.scheduled_encoder_inputs),
            output.free_encoder_hashes,
            *counts,
            *measured,
            self.named(output.draft_lengths),
            self.names(output.paused_req_ids),
        )
        for request_id in self._ended:
            self._numbers.pop(request_id, None)
        self._ended = []
        return record

    def failed(
        self,
        time: float,
        error: str,
        counts: tuple[int, int, int],
        measured: tuple[float, float],
    ) -> Planned:
        """Return a call of `schedule` that planned nothing."""
        return Planned(time, error, 0, None, None, [], [], [], [], [], [], [], *counts, *measured)
