"""Formats whose calls are tags: Qwen3-Coder, Seed-OSS, GLM, MiniMax, DeepSeek V3.2 and V4."""

from typing import Any, ClassVar

from aioserve.features.formats import TaggedParser, Tags, dumps, skip_space


class Qwen3CoderParser(TaggedParser):
    """Models forget the `<tool_call>` around it: then it is a call if the tool is known."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<tool_call>\n", "\n</tool_call>"),
        call=("<function=", ">\n", "</function>"),
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        gap="\n\n",
        separator="\n",
        has_python=True,
    )
    may_be_bare = True

    @classmethod
    def evidence(cls, template: str) -> str | None:
        own = (cls.tags.opening, cls.tags.call[0], cls.tags.parameter[0])
        return own[1] if all(each in template for each in own) else None

    @classmethod
    def said(cls, value: Any) -> str:
        return dumps(value) if isinstance(value, (dict, list)) else str(value)


# Seed-OSS: `<function=NAME><parameter=K>V</parameter>...` in `<seed:tool_call>`.


class SeedOssParser(TaggedParser):
    """Lists and objects are read as JSON, or as Python prints them."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        call=("<function=", ">\n", "</function>"),
        parameter=("<parameter=", ">", "</parameter>\n"),
        gap="\n\n",
        separator="\n",
        has_python=True,
    )
    may_be_bare = True

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return cls.tags.opening if cls.tags.opening in template else None

    @classmethod
    def said(cls, value: Any) -> str:
        return str(value)


# GLM 4.5 to 4.7, Ling 3, Laguna, Spark: `<tool_call>NAME<arg_key>K</arg_key>...`.


_KEY, _BETWEEN, _VALUE_END = "<arg_key>", "</arg_key>", "</arg_value>"
_VALUE = "<arg_value>"


class GlmParser(TaggedParser):
    """A parser of both forms: that of GLM 4.5 and 4.6, with line breaks between tags, and that of
    4.7, without. It writes the first where a call is forced.
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
        """Return a call only if an argument or the end follows."""
        at = skip_space(self.text, self.at)
        rest = self.text[at : at + len(self.tags.closing)]
        for mark in (_KEY, self.tags.closing):
            if rest.startswith(mark) or (self.is_last and rest and mark.startswith(rest)):
                return True
        is_open = any(mark.startswith(rest) for mark in (_KEY, self.tags.closing))
        return None if is_open and not self.is_last else False


class Glm47Parser(GlmParser):
    """A parser that writes the form of GLM 4.7 where a call is forced."""

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


# MiniMax M2: `<minimax:tool_call>` around all calls, each an `<invoke name="...">`.


class MiniMaxM2Parser(TaggedParser):
    """Several calls stand between one pair of marks."""

    tags: ClassVar[Tags] = Tags(
        wrapper=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=('<invoke name="', '">\n', "</invoke>\n"),
        parameter=('<parameter name="', '">', "</parameter>\n"),
        gap="\n",
        is_block=True,
    )

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return cls.tags.opening if cls.tags.opening in template else None


# DeepSeek V3.2 and V4: tags with the token DSML around all calls, each an `invoke`.


_DSML = "\uff5cDSML\uff5c"  # bars of full width; a special token


def _tags(calls: str) -> Tags:
    return Tags(
        wrapper=(f"<{_DSML}{calls}>\n", f"</{_DSML}{calls}>"),
        call=(f'<{_DSML}invoke name="', '">\n', f"</{_DSML}invoke>\n"),
        parameter=(f'<{_DSML}parameter name="', '" string="true">', f"</{_DSML}parameter>\n"),
        middles=('" string="true">', '" string="false">'),
        other_middles=('">',),
        gap="\n\n",
        is_block=True,
        tokens=(_DSML,),
    )


class DeepSeekV32Parser(TaggedParser):
    """Every argument says whether it is a text or JSON; only without that the schema decides."""

    _calls: ClassVar[str] = "function_calls"
    tags: ClassVar[Tags] = _tags(_calls)

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _DSML if _DSML in template and f"{cls._calls}>" in template else None


class DeepSeekV4Parser(DeepSeekV32Parser):
    """DeepSeek V4, which writes the tags of V3.2 in `tool_calls` instead of `function_calls`."""

    _calls = "tool_calls"
    tags: ClassVar[Tags] = _tags(_calls)
