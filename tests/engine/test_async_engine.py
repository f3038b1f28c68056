"""AsyncEngine on the simulated runner: the door, the streams, failures, the end."""

import asyncio
from abc import ABC
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import EngineClient
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestFailedError,
    RunnerDeadError,
)
from aioserve.kv_cache import AllBlocksCleared, BlockStored, KVEvent
from aioserve.lab import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import SchedulerOutput
from tests.kit import case, stats_of
from tests.processes import PATIENCE

FAST = RunnerConfig(runner="simulated", step_base_ms=0.5, simulated_output_tokens=20)


def make_config(**scheduler: Any) -> EngineConfig:
    return EngineConfig(runner=FAST, scheduler=SchedulerConfig(**scheduler))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_config()) as engine:
        yield engine


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())


async def until_idle(engine: AsyncEngine) -> None:
    """Until nothing is held; fails by timeout."""
    async with asyncio.timeout(PATIENCE):
        while (  # noqa: ASYNC110 - what is awaited has no event
            stats_of(engine).num_used_kv_blocks or stats_of(engine).num_running_reqs
        ):
            await asyncio.sleep(0.001)


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for output in engine.generate(prompt, params):
        texts[output.index] = texts.get(output.index, "") + output.text
    return texts


async def test_text_token_ids_and_messages_are_prompts(engine: AsyncEngine) -> None:
    ids = engine.model_info.tokenizer.encode("Who's there?")
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert await collect(engine, "Who's there?", params) == await collect(engine, ids, params)
    assert (await collect(engine, [{"role": "user", "content": "Speak!"}], params))[0]


async def test_streamed_deltas_are_the_text_of_all_tokens(engine: AsyncEngine) -> None:
    text, token_ids, counts = "", [], []
    async for output in engine.generate("Nay,", SamplingParams(max_tokens=50, ignore_eos=True)):
        text += output.text
        token_ids += output.token_ids
        counts.append(output.num_output_tokens)
    assert text == engine.model_info.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert counts[-1] == len(token_ids) == 50
    assert output.finish_reason is FinishReason.LENGTH


async def test_n_samples_come_tagged_and_share_the_prompt(engine: AsyncEngine) -> None:
    finished = {}
    prompt = [3] * 40
    async for output in engine.generate(prompt, SamplingParams(n=3, max_tokens=4)):
        if output.finished:
            finished[output.index] = output.num_cached_tokens
    assert finished.keys() == {0, 1, 2}
    assert sorted(finished.values()) == [0, 32, 32]


async def test_a_stop_string_ends_the_request_and_frees_it(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    whole = (await collect(engine, "Go", params))[0]
    stop = whole[20:24]
    outputs = [o async for o in engine.generate("Go", SamplingParams(max_tokens=200, stop=stop))]
    assert "".join(o.text for o in outputs) == whole[: whole.index(stop)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)
    await until_idle(engine)


BAD: list[tuple[Any, dict[str, Any], str, str]] = [
    ("", {}, "prompt", "empty"),
    ([], {}, "prompt", "empty"),
    ([1, 2, 4000], {}, "prompt", r"prompt\[2\] must be a token id from 0 to 2047, got 4000"),
    ([1] * 4096, {}, "prompt", "4096 tokens, but the model's limit is 4096"),
    ("word " * 200_000, {}, "prompt", r"at least \d+ tokens, but the model's limit is 4096"),
    ("hi", {"stop_token_ids": (9999,)}, "stop_token_ids", "9999"),
    ("hi", {"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
    ("hi", {"allowed_token_ids": (3, 2048)}, "allowed_token_ids", "names token 2048"),
    ("hi", {"bad_words_ids": ((3, -1),)}, "bad_words_ids", "names token -1"),
    ("hi", {"bad_words": ("\u263a" * 16,)}, "bad_words", "at most 16 tokens each"),
    ("hi", {"bad_words": ("\ud800",)}, "bad_words", "not valid Unicode"),
    (
        "hi",
        {"allowed_token_ids": (5,), "stop_token_ids": (5, 6), "min_tokens": 1},
        "allowed_token_ids",
        "nothing but stop tokens",
    ),
    ([{"role": "user"}], {}, "messages", r"messages\[0\].content must be a string"),
    *(
        ([5, 6, bad, 7, -1], {}, "prompt", r"prompt\[2\] must be a token id from 0 to 2047")
        for bad in (2048, -1, True, 1.0, "7", None, 2**80)
    ),
]


async def test_a_bad_request_is_refused_before_it_is_queued(engine: AsyncEngine) -> None:
    for prompt, params, param, message in BAD:
        with case(prompt, params):
            with pytest.raises(RequestError, match=message) as caught:
                await engine.add_request(prompt, SamplingParams(**params))
            assert caught.value.param == param
            assert stats_of(engine).num_waiting_reqs == 0
    assert await collect(engine, "still here?", SamplingParams(max_tokens=3))


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("user", None, "user must be a string, got None"),
    ("cache_salt", "\ud800", "cache_salt is not valid Unicode: .* surrogates"),
    ("priority", 0.5, "priority must be a 64-bit integer, got 0.5"),
    ("priority", 2**63, "priority must be a 64-bit integer, got 9223372036854775808"),
]


async def test_a_field_that_cannot_be_kept_is_refused_by_name(engine: AsyncEngine) -> None:
    for field, value, message in BAD_FIELDS:
        with case(field, value):
            with pytest.raises(RequestError, match=message) as caught:
                await engine.add_request([5], **{field: value})
            assert caught.value.param == field


async def test_an_overload_takes_back_all_samples_of_the_request() -> None:
    async with AsyncEngine(make_config(max_waiting_requests=2)) as engine:
        with pytest.raises(EngineOverloadedError):
            await engine.add_request("hello", SamplingParams(n=3))
        assert stats_of(engine).num_waiting_reqs == 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_leaving_the_loop_or_cancelling_the_task_frees_everything(depth: int) -> None:
    async with AsyncEngine(make_config(max_num_seqs=2, pipeline_depth=depth)) as engine:
        params = SamplingParams(max_tokens=2000, ignore_eos=True)

        async def read(limit: int) -> None:
            count = 0
            async for _ in engine.generate([5] * 100, params):
                count += 1
                if count == limit:
                    break

        tasks = [asyncio.create_task(read(limit)) for limit in (3, 10_000, 10_000, 10_000)]
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(engine)
        assert stats_of(engine).num_waiting_reqs == 0
        assert await collect(engine, "next", SamplingParams(max_tokens=3))


class FailingRunner(SimulatedRunner):
    """Raises in the step that carries a request whose prompt begins with token 13."""

    error: Exception = ValueError("a kernel failed")

    def _compute(self, scheduler_output: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        if any(data.token_ids[0] == 13 for data in scheduler_output.scheduled_new_reqs):
            raise self.error
        return super()._compute(scheduler_output)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(depth: int) -> None:
    config = make_config(pipeline_depth=depth)
    runner = FailingRunner(config, ModelInfo(config.model))
    async with AsyncEngine(config, runner=runner) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        with pytest.raises(RequestFailedError, match="ValueError") as caught:
            await collect(engine, [13, 1, 2], params)
        assert "a kernel failed" in str(caught.value.__cause__)
        await until_idle(engine)
        assert await collect(engine, [12, 1, 2], params)
        assert engine.errored is None


class OddRunner(SimulatedRunner):
    """Fails the step of a prompt that begins with token 13 before there is anything to await, or by
    a future that is cancelled.
    """

    is_cancelling = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        future = super().execute_model(scheduler_output)
        if any(data.token_ids[0] == 13 for data in scheduler_output.scheduled_new_reqs):
            if not self.is_cancelling:
                raise ValueError("a kernel failed")
            future.cancel()
        return future


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("is_cancelling", "name"), [(False, "ValueError"), (True, "Cancelled")])
async def test_a_step_that_fails_at_once_or_is_cancelled_is_lost_alone(
    is_cancelling: bool, name: str, depth: int
) -> None:
    config = make_config(pipeline_depth=depth)
    runner = OddRunner(config, ModelInfo(config.model))
    runner.is_cancelling = is_cancelling
    async with AsyncEngine(config, runner=runner) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for _ in range(2):
            with pytest.raises(RequestFailedError, match=name):
                await collect(engine, [13, 1, 2], params)
            await until_idle(engine)
            assert await collect(engine, [12, 1, 2], params)
        assert engine.errored is None


async def test_a_dead_runner_tells_everybody_and_refuses_who_comes_later() -> None:
    config = make_config()
    runner = FailingRunner(config, ModelInfo(config.model))
    runner.error = RunnerDeadError("the device is gone")
    async with AsyncEngine(config, runner=runner) as engine:
        stream = await engine.add_request([12] * 5, SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(engine, [13, 1], SamplingParams())
        with pytest.raises(EngineDeadError):
            [output async for output in stream]
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.add_request("too late")
        assert isinstance(engine.errored, RunnerDeadError)


def test_shutdown_lets_requests_finish_and_then_aborts_the_rest() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_config())
        await engine.start()
        short = await engine.add_request([1] * 5, SamplingParams(max_tokens=5, ignore_eos=True))
        long = await engine.add_request([1] * 5, SamplingParams(max_tokens=4000, ignore_eos=True))
        await engine.shutdown(drain_timeout=0.3)
        await engine.shutdown()
        assert [o.finish_reason async for o in short][-1] is FinishReason.LENGTH
        assert [o.finish_reason async for o in long][-1] is FinishReason.ABORT
        with pytest.raises(EngineDeadError, match="shutting down"):
            await engine.add_request("too late")

    in_virtual_time(main)


async def test_a_slow_reader_delays_nobody_and_gets_everything(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    async with await engine.add_request([7] * 9, params) as slow:
        await collect(engine, [8] * 9, params)  # finishes although nobody reads the other
        await until_idle(engine)
        outputs = [o async for o in slow]
    assert sum(len(o.token_ids) for o in outputs) == 100
    assert len(outputs) < 5


async def test_limits_that_cannot_work_are_said_before_loading() -> None:
    with pytest.raises(ConfigError, match="runs whole prompts"):
        await AsyncEngine(make_config(policy="fcfs", max_num_batched_tokens=64)).start()
    with pytest.raises(ConfigError, match="chunk_sise"):
        await AsyncEngine(make_config(options={"chunk_sise": 1})).start()
    config = EngineConfig(
        model=ModelConfig(max_model_len=4096), runner=FAST, cache=CacheConfig(num_kv_blocks=8)
    )
    with pytest.raises(ConfigError, match="the KV cache holds 128 tokens"):
        await AsyncEngine(config).start()


async def test_a_small_pool_lowers_a_length_limit_that_nobody_asked_for() -> None:
    config = EngineConfig(runner=FAST, cache=CacheConfig(num_kv_blocks=8))
    async with AsyncEngine(config) as engine:
        assert engine.max_model_len == 128
        with pytest.raises(RequestError, match="limit is 128"):
            await engine.add_request([1] * 128)


async def test_metrics_count_requests_and_return_to_zero(engine: AsyncEngine) -> None:
    await collect(engine, [1] * 10, SamplingParams(max_tokens=7, ignore_eos=True))
    await until_idle(engine)
    lines = dict(
        line.rsplit(" ", 1)
        for line in engine.metrics.render().decode().splitlines()
        if not line.startswith("#")
    )
    assert float(lines["aioserve_prompt_tokens_total"]) == 10
    assert float(lines["aioserve_generation_tokens_total"]) == 7
    assert float(lines['aioserve_requests_finished_total{reason="length"}']) == 1
    assert float(lines["aioserve_time_to_first_token_seconds_count"]) == 1
    assert float(lines["aioserve_inter_token_latency_seconds_count"]) == 6
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks"):
        assert float(lines[f"aioserve_{gauge}"]) == 0


async def test_an_observer_hears_what_the_kv_cache_holds() -> None:
    events: list[KVEvent] = []
    async with AsyncEngine(make_config(), on_kv_event=events.append) as engine:
        await collect(engine, [1] * 40, SamplingParams(max_tokens=3, ignore_eos=True))
        stored = [event.token_ids for event in events if isinstance(event, BlockStored)]
        assert stored == [[1] * 16, [1] * 16]
        assert engine.reset_prefix_cache()
        assert events[-1] == AllBlocksCleared()


async def test_metrics_say_why_requests_wait() -> None:
    async with AsyncEngine(make_config(max_num_seqs=1)) as engine:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        streams = [await engine.add_request([i] * 9, params) for i in range(3)]
        await anext(streams[0])
        lines = engine.metrics.render().decode().splitlines()
        name = "aioserve_num_requests_waiting_by_reason"
        waiting = [line for line in lines if line.startswith(name) and not line.endswith(" 0.0")]
        assert waiting == [f'{name}{{reason="seats"}} 2.0']  # the policy never asked for one of two
        for stream in streams:
            stream.close()


@pytest.mark.parametrize(
    ("count", "lines"), [(3, ["aioserve_compute_threads 3.0"]), (None, [])], ids=str
)
async def test_metrics_say_how_many_threads_compute(count: int | None, lines: list[str]) -> None:
    class Runner(SimulatedRunner):
        num_compute_threads = count

    config = make_config()
    async with AsyncEngine(config, runner=Runner(config, ModelInfo(config.model))) as engine:
        found = engine.metrics.render().decode().splitlines()
        assert [line for line in found if line.startswith("aioserve_compute_threads")] == lines


def test_an_idle_engine_runs_no_steps() -> None:
    async def main() -> None:
        async with AsyncEngine(make_config()) as engine:
            await collect(engine, [1] * 10, SamplingParams(max_tokens=3))
            await asyncio.sleep(1)
            before = stats_of(engine).num_steps
            await asyncio.sleep(60)
            assert stats_of(engine).num_steps == before

    in_virtual_time(main)


async def test_without_a_tokenizer_token_ids_go_in_and_out() -> None:
    config = EngineConfig(runner=FAST, model=ModelConfig(skip_tokenizer_init=True))
    silent = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
    async with AsyncEngine(config) as engine:
        outputs = [output async for output in engine.generate([20, 21, 22], silent)]
        assert sum(len(output.token_ids) for output in outputs) == 5
        assert not any(output.text for output in outputs)
        with pytest.raises(RequestError, match=r"no tokenizer .*: send token ids"):
            await engine.add_request("text", silent)
        with pytest.raises(RequestError, match=r"no tokenizer .*: send token ids"):
            await engine.add_request([{"role": "user", "content": "text"}], silent)
        with pytest.raises(RequestError, match=r"no tokenizer .*: set detokenize=False"):
            await engine.add_request([20, 21], SamplingParams(max_tokens=5))


#: What `AsyncEngine` has for programs; docs/embedding.md, images.md and operations.md say what for.
PUBLIC = """
    start shutdown wait_ended errored health state metrics
    add_request generate generate_one generate_all chat chat_one embed tokenize detokenize
    abort abort_now arriving adapters media supports_embeddings runner_parameters
    get_stats inspect policy_error replaced_policy_error
    switch_policy switch_shadow pause resume sleep wake reload reset_prefix_cache ask
    config model_info max_model_len started_at internals
"""


def test_an_engine_has_no_public_name_but_those_for_programs() -> None:
    engine = AsyncEngine()
    assert {name for name in dir(engine) if not name.startswith("_")} == set(PUBLIC.split())


def test_an_engine_is_one_class_behind_the_one_that_front_ends_share() -> None:
    assert AsyncEngine.__mro__ == (AsyncEngine, EngineClient, ABC, object)
