"""Which parsers read the replies of a model: by its chat template, or by what the settings say.

Knows all of them by name. Knows nothing about requests.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.engine import Conversation
from aioserve.engine.admission.chat_template import ChatTemplate
from aioserve.engine.delivery.byte_level import special_token_ids
from aioserve.errors import RequestError
from aioserve.formats.call_parser import Beginning, CallParser, Function
from aioserve.formats.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from aioserve.formats.hermes import HermesParser
from aioserve.formats.llama3 import Llama3Parser
from aioserve.formats.mistral import MistralParser
from aioserve.formats.plain_json import PlainJsonParser
from aioserve.formats.reasoning import MARKS, Marks, ReasoningParser, choose_reasoning
from aioserve.formats.reply_parser import ReplyParser

#: By the names of the setting; the first that fits a template is taken.
CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "mistral": MistralParser,
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "json": PlainJsonParser,
}

# In patterns of a grammar.
_ANY = r"(.|\n)*"
_SPACE = r"[ \t\r\n]*"


def untold_tools(tokenizer: Any, tool_call_parser: str) -> str | None:
    """Why a parser that the settings name reads no call that was asked for: the chat template tells
    the model of no tools. None if it does, or if nothing is named.
    """
    if tool_call_parser not in CALL_PARSERS:
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
    """How one model writes replies."""

    def __init__(self, tokenizer: Any, tool_call_parser: str, reasoning_parser: str) -> None:
        """Both names may be `auto`, as the chat template has it, or `none`."""
        self._tokenizer, self._chat_template = tokenizer, ChatTemplate(tokenizer)
        templates = _templates_of(tokenizer)
        self._calls = _choose_calls(tool_call_parser, templates)
        if reasoning_parser == "auto":
            reasoning_parser = choose_reasoning(templates) or "none"
        self.marks: Marks | None = MARKS.get(reasoning_parser)
        markers = [] if self._calls is None else list(self._calls.markers)
        if self.marks is not None:
            markers += [self.marks.start, self.marks.end]
        ids = tokenizer.get_vocab() if markers else {}  # one that it does not know is no token
        special = special_token_ids(tokenizer) if markers else ()
        self._special = {marker: ids[marker] for marker in markers if ids.get(marker) in special}

    async def close(self) -> None:
        """End what renders templates, if anything had to."""
        self._chat_template.close()

    @property
    def call_parser(self) -> type[CallParser]:
        """What reads calls. Raises `RequestError` if nothing here can."""
        if self._calls is None:
            raise RequestError(
                "tools are not supported with this model: its chat template shows no way to write "
                "calls that is known here (see --tool-call-parser)",
                param="tools",
            )
        return self._calls

    def make_id(self) -> str:
        """An id for a call, such as the chat template takes."""
        return self.call_parser.make_id()

    @property
    def kept_special_tokens(self) -> tuple[int, ...]:
        """Special tokens that the parsers need to see in the text."""
        return tuple(self._special.values())

    def literal(self, text: str) -> str:
        """How a grammar writes it: a special token by its id, since its text is not its own."""
        if text in self._special:
            return f"<[{self._special[text]}]>"
        return msgspec.json.encode(text).decode()

    def thought(self, conversation: Conversation) -> tuple[str, list[str]]:
        """What may stand before a reply that is bound, in a grammar, and the rules of that."""
        if self.marks is None:
            return "", []
        rules = [self._thought_rule(), "blank: /[ \\n]{0,4}/"]
        if self._prompt_opens_reasoning(conversation):
            return "thought blank ", rules
        return f"({self.literal(self.marks.start)} thought blank)? ", rules

    def _thought_rule(self) -> str:
        assert self.marks is not None
        end = self.literal(self.marks.end)
        if self.marks.end in self._special:
            return f"thought: /{_ANY}/ {end}"
        return f"thought[suffix={end}]: /{_ANY}/"

    def free_grammar(self, functions: Sequence[Function], conversation: Conversation) -> str | None:
        """A grammar of replies that say what they like, but for calls of `functions`: what begins
        as one is one. None if nothing tells where they begin.
        """
        beginnings = self.call_parser.beginnings(functions, self.literal)
        if not beginnings:
            return None
        rules = [
            *_leads(beginnings, "lead", "TEXT"),
            f"reply: ({_called(beginnings, 'lead')})* TEXT",
            f"TEXT: /{_ANY}/",
            self.call_parser.grammar(functions, True, self.literal),
        ]
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
        """What a reply is that thinks if it begins with the mark, and the rules of that."""
        assert self.marks is not None
        mark = self.marks.start
        if mark in self._special:
            return f"/{_SPACE}/ {self.literal(mark)} {inside} | reply", []
        opening = _SPACE + re.escape(mark).replace("/", r"\/")
        rules = [
            *_leads(beginnings, "first", "FIRST"),
            f"FIRST: /{_ANY}/ & ~/{opening}{_ANY}/",
        ]
        return f"/{opening}/ {inside} | ({_called(beginnings, 'first')}) reply | FIRST", rules

    def _prompt_opens_reasoning(self, conversation: Conversation) -> bool:
        """Whether a reply begins inside of reasoning, as another conversation shows."""
        assert self.marks is not None
        ask = Conversation(
            [{"role": "user", "content": "?"}],
            add_generation_prompt=conversation.add_generation_prompt,
            template_kwargs=conversation.template_kwargs,
        )
        try:
            prompt = self._chat_template.render(ask)
        except RequestError:  # the request itself will get this error
            prompt = ""
        return ReasoningParser(self.marks, prompt).is_open

    def make_parser(
        self, names: Sequence[str] | None, prompt_end: Sequence[int], *, with_reasoning: bool
    ) -> ReplyParser:
        """What reads one reply, with calls of tools of these names, if there are any."""
        reasoning = None
        if self.marks is not None and with_reasoning:
            reasoning = ReasoningParser(self.marks, self._tokenizer.decode(prompt_end))
        calls = None if names is None else self.call_parser(names)
        return ReplyParser(reasoning, calls)


def _leads(beginnings: Sequence[Beginning], name: str, text: str) -> list[str]:
    """Rules of what ends where a call begins, as soon as that is seen."""
    rules = []
    for i, beginning in enumerate(beginnings):
        is_token = beginning.sign.startswith("<")
        before = f"{text} " if beginning.has_text else ""
        rules.append(f"{name}_{i}{'' if is_token else '[lazy]'}: {before}{beginning.sign}")
    return rules


def _called(beginnings: Sequence[Beginning], name: str) -> str:
    return " | ".join(f"{name}_{i} {each.rest}" for i, each in enumerate(beginnings))


def _templates_of(tokenizer: Any) -> str:
    """The chat templates of a model; empty if it has no template."""
    templates: Any = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)


def _choose_calls(name: str, templates: str) -> type[CallParser] | None:
    if name != "auto":
        return CALL_PARSERS.get(name)
    return next((parser for parser in CALL_PARSERS.values() if parser.fits(templates)), None)
