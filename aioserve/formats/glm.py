"""GLM 4.5 to 4.7, Ling 3, Laguna, Spark: `<tool_call>NAME<arg_key>K</arg_key>...`."""

from typing import ClassVar

from aioserve.formats import TaggedParser, Tags, skip_space

_KEY, _BETWEEN, _VALUE_END = "<arg_key>", "</arg_key>", "</arg_value>"
_VALUE = "<arg_value>"


class GlmParser(TaggedParser):
    """Reads both forms: that of GLM 4.5 and 4.6, with line breaks between tags, and that of 4.7,
    without. Writes the first where a call is forced.
    """

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>", "</tool_call>"),
        call=("", "\n", ""),
        parameter=(_KEY, f"{_BETWEEN}\n{_VALUE}", f"{_VALUE_END}\n"),
        other_middles=(f"{_BETWEEN}{_VALUE}",),
        tokens=(_BETWEEN, _VALUE),
        gap="\n",
        separator="\n",
    )

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _KEY if _KEY in template and cls.tags.opening in template else None

    def skip_name_end(self) -> bool | None:
        """A call only if an argument or the end follows."""
        at = skip_space(self.text, self.at)
        rest = self.text[at : at + len(self.tags.closing)]
        for mark in (_KEY, self.tags.closing):
            if rest.startswith(mark) or (self.is_last and rest and mark.startswith(rest)):
                return True
        is_open = any(mark.startswith(rest) for mark in (_KEY, self.tags.closing))
        return None if is_open and not self.is_last else False


class Glm47Parser(GlmParser):
    """Writes the form of GLM 4.7 where a call is forced."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>", "</tool_call>"),
        call=("", "", ""),
        parameter=(_KEY, f"{_BETWEEN}{_VALUE}", _VALUE_END),
        other_middles=(f"{_BETWEEN}\n{_VALUE}",),
        tokens=(_BETWEEN, _VALUE),
        gap="",
    )

    @classmethod
    def evidence(cls, template: str) -> str | None:
        dense = f"{_BETWEEN}{_VALUE}"
        return super().evidence(template) and (dense if dense in template else None)
