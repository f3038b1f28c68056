"""A conversation as the prompt that the model's own template makes of it.

Templates are programs that come with a model: `template_renderer` runs them within limits. What
they are given is what `transformers` gives them. Knows nothing about tokens, but those that the
text of a client must not become.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import msgspec

from aioserve.engine.prompt import MARK, Conversation, Messages, unmarked
from aioserve.engine.template_renderer import TemplateRenderer
from aioserve.errors import ConfigError, RequestError

# How chat templates want messages with calls: in which form, and whether several in one message.
# Knows messages, and calls with arguments that are no JSON object, which are text. Which form a
# template shows is tried in `chat_template`.


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


# Messages of role system behind others, as agents send them, for templates that take none there.
# Knows messages. Which templates take them is known in `chat_template`.


#: Where a template shows the text of the last message, it takes such a message as it is.
PROBE: Sequence[Message] = (
    {"role": "user", "content": "?"},
    {"role": "system", "content": "probe"},
)


def has_late_system(messages: Sequence[Message]) -> bool:
    """Return whether a message of role system stands behind the first message."""
    return any(message["role"] == "system" for message in messages[1:])


def without_late_system(messages: Sequence[Message]) -> list[Message]:
    """Return the same messages with those of role system at the beginning as one, and each later
    one as text of a user, joined to the user's messages beside it.
    """
    told: list[Message] = []
    is_open = False  # whether the last one is a user's that a further one joins
    for message in messages:
        is_system = message["role"] == "system"
        is_leading = is_system and all(each["role"] == "system" for each in told)
        if is_system and not is_leading:
            message = {"role": "user", "content": message["content"]}
        is_user = message["role"] == "user"
        joins = is_user and (is_open or is_system) and told[-1]["role"] == "user"
        if joins or (is_leading and told):
            content = _joined(told[-1]["content"], message["content"])
            told[-1] = {**told[-1], "content": content}
        else:
            told.append(message)
        is_open = is_user and is_system
    return told


def _joined(first: Any, second: Any) -> Any:
    """Return two contents, each a text or a list of parts, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    before, after = (
        [{"type": "text", "text": each}] if isinstance(each, str) else list(each or ())
        for each in (first, second)
    )
    return [*before, {"type": "text", "text": "\n\n"}, *after]


# Text of clients in a chat prompt that spells a control token, and is to be read as text. What a
# template writes itself stays a control; between the two it cannot be told in a rendered prompt. So
# contents are marked before they are rendered, and the marks tell where no control is. Knows the
# tokenizer and conversations; knows no template.


_BEGINNING = "\ue0fd\uf8fd\ue0fd"  # of what stands behind a control; no vocabulary has it
# Of messages and their parts: what templates compare, and no model reads as text.
_NAMES = ("role", "type")


class _Control(NamedTuple):
    """A token of chat prompts that is none of their text."""

    text: str
    token_id: int
    is_special: bool  # else it is text elsewhere: `<tool_call>`
    takes_space_before: bool
    takes_space_behind: bool


class ContentText:
    """Marks conversations, and encodes the prompts that a template has made of them."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of `transformers`. Its controls are the added tokens that it flags as
        special, and those that its chat template writes.

        Raises `ConfigError` for one that is not fast, or that spells a control in no other way.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("model.content_special_tokens: text needs a fast tokenizer")
        controls = _controls(backend, template_of(tokenizer))
        self._backend = backend
        self._all = _Finder(controls)
        self._special = _Finder([control for control in controls if control.is_special])
        self._plain, self._beginning = _without(backend, {control.text for control in controls})
        for control in controls:
            if control.token_id in self._encode_plain(control.text, is_first=True):
                raise ConfigError(
                    "model.content_special_tokens: text is not possible with this tokenizer, which "
                    f"has no other tokens for {control.text!r}"
                )

    def marked(self, conversation: Any) -> Any:
        """Return a `Conversation` whose texts hold marks where they spell controls. What the
        assistant said may hold those that are text elsewhere: templates look for `</think>` in it.
        """
        messages = [self._marked_message(message) for message in conversation.messages]
        return msgspec.structs.replace(
            conversation,
            messages=messages,
            tools=_mapped(conversation.tools, self._all),
            template_kwargs=_mapped(conversation.template_kwargs, self._all),
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a rendered prompt with marks in it."""
        ids: list[int] = []
        pieces = list(self._all.split(prompt))
        at = 0
        for is_marked, group in groupby(pieces, lambda piece: MARK in piece[0]):
            run = list(group)
            before = pieces[at - 1][1] if at else None
            at += len(run)
            behind = pieces[at][1] if at < len(pieces) else None
            if not is_marked:
                text = "".join(text for text, _ in run)
                encode = self._backend.encode_batch_fast
                ids += encode([text], add_special_tokens=False)[0].ids
                continue
            [(text, _)] = run  # between two controls, or at an end
            text = unmarked(text)
            if before is not None and before.takes_space_behind:
                text = text.lstrip()
            if behind is not None and behind.takes_space_before:
                text = text.rstrip()
            ids += self._encode_plain(text, is_first=before is None)
        return ids

    def _encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        """Return a text without controls. Behind one, some tokenizers put no space before it."""
        encode = self._plain.encode_batch_fast
        if is_first or not text:
            return list(encode([text], add_special_tokens=False)[0].ids)
        ids: list[int] = encode([_BEGINNING + text], add_special_tokens=False)[0].ids
        assert ids[0] == self._beginning, "it is an added token"
        return ids[1:]

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        said = self._special if message.get("role") == "assistant" else self._all
        marked = {key: _mapped(value, said) for key, value in message.items() if key not in _NAMES}
        if "tool_calls" in message:
            marked["tool_calls"] = _mapped(message["tool_calls"], self._all)
        return {**message, **marked}


class _Finder:
    """Finds controls in texts, in one pass however many there are and whatever stands there."""

    def __init__(self, controls: Collection[_Control]) -> None:
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.models import WordLevel

        self._controls = list(controls)
        other = "?"
        self._finder = Tokenizer(WordLevel({other: 0}, unk_token=other))
        texts = [control.text for control in self._controls]
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in texts])
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[-n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=1)

    def split(self, text: str) -> Iterator[tuple[str, _Control | None]]:
        """Yield the pieces of a text in their order, each with the control that it is."""
        found = self._finder.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield text[start:end], self._controls[token_id - 1] if token_id else None

    def marked(self, text: str) -> str:
        """Return a text with marks in every control, and where it may become one with its
        neighbours.
        """
        pieces = [
            MARK.join(piece) + MARK if control is not None else piece
            for piece, control in self.split(text)
        ]
        begun, ended = text.lstrip(), text.rstrip()
        lengths = range(1, min(self._longest, len(text) + 1))
        if any(begun[:n] in self._tails for n in lengths):
            pieces.insert(0, MARK)
        if any(ended[-n:] in self._heads for n in lengths):
            pieces.append(MARK)
        return "".join(pieces)


def _mapped(value: Any, finder: _Finder) -> Any:
    """Return a value of JSON with marks in its texts."""
    if isinstance(value, str):
        return finder.marked(value)
    if isinstance(value, Mapping):
        return {
            _mapped(key, finder): each if key in _NAMES else _mapped(each, finder)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(each, finder) for each in value]
    return value


def template_of(tokenizer: Any) -> str:
    """Return the chat template, all of its texts where it has several; "" if there is none."""
    template: Any = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _controls(backend: Any, template: str) -> list[_Control]:
    return [
        _Control(token.content, token_id, token.special, token.lstrip, token.rstrip)
        for token_id, token in backend.get_added_tokens_decoder().items()
        if len(token.content) > 1
        and token.content.strip()
        and (token.special or token.content in template)
    ]


def _without(backend: Any, texts: Collection[str]) -> tuple[Any, int | None]:
    """Return a copy of a tokenizer that knows these added tokens no more, and all others by the
    same ids; and the id of what stands for a control before a text.
    """
    from tokenizers import AddedToken, Tokenizer

    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    known = {*(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))}
    gone = known.intersection(texts)  # the model spells nothing by them
    added = [token for token in state["added_tokens"] if token["content"] not in gone]
    for token in added:
        if token["content"] in texts:  # its place is kept: those behind it are numbered on
            token |= {"content": f"{MARK}{token['id']}{MARK}", "special": False}
    plain = Tokenizer.from_str(json.dumps({**state, "added_tokens": added}))
    plain.no_padding()
    plain.no_truncation()
    plain.add_tokens([AddedToken(_BEGINNING, normalized=False)])
    return plain, plain.token_to_id(_BEGINNING)


# Where the last message ends in the prompt: no text of a client holds it, nor does a template.
_END_MARK = "\ue0ff\uf8ff\ue0ff"


class ChatTemplate:
    """The templates of one tokenizer. Blocks the caller, which must be no event loop."""

    def __init__(
        self,
        tokenizer: Any,
        marks: Mapping[str, str] = {},
        *,
        seconds: float | None = None,
        content: ContentText | None = None,
    ) -> None:
        """`marks` stand in a text for parts of other types that the model reads ("image"), by type.
        With `content`, prompts hold its marks, and are for its `encode`.
        `seconds` of CPU time are for one text; None: as many as there are by default.
        """
        self._tokenizer, self._marks, self._content = tokenizer, marks, content
        self._renderer = TemplateRenderer(seconds)
        self._names: dict[str, frozenset[str]] = {}  # that a template may be given, by template
        self._takes: dict[str, tuple[bool, bool]] = {}  # by template: text, parts
        self._late: dict[str, bool] = {}  # by template: system messages behind others
        self._call_forms: dict[tuple[str, str], CallForm] = {}  # by template and probe
        self._broken: dict[tuple[str, str], bool] = {}  # by the same: text as arguments
        self._several: dict[str, bool] = {}  # by template: calls in one message

    def close(self) -> None:
        """End the process in which templates are rendered. Idempotent."""
        self._renderer.close()

    def render(self, conversation: Conversation) -> str:
        """Return the prompt. Raises `RequestError` if the template does, or asks too much."""
        source = self._source(with_tools=bool(conversation.tools))
        if self._content is not None:
            conversation = self._content.marked(conversation)
        messages = [_with_reasoning(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools]
        if has_late_system(messages) and not self._takes_late_system(source):
            messages = without_late_system(messages)
        num_calls = max((len(each.get("tool_calls") or ()) for each in messages), default=0)
        if num_calls > 1 and not self._takes_several(source):
            messages = one_call_each(messages)
        if num_calls:
            messages = [own for each in messages for own in self._with_calls(source, each)]
        self._check_read(source, conversation.template_kwargs)
        names = {
            "documents": None,
            **self._hints(source, conversation),
            **conversation.template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        if conversation.add_generation_prompt is None:
            names["add_generation_prompt"] = not conversation.continue_final_message
        if not conversation.continue_final_message:
            names["messages"] = self._with_contents(source, messages)
            return self._render(source, names)
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]
        names["messages"] = self._with_contents(source, messages)
        text, mark, _ = self._render(source, names).rpartition(_END_MARK)
        if not mark:
            raise RequestError(
                "the chat template leaves the last message out: it cannot be continued",
                param="continue_final_message",
            )
        return text

    def _source(self, with_tools: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template: use a text prompt", "messages")
        return str(self._tokenizer.get_chat_template(tools=[{}] if with_tools else None))

    def _render(self, source: str, names: Mapping[str, Any]) -> str:
        return self._renderer.render(source, {**self._tokenizer.special_tokens_map, **names})

    def _names_read(self, source: str) -> frozenset[str]:
        if source not in self._names:
            self._names[source] = self._renderer.names_read(source)
        return self._names[source]

    def _check_read(self, source: str, kwargs: Mapping[str, Any]) -> None:
        """Refuse fields that the template does not look at, unless they ask for nothing."""
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in self._names_read(source):
                raise RequestError(
                    f"the chat template of this model does not use {name!r}",
                    param=f"chat_template_kwargs.{name}",
                )

    def _hints(self, source: str, conversation: Conversation) -> dict[str, Any]:
        """Return what the template looks at: how much to reason by any of three names, as vLLM has
        it; `thinking` is DeepSeek's.
        """
        effort = conversation.reasoning_effort
        told: dict[str, Any] = {"verbosity": conversation.verbosity}
        if effort is not None:
            thinks = effort != "none"
            told |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        given = {name: value for name, value in told.items() if value is not None}
        return {n: value for n, value in given.items() if n in self._names_read(source)}

    def _with_calls(self, source: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the message in the first form in which this template shows its calls."""
        if not message.get("tool_calls"):
            return [message]
        if has_broken(message) and not self._takes_broken(source, message):
            return self._with_calls(source, as_content(message))
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
            asked = [self._with_calls(source, probe({"content": None}, n)) for n in (1, 2)]
            one, two = (self._try(source, messages) for messages in asked)
            self._several[source] = "probe1" in two or not is_shown(one)
        return self._several[source]

    def _with_contents(self, source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with contents as this template wants them: texts, or lists of parts."""
        if not self._marks and not any(isinstance(m["content"], list) for m in messages):
            return messages
        if source not in self._takes:
            parts = [{"type": "text", "text": "probe"}]
            asked = [[{"role": "user", "content": content}] for content in ("probe", parts)]
            self._takes[source] = (self._tells(source, asked[0]), self._tells(source, asked[1]))
        takes_text, takes_parts = self._takes[source]
        return [
            {**message, "content": self._as_text(content)}
            if isinstance(content := message["content"], list) and not takes_parts
            else {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content, str) and takes_parts and not takes_text
            else message
            for message in messages
        ]

    def _as_text(self, parts: Sequence[Mapping[str, Any]]) -> str:
        return "".join(
            part["text"] if part["type"] == "text" else self._marks.get(part["type"], "")
            for part in parts
        )

    def _takes_late_system(self, source: str) -> bool:
        if source not in self._late:
            self._late[source] = self._tells(source, PROBE)
        return self._late[source]

    def _tells(self, source: str, messages: Messages) -> bool:
        """Return whether the template shows the last content of `messages`, a probe, as a text."""
        try:
            text = self._render(source, {"messages": messages, "add_generation_prompt": True})
        except RequestError:
            return False
        return "probe" in text and "'probe'" not in text  # that would be the list itself

    def _try(self, source: str, messages: list[dict[str, Any]]) -> str:
        """Return the prompt of a user's message and these; empty if the template refuses them."""
        messages = [{"role": "user", "content": "?"}, *messages]
        try:
            return self._render(source, {"messages": messages, "add_generation_prompt": True})
        except RequestError:
            return ""


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Under all names that templates have for it."""
    reasoning = message.get("reasoning_content")
    return {**message} if reasoning is None else {**message, "thinking": reasoning}
