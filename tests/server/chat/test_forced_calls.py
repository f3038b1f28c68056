"""Calls that have to be made or kept to, by the embedded model, which has never seen one."""

import json
import random
import re
from functools import cache, lru_cache, partial
from pathlib import Path

import pytest

from aioserve.config import EngineConfig, ModelConfig, RunnerConfig, ServerConfig
from aioserve.engine import Conversation
from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.engine.chat.tools import FunctionDefinition, bind, leaves_room_for_reasoning, tool_use
from aioserve.errors import RequestError
from aioserve.features.formats import SHIPPED, Arguments, joined, load_format
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams, StructuredOutputs
from tests.server.scripted import EMBEDDED, make_model
from tests.server.serving import running
from tests.slow import mostly_slow

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


def reasoning_for(parser, marks):
    """These marks, unless the format reads whole replies."""
    return "auto" if load_format(parser).reads_reasoning else marks


def serve(parser):
    # One thread: on a busy machine two of them mostly wait for each other.
    return running(
        EngineConfig(
            runner=RunnerConfig(threads=1),
            server=ServerConfig(
                tool_call_parser=parser, reasoning_parser=reasoning_for(parser, "none")
            ),
        )
    )


@pytest.mark.asyncio(loop_factories=["uvloop"])  # a model is loaded for each
@pytest.mark.parametrize("parser", mostly_slow(SHIPPED, but=["hermes", "nemotron"]))
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


def using(*tools, choice="required", **fields):
    offered = {
        f"tools[{i}]": FunctionDefinition(**tool["function"], **fields)
        for i, tool in enumerate(tools)
    }
    return tool_use(offered, choice, is_parallel=False)


ADD = using(TOOLS[0])
PAINT = '{"name": "paint", "arguments": {"is_it": true, "colour": "red"}}'


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """By chat template and special token: a model's tokenizer, and what compiles for it."""

    @cache
    def made(template, special):
        info = ModelInfo(
            ModelConfig(model=make_model(tmp_path_factory.mktemp("m"), template, special))
        )
        return info, GrammarCompiler(info)

    return made


@lru_cache(maxsize=2)  # what renders the template of one is a process
def chat_format_of(info, parser, reasoning):
    return ChatFormat(info.tokenizer, parser, reasoning)


@pytest.fixture
def takes(compilers):
    """Whether a reply may be all of a text."""

    async def takes(
        text, parser, reasoning, *, template="x", special="<|pad|>", use=ADD, ask=ASK, **wanted
    ):
        info, compiler = compilers(template, special)
        chat_format = chat_format_of(info, parser, reasoning)
        params = SamplingParams(structured_outputs=StructuredOutputs(**wanted) if wanted else None)
        bound = bind(params, use, chat_format, ask).structured_outputs
        await compiler.check(bound)
        matcher = compiler.matcher(bound)
        ids = info.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

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


async def test_a_conversation_whose_prompt_opens_no_reasoning_is_bound_from_its_first_word(takes):
    call = f"<tool_call>\n{PAINT}\n</tool_call>"
    template = (
        "{% if not add_generation_prompt %}{{ messages[-1].content }}"
        "{% elif enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    )
    said = [*ASK.messages, {"role": "assistant", "content": "So:"}]
    thinks = partial(takes, call, "hermes", "qwen3", template=template)
    assert not await thinks(ask=ASK)
    assert await thinks(ask=Conversation(ASK.messages, reasoning_effort="none"))
    assert await thinks(ask=Conversation(said, continue_final_message=True))


async def test_tools_whose_rules_would_take_megabytes_are_refused():
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(200)}
    schema = {
        "type": "object",
        "$defs": {**chain, "d200": {"type": "string"}},
        "properties": {f"p{i}": {"type": "object", "$ref": "#/$defs/d0"} for i in range(200)},
    }
    tool = {"type": "function", "function": {"name": "x", "parameters": schema}}
    async with serve("qwen3_coder") as server:
        answer = await server.chat(tools=[tool], tool_choice="required")
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, "tools")
        assert "262,144 characters" in error["message"]


async def test_a_mark_that_is_a_special_token_is_written_as_that(takes):
    assert await takes(f"[TOOL_CALLS][{PAINT}]", "mistral", "none", special="[TOOL_CALLS]")
    assert await takes(f"[TOOL_CALLS][{PAINT}]", "mistral", "none")


CHANNELS = f"{Path(__file__).parents[2] / 'formats' / 'channels.py'}:ChannelFormat"


@pytest.mark.parametrize("special", ["<|pad|>", "<|channel|>", "<|done|>", "<|text|>"])
async def test_a_format_of_whole_replies_binds_its_reasoning_and_its_answer_too(takes, special):
    with_it = {"special": special}
    call = f"<|channel|>call paint<|text|>{ARGUMENTS}<|done|>"
    thought = "<|channel|>thought<|text|>Hm.<|done|>"
    assert await takes(call, CHANNELS, "auto", **with_it)
    assert await takes(thought + call, CHANNELS, "auto", **with_it)
    assert not await takes(f"Hm. {call}", CHANNELS, "auto", **with_it)
    assert not await takes(call.replace(ARGUMENTS, WRONG), CHANNELS, "auto", **with_it)
    answer = '<|channel|>answer<|text|>{"hair": "red"}<|done|>'
    assert await takes(thought + answer, CHANNELS, "auto", use=None, json=HAIR, **with_it)
    assert not await takes('{"hair": "red"}', CHANNELS, "auto", use=None, json=HAIR, **with_it)
    strict = {"use": STRICT, **with_it}
    assert await takes(thought + call, CHANNELS, "auto", **strict)
    assert await takes(f"Hm. {call} Ay.", CHANNELS, "auto", **strict)
    assert not await takes(call.replace(ARGUMENTS, WRONG), CHANNELS, "auto", **strict)


STRICT = using(TOOLS[0], choice="auto", strict=True)
ARGUMENTS, WRONG = '{"is_it": true, "colour": "red"}', '{"is_it": 5}'
BLOCK, BLOCK_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
ONE = "<|tool▁call▁begin|>paint<|tool▁sep|>@<|tool▁call▁end|>".replace("|", "\uff5c")
FENCED = ONE.replace("paint", "function").replace("@", "paint\n```json\n@\n```")
OBJECT = '{"name": "paint", "arguments": @}'
BY_ITSELF = [
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS][{OBJECT}, {OBJECT}]"),
    ("mistral", "[TOOL_CALLS]paint[ARGS]@"),
    ("deepseek_v31", BLOCK + ONE + ONE + BLOCK_END),
    ("deepseek_v31", ONE),
    ("deepseek_v3", BLOCK + FENCED + BLOCK_END),
    ("llama3_json", '<|python_tag|>{"name": "paint", "parameters": @}'),
]
BARE = [
    ("llama3_json", '{"name": "paint", "parameters": @}; ' + OBJECT),
    ("json", f"[{OBJECT},\n{OBJECT}]"),
    ("json", '{ "type" : "function", "name":"paint","parameters":\n@\n}'),
    ("hermes", OBJECT),
    ("hermes", f"\n```json\n{OBJECT}\n{OBJECT}\n```"),
]


@pytest.mark.parametrize(
    ("parser", "text"), mostly_slow(BY_ITSELF + BARE, but=[*BY_ITSELF[:2], *BARE[:2], *BARE[-2:]])
)
async def test_a_call_that_the_model_begins_keeps_to_its_strict_schema(takes, parser, text):
    good, bad = text.replace("@", ARGUMENTS), text.replace("@", WRONG)
    assert await takes(good, parser, "none", use=STRICT)
    assert await takes(f"{good} And so,\n {{it}} is.", parser, "none", use=STRICT)
    assert not await takes(bad, parser, "none", use=STRICT)
    marked = (parser, text) in BY_ITSELF
    assert await takes(f"Hm. {good}", parser, "none", use=STRICT)
    assert await takes(f"Hm. {bad}", parser, "none", use=STRICT) != marked
    # Reasoning is free, and may mention what it likes.
    for reasoning, template in (("qwen3", "x"), ("qwen3", "<think>\n"), ("deepseek_r1", "x")):
        opening = "" if (reasoning, template) != ("qwen3", "x") else "\n<think>"
        thinking = {"reasoning": reasoning, "template": template, "use": STRICT}
        assert await takes(f"{opening}Hm: {bad}", parser, **thinking)
        assert await takes(f"{opening}Hm: {bad}</think>\n\n{good}", parser, **thinking)
        assert not await takes(f"{opening}Hm.</think>{bad}", parser, **thinking)


PIECES = ["<think>", "</think>", "<tool_", "[", "]", ",", "Hm.", "paint", "function", "}", " "]
PIECES += ["[TOOL_CALLS]", "[ARGS]", "```json", "<tool_call>", "</tool_call>", "\n", BLOCK]
PIECES += ["```", OBJECT.replace("@", ARGUMENTS), OBJECT.replace("@", WRONG)]
PIECES += [BLOCK_END, WRONG, ARGUMENTS, '{"name": "paint", "arguments": ', '{"arguments": ']
PIECES += re.split("(paint|@)", ONE)


@pytest.mark.parametrize("parser", ["hermes", "mistral", "deepseek_v3", "deepseek_v31"])
async def test_no_call_is_read_in_what_is_allowed_that_breaks_a_strict_schema(compilers, parser):
    info, compiler = compilers("x", "<|pad|>")
    encode = partial(info.tokenizer.encode, add_special_tokens=False)
    chat_format = ChatFormat(info.tokenizer, parser, "qwen3")
    bound = bind(SamplingParams(), STRICT, chat_format, ASK).structured_outputs
    await compiler.check(bound)
    pieces = PIECES + [text.replace("@", ARGUMENTS) for name, text in BY_ITSELF if name == parser]
    rng, num_calls = random.Random(parser), 0
    for _ in range(150):
        matcher, text = compiler.matcher(bound), ""
        for piece in rng.choices(pieces, k=12):
            ids = encode(piece)
            num_taken = matcher.try_consume_tokens(ids)
            if num_taken == len(ids):
                text += piece
            elif num_taken:
                matcher.rollback(num_taken)
        reading = chat_format.make_parser(STRICT.functions, encode("x"), with_reasoning=True)
        events = joined([*reading.append(text), *reading.flush()])
        arguments = [event.text for event in events if isinstance(event, Arguments)]
        # In the last one the text may stop.
        assert set(arguments[: None if matcher.is_accepting() else -1]) <= {ARGUMENTS}, text
        num_calls += len(arguments)
    assert num_calls > 20


async def test_text_and_calls_of_other_tools_stay_free(takes):
    for parser in SHIPPED:
        for text in ("", "Ay, so please you.", '{"hair": "red"}', "<think", "<tool_cal"):
            assert await takes(text, parser, reasoning_for(parser, "qwen3"), use=STRICT)
    strict, free = (FunctionDefinition(**tool["function"]) for tool in TOOLS)
    strict.strict = True
    mixed = tool_use({"a": strict, "b": free}, "auto")
    for name, arguments, expected in (
        ("sell", WRONG, True),
        ("sell", "5", False),
        ("paint", WRONG, False),
        ("lend", ARGUMENTS, False),
    ):
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        assert await takes(call, "hermes", "none", use=mixed) == expected
    chat_format = ChatFormat(ModelInfo(ModelConfig()).tokenizer, "hermes", "none")
    assert (
        bind(SamplingParams(), using(*TOOLS, choice="auto"), chat_format, ASK) == SamplingParams()
    )


async def test_marks_that_are_special_tokens_begin_calls_and_reasoning(takes):
    text = f"Hm. [TOOL_CALLS][{PAINT}]"
    special = {"special": "[TOOL_CALLS]", "use": STRICT}
    assert await takes(text, "mistral", "none", **special)
    assert not await takes(text.replace("true", "5"), "mistral", "none", **special)
    special = {"special": "<think>", "use": STRICT}
    assert await takes(f"<think>Hm. {text[:-4]}5</think>{text}", "mistral", "qwen3", **special)
    assert not await takes(f"<think>Hm.</think>{text[:-4]}5", "mistral", "qwen3", **special)


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_model_that_is_pushed_into_calls_makes_those_that_are_strict(tmp_path):
    model = make_model(tmp_path, "{{ messages[0].content }}", "<tool_call>")
    (tmp_path / "model.safetensors").symlink_to(EMBEDDED / "model.safetensors")
    config = EngineConfig(
        model=ModelConfig(model=model),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(tool_call_parser="hermes"),
    )
    push = {"logit_bias": {0: 100}, "max_tokens": 300, "seed": 1}
    async with running(config) as server:
        for strict in (True, False):
            tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
            answer = await server.chat(tools=tools, **push)
            calls = answer.json()["choices"][0]["message"].get("tool_calls", [])
            assert len(calls) > 3 or not strict
            assert not calls or strict
            for call in calls[:-1]:  # the last one is cut
                assert call["function"]["name"] in ("paint", "sell")
                assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")


def test_text_that_is_bound_otherwise_is_no_reasoning():
    bound = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert not leaves_room_for_reasoning(bound, None)
    assert leaves_room_for_reasoning(bound, ADD)
    assert leaves_room_for_reasoning(SamplingParams(), None)
    free = using(TOOLS[0], choice="auto")
    chat_format = ChatFormat(ModelInfo(ModelConfig()).tokenizer, "hermes", "none")
    with pytest.raises(RequestError, match="leaves no room for the calls"):
        bind(bound, free, chat_format, ASK)


@pytest.mark.parametrize("parser", SHIPPED)
async def test_a_mark_that_the_tokenizer_does_not_know_is_text(parser):
    tokenizer = ModelInfo(ModelConfig()).tokenizer
    tokenizer.unk_token = tokenizer.eos_token  # as SmolLM2's: what it says for all it does not know
    chat_format = ChatFormat(tokenizer, parser, reasoning_for(parser, "qwen3"))
    marks = {*load_format(parser).markers, "<think>"}
    known = marks & tokenizer.get_vocab().keys()  # the end of a text, in harmony
    for mark in marks - known:
        assert chat_format.literal(mark) == json.dumps(mark, ensure_ascii=False)
    assert len(chat_format.kept_special_tokens) == len(known) <= 1
