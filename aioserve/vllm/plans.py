"""aioserve's plan of a step in vLLM's words: the `SchedulerOutput` that vLLM's runner is given.

Knows what the runner has heard of each request, since a request is new to it once: afterwards it is
told what has changed. vLLM has two runners; the older one takes a request that comes back after a
preemption as a known one with all its tokens and blocks, the second (`VLLM_USE_V2_MODEL_RUNNER`)
as a new one. Block ids are one higher at vLLM, whose block 0 is a padding that no request holds.
"""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as TheirPlan
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.metrics.stats import PrefixCacheStats

from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput
from aioserve.vllm.caches import EncoderItems
from aioserve.vllm.requests import Tracked
from aioserve.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _Carried(NamedTuple):
    """Ids of requests that the runner has to hear of, and encoder outputs that it may drop."""

    finished: list[str]
    preempted: list[str]
    freed: list[str]


class RunnerPlans:
    """The plans of one scheduler, in the order in which the runner gets them."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        settings: Settings,
        tracked: Mapping[str, Tracked],
        items: EncoderItems,
        *,
        log_stats: bool,
    ) -> None:
        """`tracked` has the unfinished requests by id, and changes as they come and go."""
        self.prefix_stats = PrefixCacheStats()  # for vLLM's metrics, since they were last taken
        self._tracked, self._items, self._log_stats = tracked, items, log_stats
        self._block_size = settings.block_size
        self._max_draft_tokens = settings.max_draft_tokens
        self._resumes_as_new = bool(vllm_config.use_v2_model_runner)
        is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self._sends_all_tokens = is_async and not self._resumes_as_new
        self._uses_mrope = bool(vllm_config.model_config.uses_mrope)
        self._zeroes_blocks = bool(kv_cache_config.needs_kv_cache_zeroing)
        self._at_runner: set[str] = set()  # requests of which the runner has a state
        self._last_rows: set[str] = set()  # requests of the newest step, if all tokens are sent
        self._carried = _Carried([], [], [])  # what the runner has to hear with the next plan

    def carry(self, plan: SchedulerOutput) -> None:
        """Tell the runner with the next plan what this one, which has no tokens, says."""
        self._carried.finished.extend(plan.finished_req_ids)
        self._carried.preempted.extend(plan.preempted_req_ids)
        self._carried.freed.extend(plan.free_encoder_hashes)
        self._items.plan({}, plan.free_encoder_hashes, {})
        self._last_rows = set()

    def make(self, plan: SchedulerOutput | None) -> TheirPlan:
        """Return the plan of the next step, and what was carried; None: nothing was planned."""
        left = self._leave_runner(self._carried.finished)
        if plan is None:
            made = TheirPlan.make_empty()
            self._last_rows = set()
        else:
            made = self._translate(plan)
        if any(self._carried):
            made.finished_req_ids.update(left)
            made.preempted_req_ids = {*(made.preempted_req_ids or ()), *self._carried.preempted}
            computed = {
                self._tracked[name].ours.encoder_inputs[index].content_hash
                for name, indices in made.scheduled_encoder_inputs.items()
                for index in indices
            }
            made.free_encoder_mm_hashes += [h for h in self._carried.freed if h not in computed]
            self._carried = _Carried([], [], [])
        return made

    def _leave_runner(self, request_ids: list[str]) -> set[str]:
        """Return those of the ended requests that the runner was ever given."""
        there = self._at_runner.intersection(request_ids)
        self._at_runner -= there
        return there

    def _translate(self, plan: SchedulerOutput) -> TheirPlan:
        """Return the plan in vLLM's words."""
        finished = self._leave_runner(plan.finished_req_ids)  # before a request of the same id
        cached, tracked, now = plan.scheduled_cached_reqs, self._tracked, time.monotonic()
        names, num_computed = cached.req_ids, cached.num_computed_tokens
        requests = [tracked[name].ours for name in names]
        new_blocks: list[tuple[list[int], ...] | None]
        if given := cached.new_block_ids:
            new_blocks = [(_their_blocks(ids),) if ids else None for ids in map(given.get, names)]
        else:
            new_blocks = [None] * len(names)
        num_output = _num_outputs(requests, num_computed)
        all_tokens: dict[str, list[int]] = {}
        if self._sends_all_tokens:
            last = self._last_rows
            all_tokens = {
                request.request_id: request.token_ids.copy()
                for request in requests
                if request.request_id not in last
            }
            self._last_rows = set(plan.num_scheduled_tokens)
        if self._log_stats:
            for name in plan.preempted_req_ids:
                if (row := tracked.get(name)) is not None:
                    row.record(EngineCoreEventType.PREEMPTED, now)
        new: list[NewRequestData] = []
        resumed: set[str] = set()
        if plan.scheduled_new_reqs:
            names, num_computed = [*names], [*num_computed]
        for data in plan.scheduled_new_reqs:
            name, row = data.request_id, tracked[data.request_id]
            theirs, start = row.theirs, data.num_computed_tokens
            blocks = (_their_blocks(data.block_ids),)
            self._note_admitted(row, start, now)
            if row.is_known and not self._resumes_as_new:
                names.append(name)
                resumed.add(name)
                new_blocks.append(blocks)
                num_computed.append(start)
                num_output += _num_outputs([row.ours], [start])
                all_tokens[name] = data.token_ids
                continue
            theirs.num_computed_tokens = start
            known = data.token_ids if self._resumes_as_new else None
            told = NewRequestData.from_request(theirs, blocks, known, uses_mrope=self._uses_mrope)
            # Without the images in its cached prefix otherwise, which it may have to encode after a
            # preemption.
            told.mm_features = theirs.mm_features
            new.append(told)
            row.is_known = True
            self._at_runner.add(name)
        scheduled_inputs, freed = plan.scheduled_encoder_inputs, plan.free_encoder_hashes
        if scheduled_inputs or freed:
            seeing = {name: tracked[name].ours for name in scheduled_inputs}
            self._items.plan(scheduled_inputs, freed, seeing)
        return TheirPlan(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=resumed,
                new_token_ids=[],
                all_token_ids=all_tokens,
                new_block_ids=new_blocks,
                num_computed_tokens=num_computed,
                num_output_tokens=num_output,
            ),
            num_scheduled_tokens=dict(plan.num_scheduled_tokens),
            total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={
                name: list(ids) for name, ids in plan.scheduled_spec_decode_tokens.items()
            },
            scheduled_encoder_inputs={n: list(i) for n, i in scheduled_inputs.items()},
            finished_req_ids=finished,
            free_encoder_mm_hashes=list(freed),
            preempted_req_ids=set(plan.preempted_req_ids),
            num_spec_tokens_to_schedule=self._max_draft_tokens,
            new_block_ids_to_zero=self._blocks_to_zero(plan) if self._zeroes_blocks else None,
        )

    def _note_admitted(self, row: Tracked, num_cached: int, now: float) -> None:
        """Note for vLLM's metrics that a request enters with `num_cached` cached tokens."""
        ours, theirs = row.ours, row.theirs
        if self._log_stats:
            row.record(EngineCoreEventType.SCHEDULED, now)
            if ours.takes_cached_prefix and ours.num_found_blocks * self._block_size == (
                num_cached
            ):  # not of a paused request, which has its own
                self.prefix_stats.record(
                    num_tokens=ours.num_tokens, num_hits=num_cached, preempted=row.is_known
                )
        if theirs.prefill_stats is not None and not row.is_known:
            theirs.prefill_stats.set(
                num_prompt_tokens=ours.num_prompt_tokens,
                num_local_cached_tokens=num_cached,
                num_external_cached_tokens=0,
            )

    def _blocks_to_zero(self, plan: SchedulerOutput) -> list[int] | None:
        """Return blocks that requests got for this step and that hold nothing of a cached
        prefix.
        """
        size = self._block_size
        fresh = [b for ids in plan.scheduled_cached_reqs.new_block_ids.values() for b in ids]
        for data in plan.scheduled_new_reqs:
            fresh += data.block_ids[-(-data.num_computed_tokens // size) :]
        return _their_blocks(fresh) or None


def _num_outputs(requests: list[Request], num_computed: list[int]) -> list[int]:
    """Return, of each request, the tokens of the reply that the runner knows before a step which
    begins behind `num_computed` tokens: the received ones, and one that a step in flight samples.
    """
    return [
        (known if (known := request.num_tokens) > start else start + 1) - request.num_prompt_tokens
        for request, start in zip(requests, num_computed, strict=True)
    ]


def _their_blocks(block_ids: Iterable[int]) -> list[int]:
    return [block_id + 1 for block_id in block_ids]
