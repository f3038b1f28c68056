"""Calls, grammars, stop strings and budgets over the added tokens of real families, over HTTP.

Every family by the embedded weights, which have seen none of its tokens, and by a script that
writes them as its models do; and every format with its marks as tokens of each kind.
"""

import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, ServerConfig
from aioserve.engine import Conversation
from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.engine.chat.tools import FunctionDefinition, bind, tool_use
from aioserve.features.formats import SHIPPED, Reply, SaidCall, load_format
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from tests.added_tokens import FAMILIES, Family, family_model
from tests.server.scripted import saying
from tests.server.serving import Answer, Server, running
from tests.slow import mostly_slow

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NAMES = tuple(SHIPPED)  # of all formats
PARAMETERS = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}, "at": {"enum": ["sea", "sky"]}},
    "required": ["far", "at"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("look", "listen")
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
LOOK = {"type": "function", "function": {"name": "look"}}
CALL = SaidCall("look", {"far": True, "at": "sea"})
ASK = Conversation([{"role": "user", "content": "Hi"}])


def calls_in(answer: Answer, stream: bool) -> tuple[list[tuple[str, Any]], str | None, str]:
    """The calls of a reply, why it ended, and its content."""
    assert answer.status == 200, answer
    if not stream:
        [choice] = answer.json()["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        named = [(each["name"], each["arguments"]) for each in functions]
        content = message["content"] or ""
    else:
        choices = [event["choices"][0] for event in answer.events()]
        choice, calls, content = choices[-1], dict[int, list[str]](), ""
        for delta in (each["delta"] for each in choices):
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                name, text = calls.get(call["index"], ("", ""))
                own = call["function"]
                calls[call["index"]] = [name + own.get("name", ""), text + own["arguments"]]
        named = [(name, text) for name, text in calls.values()]
    return [(name, json.loads(text)) for name, text in named], choice["finish_reason"], content


@asynccontextmanager
async def serving(family: Family, path: Path, **settings: Any) -> AsyncIterator[Server]:
    """A server of a model of the family with the embedded weights."""
    parsers = {"tool_call_parser": family.parser, "reasoning_parser": family.reasoning}
    config = EngineConfig(
        model=ModelConfig(model=family_model(family, path), max_model_len=2048),
        cache=CacheConfig(kv_cache_gib=0.05),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(**{**parsers, **settings}),
    )
    async with running(config) as server:
        yield server


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, but=["gpt_oss"]))
async def test_a_model_is_forced_into_calls_and_texts_with_its_added_tokens(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    texts = [text for text in family.texts if text.startswith("<")]
    fields = {"max_tokens": 900}
    if family.reasoning != "none":
        fields["thinking_token_budget"] = 2
    async with serving(family, tmp_path / "m") as server:
        for stream in (False, True):
            for choice in ("required", LOOK):
                answer = await server.chat(
                    tools=TOOLS, tool_choice=choice, stream=stream, seed=1, **fields
                )
                calls, reason, content = calls_in(answer, stream)
                assert (reason, content) == ("tool_calls", "")
                assert 1 <= len(calls) <= (1 if choice == LOOK else 16)
                for called, arguments in calls:
                    assert called == "look" or choice == "required"
                    assert arguments.keys() == {"far", "at"}
            for tools in (TOOLS, STRICT):
                answer = await server.chat(tools=tools, stream=stream, max_tokens=20, seed=1)
                assert answer.status == 200, answer
        for text in [*texts, *family.controls, *family.eos]:
            answer = await server.complete(
                max_tokens=60, structured_outputs={"choice": [f"{text}yes {text}"]}
            )
            assert answer.status == 200, answer
            [choice] = answer.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == (f"{text}yes {text}", "stop")
        for text in texts:
            bound = {"structured_outputs": {"regex": f"ab{re.escape(text)}c"}, "max_tokens": 60}
            for extra, left in (({}, "ab"), ({"include_stop_str_in_output": True}, f"ab{text}")):
                answer = await server.complete(stop=[text], **bound, **extra)
                [choice] = answer.json()["choices"]
                assert (choice["text"], choice["finish_reason"]) == (left, "stop")


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, but=["gemma", "mistral", "phi", "qwen"]))
async def test_a_call_in_the_tokens_of_its_family_is_read_and_may_be_strict(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    (path := tmp_path / "m").mkdir()
    kind = load_format(family.parser)
    said = kind.write(Reply(calls=[CALL]))

    def make(path: Path, template: str, special: str) -> str:
        return family_model(family, path)

    settings = {"tool_call_parser": family.parser, "reasoning_parser": family.reasoning}
    async with saying(said, path, "", make=make, **settings) as server:
        for stream in (False, True):
            for tools, choice in ((TOOLS, "auto"), (STRICT, "auto"), (TOOLS, "required")):
                answer = await server.chat(tools=tools, tool_choice=choice, stream=stream)
                calls, reason, content = calls_in(answer, stream)
                assert calls == [CALL]
                assert (reason, content.strip()) == ("tool_calls", "")


async def test_a_budget_ends_the_reasoning_by_the_mark_that_is_a_token_of_text(
    tmp_path: Path,
) -> None:
    template = "{{ messages[-1].content }}<think>\n"
    family = FAMILIES["qwen"]._replace(template=template)
    async with serving(family, tmp_path / "m") as server:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
        for fields in ({}, {"response_format": form}, {"tools": TOOLS, "tool_choice": "required"}):
            for limit in (0, 3):
                answer = await server.chat(
                    thinking_token_budget=limit, max_tokens=600, temperature=0, **fields
                )
                assert answer.status == 200, answer
                told = answer.json()
                [choice] = told["choices"]
                details = told["usage"]["completion_tokens_details"]
                assert details == {"reasoning_tokens": limit}, fields
                message = choice["message"]
                assert bool(message.get("reasoning_content")) == (limit > 0)
                assert "think>" not in (message["content"] or "")
                if "response_format" in fields:
                    assert json.loads(message["content"]).keys() == {"far", "at"}
                if "tools" in fields:
                    assert choice["finish_reason"] == "tool_calls"


def marks_of(name: str) -> list[str]:
    """What a format writes around its parts, as a tokenizer has it for a token."""
    return [m for m in load_format(name).markers if m[0] in "<[" and m[-1] in ">]"]


@pytest.fixture(scope="module")
def bound_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A model whose tokenizer has the marks of all formats as tokens, and what compiles for it."""
    compilers: list[GrammarCompiler] = []

    @functools.cache
    def made(is_special: bool) -> tuple[ModelInfo, GrammarCompiler]:
        marks = tuple(dict.fromkeys(mark for name in NAMES for mark in marks_of(name)))
        own = {"controls": marks} if is_special else {"controls": (), "texts": marks}
        family = Family(eos=("<|over|>",), template="x", **own)
        info = ModelInfo(ModelConfig(model=family_model(family, tmp_path_factory.mktemp("marks"))))
        compilers.append(GrammarCompiler(info))
        return info, compilers[-1]

    yield made
    for compiler in compilers:
        compiler.close()


@pytest.mark.parametrize("is_special", mostly_slow([True, False], but=[True]))
@pytest.mark.parametrize("parser", NAMES)
async def test_a_format_takes_its_marks_as_the_tokens_that_they_are(
    parser: str, is_special: bool, bound_model: Callable[..., Any]
) -> None:
    kind = load_format(parser)
    info, compiler = bound_model(is_special)
    for mark in marks_of(parser):
        assert len(info.tokenizer.encode(mark, add_special_tokens=False)) == 1
    chat_format = ChatFormat(info.tokenizer, parser, "auto" if kind.reads_reasoning else "none")
    offered = {"tools[0]": FunctionDefinition(name="look", parameters=PARAMETERS, strict=True)}
    said = kind.write(Reply(calls=[CALL]))
    ids = info.tokenizer.encode(said, add_special_tokens=False)
    for choice in ("required", "auto"):
        use = tool_use(offered, choice, is_parallel=False)
        wanted = bind(SamplingParams(), use, chat_format, ASK).structured_outputs
        if wanted is None:
            continue  # nothing tells where its calls begin
        await compiler.check(wanted)
        matcher = compiler.matcher(wanted)
        ahead = matcher.compute_ff_tokens()
        assert matcher.validate_tokens(ahead) == len(ahead)
        assert choice == "auto" or not ahead or ids[: len(ahead)] == ahead
        assert matcher.try_consume_tokens(ids) == len(ids), (said, choice)
        assert matcher.is_accepting()
