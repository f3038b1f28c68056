"""How chat templates want messages with calls: in which form, and whether several in one message.

Knows messages, and calls with arguments that are no JSON object, which are text. Which form a
template shows is tried in `chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking")


class CallForm(NamedTuple):
    """How a template wants a message with calls.

    Most make JSON of the arguments, or go through them; others join them to their text as they are.
    Some refuse a content of None or write the word, others leave the calls out unless it is None,
    or refuse content beside calls and reasoning.
    """

    has_text: bool  # arguments as JSON text, not as a mapping
    content: str | None  # beside calls; if there is more to say, a message before says it

    def apply(self, message: Message) -> list[Message]:
        """The message or messages as wanted."""
        calls = message["tool_calls"]
        if self.has_text:
            calls = [
                {**call, "function": {**call["function"], "arguments": _to_json(call["function"])}}
                for call in calls
            ]
        if not message["content"]:
            return [{**message, "content": self.content, "tool_calls": calls}]
        if self.content:
            return [{**message, "tool_calls": calls}]
        # Templates that drop reasoning keep that of calls the longest.
        thought = {key: message[key] for key in _REASONING if key in message}
        said = {key: message[key] for key in message.keys() - {"tool_calls", *_REASONING}}
        call = {"role": "assistant", **thought, "content": self.content, "tool_calls": calls}
        return [said, call]


def forms_of(content: str | None) -> list[CallForm]:
    """All forms of a message with such a content, the plainest first."""
    contents = dict.fromkeys([content, "", None])
    return [CallForm(has_text, own) for own in contents for has_text in (False, True)]


def has_broken(message: Message) -> bool:
    """Whether the arguments of a call of the message are a text, and not a mapping."""
    return any(map(_is_broken, message["tool_calls"]))


def as_content(message: Message) -> Message:
    """The message with its calls whose arguments are a text as text behind its content."""
    calls = [call for call in message["tool_calls"] if not _is_broken(call)]
    functions = [call["function"] for call in message["tool_calls"] if _is_broken(call)]
    said = [f'{{"name": {json.dumps(f["name"])}, "arguments": {f["arguments"]}' for f in functions]
    content = message["content"]
    if isinstance(content, list):
        content = [*content, *({"type": "text", "text": each} for each in said)]
    else:
        content = "\n".join(filter(None, (content, *said)))
    told = {key: value for key, value in message.items() if key != "tool_calls"}
    told["content"] = content
    return {**told, "tool_calls": calls} if calls else told


def _is_broken(call: Mapping[str, Any]) -> bool:
    return isinstance(call["function"]["arguments"], str)


def broken_probe(message: Message) -> Message:
    """As `probe`, with arguments that are a text."""
    asked = probe(message)
    asked["tool_calls"][0]["function"]["arguments"] = "probe_key:"
    return asked


def probe(message: Message, num_calls: int = 1) -> Message:
    """A message with calls that holds what `message` holds beside them."""
    calls = [
        {
            "id": f"probe000{i}",  # nine letters and digits, for Mistral's
            "type": "function",
            "function": {"name": f"probe{i or ''}", "arguments": {"probe_key": "probe_value"}},
        }
        for i in range(num_calls)
    ]
    thought = {key: "probe" for key in _REASONING if message.get(key)}
    content = message["content"] and "probe"
    return {"role": "assistant", "content": content, **thought, "tool_calls": calls}


def is_shown(text: str) -> bool:
    """Whether a prompt shows the probe's arguments, and neither as Python nor as a text."""
    return "probe_key" in text and "'probe_key'" not in text and '\\"probe_key' not in text


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The same messages with one call in each, and the result of that call right behind it."""
    told: list[Message] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls") or ()
        at += 1
        if len(calls) < 2:
            told.append(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[at:]))
        at += len(results)
        for call in calls:
            own = [each for each in results if each.get("tool_call_id") == call["id"]]
            results = [each for each in results if each not in own]
            told += [{**message, "tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": None}  # what it says is said once
        told += results
    return told


def _to_json(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
