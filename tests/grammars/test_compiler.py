"""How long compiled grammars live, and who has to wait for them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import llguidance
import pytest

from aioserve.config import ModelConfig
from aioserve.errors import EngineOverloadedError
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars import compiler as grammars
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

INFO = ModelInfo(ModelConfig())
compiled: list[str] = []  # by the compilers of this test
may_go_on = threading.Event()


Matcher = llguidance.LLMatcher


class NotedMatcher:
    """Says that one was made, when it may be."""

    grammar_from_json_schema = staticmethod(Matcher.grammar_from_json_schema)
    grammar_from_regex = staticmethod(Matcher.grammar_from_regex)

    def __new__(cls, tokenizer, grammar, **options):
        compiled.append(grammar)
        assert may_go_on.wait(60)
        return Matcher(tokenizer, grammar, **options)


@pytest.fixture
async def compiler(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarCompiler]:
    compiled.clear()
    may_go_on.set()
    monkeypatch.setattr(llguidance, "LLMatcher", NotedMatcher)
    compiler = GrammarCompiler(INFO)
    await compiler.prepare()
    yield compiler
    may_go_on.set()
    compiler.close()


def wants(number: int) -> StructuredOutputs:
    return StructuredOutputs(regex=f"a{{{number}}}")


async def test_a_grammar_lives_as_long_as_who_asked_for_it(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "MAX_IDLE", 2)
    waiting = wants(1)
    await compiler.check(waiting)
    for number in range(2, 9):
        await compiler.check(wants(number))  # and is gone
    may_go_on.clear()  # whoever compiled now would wait
    assert compiler.matcher(waiting).compute_ff_bytes() == b"a"
    assert len(compiled) == 8
    await compiler.check(wants(8))  # kept, as there is room
    may_go_on.set()
    await compiler.check(wants(2))
    assert len(compiled) == 9


async def test_grammars_in_use_are_bounded(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "LEAST_BYTES", 1 << 20)  # more than a small one takes
    monkeypatch.setattr(grammars, "MAX_HELD_BYTES", (2 << 20) + 300)
    holders = [wants(1), wants(1), wants(2)]
    await asyncio.gather(*map(compiler.check, holders))
    with pytest.raises(EngineOverloadedError, match=r"that take .* bytes of memory are in use"):
        await compiler.check(wants(3))
    holders.pop()
    await compiler.check(wants(3))
    assert len(compiled) == 3


async def test_what_many_ask_for_at_once_is_compiled_once(compiler, monkeypatch) -> None:
    monkeypatch.setattr(grammars, "MAX_TRIALS", 1)
    may_go_on.clear()
    same = [asyncio.create_task(compiler.check(wants(5))) for _ in range(3)]
    left = asyncio.create_task(compiler.check(wants(6)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    del left
    last = asyncio.create_task(compiler.check(wants(7)))
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*same, last)
    assert len(compiled) == 2  # who has left is not waited for


async def test_a_grammar_that_the_machine_has_no_time_for_is_not_told_to_be_bad(
    compiler, monkeypatch
) -> None:
    """Its trial has bounded the processor time that it takes."""
    monkeypatch.setattr(grammars, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(grammars, "MAX_TRIALS", 1)
    may_go_on.clear()
    told = await asyncio.gather(
        compiler.check(wants(1)), compiler.check(wants(2)), return_exceptions=True
    )
    assert [type(error) for error in told] == [EngineOverloadedError] * 2


async def test_the_start_of_the_process_of_trials_is_not_counted_as_time_of_a_grammar(
    compiler, monkeypatch
) -> None:
    """With a large vocabulary it takes longer than any grammar may, where the machine is busy."""
    make_setup = compiler._make_setup

    def late() -> object:
        time.sleep(3.1)
        return make_setup()

    monkeypatch.setattr(compiler, "_make_setup", late)
    monkeypatch.setattr(grammars, "MAX_SECONDS", 3.0)
    await compiler.check(wants(1))
    assert len(compiled) == 1


async def test_numbers_of_any_size_may_stand_in_a_schema(compiler) -> None:
    await compiler.check(StructuredOutputs(json={"type": "integer", "maximum": 10**30}))
