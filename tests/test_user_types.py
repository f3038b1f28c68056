"""A user's typed program passes mypy --strict in the environment in which aioserve is installed."""

import os
import subprocess
import sys
from pathlib import Path

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


def check(program: str, folder: Path) -> str:
    """Return what mypy says of a program in a folder of its own."""
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "MYPYPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_a_typed_program_passes_as_it_runs(tmp_path: Path) -> None:
    assert check(PROGRAM, tmp_path) == "Success: no issues found in 1 source file\n"


def test_a_wrong_argument_is_found(tmp_path: Path) -> None:
    wrong = PROGRAM.replace("max_tokens=8", "max_tokns=8")
    assert 'Unexpected keyword argument "max_tokns"' in check(wrong, tmp_path)
