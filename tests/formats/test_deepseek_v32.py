"""DeepSeek V3.2's calls: every argument says whether it is a text."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function
from aioserve.features.formats.tagged import DeepSeekV4Parser, DeepSeekV32Parser
from tests.formats.pieces import read

FUNCTIONS = [Function("add", {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})]


def dsml(text):
    """With tags that can be typed."""
    return text.replace("<@", "<\uff5cDSML\uff5c").replace("</@", "</\uff5cDSML\uff5c")


def invoke(**said):
    values = "".join(
        f'<@parameter name="{key}"{mark}>{text}</@parameter>\n'
        for key, (mark, text) in said.items()
    )
    return dsml(f'<@invoke name="add">\n{values}</@invoke>\n')


TEXT, JSON = ' string="true"', ' string="false"'


def parse(format_, pieces):
    return read(format_(FUNCTIONS), pieces)


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ({"a": (JSON, "5"), "b": (TEXT, "5\n")}, '{"a": 5, "b": "5\\n"}'),
        ({"a": (TEXT, "5"), "new": (TEXT, "[1]")}, '{"a": "5", "new": "[1]"}'),
        ({"b": (JSON, "5"), "new": (JSON, "[1]")}, '{"b": "5", "new": [1]}'),
        ({"a": ("", "5"), "b": ("", "5")}, '{"a": 5, "b": "5"}'),
        ({}, "{}"),
    ],
)
@pytest.mark.parametrize("format_", [DeepSeekV32Parser, DeepSeekV4Parser])
def test_an_argument_is_what_it_says_and_fits_its_schema(format_, said, arguments):
    opening, closing = format_.tags.wrapper
    text = f"Hm.\n\n{opening}{invoke(**said)}{invoke()}{closing} So."
    expected = [Content("Hm."), Call("add"), Arguments(arguments), Call("add"), Arguments("{}")]
    for pieces in ([text], list(text)):
        assert parse(format_, pieces) == [*expected, Content("So.")]


def test_a_block_of_the_other_version_is_content():
    text = dsml("<@tool_calls>\n<@invoke")
    assert parse(DeepSeekV32Parser, list(text)) == [Content(text)]
