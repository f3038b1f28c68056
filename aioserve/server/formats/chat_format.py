"""Which parsers read the replies of a model: by its chat template, or by what the settings say.

Knows all of them by name. Knows nothing about requests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aioserve.engine.byte_level import special_token_ids
from aioserve.errors import RequestError
from aioserve.server.formats.call_parser import CallParser, Function
from aioserve.server.formats.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from aioserve.server.formats.hermes import HermesParser
from aioserve.server.formats.llama3 import Llama3Parser
from aioserve.server.formats.mistral import MistralParser
from aioserve.server.formats.plain_json import PlainJsonParser
from aioserve.server.formats.reasoning import MARKS, Marks, ReasoningParser, choose_reasoning
from aioserve.server.formats.reply_parser import ReplyParser

#: By the names of the setting; the first that fits a template is taken.
CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "mistral": MistralParser,
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "json": PlainJsonParser,
}


class ChatFormat:
    """How one model writes replies."""

    def __init__(self, tokenizer: Any, tool_call_parser: str, reasoning_parser: str) -> None:
        """Both names may be `auto`, as the chat template has it, or `none`."""
        self._tokenizer = tokenizer
        templates = getattr(tokenizer, "chat_template", None) or ""
        if isinstance(templates, dict):
            templates = "\n".join(templates.values())
        self._calls = _choose_calls(tool_call_parser, templates)
        if reasoning_parser == "auto":
            reasoning_parser = choose_reasoning(templates) or "none"
        self.marks: Marks | None = MARKS.get(reasoning_parser)
        markers = [] if self._calls is None else list(self._calls.markers)
        if self.marks is not None:
            markers += [self.marks.start, self.marks.end]
        ids = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}
        special = special_token_ids(tokenizer) if markers else ()
        self._special = {marker: ids[marker] for marker in markers if ids[marker] in special}

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

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> str:
        """What binds a reply to calls of `functions`, after reasoning if there is any."""
        rules = self.call_parser.grammar(functions, is_parallel, self._literal)
        if self.marks is None:
            return f"start: calls\n{rules}"
        raise NotImplementedError

    def _literal(self, text: str) -> str:
        """How a grammar writes it: a special token by its id, since its text is not its own."""
        if text in self._special:
            return f"<[{self._special[text]}]>"
        return msgspec.json.encode(text).decode()

    def make_parser(
        self, names: Sequence[str] | None, prompt_end: Sequence[int], *, with_reasoning: bool
    ) -> ReplyParser:
        """What reads one reply, with calls of tools of these names, if there are any."""
        reasoning = None
        if self.marks is not None and with_reasoning:
            reasoning = ReasoningParser(self.marks, self._tokenizer.decode(prompt_end))
        calls = None if names is None else self.call_parser(names)
        return ReplyParser(reasoning, calls)


def _choose_calls(name: str, templates: str) -> type[CallParser] | None:
    if name != "auto":
        return CALL_PARSERS.get(name)
    return next((parser for parser in CALL_PARSERS.values() if parser.fits(templates)), None)
