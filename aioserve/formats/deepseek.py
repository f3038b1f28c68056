"""DeepSeek V3, R1 and V3.1: a block of calls between markers, each a name and its arguments."""

import re

from aioserve.formats import CallBlockParser, Literal, match_end


def _marker(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"  # a bar of full width


_KIND = "function"  # V3 says it before the name
_FENCE, _FENCE_END = "```json", "```"
_LINE = re.compile(r"[^\n]*")


class DeepSeekV31Parser(CallBlockParser):
    """Reads both forms: `name<sep>{...}` as V3.1 writes it, and V3's, with the name in a line."""

    block, block_end = _marker("tool▁calls▁begin"), _marker("tool▁calls▁end")
    call, sep, call_end = map(_marker, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
    fences = (_FENCE, _FENCE_END)

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        return f"{literal(name)} {literal(cls.sep)} {arguments}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"{name}{cls.sep}{arguments}"

    def read_header(self, header: str) -> bool:
        if not self.skip_space():
            return False
        if header == _KIND and self.text[self.at] != "{":
            self._line: list[str] = []
            self.state = self._read_name
        else:
            self._begin_call(header)
        return True

    def _read_name(self) -> bool:
        self._line.append(self.take(match_end(_LINE, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self._begin_call("".join(self._line).strip())
        return True

    def _begin_call(self, name: str) -> None:
        if name:
            self.name_call(name)
        else:
            self.close()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Writes V3's form where a call is forced."""

    between = "\n"

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return super().evidence(template) and (_FENCE if _FENCE in template else None)

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        before = literal(f"{name}\n{_FENCE}\n")
        after = literal(f"\n{_FENCE_END}")
        return f"{literal(_KIND)} {literal(cls.sep)} {before} {arguments} {after}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"{_KIND}{cls.sep}{name}\n{_FENCE}\n{arguments}\n{_FENCE_END}"
