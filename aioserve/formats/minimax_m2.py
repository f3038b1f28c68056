"""MiniMax M2: `<minimax:tool_call>` around all calls, each an `<invoke name="...">`."""

from typing import ClassVar

from aioserve.formats import TaggedParser, Tags


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
