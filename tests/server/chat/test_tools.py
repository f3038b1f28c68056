"""Tool calls and reasoning over a real socket, of a model that says what it is told to."""

import ast
import json
import random
import re
from itertools import product
from pathlib import Path

import msgspec
import openai
import pytest

from aioserve import AsyncEngine
from aioserve.config import ModelConfig, ServerConfig
from aioserve.engine.chat.chat_format import say_format
from tests import processes
from tests.processes import PATIENCE
from tests.server.scripted import HERMES, THINKING, TWO_CALLS, make_model, saying
from tests.server.serving import SIMULATED

MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "sub")
]


@pytest.fixture
def say(tmp_path):
    """`async with say(text, template) as server:` whatever it is asked, it says `text`."""

    def say(text, template=HERMES, special="<|pad|>", **settings):
        return saying(text, tmp_path, template, special, "m", **settings)

    return say


@pytest.mark.parametrize(
    ("parser", "template", "words"),
    [
        ("hermes", "{{ messages }}", "parser is hermes, but the chat template names no tools: req"),
        ("json", "", "parser is json, but there is no chat template: every chat is refused; "),
        ("hermes", HERMES, None),
        ("auto", "{{ messages }}", None),
        ("none", "{{ messages }}", None),
    ],
)
async def test_a_parser_of_tools_that_the_model_never_hears_of_is_said_at_the_start(
    parser, template, words, tmp_path, caplog
):
    path = make_model(tmp_path, template)
    if not template:
        (tmp_path / "chat_template.jinja").unlink()
    config = msgspec.structs.replace(
        SIMULATED,
        model=ModelConfig(model=path),
        server=ServerConfig(tool_call_parser=parser),
    )
    async with AsyncEngine(config) as engine:
        caplog.clear()
        caplog.set_level("INFO")
        say_format(engine.model_info.tokenizer, engine.config.server)
    said = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert [line for line in said if line.startswith("format of replies: ")]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.slow
def test_the_command_says_it_too():
    words = ("--runner", "simulated", "--tool-call-parser", "hermes")
    with processes.serving(*words) as (process, _):
        lines = processes.read_lines(process)
        while "the chat template names no tools" not in (line := lines.get(timeout=PATIENCE)):
            pass
        assert "WARNING" in line


def test_the_code_of_the_page_forces_a_call_of_the_embedded_model(capsys):
    page = (Path(__file__).parents[3] / "docs/tools.md").read_text()
    section = page.partition("\n## Try it without")[2].partition("\n## ")[0]
    [command] = re.findall(r"```bash\npython -m aioserve (.*?)\n```", section)
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    with processes.serving(*command.split()) as (process, url):
        processes.read_lines(process)
        exec(compile(code.replace("http://127.0.0.1:8000", url), "tools.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        name, _, arguments = line.partition(" ")
        assert name == "paint"
        called = ast.literal_eval(arguments)
        assert called.keys() == {"colour", "coats"}
        assert called["colour"] in ("red", "blue")
        assert called["coats"] in (1, 2, 3)


def message_of(answer):
    assert answer.status == 200, answer
    [choice] = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def calls_of(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


async def test_a_client_calls_tools_and_answers_them(say):
    async with (
        say(TWO_CALLS) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "What is 1 and 2?"}]
        ask = {"model": "m", "messages": messages, "tools": TOOLS}
        whole = (await client.chat.completions.create(**ask)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "Let me see."
        calls = [call.function for call in whole.message.tool_calls]
        assert [(call.name, call.arguments) for call in calls] == [
            ("add", '{"a": 1}'),
            ("sub", '{"ä": [2, "</tool_call>"]}'),
        ]
        async with client.chat.completions.stream(**ask) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == whole.message.content
        for call, other in zip(streamed.message.tool_calls, whole.message.tool_calls, strict=True):
            assert (call.function.name, call.function.arguments) == (
                other.function.name,
                other.function.arguments,
            )
        messages += [whole.message.model_dump(exclude_unset=True)]
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "3"}
            for call in whole.message.tool_calls
        ]
        answered = await client.chat.completions.create(**ask)
        assert answered.usage.prompt_tokens > 0


async def test_arguments_are_streamed_as_openai_streams_them(say):
    async with say(TWO_CALLS) as server:
        answer = await server.chat(tools=TOOLS, stream=True)
    choices = [event["choices"][0] for event in answer.events()]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "tool_calls"
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    for index, name in enumerate(("add", "sub")):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"}
        assert first["type"] == "function"
        assert first["function"] == {"name": name, "arguments": ""}
        assert len(rest) > 2
        assert all(delta.keys() == {"index", "function"} for delta in rest)
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == "Let me see."


async def test_without_tools_or_with_choice_none_nothing_is_read(say):
    async with say(TWO_CALLS) as server:
        plain = await server.chat()
        none = await server.chat(tools=TOOLS, tool_choice="none")
        assert message_of(plain) == message_of(none)
        assert message_of(none)[0]["content"] == TWO_CALLS
        tokens = [answer.json()["usage"]["prompt_tokens"] for answer in (plain, none)]
        assert tokens[0] == tokens[1]
        asked = await server.chat(tools=TOOLS)
        assert asked.json()["usage"]["prompt_tokens"] > tokens[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_there_is_one(say, stream):
    async with say(TWO_CALLS) as server:
        answer = await server.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in answer.events()]
        assert {call["index"] for d in deltas for call in d.get("tool_calls", ())} == {0}
    else:
        assert calls_of(message_of(answer)[0]) == [("add", {"a": 1})]


async def test_a_call_that_is_cut_says_so(say):
    async with say(TWO_CALLS) as server:
        encode = server.engine.model_info.tokenizer.encode
        limit = len(encode(TWO_CALLS[: TWO_CALLS.index("1}")]))
        message, reason = message_of(await server.chat(tools=TOOLS, max_tokens=limit))
    assert reason == "length"
    [call] = message["tool_calls"]
    function = {"name": "add", "arguments": '{"a": '}
    assert call == {"id": call["id"], "type": "function", "function": function}


ONE = '{"name": "add", "arguments": {"a": 1}}'
BARE = {
    ONE: 1,
    f" \n{ONE}\n": 1,
    f"```json\n{ONE}\n```": 1,
    f"```\n{ONE}\n```\n": 1,
    f"{ONE}\n{ONE}": 2,
    '{"name":"add","parameters":{}}': 1,
    f"{ONE} is what I call.": 0,
    f"I call {ONE}": 0,
    f"```python\n{ONE}\n```": 0,
    f"```json\n{ONE}\n```\nAy.": 0,
    f"{ONE}, {ONE}": 0,
    '{"name": "mul", "arguments": {"a": 1}}': 0,  # no tool
    '{"name": "add"}': 0,
    '{"name": "add", "arguments": [1]}': 0,
    '{"name": "add", "arguments": {"a": oh}}': 0,
    '{"name": "add", "arguments": {"a": 1}': 0,
    '{"name": "add", "arguments": {}, "why": 1}': 0,
    "```json": 0,
    "{": 0,
}


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_reply_that_is_the_json_of_a_tool_and_nothing_else_is_a_call(say):
    async with say("x", tool_call_parser="hermes") as server:
        for text, num_calls in BARE.items():
            server.say(text)
            message, reason = message_of(await server.chat(tools=TOOLS))
            assert len(calls_of(message)) == num_calls, text
            assert (message["content"] or "") == ("" if num_calls else text), text
            assert reason == ("tool_calls" if num_calls else "stop")
            streamed = await server.chat(tools=TOOLS, stream=True)
            deltas = [event["choices"][0]["delta"] for event in streamed.events()]
            told = "".join(delta.get("content") or "" for delta in deltas)
            names = [c for delta in deltas for c in delta.get("tool_calls", ()) if "id" in c]
            assert (len(names), told) == (num_calls, message["content"] or ""), text
            message, _ = message_of(await server.chat(tools=TOOLS, tool_choice="none"))
            assert message["content"] == text
        server.say('{"answer": {"name": "add"}} <tool_call>' + ONE + "</tool_call>")
        streamed = (await server.chat(tools=TOOLS, stream=True)).events()
        deltas = [event["choices"][0]["delta"] for event in streamed]
        pieces = [delta["content"] for delta in deltas if delta.get("content")]
        assert "".join(pieces) == '{"answer": {"name": "add"}}'
        assert len(pieces) > 5  # what can be no call is not held back
        assert any("tool_calls" in delta for delta in deltas)


BROKEN = [
    ("{'a': 1}}\n</tool_call>", True),  # broken before its first key: from there on it is no call
    ("[1]", True),  # no object
    ('{"a": "x" "b"}', False),  # broken behind it
    ('{"a": True}', False),
]


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_a_call_whose_arguments_are_no_object_is_content(say):
    good = '<tool_call>\n{"name": "sub", "arguments": {"a": 2}}\n</tool_call>'
    async with say("x") as server:
        for arguments, is_soon in BROKEN:
            bad = f'<tool_call>\n{{"name": "add", "arguments": {arguments}'
            bad += "" if arguments.endswith(">") else "}\n</tool_call>"
            told = f'{{"name": "add", "arguments": {arguments}'
            server.say(f"Let me see.\n{bad}\n{good}")
            message, reason = message_of(await server.chat(tools=TOOLS))
            assert calls_of(message) == [("sub", {"a": 2})]
            assert reason == "tool_calls"
            assert message["content"] == "Let me see." + told
            answer = await server.chat(tools=TOOLS, stream=True)
            choices = [event["choices"][0] for event in answer.events()]
            deltas = [call for each in choices for call in each["delta"].get("tool_calls", ())]
            names = [delta["function"]["name"] for delta in deltas if "name" in delta["function"]]
            # What breaks behind the first key was told as it came.
            assert names == (["sub"] if is_soon else ["add", "sub"]), arguments
            text = "".join(each["delta"].get("content") or "" for each in choices)
            assert text == ("Let me see." + told if is_soon else "Let me see.")
            server.say(bad)
            message, reason = message_of(await server.chat(tools=TOOLS))
            assert ("tool_calls" in message, reason, message["content"]) == (False, "stop", told)


PYTHON_ITEMS = """{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}[CALL {{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}]
{%- endfor %}
{% endfor %}"""
AS_TEXT = """{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments }}
{%- endfor %}{% endfor %}"""


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (HERMES, "<tool_call>QUOTED</tool_call>"),
        (AS_TEXT, "addTEXT"),
        (PYTHON_ITEMS, 'Hm.\n{"name": "add", "arguments": TEXT'),
    ],
)
async def test_a_history_with_arguments_that_do_not_parse_goes_on(say, template, shown):
    def call(name, arguments):
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{name}", "type": "function", "function": function}

    def turns(bad):
        return [
            {"role": "user", "content": "What is 1 and 2?"},
            {"role": "assistant", "content": "Hm.", "tool_calls": [call("add", bad)]},
            {"role": "tool", "tool_call_id": "call_add", "content": "no JSON"},
        ]

    good = {"role": "assistant", "content": None, "tool_calls": [call("sub", '{"a": 5}')]}
    answered = {"role": "tool", "tool_call_id": "call_sub", "content": "3"}
    async with say("Ay.", template, tool_call_parser="hermes") as server:
        for bad, more in product(
            ["{'a': 1}", '{"a": ', "[1]", "null", '{"a": 1e999'], ([], [good, answered])
        ):
            messages = [*turns(bad), *more]
            body = {"messages": messages, "tools": TOOLS}
            answer = await server.request("POST", "/v1/chat/completions", json=body)
            assert answer.status == 200, answer
            asked = server.prompts()[-1]
            assert shown.replace("QUOTED", json.dumps(bad)).replace("TEXT", bad) in asked
            assert ("5" in asked) == (len(messages) > 3)


async def test_a_reply_of_calls_alone_has_no_content(say):
    async with say(TWO_CALLS.removeprefix("Let me see.")) as server:
        message, _ = message_of(await server.chat(tools=TOOLS))
    assert message["content"] is None
    assert len(calls_of(message)) == 2


async def test_special_tokens_that_mark_calls_are_seen_and_no_others(say):
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]<|user|>'
    async with say(text, MISTRAL, special="[TOOL_CALLS]") as server:
        message, reason = message_of(await server.chat(tools=TOOLS))
    assert (calls_of(message), message["content"]) == ([("add", {"a": 1})], None)
    assert (len(message["tool_calls"][0]["id"]), reason) == (9, "tool_calls")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, "<think>\nHm, <tool_call>?\n</think>\n\n42"),
        (THINKING, "Hm, <tool_call>?\n</think>\n\n42"),
    ],
    ids=["the reply opens it", "the prompt opens it"],
)
async def test_reasoning_is_told_apart(say, template, text):
    async with say(text, template, reasoning_parser="qwen3") as server:
        for fields in ({}, {"tools": TOOLS}):
            message, _ = message_of(await server.chat(**fields))
            assert message["reasoning_content"] == "Hm, <tool_call>?"
            assert message["content"] == "42"
            events = (await server.chat(stream=True, **fields)).events()
            deltas = [event["choices"][0]["delta"] for event in events]
            for name, expected in (("reasoning_content", "Hm, <tool_call>?"), ("content", "42")):
                assert "".join(delta.get(name, "") for delta in deltas) == expected
            assert sum("reasoning_content" in delta for delta in deltas) > 2
        message, _ = message_of(await server.chat(include_reasoning=False))
        assert (message.get("reasoning_content"), message["content"]) == (None, "42")
        message, _ = message_of(await server.chat(separate_reasoning=False))
        assert (message.get("reasoning_content"), message["content"]) == (None, text)


async def test_every_choice_and_its_extensions_survive_the_reading(say):
    async with say(TWO_CALLS) as server:
        fields = {"tools": TOOLS, "n": 2, "return_token_ids": True, "logprobs": True}
        whole = (await server.chat(**fields)).json()["choices"]
        events = (await server.chat(stream=True, **fields)).events()
    none = {"content": []}
    for choice in whole:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        ids = [token_id for chunk in own for token_id in chunk.get("token_ids", ())]
        assert ids == choice["token_ids"]
        logprobs = [entry for chunk in own for entry in (chunk["logprobs"] or none)["content"]]
        assert logprobs == choice["logprobs"]["content"]


async def test_a_model_that_writes_no_known_calls_is_offered_no_tools(say):
    async with say("Hi", template="{{ messages[0].content }}") as server:
        answer = await server.chat(tools=TOOLS)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in answer.json()["error"]["message"]


async def test_a_template_that_never_ends_is_a_400_and_others_go_on(say, monkeypatch):
    monkeypatch.setattr("aioserve.engine.template_renderer.TEMPLATE_SECONDS", 0.2)
    endless = "{% if messages[0].content == 'x' %}{% for i in range(99999) %}"
    endless += "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ '<|user|>' }}"
    async with say("Hi", template=endless) as server:
        answer = await server.chat("x")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "messages")
        assert "takes too long" in answer.json()["error"]["message"]
        assert message_of(await server.chat("y"))[0]["content"] == "Hi"


def call(arguments="{}", **fields):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "function": function, **fields}]}


def tool(name="add", **function):
    return {"type": "function", "function": {"name": name, **function}}


def schema(**keywords):
    return {"tools": [tool(parameters={"type": "object", **keywords})]}


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "tool", "content": "3", "tool_call_id": "c1"}
IN_PROPERTIES = "tools[0].function.parameters.properties"
PARAMETERS = "tools[0].function.parameters"

BAD = [
    ({"messages": [USER, call(5)]}, "messages[1].tool_calls[0].function.arguments"),
    ({"tools": "add"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [tool(""), tool()]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools[2].function.name"),
    ({"tools": [tool(parametres={})]}, "tools[0].function.parametres"),
    ({"tools": [tool(parameters=[])]}, PARAMETERS),
    ({"tools": [tool(parameters={"type": "string"})]}, f"{PARAMETERS}.type"),
    (schema(properties=[]), f"{PARAMETERS}.properties"),
    (schema(properties={"a": "int"}), f"{PARAMETERS}.properties.a"),
    (schema(properties={"a": {"type": "int"}}), f"{PARAMETERS}.properties.a.type"),
    (
        schema(properties={"a": {"items": [{"enum": 5}]}}),
        f"{PARAMETERS}.properties.a.items[0].enum",
    ),
    (schema(required=["a", 5]), f"{PARAMETERS}.required"),
    (schema(**{"$defs": {"x": {"anyOf": [{}, 5]}}}), f"{PARAMETERS}.$defs.x.anyOf[1]"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": tool("sub")}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [USER, call(type="custom")]}, "messages[1].tool_calls[0].type"),
    ({"messages": [USER, call(index=0)]}, "messages[1].tool_calls[0].index"),
    ({"messages": [USER, {**call(), "role": "user"}]}, "messages[1].tool_calls"),
    ({"messages": [USER, call(), {**ANSWER, "tool_call_id": None}]}, "messages[2].tool_call_id"),
    ({"messages": [USER, call(), {**ANSWER, "content": None}]}, "messages[2].content"),
    ({"messages": [{**USER, "tool_call_id": "c1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "reasoning_content": "Hm"}]}, "messages[0].reasoning_content"),
    ({"messages": [USER, USER]}, "messages"),  # the template's own words
]


async def test_what_is_wrong_with_tools_is_a_400_that_says_where(say):
    good = {"messages": [USER, call('{"a": 1}'), ANSWER], "tools": TOOLS}
    async with say("Hi") as server:
        for change, param in BAD:
            answer = await server.chat(**{**good, **change})
            assert answer.status == 400, (change, answer)
            assert answer.json()["error"]["param"] == param, (change, answer)
        assert "users and assistants take turns" in answer.json()["error"]["message"]
        assert message_of(await server.chat(**good))[0]["content"] == "Hi"


JUNK = [None, True, -1, 10**400, "", "x", "{", [], [5], {}, {"type": "function"}, [[{}]], "\ud800"]


def spoil(rng, value):
    """A copy with something else in one place."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(JUNK)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    copy = value.copy()
    if isinstance(value, dict) and rng.random() < 0.1:
        copy[rng.choice(["x", "name", "type", "$ref"])] = copy.pop(key)
    else:
        copy[key] = spoil(rng, value[key])
    return copy


async def test_nothing_in_a_body_with_tools_is_a_failure_of_the_server(say):
    rng = random.Random(0)
    good = {"messages": [USER, call('{"a": 1}'), ANSWER], "tools": TOOLS, "max_tokens": 2}
    statuses = set()
    async with say("Hi", step_ms=1) as server:  # requests end while a step is under way
        for _ in range(100):
            body = spoil(rng, good)
            answer = await server.request("POST", "/v1/chat/completions", json=body)
            assert answer.status < 500, (body, answer)
            statuses.add(answer.status)
            assert message_of(await server.chat(**good))[0]["content"] == "Hi"
        assert set((await server.gauges()).values()) == {0}
    assert statuses == {200, 400}
