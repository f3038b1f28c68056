"""A user's typed programs pass mypy --strict and pyright where aioserve is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Protocol

from aioserve import AsyncClient, AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from aioserve.params import StructuredOutputs


class Texts(Protocol):
    def generate(
        self, prompt: str, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]: ...


async def first_words(model: Texts, prompt: str) -> str:
    text = ""
    async for output in model.generate(prompt, SamplingParams(max_tokens=8)):
        text += output.text
    return text


async def main() -> None:
    async with AsyncEngine(EngineConfig(scheduler={"policy": "fair"})) as engine:
        await first_words(engine, "To be")
        async with aclosing(engine.generate("To be", SamplingParams(stop=["a", "b"]))) as outputs:
            async for output in outputs:
                print(output.text)
        wanted = StructuredOutputs(choice=["a", "b"])
        one = await engine.generate_one("hi", SamplingParams(structured_outputs=wanted))
        print(one.finish_reason)
    async with AsyncClient("http://127.0.0.1:8000") as client:
        await first_words(client, "To be")
        async for output in client.chat([{"role": "user", "content": "hi"}]):
            print(output.text)


asyncio.run(main())
"""


ONE_PROTOCOL = """
import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from aioserve import AsyncClient, AsyncEngine, FinishedOutput, LanguageModel, SamplingParams
from aioserve.params import PoolingParams


async def seconds(model: LanguageModel, question: str) -> float:
    params = SamplingParams(max_tokens=8)
    async with aclosing(model.generate(question, params, adapter="poet")) as outputs:
        async for output in outputs:
            print(output.text)
    said = await model.generate_one([{"role": "user", "content": question}], user="ann")
    vector = await model.embed(question, PoolingParams(pooling="mean"))
    ids: list[int] = await model.tokenize(question)
    print(await model.abort("x"), await model.detokenize(ids), vector.embedding.shape)
    return said.times.duration


async def slowest(models: Sequence[LanguageModel]) -> FinishedOutput:
    outputs = [one for model in models for one in await model.generate_all(["a"], priority=1)]
    return max(outputs, key=lambda output: output.times.finished)


async def main() -> None:
    async with AsyncEngine() as engine, AsyncClient("http://127.0.0.1:8000") as client:
        print(await seconds(engine, "To be"), await seconds(client, "To be"))
        print((await slowest([engine, client])).finish_reason.value)


asyncio.run(main())
"""

A_POLICY = """
from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, SchedulerOutput


class Mine(BaseScheduler):
    class Options(PolicyOptions):
        chunk_size: PositiveInt = 512

    options: Options

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(token_budget=self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
"""

CHATS = """
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aioserve import AsyncClient, AsyncEngine, ChatOutput, FinishedChat, LanguageModel, ToolCall


@dataclass
class Advice:
    umbrella: bool


def weather(city: str) -> str:
    return f"It rains in {city}."


async def advise(model: LanguageModel, question: str) -> bool:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    reply = await model.chat_one(messages, tools=[weather], tool_choice="required")
    calls: list[ToolCall] = reply.tool_calls
    messages += [reply.message, *(call.answer(weather(**call.arguments)) for call in calls)]
    advice = await model.chat_one(messages, response_type=Advice, reasoning_effort="low")
    return advice.parsed.umbrella


async def last(outputs: AsyncGenerator[ChatOutput[Advice], None]) -> Advice:
    return [output async for output in outputs][-1].parsed


async def own(engine: AsyncEngine, client: AsyncClient) -> FinishedChat[None]:
    messages = [{"role": "user", "content": "Hello"}]
    await last(engine.chat(messages, response_type=Advice, adapter="poet"))
    await last(client.chat(messages, response_type=Advice, chat_template_kwargs={"a": 1}))
    print(await advise(engine, "Rome?"), await advise(client, "Oslo?"))
    print((await client.chat_one(messages, response_type=Advice)).parsed.umbrella)
    return await engine.chat_one(messages)
"""

BLOCKING = """
from aioserve import EngineConfig, EngineProcess, SamplingParams
from aioserve.errors import EngineOverloadedError, PromptsFailedError

with EngineProcess(EngineConfig()) as engine:
    try:
        for output in engine.generate_all(["a", [1, 2]], SamplingParams(max_tokens=4)):
            print(output.text, output.times.to_first_token)
    except PromptsFailedError as failed:
        print([result.text for result in failed.results if not isinstance(result, Exception)])
    except EngineOverloadedError as error:
        print(error.retry_after + 1.0)
"""

#: Apart from the cache of `make check`, whose settings are others.
CACHE = Path(__file__).parents[1] / ".mypy_cache" / "users"

PROGRAMS = {
    "streams": PROGRAM,
    "one protocol": ONE_PROTOCOL,
    "chats": CHATS,
    "a policy": A_POLICY,
    "a program that blocks": BLOCKING,
}


def run(folder: Path, *command: str) -> str:
    """Return what a checker says in a folder of its own."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "MYPYPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_typed_programs_pass_mypy_as_they_run_and_mistakes_in_them_are_found(
    tmp_path: Path,
) -> None:
    """In one run of mypy, which reads all of aioserve, or what the last run has kept of it."""
    wrong = {
        PROGRAM.replace("max_tokens=8", "max_tokns=8"): 'Unexpected keyword argument "max_tokns"',
        ONE_PROTOCOL.replace("adapter=", "adaptor="): 'Unexpected keyword argument "adaptor"',
        ONE_PROTOCOL.replace("engine, client]", "engine, 5]"): '"int"; expected "LanguageModel',
    }
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(program)
    for i, program in enumerate(wrong):
        (tmp_path / f"wrong{i}.py").write_text(program)
    said = run(tmp_path, "mypy", "--strict", "--cache-dir", str(CACHE), ".")
    lines = [line for line in said.splitlines() if ": error: " in line]
    assert lines
    assert [line for line in lines if not line.startswith("wrong")] == [], said
    for i, words in enumerate(wrong.values()):
        assert any(line.startswith(f"wrong{i}.py") and words in line for line in lines), said
    checked = len(PROGRAMS) + len(wrong)
    assert f" in {len(wrong)} files (checked {checked} source files)" in said


@pytest.mark.slow
def test_typed_programs_pass_pyright_as_they_run(tmp_path: Path) -> None:
    """basedpyright is pyright in a package that needs no download of its own at its first run."""
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name.replace(' ', '_')}.py").write_text(program)
    (tmp_path / "wrong.py").write_text(PROGRAM.replace("max_tokens=8", "max_tokns=8"))
    said = run(tmp_path, "basedpyright", "--pythonpath", sys.executable)
    errors = [line for line in said.splitlines() if " - error: " in line]
    assert len(errors) == 1, said
    assert "wrong.py" in errors[0]
    assert 'No parameter named "max_tokns"' in errors[0]
    assert said.endswith("\n1 error, 0 warnings, 0 notes\n")
