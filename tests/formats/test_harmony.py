"""Harmony, gpt-oss's format: messages in channels, read as reasoning, content and calls."""

import json
from pathlib import Path

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, Reasoning, choose
from aioserve.features.formats.harmony import HarmonyParser
from tests.formats.pieces import read, read_alike

FUNCTIONS = [Function(name, {"type": "object"}) for name in ("add", "get_weather")]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|channel|>final<|message|>2 + 2 = 4.<|return|>"
NEXT = "<|start|>assistant"
PLAN = "<|channel|>commentary<|message|>I add.<|end|>"
ARGUMENTS = '{"a": "<|call|>", "b": {"c": [1, "\\"}ä"]}}'
ADD = [Call("add"), Arguments(ARGUMENTS)]


def parse(pieces, functions=FUNCTIONS, prompt_end="<|start|>assistant"):
    return read(HarmonyParser(functions, prompt_end), pieces)


HEADERS = [
    " to=functions.add<|channel|>commentary json",
    " to=functions.add<|channel|>commentary <|constrain|>json",
    "<|channel|>commentary to=functions.add <|constrain|>json",
    "<|channel|>commentary to=functions.add<|constrain|>json",
    "<|channel|>commentary to=functions.add",
    "<|channel|>analysis to=functions.add code",
    "<|channel|>commentary<|channel|>commentary to=functions.add json",
]

CASES = [
    (THOUGHT + NEXT + FINAL, [Reasoning("Hm."), Content("2 + 2 = 4.")]),
    ("<|channel|>final<|constrain|>json<|message|>{}", [Content("{}")]),
    (FINAL.replace("<|channel|>final", ""), [Content("2 + 2 = 4.")]),
    *(
        (f"{THOUGHT}{NEXT}{PLAN}{NEXT}{header}<|message|>{ARGUMENTS}<|call|>",
         [Reasoning("Hm."), Content("I add."), *ADD])
        for header in HEADERS
    ),
    (
        f"{HEADERS[0]}<|message|>{ARGUMENTS}<|end|>{NEXT}"
        "<|channel|>commentary to=functions.get_weather json<|message|><|call|>",
        [*ADD, Call("get_weather"), Arguments("{}")],
    ),
    # Two messages of a kind are two lines.
    (THOUGHT + NEXT + THOUGHT + NEXT + PLAN + NEXT + FINAL,
     [Reasoning("Hm.\nHm."), Content("I add.\n2 + 2 = 4.")]),
    # Tools that the model has of itself are of its thoughts.
    (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        [Reasoning('<|channel|>analysis to=browser.search code<|message|>{"query": "x"}')],
    ),
    # Arguments that are no JSON are passed on as they are.
    (f"{HEADERS[0]}<|message|>a=1<|call|>", [Call("add"), Arguments("a=1")]),
    (f'{HEADERS[0]}<|message|>{{"a": 1}}}}<|call|>', [Call("add"), Arguments('{"a": 1}}')]),
    # Text without a header, and headers that are none.
    ("Well: to=functions.add", [Content("Well: to=functions.add")]),
    ("Well.<|end|>So.", [Content("Well.\nSo.")]),
    ("assistants help.", [Content("assistants help.")]),
    (
        "<|channel|>thought<|message|>Hm.<|end|>" + NEXT + FINAL,
        [Content("<|channel|>thought<|message|>Hm.\n2 + 2 = 4.")],
    ),
    (
        THOUGHT + "So <|start|>user<|message|>No.<|end|><|channel|>final<|message|>Yes.",
        [Reasoning("Hm."), Content("So <|start|>user<|message|>No.\nYes.")],
    ),
    ("<|channel|>commentary to=container.exec<|message|>ls<|end|>",
     [Content("<|channel|>commentary to=container.exec<|message|>ls")]),
    # Replies that were cut.
    ("<|channel|>analysis", []),
    (f"{THOUGHT}{NEXT}<|channel|>", [Reasoning("Hm.")]),
    (THOUGHT[:-4], [Reasoning("Hm.<|e")]),
    (f"{HEADERS[0]}<|message|>{ARGUMENTS}<|ca", ADD),
    (f"{HEADERS[0]}<|message|>{{", [Call("add"), Arguments("{")]),
    ("<|channel|>commentary to=functions.ad", [Content("<|channel|>commentary to=functions.ad")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "events"), CASES, ids=range(len(CASES)))
def test_a_reply_is_read_alike_however_it_is_cut(text, events):
    assert read_alike(lambda: HarmonyParser(FUNCTIONS, "<|start|>assistant"), text)[0] == events


def test_without_tools_a_call_is_content_or_a_thought():
    call = f"{HEADERS[2]}<|message|>{{}}<|call|>"
    assert parse([call], ()) == [Content(f"{HEADERS[2]}<|message|>{{}}")]
    [thought] = parse([call.replace("commentary", "analysis")], ())
    assert isinstance(thought, Reasoning)


@pytest.mark.parametrize(
    ("prompt_end", "text", "events"),
    [
        ("<|start|>assistant<|channel|>final<|message|>So", " be it.", [Content(" be it.")]),
        ("<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|>", [Reasoning("Hm.")]),
        ("<|start|>assistant<|channel|>", "final<|message|>Ay.", [Content("Ay.")]),
        ("<|start|>assistant<|channel|>final", "<|message|>Ay.", [Content("Ay.")]),
        ("and so it goes", " on.<|return|>", [Content(" on.")]),
    ],
)
def test_a_reply_goes_on_with_the_message_that_the_prompt_has_begun(prompt_end, text, events):
    assert parse([text], prompt_end=prompt_end) == events
    assert parse(list(text), prompt_end=prompt_end) == events


def test_malformed_headers_are_counted():
    reader = HarmonyParser(FUNCTIONS)
    reader.append("<|channel|>thought<|message|>Hm.<|end|>")
    reader.flush()
    assert reader.num_malformed == 1


def test_it_is_chosen_by_its_marks():
    choice = choose("auto", "auto", "<|start|>assistant<|channel|>final<|message|> <|call|>")
    assert choice.format is HarmonyParser
    assert "harmony reads whole replies ('<|channel|>' in the chat template)" in choice.why


REFERENCE = json.loads(Path(__file__).with_name("harmony_reference.json").read_text())


@pytest.mark.parametrize(("text", "messages"), REFERENCE, ids=range(len(REFERENCE)))
def test_it_reads_what_openai_harmony_reads(text, messages):
    told = {"calls": [], "reasoning": [], "content": []}
    for message in messages:
        recipient, channel = message["recipient"] or "", message["channel"]
        if recipient.startswith("functions."):
            arguments = message["text"].strip() or "{}"
            told["calls"].append((recipient.removeprefix("functions."), arguments))
        else:
            told["reasoning" if channel == "analysis" else "content"].append(message["text"])
    events = parse(list(text))
    names = [event.name for event in events if isinstance(event, Call)]
    arguments = [event.text.strip() for event in events if isinstance(event, Arguments)]
    assert list(zip(names, arguments, strict=True)) == told["calls"]
    for kind, name in ((Reasoning, "reasoning"), (Content, "content")):
        said = "".join(event.text for event in events if isinstance(event, kind))
        assert said.split() == "\n".join(told[name]).split() or told["calls"]
        assert "".join(said.split()) == "".join("".join(told[name]).split())
