"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: `<function=NAME><parameter=K>V</parameter>...`."""

from typing import Any, ClassVar

from aioserve.formats import TaggedParser, Tags, dumps


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
