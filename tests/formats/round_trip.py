"""Whether a format reads back what a chat template writes: each kind of turn, rendered and parsed.

What a template writes for an assistant's turn is what its model was trained to write. Knows how to
cut that turn out of the rendered conversation; knows no format and no template.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from aioserve.engine import Conversation
from aioserve.engine.chat_template import ChatTemplate
from aioserve.errors import RequestError
from aioserve.features.formats import (
    Arguments,
    Call,
    Choice,
    Content,
    Event,
    Function,
    Reasoning,
    ReasoningParser,
    Reply,
    ReplyParser,
    SaidCall,
    choose,
    joined,
)

TEXT = {"type": "string", "description": "Some text."}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
        },
    }
    for name, properties in {
        "write_file": {"path": TEXT, "text": TEXT},
        "look_up": {
            "query": TEXT,
            "limit": {"type": "integer", "description": "How many."},
            "ratio": {"type": "number", "description": "How near."},
            "is_exact": {"type": "boolean", "description": "Whether all words must be there."},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Which."},
            "where": {"type": "object", "description": "What must hold."},
            "after": {"type": ["string", "null"], "description": "Where to go on."},
        },
        "now": {},
    }.items()
]
#: Of one type each: some templates cannot say more.
PLAIN_TOOLS = json.loads(json.dumps(TOOLS).replace('["string", "null"]', '"string"'))
FUNCTIONS = [
    Function(tool["function"]["name"], tool["function"]["parameters"], False) for tool in TOOLS
]
PROGRAM = 'def hail(name: str) -> str:\n    return f"<b>{name}</b> \\\\o/ ☃"\n\n\nhail("Zoë")\n'
LOOK_UP = SaidCall(
    "look_up",
    {
        "query": "café & 'crème' < 5 €",
        "limit": 10,
        "ratio": 0.5,
        "is_exact": True,
        "tags": ["a b", 'c"d', "ü"],
        "where": {"year": {"from": 1999, "is_open": False}, "names": [None, "x"]},
        "after": None,
    },
)
WRITE = SaidCall("write_file", {"path": "src/hail.py", "text": PROGRAM})
NOW = SaidCall("now", {})
ANSWER = "It is **4**: 2 + 2 < 5.\n\n- naïve ☃"
THOUGHT = "Two and two.\n\nThat makes 4."
SOON = "Let me see."

#: Replies by what they are made of.
REPLIES = {
    "content": Reply(ANSWER),
    "reasoning, content": Reply(ANSWER, reasoning=THOUGHT),
    "a call": Reply(calls=[LOOK_UP]),
    "a call without arguments": Reply(calls=[NOW]),
    "content, a call": Reply(SOON, [WRITE]),
    "parallel calls": Reply(calls=[LOOK_UP, WRITE, NOW]),
    "reasoning, a call": Reply(calls=[WRITE], reasoning=THOUGHT),
    "reasoning, content, parallel calls": Reply(SOON, [WRITE, LOOK_UP], THOUGHT),
}
#: What a template may ask for to write reasoning, or to leave it out.
KWARGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": True},
    {"thinking": True},
    {"enable_thinking": False},
]
#: Ends of turns that only some turns have; every other end is seen in a turn of plain content.
ENDS = (
    "<|call|>",
    "<|end|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|im_end|>",
    "<|tool_response>",
)


LEFT_OUT, REFUSED = "the template leaves out ", "the template refuses it: "


class Turn(NamedTuple):
    """An assistant's turn as a template writes it."""

    prompt_end: str  # the end of what the generation prompt has in common with it
    text: str  # what the model writes, without the end of the turn
    is_begun_alike: bool  # the generation prompt is the beginning of this turn


ALIKE, BUT_SPACE, OTHERWISE = "alike", "but for space", "otherwise"


class Trip(NamedTuple):
    """What became of one reply on its way to text and back."""

    name: str
    problem: str  # empty: what was read is what was said
    written: str = ALIKE  # how `ReplyFormat.write` says it, beside the template
    note: str = ""  # what the template leaves out
    turn: Turn | None = None


class Model:
    """A model of which there is a chat template alone."""

    special_tokens_map: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template


class RoundTrips:
    """The round trips of one chat template. `close` it."""

    def __init__(self, source: str, parser: str = "auto", reasoning: str = "auto") -> None:
        self.choice: Choice = choose(parser, reasoning, source)
        self._template = ChatTemplate(Model(source))
        self._has_system, self._tools = True, TOOLS
        self._end = self._plain_end()

    def close(self) -> None:
        self._template.close()

    def all(self) -> list[Trip]:
        """Every reply, and one that follows results of tools."""
        trips = [self.trip(name, reply) for name, reply in REPLIES.items()]
        return [
            *trips,
            self.trip("content after results", Reply(ANSWER), after=REPLIES["content, a call"]),
        ]

    def trip(self, name: str, reply: Reply, after: Reply | None = None) -> Trip:
        """One reply, rendered and read; after the results of the calls of `after`, if there is."""
        said = [] if after is None else [message_of(after), *results_of(after)]
        turns, problem = [], ""
        for kwargs in KWARGS:
            try:
                turns.append(self._turn([*self._asked(), *said], reply, kwargs))
            except RequestError as error:
                problem = problem or f"{REFUSED}{error}"
        if not turns:
            return Trip(name, "", note=problem)
        # Some write reasoning only if they are asked to, or begin a turn otherwise than they show.
        thought = reply.reasoning.partition("\n")[0]
        turn = max(turns, key=lambda turn: (thought in turn.text, turn.is_begun_alike))
        shown, note = shown_of(reply, turn.text)
        if self._end.strip() and self._end.strip() in turn.text:
            return Trip(
                name, "", note="the template writes calls in a turn of their own", turn=turn
            )
        problem = difference(shown, self.read(turn, list(turn.text)))
        return Trip(name, problem, self._written(shown, turn), note, turn)

    def read(self, turn: Turn, pieces: Sequence[str]) -> list[Event]:
        """The events of a turn that comes in these pieces."""
        marks, format_ = self.choice.marks, self.choice.format
        reasoning = None if marks is None else ReasoningParser(marks, turn.prompt_end)
        calls = None if format_ is None else format_(FUNCTIONS, turn.prompt_end)
        reader = ReplyParser(reasoning, calls)
        events = [event for piece in pieces for event in reader.append(piece)]
        return joined(events + reader.flush())

    def _written(self, reply: Reply, turn: Turn) -> str:
        format_, marks, text = self.choice.format, self.choice.marks, turn.text
        if format_ is None:
            return OTHERWISE
        if marks is not None:
            reader = ReplyParser(ReasoningParser(marks, turn.prompt_end), None)
            events = joined(reader.append(text) + reader.flush())
            text = "".join(event.text for event in events if isinstance(event, Content))
        try:
            written = format_.write(reply)
        except ValueError:  # it cannot be said in this format
            return OTHERWISE
        if format_.reads_reasoning and written.endswith(text):
            text = written  # the prompt has begun it
        if written.strip() == text.strip():
            return ALIKE
        return BUT_SPACE if "".join(written.split()) == "".join(text.split()) else OTHERWISE

    def _turn(
        self, before: Sequence[Mapping[str, Any]], reply: Reply, kwargs: Mapping[str, Any]
    ) -> Turn:
        whole = self._render([*before, message_of(reply)], kwargs, False)
        prompt = self._render(before, kwargs, True)
        # Some write the tools before the last question, or earlier turns in short: what stands
        # before the last words that are not the model's may differ.
        last = USER["content"] if before[-1]["role"] == "user" else RESULT
        prompt, whole = (text[max(text.rfind(last), 0) :] for text in (prompt, whole))
        begun = common(prompt, whole)
        text = whole[len(begun) :]
        for end in (self._end, self._end.strip(), *ENDS):
            if end and text.rstrip().endswith(end.rstrip()):
                text = text.rstrip()[: -len(end.rstrip())]
                break
        is_alike, marks = begun == prompt, self.choice.marks
        if marks is not None and marks.end in text and prompt.rstrip().endswith(marks.start):
            begun = prompt  # which has begun the reasoning, even if this turn does not show it
        return Turn(begun[-200:], text, is_alike)

    def _plain_end(self) -> str:
        """What a template writes behind a turn of plain content."""
        system = {"role": "system", "content": "Be brief."}
        if self._refuses([system, USER]):
            if self._refuses([USER]):
                self._tools = PLAIN_TOOLS
            self._has_system = not self._refuses([system, USER])
        turn = {"role": "assistant", "content": "fine_end"}
        if self._refuses([*self._asked(), turn]):
            return ""
        return self._render([*self._asked(), turn], {}, False).rpartition("fine_end")[2]

    def _refuses(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._render(messages, {}, False)
        except RequestError:
            return True
        return False

    def _asked(self) -> list[Mapping[str, Any]]:
        return [*([{"role": "system", "content": "Be brief."}] if self._has_system else []), USER]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], is_prompt: bool
    ) -> str:
        conversation = Conversation(
            messages, self._tools, add_generation_prompt=is_prompt, template_kwargs=kwargs
        )
        return self._template.render(conversation)


RESULT = "It went well."  # of every tool
USER: Mapping[str, Any] = {"role": "user", "content": "What is it?"}


def common(prompt: str, whole: str) -> str:
    """What both begin with; of a mark, all or nothing."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    begun = "".join(char for char, _ in pairs)
    if begun != prompt and begun.rfind("<") > begun.rfind(">"):
        return begun[: begun.rfind("<")]
    return begun


def message_of(reply: Reply) -> dict[str, Any]:
    """A reply as a message of a conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.calls)
        ]
    return message


def results_of(reply: Reply) -> list[dict[str, Any]]:
    """What the tools say that a reply calls."""
    return [
        {"role": "tool", "tool_call_id": f"call0000{i}", "name": call.name, "content": RESULT}
        for i, call in enumerate(reply.calls)
    ]


def shown_of(reply: Reply, text: str) -> tuple[Reply, str]:
    """What a template shows of a reply, and what it leaves out, in words."""
    left_out = []
    if reply.reasoning and reply.reasoning.splitlines()[0] not in text:
        reply, _ = reply._replace(reasoning=""), left_out.append("reasoning")
    if reply.content and reply.content.splitlines()[0] not in text:
        reply, _ = reply._replace(content=""), left_out.append("content")
    if any(call.name not in text for call in reply.calls):
        reply, _ = reply._replace(calls=[]), left_out.append("calls")
    return reply, f"{LEFT_OUT}{' and '.join(left_out)}" if left_out else ""


def difference(said: Reply, events: Sequence[Event]) -> str:
    """What was read otherwise than it was said, but for space around it; empty if nothing was."""
    content = "".join(event.text for event in events if isinstance(event, Content)).strip()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)).strip()
    if reasoning != said.reasoning.strip():
        return f"reasoning {_short(reasoning)}"
    if content != said.content.strip():
        return f"content {_short(content)}"
    names = [event.name for event in events if isinstance(event, Call)]
    if names != [call.name for call in said.calls]:
        return f"calls of {names}"
    texts = [event.text for event in events if isinstance(event, Arguments)]
    for text, call in zip(texts, said.calls, strict=True):
        try:
            arguments = json.loads(text)
        except ValueError as error:
            return f"arguments that are no JSON ({error})"
        if _ordered(arguments) != _ordered(call.arguments):
            return f"arguments {_short(text)}"
    return ""


def _ordered(arguments: Any) -> str:
    """JSON that tells types apart, but not orders of keys, which some templates sort."""
    return json.dumps(arguments, sort_keys=True)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
