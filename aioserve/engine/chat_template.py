"""A conversation as the prompt that the model's own template makes of it.

Templates are programs that come with a model: they run in Jinja's sandbox, for so many seconds and
on texts of so many characters. What they are given is what `transformers` gives them. Knows nothing
about tokens.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from aioserve.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[Mapping[str, Any]]

# Of the thread's CPU time, however busy the machine is. A message takes some 50 microseconds.
TEMPLATE_SECONDS = 5.0
MAX_TEXT = 2**26  # characters that a template may put together


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
    reasoning_effort: str | None = None  # "none", or how much, in the template's words

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


class TemplateTooSlowError(RequestError):
    """A template took more time than it was given."""


class ChatTemplate:
    """The templates of one tokenizer."""

    def __init__(self, tokenizer: Any, placeholder: str | None = None) -> None:
        """`placeholder` stands for an image in a text; None: of a model that reads none."""
        self._tokenizer, self._placeholder = tokenizer, placeholder
        self._takes: dict[str, tuple[bool, bool]] = {}  # by template: text, parts
        self._call_forms: dict[tuple[str, str | None], _CallForm] = {}  # by template and content

    def render(self, conversation: Conversation, seconds: float = TEMPLATE_SECONDS) -> str:
        """The prompt. Raises `RequestError` if the template does, or makes too much of it, and
        `TemplateTooSlowError` if it has not ended after so many seconds.
        """
        source = self._source(with_tools=bool(conversation.tools))
        messages = [_with_reasoning(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools]
        if any(message.get("tool_calls") for message in messages):
            messages = [own for each in messages for own in self._with_calls(source, each)]
        _check_read(source, conversation.template_kwargs)
        names = {
            "documents": None,
            **_effort_kwargs(source, conversation.reasoning_effort),
            **conversation.template_kwargs,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        if conversation.add_generation_prompt is None:
            names["add_generation_prompt"] = not conversation.continue_final_message
        if not conversation.continue_final_message:
            names["messages"] = self._with_contents(source, messages)
            return self._render(source, names, seconds)
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]
        names["messages"] = self._with_contents(source, messages)
        text, mark, _ = self._render(source, names, seconds).rpartition(_END_MARK)
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

    def _render(self, source: str, names: Mapping[str, Any], seconds: float) -> str:
        try:
            template = _compile(source)  # once: its time is not this conversation's
            with _limits.within(seconds):
                pieces = template.generate({**self._tokenizer.special_tokens_map, **names})
                return "".join(_bounded(pieces))
        except RequestError:
            raise
        except Exception as error:  # templates raise what they like for roles they do not know
            where = _line_of(error)
            raise RequestError(f"the chat template refused{where}: {error}", "messages") from error

    def _with_calls(self, source: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The message in the first form in which this template shows its calls."""
        if not message.get("tool_calls"):
            return [message]
        content = message["content"] and "probe"
        if (source, content) not in self._call_forms:
            contents = dict.fromkeys([content, "", None])
            forms = [_CallForm(has_text, own) for own in contents for has_text in (False, True)]
            shown = (
                f for f in forms if self._shows(source, f.apply({**_PROBE, "content": content}))
            )
            self._call_forms[source, content] = next(shown, forms[0])
        return self._call_forms[source, content].apply(message)

    def _with_contents(self, source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With contents as this template wants them: texts, or lists of parts."""
        if self._placeholder is None and not any(isinstance(m["content"], list) for m in messages):
            return messages
        if source not in self._takes:
            parts = [{"type": "text", "text": "probe"}]
            self._takes[source] = (self._tells(source, "probe"), self._tells(source, parts))
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
            part["text"] if part["type"] == "text" else self._placeholder or "" for part in parts
        )

    def _tells(self, source: str, content: Any) -> bool:
        """Whether the template shows such a content as a text."""
        names = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            text = self._render(source, names, TEMPLATE_SECONDS)
        except RequestError:
            return False
        return "probe" in text and "'probe'" not in text  # that would be the list itself

    def _shows(self, source: str, messages: list[dict[str, Any]]) -> bool:
        """Whether the arguments of the probe's call show up as JSON."""
        messages = [{"role": "user", "content": "?"}, *messages]
        try:
            names = {"messages": messages, "add_generation_prompt": True}
            text = self._render(source, names, TEMPLATE_SECONDS)
        except RequestError:
            return False
        return '"probe_key"' in text or "probe_key>" in text


class _CallForm(NamedTuple):
    """How a template wants a message with calls.

    Most make JSON of the arguments, or go through them; others join them to their text as they are.
    Some refuse a content that is none, others leave the calls out unless it is.
    """

    has_text: bool  # arguments as JSON text, not as a mapping
    content: str | None  # beside calls; if there is more to say, a message before says it

    def apply(self, message: dict[str, Any]) -> list[dict[str, Any]]:
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
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        return [said, {"role": "assistant", "content": self.content, "tool_calls": calls}]


def _to_json(function: Mapping[str, Any]) -> str:
    return json.dumps(function["arguments"], ensure_ascii=False)


_PROBE: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "probe0000",  # nine letters and digits, for Mistral's
            "type": "function",
            "function": {"name": "probe", "arguments": {"probe_key": "probe_value"}},
        }
    ],
}


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Under all names that templates have for it."""
    reasoning = message.get("reasoning_content")
    return {**message} if reasoning is None else {**message, "thinking": reasoning}


class _Limits(threading.local):
    """What the template that this thread runs may still do."""

    deadline = float("inf")  # of the thread's CPU time

    def within(self, seconds: float) -> "_Limits":
        self._seconds = seconds
        return self

    def __enter__(self) -> None:
        self.deadline = time.thread_time() + self._seconds

    def __exit__(self, *_: object) -> None:
        self.deadline = float("inf")

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise TemplateTooSlowError("the chat template takes too long", "messages")


_limits = _Limits()


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise RequestError("the chat template makes too long a text", "messages")


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        _limits.check_time()
        yield piece


@cache
def _compile(source: str) -> "Template":
    """Raises what Jinja does for a template that is none."""
    template: Template = _make_environment().from_string(source)
    return template


def _check_read(source: str, kwargs: Mapping[str, Any]) -> None:
    """What a template does not look at may only ask for nothing."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _names_read(source):
            raise RequestError(
                f"the chat template of this model does not look at {name!r}",
                param=f"chat_template_kwargs.{name}",
            )


def _effort_kwargs(source: str, effort: str | None) -> dict[str, Any]:
    """How a template is told how much to reason: as vLLM does, by either of two names."""
    if effort is None:
        return {}
    told = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    told = {name: value for name, value in told.items() if name in _names_read(source)}
    if not told and effort != "none":
        raise RequestError(
            "the chat template of this model does not look at reasoning_effort, nor at "
            "enable_thinking",
            param="reasoning_effort",
        )
    return told


@cache
def _names_read(source: str) -> frozenset[str]:
    """What a template may be given; nothing if it is none."""
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_make_environment().parse(source)))
    except TemplateError:
        return frozenset()


@cache
def _make_environment() -> Any:
    """Jinja's sandbox as `transformers` sets it up, with the time looked at in every round of a
    loop and every call, and the size of what operators make.
    """
    from jinja2 import nodes, pass_context
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what to train on: of no interest here."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = self._filtered(loop.iter, "in_time")
            for text in list(tree.find_all(nodes.Concat)):
                text.nodes = [self._filtered(node, "in_size") for node in text.nodes]
            return tree

        def _filtered(self, node: Any, name: str) -> nodes.Filter:
            filtered = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
            filtered.set_environment(self)
            return filtered

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            _limits.check_time()
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                _check_size(_bits(left) * (right if isinstance(right, int) else 1))
            elif operator == "+":
                _check_size(_length(left) + _length(right))
            else:
                _check_size(max(_length(left) * _times(right), _length(right) * _times(left)))
            return super().call_binop(context, operator, left, right)

    @pass_context
    def in_time(_context: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            _limits.check_time()
            yield item

    @pass_context
    def in_size(_context: Any, value: Any) -> Any:
        _check_size(_length(value))
        return value

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    class PlainNamespace(Namespace):
        """Of names that do not lead into Python's own."""

        def __init__(*args: Any, **attrs: Any) -> None:  # as Jinja's: `self` may be a name
            self, *given = args
            values = dict(*given, **attrs)
            for name in values:
                check_name(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"{name!r} is no name of a namespace in a chat template")

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters |= {"in_time": in_time, "in_size": in_size, "tojson": _tojson}
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": _strftime_now,
        "dict": lambda *args, **items: dict(*args, **items),  # the class has more to offer
        "namespace": PlainNamespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, for text that is no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _times(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _line_of(error: BaseException) -> str:
    """Where in the template it was raised, as Jinja's traceback knows."""
    line: int | None = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"
