"""How one model writes replies: its format, with its tokenizer and its chat template.

Knows the grammars of bound replies, and counts malformed calls. Which format it is, is chosen in
`aioserve.features.formats`.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from aioserve.config import EngineConfig, ServerConfig
from aioserve.engine.chat.reply_format import (
    Beginning,
    Function,
    Marks,
    ReasoningParser,
    ReplyFormat,
    ReplyParser,
    check_names,
    choose,
    literal_with,
)
from aioserve.engine.chat_template import ChatTemplate
from aioserve.engine.detokenizer import special_token_ids
from aioserve.engine.operations.command import Counted
from aioserve.engine.prompt import Conversation
from aioserve.errors import RequestError
from aioserve.params import MAX_FORCED_TOKENS, SamplingParams

logger = logging.getLogger(__name__)

# In patterns of a grammar.
_SPACE = r"[ \t\r\n]*"


def check_formats(settings: ServerConfig) -> None:
    """Raise `ConfigError` if the settings name a format that is none, before a model is loaded."""
    check_names(settings.tool_call_parser, settings.reasoning_parser)


def say_format(tokenizer: Any, settings: ServerConfig) -> None:
    """A line of the log about which format reads replies, and by which evidence; another if calls
    are looked for of tools that the model never hears of.
    """
    names = settings.tool_call_parser, settings.reasoning_parser
    logger.info("format of replies: %s", choose(*names, _templates_of(tokenizer)).why)
    if (why := untold_tools(tokenizer, settings.tool_call_parser)) is not None:
        logger.warning("%s", why)


def untold_tools(tokenizer: Any, tool_call_parser: str) -> str | None:
    """Return why a parser that the settings name reads no call that was asked for: the chat
    template tells the model of no tools. None if it does, or if nothing is named.
    """
    if tool_call_parser in ("auto", "none"):
        return None
    templates = _templates_of(tokenizer)
    if re.search(r"\btools\b", templates):
        return None
    what, then = "there is no chat template", "every chat is refused"
    if templates:
        what = "the chat template names no tools"
        then = "requests with tools are served, and the model is not told of the tools"
    return (
        f"server.tool_call_parser is {tool_call_parser}, but {what}: {then}; --chat-template FILE "
        "gives another template"
    )


class ChatFormat:
    """The format in which one model writes replies."""

    def __init__(
        self,
        tokenizer: Any,
        tool_call_parser: str,
        reasoning_parser: str,
        *,
        closes_objects: bool = True,
    ) -> None:
        """Both names may be `auto`, as the chat template has it, or `none`. `closes_objects` is as
        for `for_grammar`. Raises `ConfigError` for what names no format.
        """
        self.closes_objects = closes_objects
        self.tokenizer, self._chat_template = tokenizer, ChatTemplate(tokenizer)
        choice = choose(tool_call_parser, reasoning_parser, _templates_of(tokenizer))
        self.malformed = MalformedCalls(choice.name)
        self.marks: Marks | None = choice.marks
        self._format, self._takes_tools = choice.format, choice.takes_tools
        markers = [] if self._format is None else list(self._format.markers)
        if self.marks is not None:
            markers += [self.marks.start, self.marks.end]
        ids = tokenizer.get_vocab() if markers else {}  # one that it does not know is no token
        special = special_token_ids(tokenizer) if markers else ()
        self._special = {marker: ids[marker] for marker in markers if ids.get(marker) in special}
        #: How a grammar writes a text.
        self.literal = literal_with(self._special)

    @classmethod
    def of(cls, tokenizer: Any, config: EngineConfig) -> "ChatFormat":
        """Return the format that the settings name, or that the chat template shows."""
        return cls(
            tokenizer,
            config.server.tool_call_parser,
            config.server.reasoning_parser,
            closes_objects=config.structured_outputs.json_objects == "closed",
        )

    def close(self) -> None:
        """End the process that renders templates, if there is one."""
        self._chat_template.close()

    @property
    def call_parser(self) -> type[ReplyFormat]:
        """The reader of calls. Raises `RequestError` if nothing here can."""
        if self._format is None or not self._takes_tools:
            raise RequestError(
                "tools are not supported with this model: its chat template has no known format of "
                "tool calls (see --tool-call-parser)",
                param="tools",
            )
        return self._format

    @property
    def takes_tools(self) -> bool:
        """Whether requests may have tools: it is known how the model writes calls."""
        return self._format is not None and self._takes_tools

    def call_rules(self, functions: Sequence[Function], *, is_parallel: bool) -> str:
        """Rules of which `calls` is one call of `functions`, or several. Raises `RequestError` if
        their schemas make more rules than can be compiled.
        """
        try:
            return self.call_parser.grammar(functions, is_parallel, self.literal)
        except ValueError as error:
            raise RequestError(f"the tools cannot be compiled: {error}", param="tools") from error

    @property
    def tells_apart(self) -> bool:
        """Whether a reply is more than content though there are no tools: it may reason."""
        return self.marks is not None or self._reads_all

    @property
    def thinking(self) -> Marks | None:
        """The marks by which reasoning tokens are counted and bound; None: it is not known."""
        return self._format.thinking if self._format and self._reads_all else self.marks

    @property
    def after_thinking(self) -> str:
        """The text that has to follow the end mark of reasoning where that is forced."""
        return self._format.after_thinking if self._format and self._reads_all else ""

    @property
    def _reads_all(self) -> bool:
        return self._format is not None and self._format.reads_reasoning

    def make_id(self) -> str:
        """Return an id for a call, such as the chat template takes."""
        return "" if self._format is None else self._format.make_id()

    @property
    def kept_special_tokens(self) -> tuple[int, ...]:
        """Special tokens that the parsers need to see in the text."""
        return tuple(self._special.values())

    def thought(self, conversation: Conversation) -> tuple[str, list[str]]:
        """Return what may stand before a reply that is bound, in a grammar, and the rules of
        that.
        """
        if self._format is not None and self._reads_all:
            own = self._format.reasoning_rules(self.literal)
            return ("reasoning ", [own]) if own else ("", [])
        if self.marks is None:
            return "", []
        rules = [self._thought_rule(), "blank: /[ \\n]{0,4}/"]
        if self._prompt_opens_reasoning(conversation):
            return "thought blank ", rules
        return f"({self.literal(self.marks.start)} thought blank)? ", rules

    def answer_rules(self, content: str) -> list[str]:
        """Rules of which `answer` is a reply with this content, which is a rule's right side."""
        rules = [f"content: {content}"]
        if self._format is not None and self._reads_all:
            return [self._format.answer_rules(self.literal), *rules]
        return ["answer: content", *rules]

    def _thought_rule(self) -> str:
        assert self.marks is not None
        from aioserve.engine.chat.reply_grammar import text_until

        return text_until("thought", self.marks.end, self.literal)

    def free_grammar(self, functions: Sequence[Function], conversation: Conversation) -> str | None:
        """Return a grammar of replies that say what they like, but for calls of `functions`: what
        begins as one is one. None if nothing tells where they begin.
        """
        from aioserve.engine.chat.reply_grammar import free_reply

        beginnings = self.call_parser.beginnings(functions, self.literal)
        if not beginnings:
            return None
        rules = [*free_reply(beginnings), self.call_rules(functions, is_parallel=True)]
        start = "reply"
        if self.marks is not None:
            rules.append(self._thought_rule())
            # It may never end: then all of the reply is reasoning.
            start = "(thought reply | TEXT)"
            if not self._prompt_opens_reasoning(conversation):
                start, more = self._may_open_reasoning(beginnings, start)
                rules += more
        return "\n".join([f"start: {start}", *rules])

    def _may_open_reasoning(
        self, beginnings: Sequence[Beginning], inside: str
    ) -> tuple[str, list[str]]:
        """Return what a reply is that thinks if it begins with the mark, and the rules of that."""
        from aioserve.engine.chat.reply_grammar import ANY, called, leads

        assert self.marks is not None
        mark = self.marks.start
        written = self.literal(mark)
        if not written.startswith('"'):  # with a special token, which is in no text
            return f"/{_SPACE}/ {written} {inside} | reply", []
        opening = _SPACE + re.escape(mark).replace("/", r"\/")
        rules = [
            *leads(beginnings, "first", "FIRST"),
            f"FIRST: /{ANY}/ & ~/{opening}{ANY}/",
        ]
        return f"/{opening}/ {inside} | ({called(beginnings, 'first')}) reply | FIRST", rules

    def _prompt_opens_reasoning(self, conversation: Conversation) -> bool:
        """Return whether a reply begins inside of reasoning, as another conversation shows."""
        assert self.marks is not None
        last = conversation.messages[-1:] if conversation.continue_final_message else ()
        ask = msgspec.structs.replace(
            conversation, messages=[{"role": "user", "content": "?"}, *last], tools=()
        )
        try:
            prompt = self._chat_template.render(ask)
        except RequestError:  # the request itself will get this error
            prompt = ""
        return ReasoningParser(self.marks, prompt).is_open

    def make_parser(
        self,
        functions: Sequence[Function] | None,
        prompt_end: Sequence[int],
        *,
        with_reasoning: bool,
    ) -> ReplyParser:
        """Return what reads one reply, with calls of these functions, if there are any."""
        reasoning, calls = None, None
        reads_all = with_reasoning and self._reads_all
        if (self.marks is not None and with_reasoning) or functions is not None or reads_all:
            end = self.tokenizer.decode(prompt_end)
        if self.marks is not None and with_reasoning:
            reasoning = ReasoningParser(self.marks, end)
        if functions is not None:
            calls = self.call_parser(functions, end)
        elif reads_all and self._format is not None:
            calls = self._format((), end)
        return ReplyParser(reasoning, calls)


def _templates_of(tokenizer: Any) -> str:
    """Return the chat templates of a model; empty if it has no template."""
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)


# Counts tool calls that a model wrote wrong, for /metrics. Knows two ways of it: text that began as
# a call and is none, and arguments that are no JSON object.


Way = Literal["call", "arguments"]


class MalformedCalls:
    """Counts of one application, since the process began. Counts nothing without a format."""

    def __init__(self, name: str | None) -> None:
        """`name`: of the format that reads the calls."""
        self._name = name
        self._counts: Counter[Way] = Counter()

    def add(self, way: Way, number: int = 1) -> None:
        """Count calls that came as text (`call`), or with arguments that are no JSON object."""
        self._counts[way] += number

    def tell(self) -> list[Counted]:
        """The counts with their labels, for metrics."""
        told = "Tool calls that the model wrote wrong"
        ways: tuple[Way, ...] = ("call", "arguments")
        counted = Counted("malformed_tool_calls", told, ("format", "part"), [])
        if self._name is not None:
            counted.counts += [((self._name, way), self._counts[way]) for way in ways]
        return [counted]


# Thinking budgets at the engine's door: the end mark as the tokens that will be forced. Knows a
# tokenizer's words. Knows nothing about when a budget is spent.


def spell_budget(
    params: SamplingParams,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
) -> SamplingParams:
    """`params` with the tokens of the mark that ends reasoning. Raises `RequestError` if they are
    none, too many, or not allowed.
    """
    budget = params.thinking_budget
    assert budget is not None, "it is given"
    token_ids = encode(budget.text)
    if budget.end not in decode(token_ids):
        _refuse(f"the tokenizer of this model cannot spell {budget.text!r}")
    if len(token_ids) > MAX_FORCED_TOKENS:
        _refuse(
            f"the text that ends reasoning must have at most {MAX_FORCED_TOKENS} tokens, it has "
            f"{len(token_ids)}"
        )
    _check_allowed(token_ids, params.allowed_token_ids)
    budget = msgspec.structs.replace(budget, forced_token_ids=tuple(token_ids))
    return msgspec.structs.replace(params, thinking_budget=budget)


def _check_allowed(token_ids: Collection[int], allowed: Collection[int]) -> None:
    if allowed and (missing := set(token_ids).difference(allowed)):
        _refuse(
            "allowed_token_ids must hold the tokens that end reasoning; they lack "
            + ", ".join(map(str, sorted(missing)))
        )


def _refuse(why: str) -> None:
    raise RequestError(f"thinking_budget cannot be enforced: {why}", param="thinking_budget")
