"""Calls that have to be made, by the embedded model, which has never seen one."""

import json

import pytest
from scripted import make_model
from serving import running

from aioserve.config import EngineConfig, ModelConfig, RunnerConfig, ServerConfig
from aioserve.engine import Conversation
from aioserve.errors import RequestError
from aioserve.grammars import GrammarCompiler
from aioserve.model_info import ModelInfo
from aioserve.sampling_params import SamplingParams
from aioserve.server.chat.binding import bind, leaves_room_for_reasoning
from aioserve.server.chat.tool_use import ToolUse
from aioserve.server.formats.chat_format import CALL_PARSERS, ChatFormat
from aioserve.structured_outputs import StructuredOutputs

PARAMETERS = {
    "type": "object",
    "properties": {"is_it": {"type": "boolean"}, "colour": {"$ref": "#/$defs/colour"}},
    "required": ["is_it", "colour"],
    "additionalProperties": False,
    "$defs": {"colour": {"enum": ["red", "blue"], "description": 'a ::= "//" \n b'}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("paint", "sell")
]
SELL = {"type": "function", "function": {"name": "sell"}}
HAIR = {"type": "object", "properties": {"hair": {"enum": ["red"]}}, "required": ["hair"]}


def serve(parser):
    # One thread: on a busy machine two of them mostly wait for each other.
    return running(
        EngineConfig(
            runner=RunnerConfig(threads=1),
            server=ServerConfig(tool_call_parser=parser, reasoning_parser="none"),
        )
    )


@pytest.mark.asyncio(loop_factories=["uvloop"])  # a model is loaded for each
@pytest.mark.parametrize("parser", CALL_PARSERS)
async def test_a_forced_call_is_one_of_the_tools_and_fits_its_schema(parser):
    async with serve(parser) as server:
        for choice, stream in (("required", False), ("required", True), (SELL, False)):
            answer = await server.chat(
                tools=TOOLS, tool_choice=choice, stream=stream, seed=1, max_tokens=3000
            )
            assert answer.status == 200, answer
            if stream:
                choices = [event["choices"][0] for event in answer.events()]
                reason = choices[-1]["finish_reason"]
                calls = {}
                for delta in (d for c in choices for d in c["delta"].get("tool_calls", ())):
                    name, text = calls.get(delta["index"], ("", ""))
                    function = delta["function"]
                    name += function.get("name", "")
                    calls[delta["index"]] = (name, text + function["arguments"])
                calls = list(calls.values())
            else:
                [whole] = answer.json()["choices"]
                reason = whole["finish_reason"]
                assert whole["message"]["content"] is None
                functions = [call["function"] for call in whole["message"]["tool_calls"]]
                calls = [(function["name"], function["arguments"]) for function in functions]
            assert reason == "tool_calls"
            assert 1 <= len(calls) <= (1 if choice == SELL else 16)
            for name, text in calls:
                assert name in ("paint", "sell") if choice == "required" else name == "sell"
                arguments = json.loads(text)
                assert arguments.keys() == {"is_it", "colour"}
                assert type(arguments["is_it"]) is bool
                assert arguments["colour"] in ("red", "blue")


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_schema_of_the_content_leaves_room_for_calls():
    async with serve("hermes") as server:
        form = {"type": "json_schema", "json_schema": {"name": "hair", "schema": HAIR}}
        answer = await server.chat(tools=TOOLS, response_format=form, max_tokens=1500, seed=1)
        message = answer.json()["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"])["hair"] == "red"
        answer = await server.chat(tools=TOOLS, structured_outputs={"regex": "a+"})
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, "structured_outputs.regex")
        unknown = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
        tool = {"type": "function", "function": {"name": "x", "parameters": unknown}}
        answer = await server.chat(tools=[tool], tool_choice="required")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "tools")
        assert (await server.chat(max_tokens=1)).status == 200


ASK = Conversation([{"role": "user", "content": "Hi"}])
ADD = ToolUse([TOOLS[0]], ("paint",), must_call=True, is_parallel=False)
PAINT = '{"name": "paint", "arguments": {"is_it": true, "colour": "red"}}'


@pytest.fixture
def takes(tmp_path):
    """Whether a reply may be all of a text."""

    async def takes(text, parser, reasoning, *, template="x", special="<|pad|>", use=ADD, **wanted):
        model = ModelConfig(model=make_model(tmp_path, template, special))
        info = ModelInfo(model)
        chat_format = ChatFormat(info.tokenizer, parser, reasoning)
        params = SamplingParams(structured_outputs=StructuredOutputs(**wanted) if wanted else None)
        bound = bind(params, use, chat_format, ASK).structured_outputs
        compiler = GrammarCompiler(info)
        try:
            await compiler.check(bound)
            matcher = compiler.matcher(bound)
            ids = info.tokenizer.encode(text, add_special_tokens=False)
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        finally:
            compiler.close()

    return takes


async def test_what_is_bound_may_follow_reasoning(takes):
    call = f"<tool_call>\n{PAINT}\n</tool_call>"
    assert await takes(f"Hm.</think>\n\n{call}", "hermes", "qwen3", template="<think>\n")
    assert not await takes(call, "hermes", "qwen3", template="<think>\n")
    assert await takes(f"<think>Hm.</think>\n\n{call}", "hermes", "qwen3")
    assert await takes(call, "hermes", "qwen3")
    assert not await takes(f"Hm. {call}", "hermes", "qwen3")
    special = {"template": "<think>", "special": "</think>"}
    assert await takes(f"Hm.</think>{call}", "hermes", "qwen3", **special)
    answer = '<think>Hm.</think>{"hair": "red"}'
    assert await takes(answer, "none", "qwen3", use=None, json=HAIR)
    assert not await takes("Hm.", "none", "qwen3", use=None, json=HAIR)


async def test_a_mark_that_is_a_special_token_is_written_as_that(takes):
    assert await takes(f"[TOOL_CALLS][{PAINT}]", "mistral", "none", special="[TOOL_CALLS]")
    assert await takes(f"[TOOL_CALLS][{PAINT}]", "mistral", "none")


def test_text_that_is_bound_otherwise_is_no_reasoning():
    bound = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert not leaves_room_for_reasoning(bound, None)
    assert leaves_room_for_reasoning(bound, ADD)
    assert leaves_room_for_reasoning(SamplingParams(), None)
    free = ToolUse([TOOLS[0]], ("paint",), must_call=False, is_parallel=False)
    chat_format = ChatFormat(ModelInfo(ModelConfig()).tokenizer, "hermes", "none")
    with pytest.raises(RequestError, match="leaves no room for the calls"):
        bind(bound, free, chat_format, ASK)
