"""The overlapped runner in the real engine: what clients get is what the CPU runner gives them."""

import asyncio
import json
import random
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aioserve
from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import AsyncEngine
from aioserve.errors import (
    AioserveError,
    ConfigError,
    EngineDeadError,
    RequestFailedError,
    RunnerDeadError,
)
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.spec_decode.ngram import ngram_drafter
from aioserve.gpu.cuda import sampler
from aioserve.gpu.cuda.attention import TorchDeviceAttention
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.gpu.cuda.plan import Layout, Limits, StepPlan
from aioserve.gpu.cuda.runner import OverlappedRunner
from aioserve.gpu.cuda.sampler import DeviceSampler
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import RequestOutput
from aioserve.params import PoolingParams, SamplingParams, StructuredOutputs, ThinkingBudget
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.load_plan import BatchParts
from aioserve.runner.loader import load_model
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.engine.test_speculation import NGRAM, NONE, check_equal, generate
from tests.models import VOCAB_SIZE, make_model
from tests.runner.cuda.fake_device import FakeDevice, TooEarlyError
from tests.runner.cuda.on_device import make_device_runner
from tests.runner.cuda.tiny import make_executor
from tests.slow import mostly_slow

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 20, 8, 120


def make_config(path: Path, depth: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(path), dtype="float32", max_model_len=MAX_MODEL_LEN, fused=False
        ),
        cache=CacheConfig(num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_num_seqs=6,
            pipeline_depth=depth,
            options={"chunk_size": 40},
            max_num_batched_tokens=64,
        ),
        runner=RunnerConfig(threads=1),
    )


@pytest.fixture
def served_path(model_path: Callable[..., Path]) -> Callable[..., Path]:
    """`served_path(kind)`: a tiny model with the tokenizer of the embedded one."""

    def path_of(kind: str) -> Path:
        path = model_path(kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(aioserve.__file__).parent / "model_source" / "embedded" / name, path)
        return path

    return path_of


def make_runner(
    config: EngineConfig, device: FakeDevice, *, fused: bool = False
) -> OverlappedRunner:
    """What the CUDA runner is, with another device."""
    info = ModelInfo(config.model)
    grammars = None if config.model.skip_tokenizer_init else GrammarCompiler(info)

    def build() -> StepExecutor:
        place = CudaPlace(device.torch_device, has_triton=False)
        loaded = load_model(msgspec.structs.replace(config.model, fused=fused), info, place)
        assert ("fused" in loaded.name) is fused
        page_size, num_pages = config.cache.block_size, config.cache.num_kv_blocks
        assert num_pages is not None
        limits = Limits(
            num_rows=config.scheduler.max_num_seqs,
            num_tokens=config.scheduler.step_budget(info.max_model_len),
            num_row_pages=-(-(info.max_model_len + 1) // page_size),
            page_size=page_size,
            num_pages=num_pages,
            num_drafts=16,
        )
        layout = Layout(limits)
        attention = TorchDeviceAttention(loaded.kv_cache_spec, limits, device.torch_device)
        return StepExecutor(
            device,
            loaded,
            attention,
            DeviceSampler(
                device, limits.num_rows, limits.num_samples, info.vocab_size, sampler.draw
            ),
            layout,
            torch.zeros(layout.size, dtype=torch.int32),
            BatchParts(
                loaded,
                limits.num_rows,
                info.max_model_len,
                page_size,
                info.vocab_size,
                grammars=grammars,
                eos_token_ids=info.eos_token_ids,
                drafter=ngram_drafter(config.speculation)
                if config.speculation.drafts_surely
                else None,
            ),
            adapter_room=1 << 30,
        )

    return OverlappedRunner(build, grammars)


def random_params(rng: random.Random) -> SamplingParams:
    def sometimes(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.3 else default

    has_bad_words = rng.random() < 0.4
    return SamplingParams(
        max_tokens=rng.randint(1, 25),
        temperature=rng.choice([0, 0, 0.8, 2]),
        seed=rng.randrange(1 << 60),
        top_k=sometimes(rng.randint(1, 50), 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.05, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(-0.5, 0.0),
        logit_bias=sometimes({5: 4.0, 17: -100.0}, None),
        # Of so few tokens many bad words begin, and some would end.
        allowed_token_ids=tuple(range(6)) if has_bad_words else (),
        bad_words_ids=tuple(
            tuple(rng.choices(range(6), k=rng.randint(2, 3)))
            for _ in range(150 if has_bad_words else 0)
        ),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), sometimes(60, 0))),
        min_tokens=0,
        logprobs=sometimes(rng.randint(0, 4), None),
        prompt_logprobs=sometimes(rng.randint(0, 3), None),
        detokenize=False,
    )


async def serve(engine: AsyncEngine, seed: int) -> list[list[RequestOutput]]:
    """Thirty requests, some of which leave early."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(30)]

    async def one(prompt: list[int], params: SamplingParams, delay: int) -> list[RequestOutput]:
        for _ in range(delay):
            await asyncio.sleep(0)
        return [output async for output in engine.generate(prompt, params)]

    async def leave(prompt: list[int], after: int) -> None:
        params = SamplingParams(max_tokens=30, temperature=0, detokenize=False)
        async for _ in engine.generate(prompt, params):
            after -= 1
            if after == 0:
                return

    tasks = []
    leaving = []
    for _ in range(30):
        prompt = prefix[: rng.choice([0, 30])]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        tasks.append(asyncio.create_task(one(prompt, random_params(rng), rng.randint(0, 40))))
        if rng.random() < 0.3:
            leaving.append(asyncio.create_task(leave(prompt, rng.randint(1, 5))))
    await asyncio.gather(*leaving)
    return await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_a_device_is_paused_between_steps_and_does_not_sleep(
    served_path: Callable[..., Path],
) -> None:
    """Two steps are on their way when the pause begins."""
    config = make_config(served_path("llama"), depth=2)
    async with AsyncEngine(make_config(served_path("llama"), depth=1)) as engine:
        expected = await serve(engine, seed=3)
    device = FakeDevice(1, 0.5, slowness=0.02)
    async with AsyncEngine(config, runner=make_runner(config, device)) as engine:
        serving = asyncio.create_task(serve(engine, seed=3))
        for _ in range(4):
            await asyncio.sleep(0.02)
            await engine.pause()
            snapshot = engine.inspect()
            assert snapshot is not None
            assert snapshot.steps_in_flight == []
            for refused in (engine.sleep(), engine.reload("anywhere")):
                with pytest.raises(ConfigError, match="is not served by this engine's runner"):
                    await refused
            assert engine.state == "paused"
            await engine.resume()
        found = await serving
    for a, b in zip(found, expected, strict=True):
        told = [[t for output in outputs for t in output.token_ids] for outputs in (a, b)]
        assert told[0] == told[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["llama", "mistral"], but=["mistral"]))
@pytest.mark.parametrize("eagerness", mostly_slow([0, 0.5], but=[0.5]))
async def test_a_device_that_is_behind_gives_clients_the_tokens_of_the_cpu(
    kind: str, eagerness: float, served_path: Callable[..., Path]
) -> None:
    """Greedy, seeded, penalized, biased, with logprobs, aborts, and a pool that is too small."""
    device = FakeDevice(1, eagerness, slowness=0.02)  # so that two steps are queued at times
    config = make_config(served_path(kind), depth=2)
    async with AsyncEngine(config, runner=make_runner(config, device)) as engine:
        found = await serve(engine, seed=3)
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_used_kv_blocks == 0
        assert stats.num_preemptions > 0
    async with AsyncEngine(make_config(served_path(kind), depth=1)) as engine:
        expected = await serve(engine, seed=3)
    for a, b in zip(found, expected, strict=True):
        tokens = [[t for output in outputs for t in output.token_ids] for outputs in (a, b)]
        assert tokens[0] == tokens[1]
        assert a[-1].finish_reason == b[-1].finish_reason
        logprobs = [[p for output in outputs for p in output.logprobs or ()] for outputs in (a, b)]
        for outputs, found_ones in zip((a, b), logprobs, strict=True):
            found_ones += [entry for entry in outputs[0].prompt_logprobs or () if entry is not None]
        for one, other in zip(*logprobs, strict=True):
            assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    assert device.num_behind == 2


@pytest.fixture(scope="module")
def wordy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the whole vocabulary of the embedded one."""
    embedded = Path(aioserve.__file__).parent / "model_source" / "embedded"
    path = make_model("llama", tmp_path_factory.mktemp("wordy"), vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded / name, path)
    return path


@pytest.mark.parametrize("eagerness", mostly_slow([0, 0.5], but=[0]))
async def test_masks_wait_for_the_last_token_while_the_device_computes(
    eagerness: float, wordy_path: Path
) -> None:
    """Masked and free requests, preempted in a pool that is too small, as on the CPU."""
    ways = [
        None,
        StructuredOutputs(regex="[a-z]{3}-[0-9]{2,30}"),
        StructuredOutputs(choice=("to be", "or not to be")),
        StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "minItems": 3}),
    ]

    async def texts(engine: AsyncEngine) -> list[tuple[str, object]]:
        async def one(index: int) -> tuple[str, object]:
            params = SamplingParams(
                max_tokens=45,
                temperature=[0, 1.0][index % 2],
                seed=index,
                logit_bias={5: 3.0} if index % 3 else None,
                structured_outputs=ways[index % len(ways)],
            )
            outputs = [o async for o in engine.generate([7, index, 9] * 9, params)]
            return "".join(output.text for output in outputs), outputs[-1].finish_reason

        return await asyncio.gather(*(one(index) for index in range(24)))

    device = FakeDevice(1, eagerness)
    config = make_config(wordy_path, depth=2)
    async with AsyncEngine(config, runner=make_runner(config, device)) as engine:
        found = await texts(engine)
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_preemptions > 0
    async with AsyncEngine(make_config(wordy_path, depth=1)) as engine:
        assert found == await texts(engine)
    for text, reason in found[2::4]:
        assert (text, reason) in [("to be", "stop"), ("or not to be", "stop")]
    assert all(re.fullmatch("[a-z]{3}-[0-9]{0,30}", text) for text, _ in found[1::4])
    assert all(json.loads(text) for text, reason in found[3::4] if reason == "stop")


@pytest.mark.slow
async def test_thinking_budgets_on_a_device_force_the_mark_where_the_cpu_does(
    wordy_path: Path,
) -> None:
    """With steps in flight: beside free and bound requests, preempted in a pool that is small."""
    end = "</think>"
    bound = StructuredOutputs(regex=f"[^<]*{end}(yes|no)")

    async def texts(engine: AsyncEngine) -> list[str]:
        async def one(index: int) -> str:
            budget = ThinkingBudget(max_tokens=index, start="<think>", end=end, is_implied=True)
            params = SamplingParams(
                max_tokens=45,
                temperature=[0, 1.0][index % 2],
                seed=index,
                structured_outputs=bound if index % 4 == 1 else None,
                thinking_budget=None if index % 4 == 2 else budget,
            )
            return "".join([o.text async for o in engine.generate([7, index, 9] * 9, params)])

        return await asyncio.gather(*(one(index) for index in range(24)))

    config = make_config(wordy_path, depth=2)
    async with AsyncEngine(config, runner=make_runner(config, FakeDevice(1, 0.5))) as engine:
        found = await texts(engine)
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_preemptions > 0
    async with AsyncEngine(make_config(wordy_path, depth=1)) as engine:
        assert found == await texts(engine)
    assert all(text.count(end) == 1 for i, text in enumerate(found) if i % 4 in (0, 3))
    assert all(re.fullmatch(f"[^<]*{end}(yes|no)", text) for text in found[1::4])


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_ngrams_on_a_device_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each step is read before the next is launched."""

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6  # every draft pays, however busy this machine is

    monkeypatch.setattr(DraftLength, "stepped", stepped)
    plain, _ = await generate(NONE)
    device = FakeDevice(1, eagerness=0.5)
    guessed, stats = await generate(
        NGRAM, make_runner=lambda config: make_runner(config, device), pipeline_depth=1
    )
    check_equal(guessed, plain)
    assert 200 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_preemptions


def make_tiny_runner(device: FakeDevice) -> OverlappedRunner:
    return OverlappedRunner(lambda: make_executor(device))


def make_step(step_id: int, name: str, *, is_new: bool = True) -> SchedulerOutput:
    """Three tokens of a prompt, or one decode."""
    data = NewRequestData(
        request_id=name,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        sampling_params=SamplingParams(temperature=0),
        stop_token_ids=frozenset(),
        block_ids=[step_id],
        num_computed_tokens=0,
    )
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=[data] if is_new else [],
        scheduled_cached_reqs=CachedRequestData(*(([], []) if is_new else ([name], [3])), {}),
        num_scheduled_tokens={name: 3 if is_new else 1},
        total_num_scheduled_tokens=3 if is_new else 1,
        preempted_req_ids=[],
        finished_req_ids=[],
    )


async def test_a_step_that_fails_on_the_device_fails_alone() -> None:
    device = FakeDevice(eagerness=0)
    runner = make_tiny_runner(device)
    await runner.load()
    assert device.num_attached == 1
    first = await runner.execute_model(make_step(1, "a"))
    device.fail_with = ValueError("a kernel was refused")
    with pytest.raises(ValueError, match="a kernel was refused"):
        await runner.execute_model(make_step(2, "b"))
    assert (await runner.execute_model(make_step(3, "c"))).sampled_token_ids == (
        first.sampled_token_ids
    )
    await runner.close()


async def test_a_step_that_fails_before_its_launch_fails_alone() -> None:
    runner = make_tiny_runner(FakeDevice())
    await runner.load()
    with pytest.raises(KeyError):  # of which the batch has never heard
        await runner.execute_model(make_step(1, "nobody", is_new=False))
    assert (await runner.execute_model(make_step(2, "a"))).req_ids == ["a"]
    await runner.close()


def test_copies_of_a_step_that_the_batch_refuses_are_waited_for() -> None:
    executor = make_executor(FakeDevice(eagerness=0))
    blocks = executor.make_host_blocks(1 << 20)
    step = make_step(1, "nobody", is_new=False)
    step = msgspec.structs.replace(
        step,
        scheduled_cached_reqs=CachedRequestData(["nobody"], [3], {"nobody": [2]}),
        parts={"loads": {"saves": [(3, 0)], "loads": [(1, 4)]}},
    )
    with pytest.raises(KeyError):
        executor.launch(step)
    assert bytes(blocks.memory(0)) == bytes(blocks.block_bytes)
    assert blocks.num_loaded == 1


@pytest.mark.parametrize("pipeline_depth", [1, 2])
async def test_the_one_whose_launch_raises_fails_alone(
    served_path: Callable[..., Path], pipeline_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none does, where smaller launches have the memory that they lack."""
    poison, most = VOCAB_SIZE - 1, 17
    begin = TorchDeviceAttention.begin

    def watched(self: TorchDeviceAttention, plan: StepPlan, *rest: Any) -> LayerAttention:
        if plan.num_tokens > most:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        if poison in plan.inputs.input_ids:
            raise ArithmeticError("a poisoned token")
        return begin(self, plan, *rest)

    config = make_config(served_path("llama"), pipeline_depth)
    prompts = [[3 + i, 5, 7 * i, *range(4 * i)] for i in range(4)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=penalty, logprobs=1
        )
        for penalty in (1.0, 1.2, 1.0, 1.3)
    ]

    async def ask(engine: AsyncEngine, prompt: list[int], own: SamplingParams) -> list[int]:
        found: list[int] = []
        async for output in engine.generate(prompt, own):
            found += output.token_ids
        return found

    async def ask_all(*, with_culprit: bool) -> list[Any]:
        async with AsyncEngine(config, runner=make_runner(config, FakeDevice())) as engine:
            asked = [ask(engine, *pair) for pair in zip(prompts, params, strict=True)]
            if with_culprit:
                asked.append(ask(engine, [1, poison, 2], params[1]))
            return await asyncio.gather(*asked, return_exceptions=True)

    expected = await ask_all(with_culprit=False)
    assert all(len(found) == 12 for found in expected)
    monkeypatch.setattr(TorchDeviceAttention, "begin", watched)
    *found, failure = await ask_all(with_culprit=True)
    assert found == expected
    assert isinstance(failure, RequestFailedError)
    assert "ArithmeticError" in str(failure)


async def test_a_row_of_nan_fails_alone_on_a_device() -> None:
    runner = make_tiny_runner(FakeDevice())
    await runner.load()
    assert runner._executor is not None
    first = await runner.execute_model(make_step(1, "a"))
    forward = runner._executor._model.forward

    def broken(inputs: ModelInputs, attention: LayerAttention) -> torch.Tensor:
        return torch.full_like(forward(inputs, attention), float("nan"))

    runner._executor._model.forward = broken  # type: ignore[method-assign]
    result = await runner.execute_model(make_step(2, "b"))
    assert (list(result.failed), result.sampled_token_ids) == (["b"], [[]])
    assert "NaN" in result.failed["b"]
    runner._executor._model.forward = forward  # type: ignore[method-assign]
    found = await runner.execute_model(make_step(3, "c"))
    assert found.sampled_token_ids == first.sampled_token_ids
    await runner.close()


async def test_running_out_of_device_memory_names_the_setting() -> None:
    device = FakeDevice()
    runner = make_tiny_runner(device)
    await runner.load()
    device.fail_with = torch.OutOfMemoryError("tried to allocate 20.00 GiB")
    with pytest.raises(AioserveError, match="lower gpu_memory_utilization"):
        await runner.execute_model(make_step(1, "a"))
    assert (await runner.execute_model(make_step(2, "b"))).req_ids == ["b"]
    await runner.close()


async def test_a_lost_device_says_that_no_step_can_run() -> None:
    device = FakeDevice(eagerness=0)
    runner = make_tiny_runner(device)
    await runner.load()
    device.lost, device.fail_with = True, RuntimeError("an illegal memory access")
    steps = [runner.execute_model(make_step(i, name)) for i, name in enumerate("ab", start=1)]
    results = await asyncio.gather(*steps, return_exceptions=True)
    assert isinstance(results[0], RunnerDeadError)
    assert "an illegal memory access" in str(results[0])
    await runner.close()


async def test_the_engine_ends_with_its_device_and_tells_every_client(
    served_path: Callable[..., Path],
) -> None:
    device = FakeDevice()
    config = make_config(served_path("llama"), depth=2)
    params = SamplingParams(max_tokens=50, temperature=0, detokenize=False)
    async with AsyncEngine(config, runner=make_runner(config, device)) as engine:
        stream = await engine.add_request([1, 2, 3], params)
        await anext(stream)
        device.fail_with = RuntimeError("a kernel was refused")
        with pytest.raises(RequestFailedError):
            async for _ in stream:
                pass
        stream = await engine.add_request([1, 2, 3], params)
        await anext(stream)
        device.lost, device.fail_with = True, RuntimeError("an illegal memory access")
        with pytest.raises(EngineDeadError, match="an illegal memory access"):
            async for _ in stream:
                pass
        assert isinstance(engine.errored, RunnerDeadError)


async def test_what_prevents_loading_is_raised_by_load_and_close_still_works() -> None:
    def build() -> StepExecutor:
        raise ConfigError("the model does not fit")

    runner = OverlappedRunner(build)
    with pytest.raises(ConfigError, match="does not fit"):
        await runner.load()
    await runner.close()
    await runner.close()
    with pytest.raises(RunnerDeadError, match="closed"):
        await runner.execute_model(make_step(1, "a"))


@torch.inference_mode()
def test_the_fake_device_notices_who_is_too_early() -> None:
    device = FakeDevice(eagerness=0)
    buffer, target = device.host_buffer(4), torch.zeros(4, dtype=torch.int32)
    buffer.array[:] = 7
    device.stage(target, buffer)
    arrived = device.record()
    with pytest.raises(TooEarlyError):
        buffer.array[0] = 8
    assert target.tolist() == [0] * 4
    arrived.wait()
    assert target.tolist() == [7] * 4
    buffer.array[:] = 0
    device.fetch(buffer, target)
    fetched = device.record()
    with pytest.raises(TooEarlyError):
        buffer.array.tolist()
    fetched.wait()
    assert buffer.array.tolist() == [7] * 4


@torch.inference_mode()
def test_a_result_is_not_there_before_its_event() -> None:
    executor = make_executor(FakeDevice(eagerness=0))
    step = executor.launch(make_step(1, "a"))
    assert step is not None
    with pytest.raises(TooEarlyError):
        step.parts[0].result.array.tolist()
    assert executor.finish(step).req_ids == ["a"]


def told_tokens(outputs: list[list[RequestOutput]]) -> list[list[int]]:
    return [[token for output in own for token in output.token_ids] for own in outputs]


def on_card(config: EngineConfig) -> AsyncEngine:
    """An engine with all of the CUDA runner, on a device that may be behind."""
    return AsyncEngine(config, runner=make_device_runner(config, FakeDevice(1, eagerness=0.5)))


async def test_a_card_gives_its_memory_back_and_serves_again(
    served_path: Callable[..., Path],
) -> None:
    config = make_config(served_path("llama"), depth=2)
    runner: Any = make_device_runner(config, FakeDevice(1, eagerness=0.5))
    async with AsyncEngine(config, runner=runner) as engine:
        before = told_tokens(await serve(engine, seed=3))
        with pytest.raises(ConfigError, match="sleep gives back the weights with the KV cache"):
            await engine.sleep()
        assert engine.state == "running"
        kept = [weakref.ref(cache) for cache in runner._executor._attention.cache.tensors]
        blocks = runner._executor.info.num_kv_blocks
        await engine.sleep(weights=True)
        assert all(cache() is None for cache in kept)
        await engine.wake()
        assert runner._executor.info.num_kv_blocks == blocks
        assert told_tokens(await serve(engine, seed=3)) == before


async def test_a_card_serves_other_weights_and_goes_back_where_they_cannot_be_read(
    served_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = served_path("llama")
    other, damaged = (Path(shutil.copytree(path, tmp_path / name)) for name in ("other", "bad"))
    weights = load_file(path / "model.safetensors")
    flipped = {"lm_head.weight": weights["lm_head.weight"].flip(0).contiguous()}
    save_file(weights | flipped, other / "model.safetensors", {"format": "pt"})
    del weights["model.norm.weight"]
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    async with on_card(make_config(path, depth=2)) as engine:
        old = told_tokens(await serve(engine, seed=3))
        with pytest.raises(ConfigError, match="norm"):
            await engine.reload(str(damaged))
        assert told_tokens(await serve(engine, seed=3)) == old
        await engine.reload(str(other))
        found = told_tokens(await serve(engine, seed=3))
    async with on_card(make_config(other, depth=2)) as engine:
        expected = told_tokens(await serve(engine, seed=3))
    assert found == expected != old


async def test_nothing_of_a_failed_reload_is_left_when_the_old_weights_are_loaded_again(
    served_path: Callable[..., Path], tmp_path: Path
) -> None:
    """A card has no room for both; the error, which is told later, knows the calls that failed."""
    path = served_path("llama")
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = make_config(path, depth=2)
    runner: Any = make_device_runner(config, FakeDevice(1, eagerness=0.5))
    make, failed, is_left = runner._make, list[weakref.ref[Any]](), list[bool]()

    def capture(executor: StepExecutor) -> None:
        failed.extend(map(weakref.ref, executor._attention.cache.tensors))
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    def make_or_fail(config: EngineConfig, info: ModelInfo) -> StepExecutor:
        is_left.extend(cache() is not None for cache in failed)
        executor: StepExecutor = make(config, info)
        if info.config.model == str(other):
            try:
                capture(executor)
            except torch.OutOfMemoryError as error:
                raise ConfigError("no room for graphs") from error
        return executor

    async with AsyncEngine(config, runner=runner) as engine:
        before = told_tokens(await serve(engine, seed=3))
        runner._make = make_or_fail
        with pytest.raises(ConfigError, match="no room for graphs"):
            await engine.reload(str(other))
        assert is_left
        assert not any(is_left)
        assert told_tokens(await serve(engine, seed=3)) == before


@pytest.mark.parametrize("pooling", mostly_slow(["mean", "last"], but=["mean"]))
async def test_vectors_of_prompts_are_those_of_the_cpu(
    pooling: Any, served_path: Callable[..., Path]
) -> None:
    """Prompts longer than a step, beside requests that generate."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 60, 110)]
    params = PoolingParams(pooling=pooling)

    async def vectors(engine: AsyncEngine) -> list[Any]:
        serving = asyncio.create_task(serve(engine, seed=3))
        found = await asyncio.gather(*(engine.embed(prompt, params) for prompt in prompts))
        await serving
        return [output.embedding for output in found]

    path = served_path("llama")
    async with AsyncEngine(make_config(path, depth=1)) as engine:
        expected = await vectors(engine)
    async with on_card(make_config(path, depth=2)) as engine:
        found = await vectors(engine)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
