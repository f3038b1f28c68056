"""Which texts each format of a structural tag lets by."""

from typing import Any

import pytest

from aioserve.config import ModelConfig
from aioserve.errors import RequestError
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

INFO = ModelInfo(ModelConfig())
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture
async def takes():
    """Whether a text may be all that is said."""
    compiler = GrammarCompiler(INFO)
    await compiler.prepare()

    async def takes(tag: dict[str, Any], text: str, **options: bool) -> bool:
        wanted = StructuredOutputs(structural_tag=tag, **options)
        await compiler.check(wanted)
        matcher = compiler.matcher(wanted)
        ids = INFO.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    yield takes
    compiler.close()


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind} | fields


NUMBER = of("json_schema", json_schema={"type": "integer"})
ANY = of("any_text")
F, G = tag("<f=1>", NUMBER, "</f>"), tag("<f=2>", const("x"), "</f>")
CALLS = of("triggered_tags", triggers=["<f="], tags=[F, G])
LIST = of("tags_with_separator", tags=[F, G], separator=", ")


@pytest.mark.parametrize(
    ("piece", "good", "bad"),
    [
        (const("a/b"), ["a/b"], ["", "a/", "a/bc"]),
        (NUMBER, ["12"], ["x", ""]),
        (of("regex", pattern="[a-c/]{2}"), ["a/"], ["a", "ad"]),
        (of("grammar", grammar='root ::= "y" | "n"'), ["y", "n"], ["yn"]),
        (of("grammar", grammar='start: "y" X\nX: /z+/'), ["yzz"], ["y"]),
        (ANY, ["", "a\nb</f>"], []),
        (of("any_text", excludes=["<f", "/"], max_chars=4), ["", "a<\n"], ["a<f", "/", "abcde"]),
        (of("sequence", elements=[const("a"), NUMBER, const("b")]), ["a1b"], ["ab", "a1"]),
        (of("sequence", elements=[ANY, const("b"), ANY]), ["aba", "b"], ["aa"]),
        (of("or", elements=[const("a"), F]), ["a", "<f=1>2</f>"], ["b", "a<f=1>2</f>"]),
        (of("sequence", elements=[ANY, of("or", elements=[F, G])]), ["?<f=2>x</f>"], ["?"]),
        (of("optional", content=NUMBER), ["", "3"], ["a"]),
        (of("sequence", elements=[of("star", content=G), const("!")]), ["!", "<f=2>x</f>!"], [""]),
        (of("plus", content=const("ab")), ["ab", "abab"], ["", "aba"]),
        (of("repeat", min=1, max=2, content=const("ab")), ["ab", "abab"], ["", "ababab"]),
        (of("repeat", min=2, max=-1, content=const("ab")), ["ababab"], ["ab"]),
        (tag("<", ANY, [">", "!"]), ["<a>", "<a\n!"], ["a>", "<a", "<a>b"]),
        (tag("", ANY, ""), ["a"], []),
        (tag("(", of("sequence", elements=[ANY, const("b")]), ")"), ["(ab)"], ["(ab", "(a)"]),
        (CALLS, ["", "a <f=1>5</f> b<f=2>x</f>"], ["<f=3>", "<f=1>x</f>", "<f=2>x"]),
        (CALLS | {"at_least_one": True}, ["<f=2>x</f> b"], ["", "b<f=2>x</f>"]),
        (
            CALLS | {"stop_after_first": True},
            ["b", "b<f=2>x</f>"],
            ["<f=2>x</f> ", "<f=2>x</f><f=2>x</f>"],
        ),
        (
            CALLS | {"stop_after_first": True, "at_least_one": True},
            ["<f=2>x</f>"],
            ["", "<f=2>x</f> ", " <f=2>x</f>"],
        ),
        (CALLS | {"excludes": ["no"]}, ["n<f=2>x</f>"], ["no"]),
        (tag("<r>", CALLS, "</r>"), ["<r>a<f=2>x</f></r>", "<r></r>"], ["<r>", "<r><f=3></r>"]),
        (LIST, ["", "<f=1>2</f>, <f=2>x</f>"], ["<f=1>2</f>,", "a"]),
        (LIST | {"at_least_one": True}, ["<f=1>2</f>"], [""]),
        (LIST | {"stop_after_first": True}, ["<f=1>2</f>", ""], ["<f=1>2</f>, <f=1>2</f>"]),
        (
            of("dispatch", rules=[["<f>", NUMBER], ["<g>", const("x")]]),
            ["a", "<f>1 <g>x<f>2."],
            ["<g>y"],
        ),
        (of("dispatch", rules=[["<g>", const("x")]], loop=False), ["a<g>x"], ["<g>x<g>x", "<g>"]),
    ],
)
async def test_a_format_takes_its_texts_and_no_others(takes, piece, good, bad) -> None:
    given = {"type": "structural_tag", "format": piece}
    assert [text for text in good if not await takes(given, text)] == []
    assert [text for text in bad if await takes(given, text)] == []


async def test_the_older_shape_is_read_as_well(takes) -> None:
    given = {
        "structures": [{"begin": "<f=1>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    assert await takes(given, "a <f=1>5</f> b")
    assert not await takes(given, "a <f=1>x</f> b")


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (of("any_tokens"), r"Invalid value 'any_tokens' - at `\$.format.type`"),
        (of("sequence", elements=[of("token", token=3)]), r"'token' - at `\$.format.elements\[0\]"),
        (NUMBER | {"style": "qwen_xml"}, r"'qwen_xml' - at `\$.format.style`"),
        (NUMBER | {"any_order": True}, "any_order is not supported"),
        (ANY | {"max_tokens": 3}, r"at `\$.format.max_tokens`"),
        (of("sequence", elements=[ANY, NUMBER]), "what follows begin with a string"),
        (of("star", content=ANY), "what follows begin with a string"),
        (of("or", elements=[]), "elements is empty"),
        (of("repeat", min=3, max=2, content=NUMBER), "no number is from 3 to 2"),
        (CALLS | {"tags": []}, "tags, is empty"),
        (CALLS | {"triggers": ["<g"]}, "no trigger is the beginning of '<f=1>'"),
        (tag("(", NUMBER, [")", ""]), "none may be empty"),
        (of("grammar", grammar="root ::= ("), "Failed to convert"),
    ],
)
async def test_what_cannot_be_said_is_refused_by_name(takes, piece, message) -> None:
    with pytest.raises(RequestError, match=message):
        await takes({"format": piece}, "")


async def test_blanks_in_json_are_as_wide_as_asked(takes) -> None:
    given = {"format": of("json_schema", json_schema={"type": "object"})}
    assert await takes(given, '{"a": 1}')
    assert not await takes(given, '{"a":   1}')
    assert not await takes(given, '{"a": 1}', disable_any_whitespace=True)
