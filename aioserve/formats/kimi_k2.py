"""Kimi K2: a section of calls, each an id such as `functions.NAME:0` and JSON arguments."""

import re

from aioserve.formats import CallBlockParser, Literal

_ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?P<number>:\d+)?")


class KimiK2Parser(CallBlockParser):
    """The id is the model's own: its templates hand it back; it numbers a conversation's calls."""

    block, block_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, sep, call_end = (
        f"<|{name}|>" for name in ("tool_call_begin", "tool_call_argument_begin", "tool_call_end")
    )

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {literal(cls.sep)} {arguments}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"functions.{name}:{number}{cls.sep}{arguments}"

    def read_header(self, header: str) -> bool:
        found = _ID.fullmatch(header)
        if found is None:
            self.close()
        else:
            self.name_call(found["name"], header if found["number"] else None)
        return True
