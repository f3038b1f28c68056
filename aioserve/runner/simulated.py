"""A runner without a model: invented tokens and vectors after a modelled time, on the loop's clock.

Before it, the result of a step, which is there at a time of that clock, and what is invented for a
request: the same each time.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.kv_cache import Ahead, WindowSpec
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput, TokenLogprobs, Vector
from aioserve.params import RUNNER_PARAMETERS, PoolingParams
from aioserve.request import ROW_VALUES, invented
from aioserve.runner.interface import KVConnectorWorker, RunnerInfo, RunnerInterface, window_spec
from aioserve.runner.step_times import StepTimeSource, step_times
from aioserve.scheduler.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    step_content,
)
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.runner.batch.drafter import DraftLengths

Jump = Callable[[float], bool]


class StepFuture(asyncio.Future[ModelRunnerOutput]):
    """A future that is done at a time of the loop's clock. A task that waits for it alone on a
    virtual clock does not go through the loop: the clock jumps.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, when: float, output: ModelRunnerOutput, jump_to: Jump
    ) -> None:
        super().__init__(loop=loop)
        self._when = when
        self._output = output
        self._jump_to = jump_to
        self._has_timer = False

    def __await__(self) -> Generator[Any, None, ModelRunnerOutput]:
        if not self._has_timer and not self.done() and self._jump_to(self._when):
            self.set_result(self._output)
        return super().__await__()

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Any = None) -> None:
        """Add a callback; the future then completes through the event loop."""
        if not self._has_timer and not self.done():
            self._has_timer = True
            self.get_loop().call_at(self._when, self._finish)
        super().add_done_callback(fn, context=context)

    def _finish(self) -> None:
        if not self.done():  # it was cancelled at shutdown
            self.set_result(self._output)


# What the simulated runner remembers of a request, and what it invents for it: the same each time.
# Knows a request and a seed; knows nothing about steps and their time.


NEVER = 2**62  # as a position
_MASK = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode


class SimulatedRow:
    """A request in the batch of the simulated runner: its lengths, and the seed of what it says."""

    __slots__ = (
        "encoder_inputs",
        "eos_position",
        "eos_token_id",
        "hash",
        "num_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "offset",
        "pooling",
        "prompt",
    )

    def __init__(
        self, data: NewRequestData, mean_output_tokens: int, seed: int, vocab_size: int
    ) -> None:
        prompt = data.token_ids
        if len(prompt) > data.num_prompt_tokens:  # it was preempted
            prompt = prompt[: data.num_prompt_tokens]
        params = data.sampling_params
        self.num_tokens = len(data.token_ids)
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_logprobs = params.logprobs
        # Until it was told how likely its prompt is, if it asks.
        is_asking = params.prompt_logprobs is not None and len(prompt) == len(data.token_ids)
        self.prompt = certain(prompt[1:], params.prompt_logprobs or 0) if is_asking else None
        self.encoder_inputs = data.encoder_inputs
        self.pooling = data.pooling_params
        # Token and length depend on the prompt alone, so that they are equal under every policy.
        self.hash = crc32(_encode([seed, prompt]))
        self.offset = self.hash % vocab_size
        # From 1 to twice the mean, evenly: replies of varied lengths make schedulers visible.
        num_output_tokens = max(1 + self.hash % (2 * mean_output_tokens - 1), params.min_tokens)
        self.eos_token_id = min(data.stop_token_ids, default=-1)
        self.eos_position = self.num_prompt_tokens + num_output_tokens
        if not data.stop_token_ids:
            self.eos_position = NEVER


def draw(seed: int, place: int) -> float:
    """Return a number from 0 to 1, even, and independent of the places beside: a CRC would not be,
    it is linear. The mixing of splitmix64 (Steele, Lea and Flood, 2014).
    """
    x = (seed << 32 | place) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return (x ^ x >> 31) / 2**64


def certain(token_ids: list[int], num_logprobs: int) -> list[TokenLogprobs]:
    """Return all probability on each of these tokens."""
    top = min(num_logprobs, 1)
    return [TokenLogprobs(0.0, 1, [token_id][:top], [0.0][:top]) for token_id in token_ids]


# A runner without a model: invented tokens and vectors after a modelled time, on the loop's clock.
# Test double, quick start without weights, and the lab's machine. Knows what a step costs; knows
# nothing about what is computed. Its view of the batch is rebuilt from `SchedulerOutput` alone.


OnStep = Callable[[SchedulerOutput, ModelRunnerOutput, float, float], None]

# Room for requests of every seat at a quarter of the longest length; a guess that makes pressure
# on memory visible without being the rule.
DEFAULT_POOL_SHARE = 0.25
HASH_MULTIPLIER = 2654435761  # Knuth's, for integers of 32 bits
# Chance that a draft token is right if the one before it was, of requests that do not say: a guess.
DRAFT_ACCEPTANCE = 0.7
# Without steps for so long, threads sleep and caches are cold. A guess.
IDLE_SECONDS = 0.001


class SimulatedRunner(RunnerInterface):
    """Steps take the time that a `StepTimeSource` says."""

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        *,
        jump_to: Jump = lambda when: False,
        step_time: StepTimeSource | None = None,
    ) -> None:
        """`jump_to` moves a virtual clock ahead if nothing would happen on the way, and says
        whether it did. `step_time` is that of the settings, if it has been read.
        """
        #: Hears of every step, what will come out of it, and from when to when it takes.
        self.on_step: OnStep | None = None
        #: By request id, in place of `DRAFT_ACCEPTANCE`.
        self.draft_acceptance: Mapping[str, float] = {}
        #: By request id: the tokens of its reply, the end token included, where the length does not
        #: come from the prompt.
        self.output_tokens: Mapping[str, int] = {}
        #: Times the model's seconds, from the next step on: of a straggler.
        self.slowdown = 1.0
        #: Seconds of steps at full power that lower clocks have saved.
        self.saved_seconds = 0.0
        self._draft_length: DraftLengths | None = None
        if config.runner.simulated_draft_tokens:
            self._draft_length = load("drafters", "length")(config.runner.simulated_draft_tokens)
        self._jump_to = jump_to
        self._config = config.runner
        self._step_time = step_time or step_times(config.runner)
        if (depth := self._step_time.pipeline_depth) not in (1, 2):
            raise ConfigError(f"step times: pipeline_depth must be 1 or 2, got {depth!r}")
        self._rates = rates = self._step_time.rates
        self._host_seconds = 1e-3 * rates.host_ms
        self._noise = Random(f"{config.runner.seed} step times")
        self._is_cold = True  # no step has run yet
        self._model_info = model_info
        self._vocab_size = model_info.vocab_size
        self._factor = HASH_MULTIPLIER % self._vocab_size
        self._special_token_ids = frozenset(model_info.eos_token_ids)
        self._rows: dict[str, SimulatedRow] = {}
        # No request has wanted more than one token a step so far.
        self._is_plain = not config.runner.simulated_draft_tokens
        self._encoder_outputs: set[str] = set()  # by content
        self._busy_until = 0.0
        self._block_size = config.cache.block_size
        self._kv_blocks: KVConnectorWorker | None = None
        #: What engines in one loop share as a directory; None: each has its own, if any.
        self.kv_directory: Any = None
        scheduler, cache = config.scheduler, config.cache
        slots = int(DEFAULT_POOL_SHARE * scheduler.max_num_seqs * model_info.max_model_len)
        slots = max(slots, model_info.max_model_len)
        step_budget = scheduler.step_budget(model_info.max_model_len)
        known = self._step_time.num_kv_tokens(step_budget, scheduler.max_num_seqs)
        num_blocks = -(-slots // cache.block_size) if known is None else known // cache.block_size
        windows: WindowSpec | None = None
        if config.runner.simulated_window is not None and cache.num_window_blocks != 0:
            windows = window_spec(
                config,
                model_info.max_model_len,
                config.runner.simulated_window,
                cache.num_window_blocks,
            )
        has_drafts = config.speculation.drafts_surely
        has_drafts = has_drafts or config.runner.simulated_draft_tokens > 0
        #: What `load` answers; known before, as nothing is loaded.
        self.info = RunnerInfo(
            num_kv_blocks=cache.num_kv_blocks or num_blocks,
            num_state_slots=cache.num_state_slots,
            windows=windows,
            parameters=frozenset(RUNNER_PARAMETERS),
            supports_pooling=True,
            max_draft_tokens=config.runner.simulated_draft_tokens,
            gives_row_values=True,
            # What a draft continues is not known before the step in flight has ended.
            pipeline_depth=1 if has_drafts else depth,
            sets_frequency=True,
        )

    def check_sleep(self, *, frees_weights: bool) -> None:
        pass  # there is nothing to give back

    async def load(self) -> RunnerInfo:
        return self.info

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        loop = asyncio.get_running_loop()
        try:
            output, end = self.run_step(scheduler_output, loop.time())
        except Exception as error:
            failed: asyncio.Future[ModelRunnerOutput] = loop.create_future()
            failed.set_exception(error)
            return failed
        return StepFuture(loop, end, output, self._jump_to)

    def run_step(
        self, scheduler_output: SchedulerOutput, now: float
    ) -> tuple[ModelRunnerOutput, float]:
        """Return the output of a step that is handed over at `now`, and the time when it is there:
        for code that keeps the time of many runners without a loop.
        """
        # Steps run in order: this one starts when the last one ends.
        started = self._busy_until
        if now > started:
            is_idle = now - started > IDLE_SECONDS
            started = now + 1e-3 * self._rates.idle_ms if is_idle else now
        seconds, output = self._compute(scheduler_output)
        if self._is_cold and seconds:
            self._is_cold = False
            seconds += 1e-3 * self._rates.cold_ms
        if self._rates.jitter:
            seconds *= max(self._noise.gauss(1.0, self._rates.jitter), 0.0)
        self._busy_until = started + self.slowdown * seconds
        if self.on_step is not None:
            self.on_step(scheduler_output, output, now, self._busy_until)
        return output, self._busy_until

    def make_kv_worker(self, num_bytes: int) -> KVConnectorWorker:
        seconds = 1e-6 * self._rates.kv_load_token_us * self._block_size
        made: KVConnectorWorker = load("kv copies", "simulated")(
            num_bytes, self._block_bytes, seconds
        )
        self._kv_blocks = made
        return made

    def make_kv_store(self, max_bytes: int) -> Any:
        """Return a directory of at most `max_bytes`, or `kv_directory`. To be called on the event
        loop.
        """
        if self.kv_directory is not None:
            return self.kv_directory.shared()
        seconds = 1e-6 * self._rates.kv_read_token_us * self._block_size
        return load("kv copies", "simulated directory")(max_bytes, self._block_bytes, seconds)

    @property
    def _block_bytes(self) -> int:
        return self._config.simulated_kv_token_bytes * self._block_size

    def decode_on(self, request_ids: list[str], num_steps: int) -> list[list[int]]:
        """Return the tokens of `num_steps` more steps of these rows, none of which ends; by row."""
        special, vocab_size, factor = self._special_token_ids, self._vocab_size, self._factor
        found = []
        for request_id in request_ids:
            row = self._rows[request_id]
            first, offset = row.num_tokens, row.offset
            tokens = [(offset + factor * n) % vocab_size for n in range(first, first + num_steps)]
            if special.isdisjoint(tokens):
                row.num_tokens = first + num_steps
            else:
                tokens = [self._sample(row) for _ in tokens]
            found.append(tokens)
        return found

    def ends_of_decodes(self, num_rows: int, num_context: int, num_steps: int) -> list[float]:
        """Return when the step in flight ends, of `num_rows` rows that read `num_context` tokens,
        and when each of `num_steps` more steps of the same rows after it.
        """
        seconds = self._step_time.seconds_of_decodes(num_rows, num_context + num_rows, num_steps)
        if host := self._host_seconds:
            seconds = [of_one + host for of_one in seconds]
        if self.slowdown != 1:
            seconds = [self.slowdown * of_one for of_one in seconds]
        return list(accumulate(seconds, initial=self._busy_until))

    @property
    def has_jitter(self) -> bool:
        """Whether the times of steps vary by chance: then none is known in advance."""
        return self._rates.jitter > 0

    def num_steps_before_ends(self, request_ids: list[str]) -> int:
        """Decode steps after the one in flight in which none of these rows samples its end token;
        below 0 where a row has sampled it in the step in flight.
        """
        rows = self._rows
        return min(
            rows[request_id].eos_position - rows[request_id].num_tokens
            for request_id in request_ids
        )

    def be_busy_until(self, when: float) -> None:
        """Count as busy until `when`, with steps that others have timed by `ends_of_decodes`."""
        self._busy_until = when

    async def close(self) -> None:
        self._rows.clear()

    def _compute(self, scheduler_output: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        """Step time in seconds, and the tokens."""
        computed = self._update_rows(scheduler_output)
        num_encoder = 0
        if "encoder" in scheduler_output.parts:
            num_encoder = self._encode(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        if self._is_plain and scheduler_output.total_num_scheduled_tokens == len(cached.req_ids):
            output = ModelRunnerOutput(cached.req_ids, self._decode(cached))
            seconds = self._seconds(scheduler_output, num_encoder)
        else:
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            seconds = self._seconds(scheduler_output, num_encoder)
            output = self._run(scheduler_output, computed, seconds)
        if (wanted := scheduler_output.parts.get(ROW_VALUES)) is not None:
            for request_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
                if token_ids:
                    row = self._rows[request_id]
                    values = invented(wanted[request_id], row.hash, row.num_tokens)
                    output.row_values[request_id] = values
        return seconds, output

    def _seconds(self, scheduler_output: SchedulerOutput, num_encoder: int) -> float:
        """Return seconds that the step takes; 0 for a step that runs no request."""
        if not scheduler_output.num_scheduled_tokens:
            return 0.0
        features, prefills = step_content(scheduler_output)
        if (told := scheduler_output.parts.get("frequency")) is None:
            seconds = self._step_time.seconds(features, prefills)
        else:
            seconds = self._step_time.seconds_at(told["share"], features, prefills)
            unused = 1 - self._step_time.share_of_watts(told["share"])
            self.saved_seconds += self.slowdown * seconds * unused
        if num_encoder:
            seconds += 1e-6 * self._rates.encoder_token_us * num_encoder
        return seconds + self._host_seconds

    def _update_rows(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """Forget requests that left, add new ones; returns how many tokens of each are computed."""
        for request_id in scheduler_output.finished_req_ids:
            self._rows.pop(request_id, None)
        for request_id in scheduler_output.preempted_req_ids:
            self._rows.pop(request_id, None)
        if self._draft_length is not None:
            for request_id in scheduler_output.finished_req_ids:
                self._draft_length.forget(request_id)
            for request_id in scheduler_output.preempted_req_ids:
                self._draft_length.forget(request_id)
        config = self._config
        computed: dict[str, int] = {}
        for data in scheduler_output.scheduled_new_reqs:
            row = SimulatedRow(data, config.simulated_output_tokens, config.seed, self._vocab_size)
            if (length := self.output_tokens.get(data.request_id)) and data.stop_token_ids:
                row.eos_position = row.num_prompt_tokens + length - 1
            self._rows[data.request_id] = row
            computed[data.request_id] = data.num_computed_tokens
            is_plain = row.num_logprobs is None and row.prompt is None and row.pooling is None
            if not is_plain or row.encoder_inputs:
                self._is_plain = False
        return computed

    def _decode(self, cached: CachedRequestData) -> list[list[int]]:
        """Return one token each. The lab's hot path: millions of rows go through here."""
        rows, special = self._rows, self._special_token_ids
        vocab_size, factor = self._vocab_size, self._factor
        sampled: list[list[int]] = []
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            row = rows[request_id]
            num_tokens = row.num_tokens
            if num_computed + 1 < num_tokens:  # a piece of a prompt
                sampled.append([])
                continue
            token_id = (row.offset + factor * num_tokens) % vocab_size
            if token_id in special or num_tokens >= row.eos_position:
                token_id = self._sample(row)
            else:
                row.num_tokens = num_tokens + 1
            sampled.append([token_id])
        return sampled

    def _run(
        self, scheduler_output: SchedulerOutput, computed: dict[str, int], seconds: float
    ) -> ModelRunnerOutput:
        """Return tokens of a step of any kind, which takes `seconds`."""
        sampled: list[list[int]] = []
        logprobs: dict[str, list[TokenLogprobs]] = {}
        drafts: dict[str, list[int]] = {}
        of_prompts: dict[str, list[TokenLogprobs]] = {}
        pooled: dict[str, Vector] = {}
        drafted = scheduler_output.scheduled_spec_decode_tokens
        if (lengths := self._draft_length) is not None:
            lengths.asked = scheduler_output.draft_lengths
        asking: dict[str, SimulatedRow] = {}
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            end = computed[request_id] + num_tokens
            if row.encoder_inputs:
                self._check_encoded(row, computed[request_id], end)
            if end < row.num_tokens:
                sampled.append([])
                continue
            if row.pooling is not None:
                sampled.append([])
                pooled[request_id] = self._invent_vector(row, row.pooling)
                continue
            drafts_of_row = drafted.get(request_id)
            if drafts_of_row is None:
                token_ids = [self._sample(row)]
            else:
                token_ids = self._verify(row, drafts_of_row)
                num_right = len(token_ids) - 1
                if lengths is not None:
                    lengths.verified(request_id, len(drafts_of_row), num_right)
            sampled.append(token_ids)
            if row.num_logprobs is not None:
                logprobs[request_id] = certain(token_ids, row.num_logprobs)
            if row.prompt is not None:
                of_prompts[request_id], row.prompt = row.prompt, None
            if lengths is not None:
                asking[request_id] = row
        if lengths is not None and seconds:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            lengths.stepped(len(sampled), num_tokens, seconds)
            limits = lengths.limits(asking)
            for request_id, row in asking.items():
                drafts[request_id] = self._draft(row, limits.get(request_id, 0), request_id)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids, sampled, logprobs, drafts, {}, of_prompts, pooled)

    def _invent_vector(self, row: SimulatedRow, params: PoolingParams) -> Vector:
        """Return a vector of the right size, always the same of a prompt; equal prompts are
        nearest.
        """
        import numpy as np

        vector = np.random.default_rng(row.hash).standard_normal(
            self._model_info.hidden_size, np.float32
        )[: params.dimensions]
        return vector / np.linalg.norm(vector) if params.normalize else vector

    def _encode(self, scheduler_output: SchedulerOutput) -> int:
        """Run the encoder inputs of the step; their number of tokens."""
        self._encoder_outputs.difference_update(scheduler_output.free_encoder_hashes)
        num_tokens = 0
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            for index in indices:
                item = self._rows[request_id].encoder_inputs[index]
                self._encoder_outputs.add(item.content_hash)
                num_tokens += item.size
        if (ahead := Ahead.of(scheduler_output.parts)) is not None:
            num_tokens += ahead.num_tokens
            if ahead.is_last:
                self._encoder_outputs.add(ahead.item.content_hash)
        return num_tokens

    def _check_encoded(self, row: SimulatedRow, start: int, end: int) -> None:
        for item in row.encoder_inputs:
            if item.position < end and item.end > start:
                assert item.content_hash in self._encoder_outputs, "a token before its image"

    def _verify(self, row: SimulatedRow, drafts: list[int]) -> list[int]:
        """Return the drafts that are right, and one token more; nothing after the end token."""
        token_ids: list[int] = []
        for draft in [*drafts, None]:
            token_ids.append(self._sample(row))
            if token_ids[-1] != draft or row.num_tokens > row.eos_position:
                break
        return token_ids

    def _draft(self, row: SimulatedRow, most: int, request_id: str) -> list[int]:
        """`most` guesses for a row; a share is right, and they are always the same."""
        num_tokens, drafts = row.num_tokens, []
        chance = self.draft_acceptance.get(request_id, DRAFT_ACCEPTANCE)
        for _ in range(most):
            is_right = draw(row.hash, row.num_tokens) < chance
            token_id = self._sample(row)
            drafts.append(token_id if is_right else (token_id + 1) % self._vocab_size)
        row.num_tokens = num_tokens
        return drafts

    def _sample(self, row: SimulatedRow) -> int:
        """Return the row's next token, which it then has."""
        num_tokens = row.num_tokens
        row.num_tokens = num_tokens + 1
        if num_tokens >= row.eos_position:
            return row.eos_token_id
        token_id = (row.offset + self._factor * num_tokens) % self._vocab_size
        while token_id in self._special_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id
