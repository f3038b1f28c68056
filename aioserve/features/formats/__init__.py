"""How models write tool calls and reasoning into their text, and how to read that as it comes.

This is all that an author of a format imports. Knows no HTTP and no engine: text goes in, in any
pieces; events come out. The formats that ship stand beside, a family in a file; parsers are loaded
when they are asked for.
"""

from typing import TYPE_CHECKING

from aioserve.engine.chat.reply_format import (
    MARKS,
    SHIPPED,
    SPACE,
    Arguments,
    Beginning,
    Call,
    Choice,
    Content,
    Event,
    Function,
    Literal,
    Marks,
    Reasoning,
    ReasoningParser,
    Reply,
    ReplyFormat,
    ReplyParser,
    SaidCall,
    available_formats,
    check_names,
    choose,
    choose_reasoning,
    dumps,
    joined,
    literal_with,
    load_format,
    object_of,
    overlap,
)
from aioserve.engine.chat.reply_grammar import (
    ANY,
    MAX_FORCED_CALLS,
    alternatives,
    called,
    free_reply,
    json_rule,
    leads,
    repeated,
    text_until,
)
from aioserve.features.formats.text import JsonValue, any_of, match_end, skip_space, typed_json
from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.features.formats.call_block import CallBlockParser
    from aioserve.features.formats.call_parser import (
        ARGUMENT_KEYS,
        CallObject,
        CallParser,
        bare_beginnings,
    )
    from aioserve.features.formats.tagged import TaggedParser, Tags

__all__ = [
    "ANY",
    "ARGUMENT_KEYS",
    "MARKS",
    "MAX_FORCED_CALLS",
    "SHIPPED",
    "SPACE",
    "Arguments",
    "Beginning",
    "Call",
    "CallBlockParser",
    "CallObject",
    "CallParser",
    "Choice",
    "Content",
    "Event",
    "Function",
    "JsonValue",
    "Literal",
    "Marks",
    "Reasoning",
    "ReasoningParser",
    "Reply",
    "ReplyFormat",
    "ReplyParser",
    "SaidCall",
    "TaggedParser",
    "Tags",
    "alternatives",
    "any_of",
    "available_formats",
    "bare_beginnings",
    "called",
    "check_names",
    "choose",
    "choose_reasoning",
    "dumps",
    "free_reply",
    "joined",
    "json_rule",
    "leads",
    "literal_with",
    "load_format",
    "match_end",
    "object_of",
    "overlap",
    "repeated",
    "skip_space",
    "text_until",
    "typed_json",
]

#: Where the bases of formats are.
_HOMES = {
    "ARGUMENT_KEYS": "call_parser",
    "CallBlockParser": "call_block",
    "CallObject": "call_parser",
    "CallParser": "call_parser",
    "TaggedParser": "tagged",
    "Tags": "tagged",
    "bare_beginnings": "call_parser",
}

__getattr__ = late_names(__name__, _HOMES)
