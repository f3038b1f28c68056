"""How models write tool calls and reasoning into their text, and how to read that as it comes.

This is all that an author of a format imports. Knows no HTTP and no engine: text goes in, in any
pieces; events come out. The formats that ship stand beside, one file for each.
"""

from aioserve.formats.bare_calls import bare_beginnings
from aioserve.formats.call_block import CallBlockParser
from aioserve.formats.call_object import ARGUMENT_KEYS, CallObject
from aioserve.formats.call_parser import CallParser
from aioserve.formats.choice import Choice, check_names, choose
from aioserve.formats.events import Arguments, Call, Content, Event, Reasoning, joined
from aioserve.formats.grammar import (
    ANY,
    MAX_FORCED_CALLS,
    Beginning,
    Function,
    Literal,
    alternatives,
    called,
    free_reply,
    json_rule,
    leads,
    literal_with,
    repeated,
    text_until,
)
from aioserve.formats.json_value import JsonValue
from aioserve.formats.reasoning import MARKS, Marks, ReasoningParser, choose_reasoning
from aioserve.formats.registry import SHIPPED, available_formats, load_format
from aioserve.formats.reply_format import Reply, ReplyFormat, SaidCall, dumps, object_of
from aioserve.formats.reply_parser import ReplyParser
from aioserve.formats.tagged import TaggedParser
from aioserve.formats.tags import Tags
from aioserve.formats.text import SPACE, any_of, match_end, overlap, skip_space
from aioserve.formats.typed_text import typed_json

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
