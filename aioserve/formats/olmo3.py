"""Olmo 3: `<function_calls>` around lines with one call each, as Python writes it."""

from aioserve.formats import Reply
from aioserve.formats.notation import PYTHON
from aioserve.formats.noted_calls import NotedCallParser


class Olmo3Parser(NotedCallParser):
    """Its template writes `true`, `false` and `null`, and no content beside calls."""

    notation = PYTHON._replace(words=("true", "false", "null"))
    marked = ("<function_calls>", "</function_calls>")
    listed = ("\n", "\n", "\n")
    markers = marked

    @classmethod
    def write(cls, reply: Reply) -> str:
        return "\n".join(filter(None, [reply.content, cls.block(reply)]))
