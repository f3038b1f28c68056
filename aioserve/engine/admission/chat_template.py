"""A conversation as the prompt that the model's own template makes of it.

Templates are programs that come with a model: `template_renderer` runs them within limits. What
they are given is what `transformers` gives them. Knows nothing about tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.engine.admission.call_forms import (
    CallForm,
    as_content,
    broken_probe,
    forms_of,
    has_broken,
    is_shown,
    one_call_each,
    probe,
)
from aioserve.engine.admission.content_text import ContentText
from aioserve.engine.admission.late_system import PROBE, has_late_system, without_late_system
from aioserve.engine.admission.template_renderer import TemplateRenderer
from aioserve.errors import RequestError

Messages = Sequence[Mapping[str, Any]]


# What every template is given, or what `transformers` takes with it.
_OWN_NAMES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "tokenize",
    "tools",
}
# Where the last message ends in the prompt: no text of a client holds it, nor does a template.
_END_MARK = "\ue0ff\uf8ff\ue0ff"


class Conversation(msgspec.Struct, frozen=True):
    """Messages as templates know them, and the tools that the model is told of.

    Messages hold "role" and "content"; those of an assistant may hold "tool_calls", each a
    {"id", "type", "function": {"name", "arguments"}} whose arguments are a mapping. Raises
    `RequestError` for what cannot go together.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False  # the reply goes on with it, as if it had begun so
    template_kwargs: Mapping[str, Any] = {}  # what else the template looks at, by name
    # Hints, which a template may look at.
    reasoning_effort: str | None = None  # "none", or how much, in the template's words
    verbosity: str | None = None  # how long a reply is to be, in the template's words

    def __post_init__(self) -> None:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other: one goes "
                    "on with the last message, one begins the next",
                    param="continue_final_message",
                )
            if not self.messages or not isinstance(self.messages[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text",
                    param="continue_final_message",
                )
        for name in self.template_kwargs:
            if name in _OWN_NAMES:
                raise RequestError(
                    f"chat_template_kwargs must not hold {name!r}: the request has a field for it, "
                    "or the server has the say",
                    param=f"chat_template_kwargs.{name}",
                )


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
        """The prompt. Raises `RequestError` if the template does, or asks too much."""
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
        """What a template does not look at may only ask for nothing."""
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in self._names_read(source):
                raise RequestError(
                    f"the chat template of this model does not look at {name!r}",
                    param=f"chat_template_kwargs.{name}",
                )

    def _hints(self, source: str, conversation: Conversation) -> dict[str, Any]:
        """What the template looks at: how much to reason by either of two names, as vLLM has it."""
        effort = conversation.reasoning_effort
        told: dict[str, Any] = {"verbosity": conversation.verbosity}
        if effort is not None:
            told |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        given = {name: value for name, value in told.items() if value is not None}
        return {n: value for n, value in given.items() if n in self._names_read(source)}

    def _with_calls(self, source: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The message in the first form in which this template shows its calls."""
        if not message.get("tool_calls"):
            return [message]
        if has_broken(message) and not self._takes_broken(source, message):
            return self._with_calls(source, as_content(message))
        return self._call_form(source, probe(message)).apply(message)

    def _takes_broken(self, source: str, message: dict[str, Any]) -> bool:
        """Whether a template shows arguments that are a text, and no JSON object, in that form."""
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
        """Whether a template shows all calls of a message, or none."""
        if source not in self._several:
            asked = [self._with_calls(source, probe({"content": None}, n)) for n in (1, 2)]
            one, two = (self._try(source, messages) for messages in asked)
            self._several[source] = "probe1" in two or not is_shown(one)
        return self._several[source]

    def _with_contents(self, source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With contents as this template wants them: texts, or lists of parts."""
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
        """Whether the template shows the last content of `messages`, a probe, as a text."""
        try:
            text = self._render(source, {"messages": messages, "add_generation_prompt": True})
        except RequestError:
            return False
        return "probe" in text and "'probe'" not in text  # that would be the list itself

    def _try(self, source: str, messages: list[dict[str, Any]]) -> str:
        """The prompt of a user's message and these; empty if the template refuses them."""
        messages = [{"role": "user", "content": "?"}, *messages]
        try:
            return self._render(source, {"messages": messages, "add_generation_prompt": True})
        except RequestError:
            return ""


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Under all names that templates have for it."""
    reasoning = message.get("reasoning_content")
    return {**message} if reasoning is None else {**message, "thinking": reasoning}
