"""Which format is taken: by name, by file, by the evidence of a template."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.features.formats import (
    MARKS,
    SHIPPED,
    Marks,
    available_formats,
    check_names,
    choose,
    load_format,
)
from aioserve.features.formats.call_block import KimiK2Parser
from aioserve.features.formats.json_formats import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    PlainJsonParser,
)
from aioserve.features.formats.noted_calls import Gemma4Parser
from aioserve.features.formats.tagged import SeedOssParser, Tags
from tests.formats.channels import ChannelFormat

CHANNELS = f"{Path(__file__).with_name('channels.py')}:ChannelFormat"
MARKED = """
from aioserve.features.formats import Marks
from aioserve.features.formats.json_formats import HermesParser

class Marked(HermesParser):
    marks = Marks("<hm>", "</hm>")
    @classmethod
    def evidence(cls, template):
        return "<mine>" if "<mine>" in template else None
"""


@pytest.mark.parametrize(
    ("template", "format_", "why"),
    [
        ("<tool_call>", HermesParser, "hermes reads tool calls ('<tool_call>' in the chat templa"),
        ("[TOOL_CALLS] <tool_call>", MistralParser, "mistral reads tool calls ('[TOOL_CALLS]' in"),
        ("<|start_header_id|> tools", Llama3Parser, "llama3_json reads tool calls ('<|start_he"),
        ("<tool_call><function=", None, "no tool calls are read (the chat template shows no form"),
        ("", None, "no tool calls are read (the chat template shows no format that is known"),
    ],
)
def test_a_format_is_chosen_by_the_evidence_of_the_template(template, format_, why):
    choice = choose("auto", "auto", template)
    assert choice.format is format_
    assert choice.why.startswith(why)
    assert choice.takes_tools == (format_ is not None)


#: The least that a chat template has to hold for each format that ships to be taken.
LEAST = {
    "harmony": ["<|channel|><|message|>"],
    "gemma4": ["<|tool_call>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["],
    "olmo3": ["<function_calls>"],
    "llama4_pythonic": ["[func_name1(params=1"],
    "llama4_json": ["<|header_start|>tools"],
    "deepseek_v3": ["<\uff5ctool\u2581calls\u2581begin\uff5c>```json"],
    "deepseek_v31": ["<\uff5ctool\u2581calls\u2581begin\uff5c>"],
    "nemotron": ["<TOOLCALL>"],
    "apriel": ["<tool_calls>["],
    "phi4_mini": ["<|/tool_call|>", "<|/tool|>", "functools["],
    "granite": ["<|tool_call|>"],
    "mistral": ["[TOOL_CALLS]"],
    "deepseek_v32": ["\uff5cDSML\uff5cfunction_calls>"],
    "deepseek_v4": ["\uff5cDSML\uff5ctool_calls>"],
    "kimi_k2": ["<|tool_calls_section_begin|>"],
    "minimax_m2": ["<minimax:tool_call>"],
    "seed_oss": ["<seed:tool_call>"],
    "glm47": ["<tool_call><arg_key></arg_key><arg_value>"],
    "glm": ["<tool_call><arg_key>"],
    "qwen3_coder": ["<tool_call><function=<parameter="],
    "hermes": ["<tool_call>"],
    "llama3_json": ["<|python_tag|>", "<|start_header_id|>tools"],
    "json": [],
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_format_that_ships_is_found_by_the_least_evidence(name):
    for template in LEAST[name]:
        assert load_format(name).evidence(template) is not None
        assert choose("auto", "auto", template).name == name


@pytest.mark.parametrize("base", [KimiK2Parser, Gemma4Parser, SeedOssParser, MistralParser])
def test_the_signs_that_a_format_states_hold_for_formats_derived_from_it(base):
    stated = type("Stated", (base,), {"signs": ("<mine>",)})
    derived = type("Derived", (stated,), {})
    assert derived.evidence("<mine>") == "<mine>"
    assert derived.evidence(base.signs[0]) is None
    assert type("Hidden", (base,), {"signs": ()}).evidence(base.signs[0]) is None


def test_a_format_that_states_other_marks_and_no_signs_is_found_by_these_marks():
    tags = Tags(("<t>", "</t>"), ("<f>", ">", "</f>"), ("<p>", ">", "</p>"), "")
    others = [
        type("Block", (KimiK2Parser,), {"block": "<t>"}),
        type("Noted", (Gemma4Parser,), {"marked": ("<t>", "</t>")}),
        type("Tagged", (SeedOssParser,), {"tags": tags}),
    ]
    for format_ in others:
        assert (format_.evidence("<t>"), format_.evidence("<tool>")) == ("<t>", None)


def test_a_format_without_signs_and_evidence_is_refused_when_it_is_loaded(tmp_path):
    path = tmp_path / "mine.py"
    example = (Path(__file__).parents[2] / "examples/bracket_format.py").read_text()
    stated = "    signs = (_OPEN,)\n"
    assert stated in example
    path.write_text(example.replace(stated, ""))
    with pytest.raises(ConfigError, match=r"mine\.py' does not implement signs$"):
        load_format(str(path))
    derived = "\n\nclass Shown(BracketFormat):\n    signs = (_OPEN,)\n"
    path.write_text(example.replace(stated, "") + derived)
    assert load_format(str(path)).evidence("[call add]") == "[call "
    path.write_text(example.replace(stated, "    signs = ()\n"))
    assert load_format(str(path)).evidence("[call add]") is None
    evidence = (
        "    @classmethod\n    def evidence(cls, template):\n        return template or None\n"
    )
    path.write_text(example.replace(stated, evidence))
    assert load_format(str(path)).evidence("[call add]") == "[call add]"
    assert PlainJsonParser.evidence("[call add]") is None


def test_only_formats_that_a_template_may_show_are_loaded():
    program = """
import sys
from aioserve.features.formats import choose
assert choose("auto", "auto", "<tool_call>").name == "hermes"
assert "aioserve.features.formats.json_formats" in sys.modules
others = {"call_block", "tagged", "noted_calls", "harmony"}
assert not {name for name in others if f"aioserve.features.formats.{name}" in sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_name_wins_over_the_template():
    choice = choose("mistral", "none", "<tool_call><think>")
    assert (choice.name, choice.format, choice.marks) == ("mistral", MistralParser, None)
    assert choice.why == (
        "mistral reads tool calls (server.tool_call_parser), no reasoning is read "
        "(server.reasoning_parser is none)"
    )


def test_reasoning_is_chosen_by_the_template_and_by_the_marks_of_a_format(tmp_path):
    assert choose("auto", "auto", "<tool_call> <think>").marks == MARKS["qwen3"]
    assert choose("none", "mistral", "<think>").marks == MARKS["mistral"]
    (tmp_path / "mine.py").write_text(MARKED)
    mine = f"{tmp_path / 'mine.py'}:Marked"
    assert choose(mine, "auto", "<hm> <think>").marks == Marks("<hm>", "</hm>")
    assert choose(mine, "auto", "<think>").marks == MARKS["qwen3"]
    assert choose("none", mine, "").marks == Marks("<hm>", "</hm>")


def test_a_format_of_another_package_is_found_by_name_and_asked_first(tmp_path, monkeypatch):
    (tmp_path / "strange_format.py").write_text(MARKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [
        EntryPoint("strange", "strange_format:Marked", "aioserve.formats"),
        EntryPoint("broken", "no_such_module:Marked", "aioserve.formats"),
    ]
    monkeypatch.setattr(
        "aioserve.engine.chat.reply_format.installed_entry_points", lambda group: found
    )
    monkeypatch.setattr("aioserve.support.plugins.installed_entry_points", lambda group: found)
    assert available_formats().keys() == {*SHIPPED, "strange", "broken"}
    assert choose("strange", "auto", "").name == "strange"
    assert choose("auto", "auto", "<mine> <tool_call>").name == "strange"
    assert choose("auto", "auto", "<tool_call>").name == "hermes"


@pytest.mark.parametrize(
    ("tools", "reasoning", "message"),
    [
        (
            "hermse",
            "auto",
            r"unknown format 'hermse' \(did you mean 'hermes'\?\); available: ",
        ),
        ("nowhere.py:Mine", "auto", "no file nowhere.py in .* to take a format from"),
        ("pathlib:Path", "auto", "not a ReplyFormat; derive from CallParser or ReplyFormat"),
        ("auto", "qwen4", r"'qwen4', which names no marks and no format \(did you mean 'qwen3'"),
        ("auto", "hermes", "hermes, a format with no marks of reasoning; expected one of auto"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(tools, reasoning, message):
    with pytest.raises(ConfigError, match=message):
        check_names(tools, reasoning)
    with pytest.raises(ConfigError, match=message):
        choose(tools, reasoning, "")


def test_a_format_of_whole_replies_reads_reasoning_and_nothing_else_does():
    choice = choose(CHANNELS, "auto", "<think>")
    assert choice.format.__name__ == ChannelFormat.__name__
    assert choice.marks is None
    assert choice.takes_tools
    assert "reads whole replies (server.tool_call_parser)" in choice.why
    without_tools = choose("none", CHANNELS, "")
    assert without_tools.format.__name__ == ChannelFormat.__name__
    assert not without_tools.takes_tools
    with pytest.raises(ConfigError, match="reads reasoning by itself: leave"):
        choose(CHANNELS, "qwen3", "")
    with pytest.raises(ConfigError, match="a format that reads whole replies, but"):
        choose("hermes", CHANNELS, "")
