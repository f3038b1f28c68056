"""vLLM's scheduler interface on aioserve's step loop: a plan goes out in vLLM's words, a result in.

Knows vLLM's requests, plans and results, and what its engine core calls when. Decides nothing: the
policy does, and `BaseScheduler`, `KVCacheManager` and `StepLoop` keep all books, as in aioserve's
own engine. Block ids are one higher at vLLM, whose block 0 is a padding that no request holds.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.interface import SchedulerInterface as TheirInterface
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.output import SchedulerOutput as TheirPlan
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from aioserve.config import SchedulerConfig
from aioserve.engine.step_loop import PolicyFailures, StepInFlight, StepLoop, StepObserver
from aioserve.errors import AioserveError, InvariantError, PolicyError, RequestRejectedError
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import EngineCoreOutput as OurOutput
from aioserve.outputs import FinishReason as OurReason
from aioserve.outputs import ModelRunnerOutput
from aioserve.request import Request
from aioserve.scheduler import FALLBACK_POLICY, BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.blame import blamed
from aioserve.scheduler.delegate import innermost
from aioserve.scheduler.results import take_drafts
from aioserve.vllm.caches import BlockEvents, DraftHeadPrefixes, EncoderItems
from aioserve.vllm.plans import RunnerPlans
from aioserve.vllm.requests import ENDS, REASONS, STATUSES, Arrivals, Tracked, to_ours
from aioserve.vllm.served import BoundedScheduler, load_served
from aioserve.vllm.settings import read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.v1.core.sched.output import SchedulerOutput as _Plan
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.outputs import ModelRunnerOutput as TheirResult
    from vllm.v1.structured_output import StructuredOutputManager

    from aioserve.vllm.checks import Checks
    from aioserve.vllm.shadow import ShadowBeside

logger = logging.getLogger(__name__)

Outputs = dict[int, list[EngineCoreOutput]]  # by client index


class _Handed(NamedTuple):
    """A plan that vLLM's engine core has: every one comes back, in order."""

    plan: "_Plan"
    step: StepInFlight[None] | None  # None: it told the runner nothing of a step
    masked: list[str]  # requests of structured output that get a token in it


class _Ends(StepObserver):
    """The requests that have ended, whatever ended them."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, OurReason]] = []

    def on_ended(self, request_ids: list[str], reason: OurReason, now: float) -> None:
        self.ended += [(request_id, reason) for request_id in request_ids]


class _Seats(StepObserver):
    """The word of a pause on new requests, said to every policy that takes over as well."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        self._say()


class Scheduler(TheirInterface):
    """The class that `--scheduler-cls aioserve.vllm.Scheduler` names. It is called from one thread
    of vLLM's.
    """

    # Of which vLLM's engine core asks, though its interface does not name them: there is neither.
    connector = None
    ec_connector = None

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        structured_output_manager: "StructuredOutputManager",
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """Make the scheduler as vLLM calls it. Raises `ConfigError` for settings that cannot work,
        and for features of vLLM's that are not translated.
        """
        self.settings = settings = read_settings(
            vllm_config, kv_cache_config, block_size, mm_registry
        )
        if vllm_config.lora_config is not None and current_platform.is_cpu():
            logger.warning(
                "vLLM's build for CPUs computes rows without an adapter, beside rows with one, by "
                "the adapter of its last slot, under every scheduler (vLLM's pull request 48421): "
                "state --max-loras one above the number of adapters, so that this slot stays empty"
            )
        self._clock = time.monotonic
        self._arrivals = Arrivals(self._clock)
        self._kv_cache = self._make_kv_cache(
            record_events=settings.check or settings.enable_kv_events
        )
        self._events = (
            BlockEvents(vllm_config, settings.block_size) if settings.enable_kv_events else None
        )
        config = settings.scheduler
        self._loop: StepLoop[None] = StepLoop(
            BoundedScheduler(self._make_policy(), config.stall_timeout),
            depth=config.depth,
            clock=self._clock,
            stall_timeout=config.stall_timeout,
            fallback=config.under(FALLBACK_POLICY),
        )
        self.checks: Checks | None = None  # of the setting `check`
        if settings.check:
            from aioserve.vllm import checks

            self.checks = checks.Checks(
                self._loop, config, self._kv_cache, settings.max_model_len, self._clock
            )
        self._asleep_until = 0.0  # on the clock: the policy holds all back; 0: it does not
        self._loop.wake = self._wake
        self._ends = _Ends()
        self._loop.observers.subscribe(self._ends)
        self._loop.observers.subscribe(_Seats(self._limit_seats))
        self._shadow: ShadowBeside | None = None
        if settings.shadow is not None:
            from aioserve.vllm import shadow

            self._shadow = shadow.ShadowBeside(
                settings.shadow, config, self._make_kv_cache, settings.max_model_len, self._clock
            )
            self._loop.observers.subscribe(self._shadow)
        self._grammars = structured_output_manager
        self._log_stats = log_stats
        self._pause_state = PauseState.UNPAUSED
        self._tracked: dict[str, Tracked] = {}
        self._theirs: dict[str, TheirRequest] = {}  # of the same requests
        self._structured: set[str] = set()  # requests of structured output among them
        self._compiling: dict[str, TheirRequest] = {}  # their grammars are not there yet
        self._handed: deque[_Handed] = deque()
        self._refused: list[tuple[int, EngineCoreOutput]] = []  # with their clients
        self._items = EncoderItems()  # images and sounds
        self._plans = RunnerPlans(
            vllm_config,
            kv_cache_config,
            settings,
            self._tracked,
            self._items,
            log_stats=log_stats,
        )
        self._runs_images_whole = bool(vllm_config.scheduler_config.disable_chunked_mm_input)
        self._finished: dict[int, set[str]] | None = {} if include_finished_set else None
        self._draft_lengths: Mapping[str, int] = {}  # what the policy said of the newest step
        self._draft_stats: SpecDecodingStats | None = None

    @property
    def failures(self) -> PolicyFailures:
        """Counts of what policies did wrong, since the start."""
        return self._loop.failures

    @property
    def policy(self) -> BaseScheduler:
        """The policy that plans now: the one of the settings, or the fallback."""
        policy = innermost(self._loop.scheduler)
        assert isinstance(policy, BaseScheduler)
        return policy

    def _make_kv_cache(self, *, record_events: bool = False) -> KVCacheManager:
        """Return an empty one, of as many KV blocks as vLLM has."""
        settings = self.settings
        heads = [DraftHeadPrefixes()] if settings.has_draft_head else []
        kv_cache = KVCacheManager(
            settings.num_blocks,
            settings.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
            watermark=settings.watermark,
            record_events=record_events,
            max_draft_tokens=settings.max_draft_tokens,
            resources=heads,
        )
        for head in heads:
            head.watch(kv_cache)
        return kv_cache

    def _make_policy(self) -> SchedulerInterface:
        """Return the policy of the settings, with a recorder around it if a log is to be
        written.
        """
        config = self.settings.scheduler
        policy = load_served(config.policy)
        make: Callable[..., SchedulerInterface] = policy
        if config.decision_log is not None:
            from aioserve.lab.decision_log.recorder import LogWriter, RecordingScheduler

            log = LogWriter(Path(config.decision_log))
            make = partial(RecordingScheduler, policy, sink=log)
        with blamed(policy, "__init__()"):
            return make(
                config,
                self._kv_cache,
                max_model_len=self.settings.max_model_len,
                clock=self._clock,
            )

    # Requests come and go.

    def add_request(self, request: TheirRequest) -> None:
        """Queue a request. One that is refused ends with the next outputs: vLLM's engine core does
        not survive what is raised here.
        """
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        if _is_ready(request):
            self._enter(request)
        else:
            self._compiling[request.request_id] = request

    def _enter(self, request: TheirRequest) -> None:
        """Give a request to the policy, unless it cannot be served."""
        structured = request.structured_output_request
        try:
            if structured is not None and isinstance(grammar := structured.grammar, Exception):
                self._refuse(
                    request, FinishReason.ERROR, f"its grammar does not compile: {grammar}"
                )
                return
            tracked = to_ours(request, self._arrivals, whole_images=self._runs_images_whole)
            if tracked.ours.encoder_inputs:
                self._items.enter(tracked.ours)
            try:
                self._loop.add_request(tracked.ours)
            except AioserveError:
                self._items.leave(tracked.ours)
                raise
        except PolicyError as error:  # as of a step: its client is told that it failed, not why
            self._refuse(request, FinishReason.ERROR, str(error), is_told=False)
            return
        except AioserveError as error:
            self._refuse(request, FinishReason.ABORT, str(error))
            return
        if self.checks is not None:
            self.checks.look(self.checks.added, tracked.ours)
        request.status = TheirStatus.WAITING
        self._tracked[request.request_id] = tracked
        self._theirs[request.request_id] = request
        if structured is not None:
            self._structured.add(request.request_id)

    def _refuse(
        self, request: TheirRequest, reason: FinishReason, why: str, *, is_told: bool = True
    ) -> None:
        """End a request that waits in no line; its client is told why if `is_told`."""
        logger.warning("request %s is refused: %s", request.request_id, why)
        request.status = ENDS[reason]
        self._note_finished(request)
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=reason,
            stop_reason=why if is_told else None,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        self._refused.append((request.client_index, output))

    def _enter_compiled(self) -> None:
        """Requests whose grammars are there wait in the policy's line from now on."""
        ready = [r for r in self._compiling.values() if _is_ready(r)]
        for request in ready:
            del self._compiling[request.request_id]
            self._enter(request)

    def has_request(self, request_id: str) -> bool:
        """Return whether the request has come and not ended. vLLM asks from version 0.33 on."""
        return request_id in self._tracked or request_id in self._compiling

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: TheirStatus
    ) -> list[TheirRequest]:
        """End requests from outside, all of them if None; returns those that have ended by this."""
        if request_ids is None:
            names = [*self._tracked, *self._compiling]
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._loop.finish_requests(
            [name for name in names if name in self._tracked], STATUSES[finished_status]
        )
        if self.checks is not None:
            self.checks.look(self.checks.ended, self._ends.ended)
        ended = []
        for name in names:
            request = self._compiling.pop(name, None)
            if request is None and (tracked := self._forget(name)) is not None:
                request = tracked.theirs
            if request is not None:
                request.status = finished_status
                self._note_finished(request)
                ended.append(request)
        # vLLM's engine core tells their clients itself.
        told = {request.request_id for request in ended}
        self._ends.ended = [end for end in self._ends.ended if end[0] not in told]
        return ended

    def _forget(self, request_id: str) -> Tracked | None:
        """The request has ended, and its client has been told, or is being told now."""
        self._theirs.pop(request_id, None)
        self._structured.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.ours.encoder_inputs:
            self._items.leave(tracked.ours)
        return tracked

    def _note_finished(self, request: TheirRequest) -> None:
        if self._finished is not None:
            self._finished.setdefault(request.client_index, set()).add(request.request_id)

    # A step goes out.

    def schedule(self, throttle_prefills: bool = False) -> TheirPlan:
        """Plan one step; without tokens if it only tells the runner which requests have ended."""
        if self._compiling:
            self._enter_compiled()
        loop, step = self._loop, None
        due = loop.scheduler.next_expiry()
        if due is not None and due <= self._clock():
            loop.expire_requests()
        if not loop.is_paused and loop.scheduler.has_requests() and self._is_time():
            step = loop.plan()
            self._note_idle(step)
            if self.checks is not None:
                told = None if step is None else step.output
                self.checks.look(self.checks.planned_step, told, self._ends.ended)
            if step is not None:
                loop.observers.tell(loop.observers.planned, step.output)
                if not (loop.in_flight and loop.in_flight[-1] is step):
                    step = None
        if step is not None:
            self._draft_lengths = step.told.draft_lengths
        plan = self._plans.make(None if step is None else step.told)
        masked: list[str] = []
        if step is not None and self._structured:
            rows = [row for row in self._rows(plan) if _is_masked(row)]
            masked = [row.ours.request_id for row in rows]
            plan.has_structured_output_requests = bool(masked)
            # A mask that waits for the token of a step in flight is made when that is back.
            plan.pending_structured_output_tokens = (
                any(row.ours.num_computed_tokens > row.ours.num_tokens for row in rows)
                and len(loop.in_flight) > 1
            )
        self._handed.append(_Handed(plan, step, masked))
        return plan

    def _is_time(self) -> bool:
        """Return whether to ask the policy: vLLM does every millisecond while a policy holds all
        back.
        """
        return self._clock() >= self._asleep_until

    def _note_idle(self, step: StepInFlight[None] | None) -> None:
        """A step was planned: if it runs nothing, and none is in flight, the policy sleeps until
        the time that it has stated, for some milliseconds otherwise, or until something happens.
        """
        self._asleep_until = 0.0
        if self._loop.in_flight or step is None:
            return
        seconds = self._loop.idle_seconds()
        if seconds is not None:
            self._asleep_until = self._clock() + seconds

    def _wake(self) -> None:
        self._asleep_until = 0.0

    def _rows(self, plan: TheirPlan) -> list[Tracked]:
        return [self._tracked[name] for name in plan.num_scheduled_tokens]

    def get_grammar_bitmask(self, scheduler_output: TheirPlan) -> GrammarOutput | None:
        """Return which tokens the grammars allow in this step, by request."""
        masked = next((h.masked for h in self._handed if h.plan is scheduler_output), [])
        names = [name for name in masked if name in self._theirs]
        if not names:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        bitmask = self._grammars.grammar_bitmask(self._theirs, names, drafts)
        if bitmask is None:
            return None
        return GrammarOutput(names, bitmask, [len(drafts.get(name, ())) for name in names])

    # A result comes in.

    def update_from_output(
        self, scheduler_output: TheirPlan, model_runner_output: "TheirResult"
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the result of a plan, in the order of the plans; vLLM calls it for every one."""
        handed = self._handed.popleft()
        if handed.plan is not scheduler_output:
            raise InvariantError("vLLM brings back a plan that is not the oldest it has")
        outputs: Outputs = {}
        if handed.step is not None:
            result = _our_result(handed.step.output, model_runner_output)
            if self._log_stats and scheduler_output.scheduled_spec_decode_tokens:
                self._note_drafts(scheduler_output, result)
            ours = self._loop.take(result)
            if self.checks is not None:
                told = handed.step.output
                self.checks.look(self.checks.received, told, result, ours, self._ends.ended)
            for client, batch in ours.items():
                outputs[client] = self._their_outputs(batch.outputs, model_runner_output)
        self._tell_ends(outputs)
        for client, output in self._refused:
            outputs.setdefault(client, []).append(output)
        self._refused.clear()
        self._loop.end_turn()
        if self._events is not None:
            self._events.publish(self._kv_cache.take_events())
        made = {client: EngineCoreOutputs(outputs=given) for client, given in outputs.items()}
        for client, names in (self._finished or {}).items():
            made.setdefault(client, EngineCoreOutputs()).finished_requests = names
        if self._finished:
            self._finished = {}
        if (stats := self.make_stats()) is not None:
            if not made:
                made[0] = EngineCoreOutputs()
            next(iter(made.values())).scheduler_stats = stats
        return made

    def _note_drafts(self, plan: TheirPlan, result: ModelRunnerOutput) -> None:
        """Note for vLLM's metrics how many draft tokens of a step were right."""
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for name, drafts in plan.scheduled_spec_decode_tokens.items():
            if token_ids := sampled[name]:
                if self._draft_stats is None:
                    self._draft_stats = SpecDecodingStats.new(self.settings.max_draft_tokens)
                self._draft_stats.observe_draft(len(drafts), len(token_ids) - 1)

    def _their_outputs(
        self, outputs: list[OurOutput], result: "TheirResult"
    ) -> list[EngineCoreOutput]:
        """Return what a step brought, in vLLM's words."""
        made, tracked = [], self._tracked
        for output in outputs:
            row = tracked[output.request_id]
            if not row.is_plain or result.num_nans_in_logits:
                made.append(self._their_output(row, output, result))
            elif output.finish_reason is None:  # tokens alone: most are
                made.append(EngineCoreOutput(output.request_id, output.new_token_ids))
            else:
                reason, stop_reason = REASONS[output.finish_reason], output.stop_reason
                self._note_end(row.theirs, reason, stop_reason)
                name, token_ids = output.request_id, output.new_token_ids
                made.append(
                    EngineCoreOutput(name, token_ids, finish_reason=reason, stop_reason=stop_reason)
                )
        return made

    def _their_output(
        self, row: Tracked, output: OurOutput, result: "TheirResult"
    ) -> EngineCoreOutput:
        """Return what a step brought for one request, in vLLM's words."""
        name, token_ids = output.request_id, output.new_token_ids
        reason = None if output.finish_reason is None else REASONS[output.finish_reason]
        stop_reason = output.stop_reason
        if row.follows_tokens:
            reason, stop_reason = self._follow(row, token_ids, reason, stop_reason)
        theirs, index = row.theirs, result.req_id_to_index[name]
        logprobs = None
        params = theirs.sampling_params
        if result.logprobs is not None and params is not None and params.num_logprobs is not None:
            logprobs = result.logprobs.slice_request(index, len(token_ids))
        prefill_stats = theirs.take_prefill_stats()
        if prefill_stats is not None:
            size = self._kv_cache.block_size
            caches = self.settings.enable_prefix_caching
            prefill_stats.finalize(row.ours.num_prompt_tokens // size * size if caches else 0)
        if reason is not None:
            self._note_end(theirs, reason, stop_reason)
        nans = result.num_nans_in_logits
        if nans is not None and name in nans:
            theirs.num_nans_in_logits = nans[name]
        row.settle()
        return EngineCoreOutput(
            name,
            token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=result.prompt_logprobs_dict.get(name),
            prompt_token_id_logprobs=result.prompt_token_id_logprobs_dict.get(name),
            finish_reason=reason,
            stop_reason=stop_reason,
            events=theirs.take_events(),
            trace_headers=theirs.trace_headers,
            prefill_stats=prefill_stats,
            num_nans_in_logits=theirs.num_nans_in_logits,
            pooling_output=pooled[index] if (pooled := result.pooler_output) else None,
        )

    def _note_end(
        self, request: TheirRequest, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """Its result has ended a request."""
        request.status, request.stop_reason = ENDS[reason], stop_reason
        self._forget(request.request_id)
        self._note_finished(request)

    def _follow(
        self,
        row: Tracked,
        token_ids: list[int],
        reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> tuple[FinishReason | None, int | str | None]:
        """Show vLLM the tokens of a request that it looks at; what ends the request then."""
        theirs, params = row.theirs, row.theirs.sampling_params
        theirs.append_output_token_ids(token_ids)
        detection = None if params is None else params.repetition_detection
        ended: tuple[FinishReason, str | None]
        if not self._grammars.accept_tokens(theirs, token_ids):
            logger.error("the grammar of %s allows none of its tokens %s", row.ours, token_ids)
            ended = FinishReason.ERROR, None
        elif (
            reason is None
            and params is not None
            and detection is not None
            and theirs.num_output_tokens >= params.min_tokens
            and check_sequence_repetition(theirs.output_token_ids, detection)
        ):
            ended = FinishReason.REPETITION, "repetition_detected"
        else:
            return reason, stop_reason
        if reason is None:
            status = STATUSES[ENDS[ended[0]]]
            self._loop.finish_requests([theirs.request_id], status)
            if self.checks is not None:
                self.checks.look(self.checks.ended, self._ends.ended)
        return ended

    def _tell_ends(self, outputs: Outputs) -> None:
        """Outputs for requests that no result has ended: their time was up, or the policy has
        rejected them or failed.
        """
        if not (self._ends.ended or self._loop.failed):
            return
        ended, self._ends.ended = self._ends.ended, []
        why: dict[str, BaseException] = {}
        while self._loop.failed:
            names, error = self._loop.failed.pop(0)
            if names is None:
                names = [n for n, row in self._tracked.items() if row.ours.status.is_finished]
                ended += [(name, OurReason.ERROR) for name in names]
            why.update(dict.fromkeys(names, error))
        for name, our_reason in ended:
            row = self._tracked.get(name)
            if row is None or not row.ours.status.is_finished:
                continue  # its client knows, or it is a later request of that name
            self._forget(name)
            theirs, reason = row.theirs, REASONS[our_reason]
            theirs.status = ENDS[reason]
            self._note_finished(theirs)
            output = EngineCoreOutput(
                name,
                [],
                finish_reason=reason,
                stop_reason=_why(our_reason, why.get(name)),
                events=theirs.take_events(),
                trace_headers=theirs.trace_headers,
            )
            outputs.setdefault(theirs.client_index, []).append(output)

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """Verify these guesses with the next tokens of their requests: as many as the policy's
        `draft_length` asked for, and what the grammars allow of them.
        """
        drafts: dict[str, list[int]] = {}
        guessed: list[Request] = []
        names, guesses = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        for name, token_ids in zip(names, guesses, strict=True):
            row = self._tracked.get(name)
            if row is None or row.ours.num_computed_tokens + 1 < row.ours.num_tokens:
                continue  # it has ended, or its prompt is not computed yet
            most = self._draft_lengths.get(name)
            found = list(token_ids if most is None else token_ids[:most])
            if row.is_structured:
                found = self._grammars.validate_tokens(row.theirs, found)
            drafts[name] = found
            guessed.append(row.ours)
        take_drafts(self.policy.book, guessed, drafts)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: "DraftTokenIds", scheduler_output: TheirPlan
    ) -> None:
        """Asked for drafts beside asynchronous scheduling alone, which is refused at the start."""
        raise InvariantError("vLLM guesses ahead of its results, which was refused at the start")

    # What vLLM's engine core asks.

    def get_num_unfinished_requests(self) -> int:
        """Return requests that wait or run, as far as the pause lets them."""
        num_running, num_waiting = self.get_request_counts()
        if self._pause_state is PauseState.PAUSED_ALL:
            return 0
        return num_running + (num_waiting if self._pause_state is PauseState.UNPAUSED else 0)

    def has_finished_requests(self) -> bool:
        """Return whether the runner has to hear that requests have ended. In a pause it hears it
        later.
        """
        return not self._loop.is_paused and self._loop.scheduler.has_finished_requests()

    def has_requests(self) -> bool:
        """Return whether a step is to be made: to plan, to tell of ends, or to tell clients."""
        return bool(self._refused or self._ends.ended or self._loop.failed) or (
            super().has_requests()
        )

    def get_request_counts(self) -> tuple[int, int]:
        """Return number of requests, as `(running, waiting)`."""
        num_running, num_waiting = self._loop.scheduler.get_request_counts()
        return num_running, num_waiting + len(self._compiling)

    def get_kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests and leases hold, 0 to 1."""
        pool = self._kv_cache.pool
        return pool.num_used_blocks / pool.num_blocks

    # What operators cause.

    @property
    def pause_state(self) -> PauseState:
        """Whether requests are served: all, those that run, or none."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Serve all requests, no new ones, or none."""
        self._pause_state = pause_state
        self._loop.pause()  # also between two states: what stood still before does not count
        if pause_state is not PauseState.PAUSED_ALL:
            self._loop.resume()
        self._limit_seats()

    def _limit_seats(self) -> None:
        """No request is admitted where there is no seat."""
        is_open = self._pause_state is PauseState.UNPAUSED
        self.policy.max_num_seqs = self.settings.scheduler.max_num_seqs if is_open else 0

    def switch(self, policy: str, options: Mapping[str, Any] | None = None) -> None:
        """Let another policy plan from the next step on; the requests, their KV blocks and their
        cached prefixes stay. For programs that have the engine core in their process: vLLM has no
        call that leads here. Raises `ConfigError` for a policy or options that cannot work, or
        `PolicyError`; nothing has changed then.
        """
        config = msgspec.structs.replace(
            self.settings.scheduler, policy=policy, options=dict(options or {})
        )
        load_served(policy)
        self._loop.switch(config)
        self.settings = msgspec.structs.replace(self.settings, scheduler=config)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes. False if blocks are held. `reset_running_requests` preempts
        all requests first, unless a step is in flight.
        """
        if reset_running_requests and not self._loop.in_flight:
            self._vacate()
        self._plans.prefix_stats.reset = True
        return self._loop.scheduler.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Forget the outputs for images and sounds, which vLLM's runner forgets as well. Running
        requests are preempted, since they may need one of them; none are while a step is in flight,
        for which vLLM does not ask.
        """
        if self._items.are_known and not self._loop.in_flight:
            self._vacate()

    def _vacate(self) -> None:
        """Preempt all requests, of which the runner hears with the next plan."""
        plan = self._loop.vacate()
        if self.checks is not None:
            self.checks.look(self.checks.planned_step, plan, self._ends.ended)
        self._plans.carry(plan)

    def make_stats(self) -> SchedulerStats | None:
        """Return the state after the last call, for vLLM's metrics; None if it wants none."""
        if not self._log_stats:
            return None
        num_running, num_waiting = self.get_request_counts()
        prefix_stats, self._plans.prefix_stats = self._plans.prefix_stats, PrefixCacheStats()
        draft_stats, self._draft_stats = self._draft_stats, None
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting - len(self._compiling),
            num_skipped_waiting_reqs=len(self._compiling),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=prefix_stats,
            spec_decoding_stats=draft_stats,
        )

    def get_kv_event_publisher_config(self) -> "KVEventsConfig | None":
        """Return where events of KV blocks are published; None: nowhere."""
        return None if self._events is None else self._events.config

    def shutdown(self) -> None:
        """Give back what the scheduler holds outside itself."""
        if self._shadow is not None:
            self._shadow.close()
        self._loop.scheduler.shutdown()
        if self._events is not None:
            self._events.shutdown()


def _is_ready(request: TheirRequest) -> bool:
    structured = request.structured_output_request
    return structured is None or structured.grammar is not None


def _is_masked(row: Tracked) -> bool:
    """Return whether a request of structured output gets a token in the step that was just
    planned.
    """
    return row.is_structured and row.ours.num_computed_tokens >= row.ours.num_tokens


def _our_result(plan: SchedulerOutput, result: "TheirResult") -> ModelRunnerOutput:
    """Return what the runner brought of a plan, with its rows in the order of the plan."""
    names, index = list(plan.num_scheduled_tokens), result.req_id_to_index
    pooled = {}
    if vectors := result.pooler_output:
        pooled = {name: v for name in names if (v := vectors[index[name]]) is not None}
    sampled: Sequence[list[int]] = result.sampled_token_ids
    if not sampled:
        return ModelRunnerOutput(names, [[] for _ in names], pooled=pooled)
    return ModelRunnerOutput(names, [sampled[index[name]] for name in names])


def _why(reason: OurReason, error: BaseException | None) -> str | None:
    """Return what vLLM's client is told as `stop_reason`."""
    if isinstance(error, RequestRejectedError):
        return f"rejected: {error} (ask again in {error.retry_after:g} s)"
    return "timeout" if reason is OurReason.TIMEOUT else None
