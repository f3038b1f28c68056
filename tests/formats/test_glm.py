"""GLM's calls: keys and values between tags, with line breaks or without."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function
from aioserve.features.formats.tagged import Glm47Parser, GlmParser
from tests.formats.pieces import read

FUNCTIONS = [Function("add", {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})]
ADD = [Call("add"), Arguments('{"a": 1, "b": " x\\n"}')]
LINES = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value> x\n</arg_value>\n</tool_call>"
)
DENSE = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value> x\n</arg_value></tool_call>"
)


def parse(format_, pieces):
    return read(format_(FUNCTIONS), pieces)


@pytest.mark.parametrize("format_", [GlmParser, Glm47Parser])
@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"Hm.\n{LINES}\n{DENSE}\nSo.", [Content("Hm."), *ADD, *ADD, Content("So.")]),
        ("<tool_call>now\n</tool_call>", [Call("now"), Arguments("{}")]),
        ("<tool_call>now</tool_call>", [Call("now"), Arguments("{}")]),
        ("<tool_call>\nnow\n\n</tool_", [Call("now"), Arguments("{}")]),
        (LINES[: LINES.index("1<") + 3], [Call("add"), Arguments('{"a": ')]),
        ("<tool_call>now", [Content("<tool_call>now")]),
        ("A <tool_call> tag\nand <arg_key>", [Content("A <tool_call> tag\nand <arg_key>")]),
        (
            "<tool_call>now\n<arg_key>a</arg_key>1</tool_call>",
            [Call("now"), Arguments("{}"), Content("<arg_key>a</arg_key>1</tool_call>")],
        ),
    ],
)
def test_both_names_read_both_forms(format_, text, events):
    assert parse(format_, [text]) == parse(format_, list(text)) == events
