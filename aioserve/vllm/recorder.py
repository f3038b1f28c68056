"""vLLM's own scheduler, with a decision log of all that it is asked and does.

    vllm serve MODEL --scheduler-cls aioserve.vllm.Recorder \\
        --additional-config '{"aioserve": {"decision_log": "traffic.log"}}'

What vLLM decides, and what it serves, stays as it is: each call is passed on, and noted afterwards.
With `shadow` in place of the log, or beside it, a policy of aioserve's follows the same traffic.
Whatever goes wrong with a note ends the log, with one line that says why, and never a request.
`replay`, `compare --replay`, `trace` and `calibrate` read such a log on any machine.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput as TheirPlan
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput as TheirResult
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, RequestError
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.decision_log.recorder import LogWriter, RecordSink, plain_settings
from aioserve.lab.decision_log.records import (
    Added,
    Closed,
    Finished,
    Header,
    Record,
    Reset,
    Shorthand,
    Updated,
)
from aioserve.outputs import FinishReason
from aioserve.outputs import ModelRunnerOutput as OurResult
from aioserve.request import RequestStatus
from aioserve.scheduler import SchedulerOutput
from aioserve.support import __version__
from aioserve.vllm.observed import Observed
from aioserve.vllm.requests import STATUSES, Arrivals, to_ours
from aioserve.vllm.settings import KEY, read_shadow

if TYPE_CHECKING:
    from aioserve.vllm.shadow import ShadowBeside, ShadowSettings

SETTING = "decision_log"


class Recorder:
    """A recorder for `--scheduler-cls`: the scheduler that vLLM would take, watched. What is not
    watched here is passed on as it is asked.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        **others: Any,
    ) -> None:
        """Raises `ConfigError` without a file to write to, or one that cannot be written, and for a
        shadow that cannot work.
        """
        path, shadow = _stated(vllm_config)
        sink = _NoLog() if path is None else LogWriter(path)
        config = copy.copy(vllm_config.scheduler_config)
        config.scheduler_cls = None  # then it is the one for these settings
        self.live: Any = config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=structured_output_manager,
            block_size=block_size,
            **others,
        )
        header = make_header(vllm_config, kv_cache_config, block_size)
        self._notes = Notes(self.live, header, sink)
        if shadow is not None:
            self._notes.shadow = _make_shadow(shadow, header)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else vLLM asks of its scheduler."""
        if name == "live":  # it is not there yet
            raise AttributeError(name)
        return getattr(self.live, name)

    def add_request(self, request: TheirRequest) -> None:
        """Add a request as vLLM's scheduler does; it is noted once it is accepted."""
        self.live.add_request(request)
        self._notes.try_to(self._notes.added, request)

    def schedule(self, throttle_prefills: bool = False) -> TheirPlan:
        """Plan a step as vLLM's scheduler does; it is noted if it tells the runner anything."""
        began = time.monotonic()
        plan = self.live.schedule(throttle_prefills)
        self._notes.try_to(self._notes.planned, plan, began)
        return plan

    def update_from_output(
        self, scheduler_output: TheirPlan, model_runner_output: TheirResult
    ) -> Any:
        """Take a result as vLLM's scheduler does; it is noted if the step had tokens."""
        began = time.monotonic()
        outputs = self.live.update_from_output(scheduler_output, model_runner_output)
        self._notes.try_to(
            self._notes.updated, scheduler_output, model_runner_output, outputs, began
        )
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: TheirStatus
    ) -> Any:
        """End requests as vLLM's scheduler does; it is noted for those that have ended by it."""
        ended = self.live.finish_requests(request_ids, finished_status)
        self._notes.try_to(self._notes.finished, ended, finished_status)
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the cache as vLLM's scheduler does; it is noted if anything was forgotten."""
        is_reset: bool = self.live.reset_prefix_cache(*args, **kwargs)
        self._notes.try_to(self._notes.reset, is_reset)
        return is_reset

    def shutdown(self) -> None:
        """Shut down as vLLM's scheduler does, and end the log."""
        self.live.shutdown()
        self._notes.close()


class Notes:
    """The records of one scheduler of vLLM's. Times are those of `time.monotonic`."""

    def __init__(self, theirs: Any, header: Header, sink: RecordSink) -> None:
        self._theirs, self._sink = theirs, sink
        self._observed, self._short = Observed(), Shorthand()
        self._arrivals = Arrivals(time.monotonic)
        self._step_ids: dict[int, int] = {}  # of plans without a result, by the plan's identity
        self._has_failed = False
        self.shadow: ShadowBeside | None = None
        self._in_flight: dict[int, SchedulerOutput] = {}  # by step id, of which a shadow learns
        sink.write(header)
        sink.flush()

    def try_to(self, note: Callable[..., None], *args: Any) -> None:
        """Note something, unless that has failed before: what follows would not fit."""
        if self._has_failed:
            return
        try:
            note(*args)
        except Exception as error:
            self._has_failed = True
            self._sink.flush()  # what was noted before is true
            self._sink.fail(error)

    def added(self, theirs: TheirRequest) -> None:
        now = time.monotonic()
        try:
            request = to_ours(theirs, self._arrivals).ours
        except RequestError:  # of which vLLM takes more than aioserve has words for
            request = to_ours(theirs, self._arrivals, only_ordered=True).ours
        self._observed.add(theirs.request_id, request)
        self._short.add(request.request_id)
        self._sink.write(Added(now, request.spec, None))
        if self.shadow is not None:
            self.shadow.on_added(request, now)

    def planned(self, plan: TheirPlan, began: float) -> None:
        if not (plan.num_scheduled_tokens or plan.finished_req_ids or plan.preempted_req_ids):
            return  # vLLM asks every millisecond while requests wait for something else
        took = time.monotonic() - began
        output = self._observed.planned(plan)
        if output.num_scheduled_tokens:
            self._step_ids[id(plan)] = output.step_id
        self._sink.write(self._short.planned(began, output, self._counts(), (took, 0.0)))
        if self.shadow is not None and output.num_scheduled_tokens:
            self._in_flight[output.step_id] = output
            self.shadow.on_planned(output, began)

    def updated(
        self, plan: TheirPlan, result: TheirResult, outputs: Mapping[int, Any], began: float
    ) -> None:
        step_id = self._step_ids.pop(id(plan), None)
        if step_id is None:  # the step had no token
            return
        took = time.monotonic() - began
        known = self._observed.requests
        ended: list[str] = []
        reasons: list[tuple[int | str, str]] = []
        for batch in outputs.values():
            for output in batch.outputs:  # tokens alone are in the result
                if output.request_id not in known:
                    continue
                if output.finish_reason is None and self.shadow is None:
                    continue
                request, _ = self._observed.took(output)
                reason = request.status.finish_reason
                if reason is None:
                    continue
                ended.append(request.request_id)
                reasons.append((self._short.name(request.request_id), reason.value))
        sampled, rows = result.sampled_token_ids, result.req_id_to_index
        tokens = [sampled[rows[name]] if sampled else [] for name in plan.num_scheduled_tokens]
        self._sink.write(Updated(began, None, step_id, tokens, [], reasons, took))
        if self.shadow is not None:
            output = self._in_flight.pop(step_id)
            names = list(output.num_scheduled_tokens)
            self.shadow.on_back(output, OurResult(names, tokens), began)
            for name, (_, said) in zip(ended, reasons, strict=True):
                self.shadow.on_ended([name], FinishReason(said), began)
        self._forget(ended)

    def finished(self, ended: Iterable[TheirRequest], theirs: TheirStatus) -> None:
        now, status = time.monotonic(), STATUSES[theirs]
        names = [r.request_id for r in ended if r.request_id in self._observed.requests]
        for name in names:
            self._observed.end(name, status)
        if names:
            numbers = self._short.names(names)
            self._sink.write(Finished(now, numbers, int(status), numbers, None))
            self._tell_ended(names, status, now)
            self._forget(names)

    def _tell_ended(self, names: list[str], status: RequestStatus, now: float) -> None:
        reason = status.finish_reason
        if self.shadow is not None and reason is not None:
            self.shadow.on_ended(names, reason, now)

    def reset(self, is_reset: bool) -> None:
        if is_reset:
            self._sink.write(Reset(time.monotonic(), True, None))

    def close(self) -> None:
        """Close the log and the shadow."""
        self.try_to(self._sink.write, Closed(time.monotonic()))
        self._sink.close()
        if self.shadow is not None:
            self.shadow.close()

    def _forget(self, names: list[str]) -> None:
        self._short.forget(names)
        if not self._observed.requests:
            self._sink.flush()

    def _counts(self) -> tuple[int, int, int]:
        num_running = len(self._theirs.running)
        pool = self._theirs.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return num_running, len(self._observed.requests) - num_running, num_used


class _NoLog(RecordSink):
    """No log is asked for, but a shadow."""

    def write(self, record: Record) -> None:
        """Do nothing with the record."""


def _stated(vllm_config: VllmConfig) -> tuple[Path | None, "ShadowSettings | None"]:
    """Return the file to write to and the settings of a shadow, of which one may be missing; of
    several engines of one server, each has its own files.
    """
    stated = vllm_config.additional_config
    tree = stated.get(KEY) if isinstance(stated, Mapping) else None
    given = dict(tree) if isinstance(tree, Mapping) else {}
    path, shadow = given.get(SETTING), read_shadow(given)
    example = f'--additional-config \'{{"{KEY}": {{"{SETTING}": "traffic.log"}}}}\''
    if (path is None and shadow is None) or not (path is None or (isinstance(path, str) and path)):
        raise ConfigError(
            f"aioserve.vllm.Recorder needs the file that it is to write, as {example}; got "
            f"{tree!r:.80}"
        )
    if others := sorted(set(given) - {SETTING, "shadow"}):
        raise ConfigError(
            f"aioserve.vllm.Recorder leaves every decision to vLLM: of {KEY} it takes "
            f"{SETTING!r} and 'shadow' alone, and not {', '.join(others)} (aioserve.vllm.Scheduler "
            "does)"
        )
    parallel = vllm_config.parallel_config
    own = f".{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    if shadow is not None:
        shadow = msgspec.structs.replace(shadow, file=shadow.file + own)
    return (None if path is None else Path(path + own)), shadow


def _make_shadow(settings: "ShadowSettings", header: Header) -> "ShadowBeside":
    """Return a shadow with the limits and as many KV blocks as vLLM's scheduler has. Raises
    `ConfigError` if its policy cannot work.
    """
    from aioserve.vllm.shadow import ShadowBeside

    def make_kv_cache() -> KVCacheManager:
        return KVCacheManager(
            header.num_kv_blocks,
            header.block_size,
            enable_prefix_caching=header.enable_prefix_caching,
            max_draft_tokens=header.max_draft_tokens,
        )

    return ShadowBeside(
        settings, header.config, make_kv_cache, header.max_model_len, time.monotonic
    )


def make_header(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> Header:
    """Return the settings of an engine of vLLM's as the first record of a log: with the policy
    `vllm`, which a replay asks for by that name.
    """
    theirs, cache = vllm_config.scheduler_config, vllm_config.cache_config
    lora = vllm_config.lora_config
    config = SchedulerConfig(
        policy="vllm",
        options={
            "policy": theirs.policy,
            "reserve_full_isl": theirs.scheduler_reserve_full_isl,
            "watermark": theirs.watermark,
        },
        max_num_seqs=theirs.max_num_active_seqs or theirs.max_num_seqs,
        max_num_batched_tokens=theirs.max_num_scheduled_tokens or theirs.max_num_batched_tokens,
        long_prefill_token_threshold=theirs.long_prefill_token_threshold or None,
        pipeline_depth=2 if theirs.async_scheduling else 1,
        **({} if lora is None else {"max_loras": lora.max_loras}),
    )
    num_blocks = kv_cache_config.num_blocks - 1  # the first is held by no request
    return Header(
        time=time.monotonic(),
        version=__version__,
        unix_time=time.time(),
        scheduler=plain_settings(config),
        max_model_len=vllm_config.model_config.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        num_watermark_blocks=int(theirs.watermark * kv_cache_config.num_blocks),
        max_draft_tokens=vllm_config.num_speculative_tokens,
    )
