"""Seed-OSS: `<function=NAME><parameter=K>V</parameter>...` in `<seed:tool_call>`."""

from typing import Any, ClassVar

from aioserve.formats import TaggedParser, Tags


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
