"""What a client's grammar can do to the process in which it is tried, and not to the engine's."""

import asyncio
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioserve.config import ModelConfig
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars import compiler as grammars
from aioserve.features.grammars.trial import Setup, Trials
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs
from tests.processes import JSON, PATIENCE, serving

INFO = ModelInfo(ModelConfig())
MIB = 1 << 20

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),
    pytest.mark.usefixtures("own_processes"),
]


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(INFO)
    await compiler.prepare()
    yield compiler
    compiler.close()


def chain(depth: int) -> str:
    """A grammar of rules of which each is the next one: llguidance follows it by recursion."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(depth))
    return f'start: r0\n{rules}\nr{depth}: "a"'


def own_bytes() -> int:
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def children() -> set[int]:
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


async def is_served(compiler: GrammarCompiler) -> bool:
    wanted = StructuredOutputs(regex="[a-z]{3}")
    await compiler.check(wanted)
    return not compiler.matcher(wanted).is_error()


async def test_a_grammar_that_crashes_the_library_is_refused_and_the_next_is_served(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "STACK_BYTES", 1 << 22)  # so that it ends before the memory
    with pytest.raises(RequestError, match=r"structured_outputs\.grammar: .*too deeply"):
        await compiler.check(StructuredOutputs(grammar=chain(12_000)))
    assert await is_served(compiler)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a?" * 9_000 + "b", "more than 32 MiB of memory"),
        ("a?" * 20_000 + "b", "too big"),
        ("(((d{100}){100}){100})", "repeats a piece"),
    ],
)
async def test_memory_that_a_refused_grammar_takes_is_not_the_engines(
    pattern: str, message: str, compiler: GrammarCompiler
) -> None:
    assert await is_served(compiler)
    before = own_bytes()
    with pytest.raises(RequestError, match=message) as caught:
        await compiler.check(StructuredOutputs(regex=pattern))
    assert caught.value.param == "structured_outputs.regex"
    assert own_bytes() - before < 8 * MIB


async def test_a_grammar_that_takes_too_long_is_refused(compiler: GrammarCompiler) -> None:
    def make_setup() -> Setup:
        made = compiler._make_setup()
        return Setup(made.tokenizer, made.vocab_size, made.eos_token_ids, {}, 1 << 25, 0.1, 1 << 33)

    trials = Trials(make_setup)
    wanted = b'{"regex":"%s"}' % (b"a?" * 20_000 + b"b")
    verdict = await asyncio.to_thread(trials.run, wanted)
    assert "of processor time" in verdict.error
    assert not (await asyncio.to_thread(trials.run, b'{"regex":"abc"}')).error
    trials.close()


async def test_a_refused_grammar_is_not_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, key: tried.append(key) or run(self, key))
    for pattern in ("(", "(", "abc", "abc"):
        try:
            await compiler.check(StructuredOutputs(regex=pattern))
        except RequestError:
            assert pattern == "("
    assert [b'"regex":"("' in key for key in tried] == [True, True, False]


async def test_what_a_grammar_takes_counts_and_not_its_text(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_HELD_BYTES", 4 * MIB)
    with pytest.raises(EngineOverloadedError, match="bytes of memory are in use"):
        await compiler.check(StructuredOutputs(grammar=chain(6_000)))  # takes some 13 MiB
    assert await is_served(compiler)


async def test_a_process_of_trials_that_was_ended_is_replaced(compiler: GrammarCompiler) -> None:
    others = children()
    assert await is_served(compiler)
    (process,) = children() - others
    os.kill(process, signal.SIGKILL)
    wanted = StructuredOutputs(regex="[a-z]{4}")
    await compiler.check(wanted)
    assert not compiler.matcher(wanted).is_error()
    compiler.close()
    assert children() <= others


async def test_where_no_process_can_be_started_a_grammar_is_for_later(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(EngineOverloadedError, match="no process can be started"):
            await compiler.check(StructuredOutputs(regex="abc"))
    assert await is_served(compiler)


def ask(url: str, **wanted: Any) -> tuple[int, str]:
    """Status and body of a completion with these structured outputs."""
    body = {"prompt": "x", "max_tokens": 2, "structured_outputs": wanted}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server, and its URL."""
    with serving("--kv-cache-gib", "0.05", is_shared=True) as started:
        yield started


async def test_a_schema_of_numbers_beyond_64_bits_ends_no_server(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server
    beyond = {"type": "integer", "minimum": -(2**63) - 9, "maximum": -(2**63) - 2}
    status, said = await asyncio.to_thread(ask, url, json=beyond)
    assert status == 400, said
    assert "maximum is -9223372036854775810" in said
    assert (await asyncio.to_thread(ask, url, json={"type": "integer"}))[0] == 200
    assert process.poll() is None


async def test_short_patterns_take_no_memory_of_a_server_for_good(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server

    def resident() -> int:
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])

    assert (await asyncio.to_thread(ask, url, regex="[a-z]{3}"))[0] == 200
    before = resident()
    for times in (100, 101):
        pattern = f"(((d{{{times}}}){{100}}){{100}})"
        assert (await asyncio.to_thread(ask, url, regex=pattern))[0] == 400
    assert (resident() - before) * os.sysconf("SC_PAGE_SIZE") < 64 * MIB


async def test_a_process_of_trials_that_is_stopped_is_replaced(compiler: GrammarCompiler) -> None:
    before = children()
    assert await is_served(compiler)
    (pid,) = children() - before
    os.kill(pid, signal.SIGSTOP)
    wanted = [StructuredOutputs(regex=f"[a-z]{{{number}}}") for number in range(5, 9)]
    await asyncio.gather(*map(compiler.check, wanted))
    assert len(children() - before - {pid}) == 1
    assert pid not in children()
