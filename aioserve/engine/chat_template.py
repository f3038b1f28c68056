"""A conversation as the prompt that the model's own template makes of it.

Templates are programs that come with a model: `template_renderer` runs them within limits. What
they are given is what `transformers` gives them; how messages with calls are written is in
`call_forms`. Knows nothing about tokens.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from aioserve.engine.prompt import Conversation, Messages
from aioserve.engine.template_renderer import TemplateRenderer
from aioserve.errors import RequestError

if TYPE_CHECKING:
    from aioserve.engine.call_forms import CallForms

Message = dict[str, Any]


def template_of(tokenizer: Any) -> str:
    """Return the chat template, all of its texts where it has several; "" if there is none."""
    template: Any = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


class MarksTexts(Protocol):
    """Something that marks the texts of a conversation which its prompt must not read otherwise."""

    def marked(self, conversation: Any) -> Any:
        """Return a `Conversation` with marks in its texts."""


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
        content: MarksTexts | None = None,
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

    @cached_property
    def _calls(self) -> "CallForms":
        """What writes messages with calls; loaded with the first of them."""
        from aioserve.engine.call_forms import CallForms

        return CallForms(self._try)

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
        if any(each.get("tool_calls") for each in messages):
            messages = self._calls.written(source, messages)
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
