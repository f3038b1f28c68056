"""How chat templates want messages with calls: in which form, and whether several in one message.

Which form a template shows is tried. Loaded with the first message that has calls. Knows messages,
and calls with arguments that are no JSON object, which are text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking")


class CallForm(NamedTuple):
    """The form in which a template wants a message with calls.

    Most make JSON of the arguments, or go through them; others join them to their text as they are.
    Some refuse a content of None or write the word, others leave the calls out unless it is None,
    or refuse content beside calls and reasoning.
    """

    has_text: bool  # arguments as JSON text, not as a mapping
    content: str | None  # beside calls; if there is more to say, a message before says it

    def apply(self, message: Message) -> list[Message]:
        """Return the message or messages as wanted."""
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


class CallForms:
    """The forms in which the templates of one tokenizer show calls."""

    def __init__(self, attempt: Callable[[str, list[Message]], str]) -> None:
        """`attempt` returns what a template makes of messages behind a user's; empty if it refuses
        them.
        """
        self._try = attempt
        self._call_forms: dict[tuple[str, str], CallForm] = {}  # by template and probe
        self._broken: dict[tuple[str, str], bool] = {}  # by the same: text as arguments
        self._several: dict[str, bool] = {}  # by template: calls in one message

    def written(self, source: str, messages: Sequence[Message]) -> list[Message]:
        """Return messages, some of which have calls, as this template shows them."""
        num_calls = max(len(each.get("tool_calls") or ()) for each in messages)
        if num_calls > 1 and not self._takes_several(source):
            messages = one_call_each(messages)
        return [own for each in messages for own in self._written(source, each)]

    def _written(self, source: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the message in the first form in which this template shows its calls."""
        if not message.get("tool_calls"):
            return [message]
        if has_broken(message) and not self._takes_broken(source, message):
            return self._written(source, as_content(message))
        return self._call_form(source, probe(message)).apply(message)

    def _takes_broken(self, source: str, message: dict[str, Any]) -> bool:
        """Return whether a template shows arguments that are a text, and no JSON object, in that
        form.
        """
        asked = probe(message)
        key = source, str(asked)
        if key not in self._broken:
            form = self._call_form(source, asked)
            self._broken[key] = is_shown(self._try(source, form.apply(broken_probe(message))))
        return self._broken[key]

    def _call_form(self, source: str, asked: dict[str, Any]) -> CallForm:
        key = source, str(asked)
        if key not in self._call_forms:
            forms = forms_of(asked["content"])
            tried = [(f, text) for f in forms if (text := self._try(source, f.apply(asked)))]
            shown = [(form, text) for form, text in tried if is_shown(text)] or tried
            clean = (form for form, text in shown if "None" not in text)
            self._call_forms[key] = next(clean, shown[0][0] if shown else forms[0])
        return self._call_forms[key]

    def _takes_several(self, source: str) -> bool:
        """Return whether a template shows all calls of a message, or none."""
        if source not in self._several:
            asked = [self._written(source, probe({"content": None}, n)) for n in (1, 2)]
            one, two = (self._try(source, messages) for messages in asked)
            self._several[source] = "probe1" in two or not is_shown(one)
        return self._several[source]


# Messages with calls: their forms, and what is asked to find the right one.


def forms_of(content: str | None) -> list[CallForm]:
    """Return all forms of a message with such a content, the plainest first."""
    contents = dict.fromkeys([content, "", None])
    return [CallForm(has_text, own) for own in contents for has_text in (False, True)]


def has_broken(message: Message) -> bool:
    """Return whether the arguments of a call of the message are a text, and not a mapping."""
    return any(map(_is_broken, message["tool_calls"]))


def as_content(message: Message) -> Message:
    """Return the message with its calls whose arguments are a text as text behind its content."""
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
    """Return the message of `probe`, with arguments that are a text."""
    asked = probe(message)
    asked["tool_calls"][0]["function"]["arguments"] = "probe_key:"
    return asked


def probe(message: Message, num_calls: int = 1) -> Message:
    """Return a message with calls that holds what `message` holds beside them."""
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
    """Return whether a prompt shows the probe's arguments, and neither as Python nor as a text."""
    return "probe_key" in text and "'probe_key'" not in text and '\\"probe_key' not in text


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the same messages with one call in each, and the result of that call right behind
    it.
    """
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
