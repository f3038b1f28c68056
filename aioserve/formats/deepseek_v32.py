"""DeepSeek V3.2 and V4: tags with the token DSML around all calls, each an `invoke`."""

from typing import ClassVar

from aioserve.formats import TaggedParser, Tags

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
