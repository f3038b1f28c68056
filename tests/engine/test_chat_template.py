"""What becomes of a conversation, and of templates that mean no good."""

import gc
import json
import resource

import psutil
import pytest

from aioserve.config import ModelConfig
from aioserve.engine import template_process, template_renderer
from aioserve.engine.chat_template import ChatTemplate
from aioserve.engine.prompt import Conversation
from aioserve.engine.template_renderer import TemplateTooSlowError
from aioserve.errors import RequestError, TemplateStalledError
from aioserve.model_source.info import ModelInfo
from tests.processes import PATIENCE
from tests.slow import mostly_slow

USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Hm.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"ä": [1]}}}
    ],
}
ANSWER = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}
QWEN = """
{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}{% if loop.first %}{% set ns.last = loop.length %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role ~ loop.index0 ~ ns.last }}
    {%- if message.content is string %}{{ '\n' + message.content }}{% endif %}
    {%- if message.reasoning_content %}{{ message.thinking }}{% endif %}
    {%- if loop.last or loop.nextitem.role == "tool" %}{{ '!' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{% set call = call.function %}{% endif %}
        {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments | tojson }}{{ '}</tool_call>' }}
        {%- if loop.index > 5 %}{% break %}{% endif %}
    {%- endfor %}
    {%- if message.role == "assistant" %}{% generation %}{{ '<|im_end|>\n' }}{% endgeneration %}
    {%- else %}{{ '<|im_end|>\n' * 1 }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    return ModelInfo(ModelConfig()).tokenizer


@pytest.fixture(scope="module")
def template(tokenizer):
    template = ChatTemplate(tokenizer)
    yield template
    template.close()


@pytest.fixture
def render(tokenizer, template, monkeypatch):
    """The conversation as a template has it."""

    def render(source, *messages, tools=(), by=template, **options):
        monkeypatch.setattr(tokenizer, "chat_template", source)
        return by.render(Conversation(messages or [USER], tools, **options))

    return render


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_prompt_is_what_transformers_makes_of_the_conversation(tokenizer, render, tools):
    for source in (tokenizer.chat_template, QWEN):
        messages = [USER, CALL, ANSWER]
        expected = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert render(source, *messages, tools=tools) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"template_kwargs": {"title": "King", "unread": False}},
    ],
)
def test_what_a_client_says_of_the_prompt_is_what_transformers_makes_of_it(
    tokenizer, render, options
):
    messages = [USER, {"role": "assistant", "content": "Good morrow, Hi"}]
    given = {"add_generation_prompt": "continue_final_message" not in options, **options}
    given |= given.pop("template_kwargs", {})
    for source in (tokenizer.chat_template, QWEN + "{{ title }}"):
        if source != tokenizer.chat_template or "template_kwargs" not in options:
            expected = tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, **given
            )
            assert render(source, *messages, **options) == expected


def test_the_effort_of_reasoning_is_told_by_the_name_that_the_template_knows(render):
    said = {
        (name, effort): render("{{ " + name + " }}", reasoning_effort=effort)
        for name in ("reasoning_effort", "enable_thinking")
        for effort in ("none", "low")
    }
    assert list(said.values()) == ["none", "low", "False", "True"]
    options = {"reasoning_effort": "low", "template_kwargs": {"enable_thinking": False}}
    assert render("{{ enable_thinking }}", **options) == "False"
    assert render("", reasoning_effort="none") == render("", reasoning_effort="low") == ""


def test_a_reply_goes_on_after_the_spaces_of_the_last_message(render):
    trims = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    last = {"role": "assistant", "content": "Hi, \n"}
    assert render(trims, USER, last, continue_final_message=True) == "Hi;Hi, \n"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([USER], {"template_kwargs": {"unread": 0}}, "chat_template_kwargs.unread"),
        ([USER], {"template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ([USER], {"template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ([USER, CALL], {"continue_final_message": True}, "continue_final_message"),
        (
            [USER],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            [USER, {"role": "critic", "content": "x"}],
            {"continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_what_no_prompt_can_be_made_of_is_refused(render, messages, options, param):
    source = "{% for m in messages if m.role != 'critic' %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError) as caught:
        render(source, *messages, **options)
    assert caught.value.param == param


def test_arguments_are_text_for_a_template_that_joins_them(render):
    joins = """{% for message in messages %}{% for call in message.tool_calls or [] %}
        {{- '```json\n' + call['function']['arguments'] + '\n```' }}{% endfor %}{% endfor %}"""
    assert render(joins, USER, CALL) == '```json\n{"ä": [1]}\n```'
    prints = joins.replace(" + ", " ~ ")  # a mapping would not make it raise
    assert render(prints, USER, CALL) == '```json\n{"ä": [1]}\n```'


@pytest.mark.parametrize("content", [None, "", "Hm."])
@pytest.mark.parametrize(
    "condition",
    [
        "'x' not in message.content",  # refuses none, as Qwen3's
        "message.content is none",  # leaves calls out beside text, as those of DeepSeek R1
        "true",
    ],
)
def test_calls_are_shown_whatever_is_said_beside_them(render, condition, content):
    source = (
        "{% for message in messages %}{{ message.content or '' }}"
        "{% if message.tool_calls and (" + condition + ") %}{{ message.tool_calls | tojson }}"
        "{% endif %}{% endfor %}"
    )
    call = {**CALL, "content": content}
    text = render(source, {"role": "assistant", "content": ""}, call)
    assert '"arguments": {"ä": [1]}' in text
    assert text.startswith(content or "[")


FIRST_CALL = (
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('no') }}{% endif %}"
    "({{ message.thinking }}{{ message.tool_calls[0].function | tojson }})"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def test_of_a_template_that_shows_one_call_each_call_has_its_message_and_its_result(render):
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in ("add", "sell")
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [
        {"role": "tool", "content": f"[{each['id']}]", "tool_call_id": each["id"]} for each in calls
    ]
    assert render(FIRST_CALL, message, *results[::-1]) == "".join(
        f'({{"name": "{name}", "arguments": {{}}}})[{name}]' for name in ("add", "sell")
    )
    shown = FIRST_CALL.replace("tool_calls[0].function", "tool_calls")
    assert render(shown, message, *results[::-1]).endswith("[sell][add]")


def test_a_template_that_refuses_content_beside_reasoning_and_calls_gets_two_messages(render):
    message = {**CALL, "content": "I add.", "reasoning_content": "Hm."}
    function = json.dumps(CALL["tool_calls"][0]["function"], ensure_ascii=False)
    assert render(FIRST_CALL, message) == f"I add.(Hm.{function})"


def test_a_template_that_shows_no_calls_gets_a_content_that_it_takes(render):
    source = "{% for message in messages %}{{ message.role + ':' + message.content }};{% endfor %}"
    calls = CALL["tool_calls"]
    for message in (CALL, {**CALL, "tool_calls": calls * 2}):
        assert render(source, {"role": "user", "content": "?"}, message) == "user:?;assistant:;"


@pytest.mark.parametrize("write", ["{{ key }}:<{{ value }}>", "{{ key }}='{{ value }}'"])
def test_templates_that_write_arguments_in_a_notation_of_their_own_get_a_mapping(render, write):
    source = (
        "{% for call in messages[-1].tool_calls %}{% if call.function.arguments is mapping %}"
        "{% for key, value in call.function.arguments.items() %}" + write + "{% endfor %}"
        "{% else %}{{ call.function.arguments }}{% endif %}{% endfor %}"
    )
    assert render(source, CALL) == write.replace("{{ key }}", "ä").replace("{{ value }}", "[1]")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
        "{{ 10 ** 999999999 }}",  # one step of Python's own, which nothing inside can end
    ],
)
def test_a_template_that_does_not_end_is_ended(tokenizer, render, source):
    slow = ChatTemplate(tokenizer, seconds=0.2)
    with pytest.raises(TemplateTooSlowError, match="takes too long"):
        render(source, by=slow)
    assert render("{{ messages[0].content }}", by=slow) == "Hi"
    slow.close()


@pytest.mark.parametrize(
    "source",
    mostly_slow(
        [
            "{{ 'x' * 10 ** 9 }}",
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}",
            "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}",
            "{% set x = 'x' * 10 ** 6 %}{% for i in range(99) %}{{ x }}{% endfor %}",
            "{{ '%300000000d' % 1 }}",
            "{{ 'x' | center(10 ** 10) }}",
            "{{ messages[0].content.ljust(10 ** 8) }}",
            "{{ messages | tojson(indent=10 ** 8) }}",
            "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
            "{{ messages[0].content.replace('', 'x' * 10 ** 8) }}",
        ],
        but=["{{ 'x' | center(10 ** 10) }}"],
    ),
)
def test_a_template_does_not_fill_the_memory(render, source):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    with pytest.raises(
        RequestError, match=r"template is too long|needs more than the 1 GiB of memory"
    ):
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < peak + 2**18
    assert render("{{ messages[0].content }}") == "Hi"


def test_the_server_and_what_renders_speak_the_same_words():
    for name in ("HEAD", "RENDER", "NAMES", "TEXT", "REFUSAL", "TOO_LONG"):
        ours, theirs = getattr(template_renderer, name), getattr(template_process, name)
        assert getattr(ours, "format", ours) == getattr(theirs, "format", theirs), name


@pytest.mark.usefixtures("own_processes")
def test_what_renders_is_started_again_when_it_was_ended(tokenizer, render):
    own, before = ChatTemplate(tokenizer), set(psutil.Process().children())
    assert render("{{ messages[0].content }}", by=own) == "Hi"
    started = set(psutil.Process().children()) - before
    assert started
    for process in started:
        process.kill()
        process.wait(PATIENCE)
    assert render("{{ messages[0].content }}", by=own) == "Hi"
    own.close()


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize("content", ["Hi", "x" * 10**6])
def test_what_renders_is_replaced_when_it_stands_still(tokenizer, render, content, monkeypatch):
    """Also where the conversation does not fit into the socket."""
    # A process counts as stopped after four looks.
    monkeypatch.setattr(template_renderer, "LOOK_SECONDS", 0.1)
    message = {"role": "user", "content": content}
    own, before = ChatTemplate(tokenizer), set(psutil.Process().children())
    assert render("{{ messages[0].content }}", message, by=own) == content
    started = set(psutil.Process().children()) - before
    assert started
    for process in started:
        process.suspend()
    with pytest.raises(TemplateStalledError, match="did not respond and was ended: try again"):
        render("{{ messages[0].content }}", message, by=own)
    assert render("{{ messages[0].content }}", message, by=own) == content
    assert all(process.status() != psutil.STATUS_STOPPED for process in psutil.Process().children())
    own.close()


@pytest.mark.usefixtures("own_processes")
def test_what_renders_ends_with_its_owner(tokenizer, render):
    before = set(psutil.Process().children())
    closed, dropped = ChatTemplate(tokenizer), ChatTemplate(tokenizer)
    for each in (closed, dropped):
        assert render("{{ messages[0].content }}", by=each) == "Hi"
    assert len(set(psutil.Process().children()) - before) == 2
    closed.close()
    del dropped, each
    gc.collect()
    assert not set(psutil.Process().children()) - before


def test_what_json_has_no_word_for_is_refused(render):
    with pytest.raises(RequestError, match="can be given JSON only"):
        render("{{ title }}", template_kwargs={"title": {1, 2}})


@pytest.mark.parametrize("text", ["Hä?", "\ud800", "\U0001f3ad" * 70_000, "\x00"])
def test_texts_of_all_kinds_and_lengths_arrive_whole(render, text):
    assert render("{{ messages[0].content }}", {"role": "user", "content": text}) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{{ raise_exception('roles must alternate') }}", r"in line 2: roles must alternate"),
        ("{{ messages[0].content + 1 }}", r"in line 1: can only concatenate str"),
        ("{% for %}", r"in line 1: "),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "is unsafe|undefined"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ dict.__base__ }}{{ dict.mro() }}", "has no attribute|unsafe"),
        ("{{ namespace(__init__=1) }}", "no name of a namespace"),
        ("{{ cycler.__init__.__globals__.os.popen('id') }}", "unsafe|undefined"),
    ],
)
def test_a_template_that_raises_or_breaks_out_is_refused(render, source, message):
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert caught.value.param == "messages"
