"""What is refused is refused before the work is done, and hears when to come again."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.chat_template import ChatTemplate
from aioserve.engine.input_processor import (
    INLINE_CHARACTERS,
    SHORT_MESSAGES,
    InputProcessor,
)
from aioserve.engine.metrics import RATE_SECONDS, RecentRate
from aioserve.engine.prompt import Conversation
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.lab import VirtualClockEventLoop
from tests.processes import PATIENCE

ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def make_config(step_base_ms: float = 1.0, **scheduler: Any) -> EngineConfig:
    runner = RunnerConfig(runner="simulated", step_base_ms=step_base_ms)
    return EngineConfig(runner=runner, scheduler=SchedulerConfig(**scheduler))


@pytest.fixture(params=["simulated", "cpu"])  # that of a CPU has another thread for templates
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    is_simulated = request.param == "simulated"
    async with AsyncEngine(make_config() if is_simulated else EngineConfig()) as engine:
        yield engine


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    "messages", [chat("word " * 200_000), chat(*["x" * 400] * 200), chat(*[""] * 5000)]
)
async def test_a_conversation_that_is_too_long_is_not_rendered(
    engine: AsyncEngine, messages: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "render", None)
    with pytest.raises(RequestError, match=r"has at least \d+ tokens, but the model's limit is"):
        await engine.add_request(messages, SHORT)


@pytest.mark.parametrize(
    "messages",
    [chat("Hello"), chat("x" * (INLINE_CHARACTERS + 1)), chat(*["x"] * (SHORT_MESSAGES + 1))],
)
async def test_a_conversation_is_rendered_off_the_loop(
    engine: AsyncEngine, messages: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, render = [], ChatTemplate.render

    def note(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", note)
    (await engine.add_request(messages, SHORT)).close()
    assert [thread is not threading.main_thread() for thread in threads] == [True]


async def test_a_short_conversation_does_not_wait_for_the_template_of_a_long_one(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, render = threading.Event(), ChatTemplate.render

    def wait(template: ChatTemplate, conversation: Conversation) -> str:
        if len(conversation.messages) > 1:
            assert go_on.wait(PATIENCE)
        return render(template, conversation)

    monkeypatch.setattr(ChatTemplate, "render", wait)
    long = asyncio.create_task(engine.add_request(chat(*["x"] * (SHORT_MESSAGES + 1)), SHORT))
    await asyncio.sleep(0)
    (await engine.add_request(chat("Hello"), SHORT)).close()
    assert not long.done()
    go_on.set()
    (await long).close()


async def test_a_conversation_whose_reader_leaves_while_it_is_rendered_leaves_nothing(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, go_on, render = threading.Event(), threading.Event(), ChatTemplate.render

    def wait(template: ChatTemplate, conversation: Conversation) -> str:
        rendering.set()
        assert go_on.wait(PATIENCE)
        return render(template, conversation)

    monkeypatch.setattr(ChatTemplate, "render", wait)
    leaving = asyncio.create_task(engine.add_request(chat("Hello"), SHORT, request_id="a"))
    assert await asyncio.to_thread(rendering.wait, PATIENCE)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert (await engine.abort("a"), engine.inspect().num_arriving) == (False, 0)
    go_on.set()
    (await engine.add_request(chat("Hello"), SHORT, request_id="a")).close()


async def test_the_threads_that_render_end_with_their_engine() -> None:
    def rendering() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if "aioserve-template" in each.name]

    known = rendering()
    async with AsyncEngine(EngineConfig()) as engine:
        (await engine.add_request(chat("Hello"), SHORT)).close()
        [own] = set(rendering()) - {*known}
    own.join(PATIENCE)
    assert not own.is_alive()


async def test_a_full_queue_refuses_before_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_num_seqs=1, max_waiting_tokens=500)
    async with AsyncEngine(config) as engine:
        running = await engine.add_request([5] * 9, ENDLESS)
        await anext(running)
        waiting = await engine.add_request([5] * 400, ENDLESS)
        monkeypatch.setattr(InputProcessor, "tokenize", None)
        with pytest.raises(EngineOverloadedError, match=r"400 prompt tokens are waiting already"):
            await engine.add_request("word " * 500, SHORT)
        waiting.close()
        running.close()


async def test_prompts_that_are_being_tokenized_wait_as_well() -> None:
    config = make_config(max_num_seqs=1, max_waiting_tokens=500)
    async with AsyncEngine(config) as engine:
        text = "word " * 800  # at least 307 tokens, and long enough for the thread
        first = asyncio.create_task(engine.add_request(text, SHORT))
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError, match=r"prompt tokens are waiting already"):
            await engine.add_request(text, SHORT)
        first.cancel()
        await asyncio.wait([first])
        snapshot = engine.inspect()
        assert snapshot is not None
        assert snapshot.num_arriving == snapshot.num_arriving_tokens == 0


async def test_requests_whose_grammars_are_being_compiled_wait_as_well(monkeypatch) -> None:
    config = make_config(max_waiting_requests=1)
    async with AsyncEngine(config) as engine:
        compiling, never = asyncio.Event(), asyncio.Event()

        async def check(door: InputProcessor, params: SamplingParams) -> None:
            assert not compiling.is_set(), "the second is let by"
            compiling.set()
            await never.wait()

        monkeypatch.setattr(InputProcessor, "check_grammar", check)
        first = asyncio.create_task(engine.add_request([5], SHORT))
        await compiling.wait()
        with pytest.raises(EngineOverloadedError, match="1 requests are waiting already"):
            await engine.add_request([5], SHORT)
        first.cancel()
        await asyncio.wait([first])
        snapshot = engine.inspect()
        assert snapshot is not None
        assert snapshot.num_arriving == 0


def test_who_is_refused_hears_how_long_the_queue_will_take() -> None:
    """The engine serves 100 tokens a second, and `num_waiting` requests of 100 tokens wait."""

    async def main(num_waiting: int) -> float:
        config = EngineConfig(
            model=ModelConfig(skip_tokenizer_init=True),
            runner=RunnerConfig(runner="simulated", step_base_ms=500),
            scheduler=SchedulerConfig(max_num_seqs=1, max_waiting_requests=num_waiting),
        )
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        async with AsyncEngine(config) as engine:

            async def client() -> None:
                while True:
                    stream = await engine.add_request([5] * 100, params)
                    async for _ in stream:
                        pass

            clients = [asyncio.create_task(client())]
            await asyncio.sleep(0.1)  # it has the seat
            clients += [asyncio.create_task(client()) for _ in range(num_waiting)]
            await asyncio.sleep(0.1)
            with pytest.raises(EngineOverloadedError) as early:
                await engine.add_request([5] * 100, params)
            assert early.value.retry_after == 1.0  # nothing was served yet
            await asyncio.sleep(60)
            with pytest.raises(EngineOverloadedError) as late:
                await engine.add_request([5] * 100, params)
            for task in clients:
                task.cancel()
            return late.value.retry_after

    for num_waiting, expected in ((3, 3.0), (20, 20.0), (300, 60.0)):
        with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
            assert runner.run(main(num_waiting)) == pytest.approx(expected, rel=0.3)


def test_a_recent_rate_follows_what_comes() -> None:
    rate = RecentRate()
    assert rate.per_second(5.0) == 0
    for second in range(100):
        rate.add(7.0, float(second))
    assert rate.per_second(99.5) == pytest.approx(7, rel=0.05)
    for second in range(100, 200):
        rate.add(70.0, float(second))
    assert rate.per_second(199.5) == pytest.approx(70, rel=0.05)
    assert rate.per_second(200 + 5 * RATE_SECONDS) < 1


def test_a_recent_rate_is_fair_to_a_young_one() -> None:
    rate = RecentRate()
    for tenth in range(30):
        rate.add(1.0, tenth / 10)
    assert rate.per_second(3.0) == pytest.approx(10, rel=0.1)


async def test_text_with_a_token_that_the_model_has_no_weights_for_is_refused(
    tmp_path: Path,
) -> None:
    """Else a row beyond the end of the embedding would be read."""
    path = tmp_path / "model"
    shutil.copytree(Path(aioserve.__file__).parent / "model_source" / "embedded", path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|late|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = EngineConfig(
        model=ModelConfig(model=str(path)), runner=RunnerConfig(runner="simulated")
    )
    async with AsyncEngine(config) as engine:
        for prompt in ("a<|late|>", chat("<|late|>")):
            with pytest.raises(RequestError, match=r"the token '<\|late\|>', which is number 2048"):
                await engine.add_request(prompt, SHORT)
        await engine.add_request("<|lat|>", SHORT)
