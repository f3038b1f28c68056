"""What schemas become before native code reads them: exact numbers, keys once, closed objects."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import pytest

from aioserve.config import ModelConfig, StructuredOutputsConfig
from aioserve.errors import RequestError
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars.pattern import MAX_REPETITION, check_repetitions, names_of
from aioserve.features.grammars.schema import LARGEST, MAX_COUNT, MAX_DEPTH, for_grammar, place_of
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

INFO = ModelInfo(ModelConfig())
OPEN = StructuredOutputsConfig(json_objects="open")
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture
async def takes() -> AsyncIterator[Callable[..., Any]]:
    """Whether a text may be all that is said."""
    compilers: dict[StructuredOutputsConfig, GrammarCompiler] = {}

    async def takes(
        wanted: Any, text: Any, settings: StructuredOutputsConfig | None = None
    ) -> bool:
        settings = settings or StructuredOutputsConfig()
        compiler = compilers.setdefault(settings, GrammarCompiler(INFO, settings))
        given = wanted if isinstance(wanted, StructuredOutputs) else StructuredOutputs(json=wanted)
        await compiler.check(given)
        matcher = compiler.matcher(given)
        said = text if isinstance(text, str) else json.dumps(text)
        ids = INFO.tokenizer.encode(said, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    yield takes
    for compiler in compilers.values():
        compiler.close()


BEYOND = [
    ({"type": "integer", "minimum": -(2**63) - 9, "maximum": -(2**63) - 2}, "maximum is -92"),
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum is -92"),
    ({"type": "integer", "minimum": 10**20, "maximum": 10**20}, "minimum is 10{20}: no number"),
    ({"type": "integer", "exclusiveMinimum": 2**63}, "exclusiveMinimum is 92"),
    ({"type": "number", "minimum": 1e19}, r"minimum is 1e\+19"),
    ({"minimum": 10**17 - 10, "maximum": 10**17 - 1}, "minimum and maximum, 9.* have no number"),
    ({"minimum": 1e15 + 0.125, "maximum": 1e15 + 0.25}, "have no number between them that a fl"),
    ({"const": 2**53 + 1}, "const is 9007199254740993: a constant must be"),
    ({"enum": [1, {"a": [-(2**63)]}]}, r"enum\[1\].a\[0\] is -9223372036854775808"),
    ({"const": 1e300}, r"const is 1e\+300"),
    ({"type": "integer", "multipleOf": 2**32}, "multipleOf is 4294967296: its digits"),
    ({"multipleOf": 86400, "minimum": 0}, "multipleOf is 86400: .* at most 10,000 beside bounds"),
    ({"const": 0.12345678901234567}, "a constant must be a number that a float holds"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf must be above 0"),
    ({"allOf": [{"multipleOf": 98304}, {"multipleOf": 98304}]}, "their product must be below"),
    ({"type": "string", "minLength": 2**63}, "minLength must be at most 2,147,483,647"),
    ({"type": "array", "minItems": 2**31}, "minItems must be at most"),
    ({"type": "object", "minProperties": 2**64}, "minProperties must be at most"),
    ({"properties": {"a": {"maximum": -(10**400)}}}, "properties.a.maximum is a number of 1329"),
    ({"type": "string", "pattern": "a{4294967295}"}, "pattern: a pattern repeats a piece at most"),
    ({"patternProperties": {"a{9999999}": {}}}, r"patternProperties.a\{9999999\}: a pattern"),
]


@pytest.mark.parametrize(("schema", "message"), BEYOND)
async def test_numbers_that_native_code_would_round_are_refused_with_their_place(
    takes, schema: dict[str, Any], message: str
) -> None:
    lark = StructuredOutputs(grammar="start: %json " + json.dumps(schema))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for wanted in (schema, lark, StructuredOutputs(structural_tag=tag)):
        with pytest.raises(RequestError, match=message):
            await takes(wanted, "1")


async def test_bounds_of_64_bits_hold_to_the_last_number_that_is_exact(takes) -> None:
    whole = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    for number in (0, LARGEST, -LARGEST, 2**53 + 1):
        assert await takes(whole, number)
    for number in (2**63, -(2**63) - 1, 10**20):
        assert not await takes(whole, number)
    above = {"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 2}
    assert [await takes(above, 2**53 + i) for i in range(4)] == [False, False, True, False]
    assert await takes({"type": "integer", "minimum": 10**18}, 10**18)
    assert not await takes({"type": "integer", "minimum": 10**18}, 10**18 - 1)
    assert await takes({"type": "number", "maximum": -1e18}, -2 * 10**18)
    assert await takes({"type": "integer", "maximum": 10**30}, 10**18)
    long = {"type": "string", "maxLength": 2**53 - 1}
    assert await takes(long, '"as zod writes it"')
    assert await takes({"type": "array", "maxItems": 2.0, "items": {"type": "null"}}, [None, None])
    assert "maxLength" not in for_grammar({"maxLength": MAX_COUNT + 1}, closes_objects=False)


FUZZ = """
import asyncio, json, random, resource, sys
import jsonschema
from llguidance import LLMatcher, LLTokenizer
from aioserve.config import StructuredOutputsConfig
from aioserve.features.grammars.translation import grammar_of
from aioserve.params import StructuredOutputs
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
rng, tokenizer, num_served = random.Random(int(sys.argv[1])), LLTokenizer("byte"), 0
EDGES = [0, 2**31, 2**32, 2**53, 2**63, 2**64, 10**18, 10**19, 10**20, 1e16, 1e18, 1e19, 0.5, 1e-7]
def number():
    near = rng.choice(EDGES)
    return rng.choice((1, -1)) * near + rng.choice((0, 0, 1, -1, 1024, -1025))
def schema():
    if rng.random() < 0.2:
        return {"enum": [number(), number()]}
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    made = {n: number() for n in names if rng.random() < 0.4}
    made["type"] = rng.choice(("integer", "number"))
    made |= {"multipleOf": abs(number())} if rng.random() < 0.2 else {}
    return {"allOf": [made, {names[0]: number()}]} if rng.random() < 0.2 else made
for _ in range(400):
    wanted = schema()
    print(json.dumps(wanted), flush=True)
    try:
        grammar = grammar_of(StructuredOutputs(json=wanted), StructuredOutputsConfig())
    except ValueError:
        continue
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    said = b""
    while not matcher.is_error() and not matcher.is_stopped() and len(said) < 60:
        mask = matcher.compute_bitmask()
        allowed = [b for b in range(256) if mask[b // 8] >> b % 8 & 1]
        if not allowed or (matcher.is_accepting() and rng.random() < 0.2):
            break
        said += bytes([rng.choice(allowed)])
        matcher.consume_token(said[-1])
    if not matcher.is_error() and said and matcher.is_accepting() and b"e" not in said.lower():
        value = json.loads(said)
        if isinstance(value, int) and "multipleOf" not in json.dumps(wanted):
            assert jsonschema.Draft202012Validator(wanted).is_valid(value), (wanted, said)
        num_served += 1
print(num_served)
"""


async def test_random_numbers_end_no_process_and_replies_fit_their_schemas() -> None:
    """Each child compiles what would end it, had the door let it by."""

    def run(seed: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", FUZZ, str(seed)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    done = await asyncio.to_thread(run, 1)
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-600:])
    assert int(done.stdout.splitlines()[-1]) > 50


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a$", ["a"]),
        ("^(a|b)c?$", ["a", "ac", "b", "bc"]),
        ("^x[0-2]{1,2}$", ["x0", "x1", "x2"] + [f"x{i}{j}" for i in range(3) for j in range(3)]),
        (r"^\$ref\d$", [f"$ref{i}" for i in range(10)]),
        ("^(?:on|off)$", ["off", "on"]),
        ("^a|b$", None),
        ("a", None),
        ("^a.*$", None),
        ("^[a-z]{2}$", None),
        ("^[^a]$", None),
        (r"^a\$", None),
        ("^(a$", None),
        ("^(?=a)a$", None),
        ("^[a$", None),
        ("^a{2$", None),
        ("^(((((((((((((((((((((a)))))))))))))))))))))$", None),
        ("^(a?){64}{64}$", None),
    ],
)
async def test_names_of_a_pattern_are_known_where_they_are_few(
    pattern: str, names: list[str] | None
) -> None:
    found = names_of(pattern)
    assert (None if found is None else sorted(found)) == (names and sorted(names))


async def test_a_piece_of_a_pattern_is_repeated_so_often_and_no_more() -> None:
    for pattern in (
        "a{100000}",
        "(ab){300}{300}",
        r"\x{200000}",
        r"\{200000}",
        "((a{9}){9}b{9}){9}",
    ):
        check_repetitions(pattern)
    for pattern in (
        f"a{{{MAX_REPETITION + 1}}}",
        "(a{1000}){1000}",
        "((a{100}|b){100}c){100}",
        "a{0,99999999999999999999}",
        "x(a{400}b{400}){400}",
    ):
        with pytest.raises(ValueError, match="repeats a piece at most 100,000 times"):
            check_repetitions(pattern)


async def test_a_key_of_a_pattern_is_written_once(takes) -> None:
    letters = {"patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False}
    assert await takes(letters, '{"a": 3}')
    assert not await takes(letters, '{"a": 3, "a": 3}')
    two = {
        "type": "object",
        "properties": {"b": {"minimum": 2}},
        "patternProperties": {"^[ab]$": {"type": "integer"}, "^b|c$": True, "^d": {"type": "null"}},
        "required": ["a", "d1"],
        "additionalProperties": False,
    }
    with pytest.raises(RequestError, match="not disjoint"):
        await takes(two, {})
    del two["patternProperties"]["^b|c$"]
    assert await takes(two, {"b": 2, "a": 1, "d1": None, "d2": None})
    assert not await takes(two, {"b": 1, "a": 1, "d1": None})
    assert not await takes(two, {"b": 2, "d1": None})
    assert not await takes(two, '{"b": 2, "a": 1, "a": 1, "d1": null}')
    assert not await takes(two, '{"a": 1, "d1": null, "d1": null}')
    one = {**letters, "maxProperties": 1}
    assert await takes(one, {})
    assert not await takes(one, '{"a": 1, "a": 2}')


@pytest.mark.parametrize(
    ("counts", "required"),
    [
        ({"minProperties": 2}, []),
        ({"minProperties": 2}, ["c"]),
        ({"minProperties": 1, "maxProperties": 2}, ["b"]),
        ({"maxProperties": 2}, []),
        ({"minProperties": 3, "maxProperties": 9}, []),
    ],
)
async def test_keys_of_a_pattern_are_counted_once_each(
    counts: dict[str, int], required: list[str], takes
) -> None:
    integers = {"patternProperties": {"^[abc]$": {"type": "integer"}}}
    closed = {"type": "object", "additionalProperties": False, "required": required}
    schema = {**closed, **integers, **counts}
    least, most = counts.get("minProperties", 0), counts.get("maxProperties", 3)
    for number in range(4):
        for names in itertools.combinations("abc", number):
            fits = least <= number <= most and {*required} <= {*names}
            assert await takes(schema, dict.fromkeys(names, 1)) == fits
    assert not await takes(schema, '{"b": 1, "b": 1}')
    assert not await takes(schema, '{"a": 1, "b": 1, "b": 1}')
    with pytest.raises(RequestError, match="leave no choice among the 3 names"):
        await takes({**schema, "minProperties": 4}, {})
    letters = {"^[a-z]$": {"type": "integer"}}
    with pytest.raises(RequestError, match="more than 512 choices among the 26 names"):
        await takes({**closed, "patternProperties": letters, "minProperties": 5}, {})


async def test_a_declared_key_is_not_written_again_by_escapes(takes) -> None:
    named = {**CITY, "additionalProperties": True}
    assert await takes(named, {"name": "x", "more": "y"})
    assert not await takes(named, r'{"name": "x", "\u006eame": 1}')
    assert not await takes(CITY, r'{"name": "x", "\u006eame": 1}', OPEN)
    typed = {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": True}
    assert await takes(typed, {"ab": 1, "b": "x"})
    assert not await takes(typed, r'{"\u0061b": "x"}')
    rule = StructuredOutputs(grammar="start: %json " + json.dumps(named))
    assert not await takes(rule, r'{"name":"x","\u006eame":1}')
    assert await takes({**named, "properties": {"name": {"const": "\0"}}}, r'{"name":"\u0000"}')


async def test_names_that_are_listed_are_the_keys(takes) -> None:
    """As pydantic writes `dict[Literal["low", "high"], int]`."""
    levels = {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": {"enum": ["low", "high"]},
    }
    assert await takes(levels, {"low": 1, "high": 2})
    assert await takes(levels, {})
    assert not await takes(levels, {"middle": 1})
    assert not await takes(levels, '{"low": 1, "low": 1}')
    short = {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}
    assert await takes(short, {"ab": 1, "abc": []})
    assert not await takes(short, {"a": 1})
    alone = {"properties": {"a": {}}, "type": "object", "unevaluatedProperties": False}
    assert await takes(alone, {"a": 1}, OPEN)
    assert not await takes(alone, {"a": 1, "b": 1}, OPEN)


CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
MAYOR = {"$ref": "#/$defs/Person"}
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}}
PET = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
CLOSED: list[tuple[dict[str, Any], Any, Any]] = [
    (CITY, {"name": "x"}, {"name": "x", "population": 1}),
    ({**CITY, "required": ["name", "zip"]}, {"name": "x", "zip": 1}, {"name": "x", "q": 1}),
    ({"type": "array", "items": CITY}, [{"name": "x"}], [{"name": "x", "y": 1}]),
    ({"type": "object", "properties": {}}, {}, {"a": 1}),
    ({**CITY, "type": ["object", "null"]}, None, {"name": "x", "y": 1}),
    ({"properties": {"m": MAYOR}, "$defs": {"Person": PERSON}}, {"m": {"age": 1}}, {"m": {"b": 1}}),
    ({"anyOf": [CITY, {"type": "null"}], "title": "A city"}, {"name": "x"}, {"name": "x", "y": 1}),
    ({"oneOf": [PET, DOG]}, {"kind": "dog"}, {"kind": "dog", "y": 1}),
    (
        {"allOf": [MAYOR, {"properties": {"town": CITY}}], "$defs": {"Person": PERSON}},
        {"age": 1, "town": {"name": "x"}},
        {"age": 1, "y": 1},
    ),
    ({**CITY, "anyOf": [{"required": ["name"]}, {"required": ["id"]}]}, {"name": "x"}, {"y": 1}),
    ({"patternProperties": {"^x_": {}}, "properties": {"a": {}}}, {"a": 1, "x_1": 1}, {"b": 1}),
]


async def test_an_object_has_the_keys_that_its_schema_declares(takes) -> None:
    for schema, good, extra in CLOSED:
        assert jsonschema.Draft202012Validator(schema).is_valid(good)
        assert await takes(schema, good), schema
        assert not await takes(schema, extra), schema
        assert await takes(schema, good, OPEN), schema


async def test_an_object_stays_open_where_its_schema_says_or_needs_it(takes) -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"type": "object"}, {"a": {"b": 1}}),
        ({**CITY, "additionalProperties": True}, {"name": "x", "y": 1}),
        ({**CITY, "additionalProperties": {"type": "integer"}}, {"name": "x", "y": 1}),
        ({**CITY, "minProperties": 2, "required": ["name"]}, {"name": "x", "y": 1}),
        ({"allOf": [CITY, {"additionalProperties": True}]}, {"name": "x", "y": 1}),
        ({"allOf": [CITY, {"type": "object"}, {"minProperties": 2}]}, {"name": "x", "y": 1}),
        ({"properties": {"a": {"type": "object", "additionalProperties": {}}}}, {"a": {"b": 1}}),
        ({"anyOf": [{"type": "object"}, CITY]}, {"y": 1}),
        ({**CITY, "anyOf": [True, {"required": ["name"]}]}, {"name": "x", "y": 1}),
        ({"properties": {"a": {"const": {"b": 1}}}}, {"a": {"b": 1}}),
    ]
    for schema, value in cases:
        assert await takes(schema, value), schema


async def test_schemas_of_one_object_do_not_close_each_other_out(takes) -> None:
    base = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}
    whole = {
        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"name": {"type": "string"}}}],
        "properties": {"last": {"$ref": "#/$defs/Base"}},
        "required": ["name", "last"],
        "$defs": {"Base": base},
    }
    assert await takes(whole, {"id": 1, "name": "x", "last": {"id": 2}})
    assert not await takes(whole, {"id": 1, "name": "x", "last": {"id": 2}, "more": 1})
    node = {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
    tree = {"$ref": "#/$defs/N", "$defs": {"N": {**node, "required": ["next"], "type": "object"}}}
    assert await takes(tree, {"next": {"next": None}})
    assert not await takes(tree, {"next": {"next": None, "x": 1}})
    elsewhere = {
        "properties": {"a": {"$ref": "#anchored"}},
        "$defs": {"A": {"$anchor": "anchored"}},
    }
    assert for_grammar(elsewhere, closes_objects=True) == elsewhere


async def test_whitespace_between_the_parts_of_json_is_a_blank_at_most(takes) -> None:
    city = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    texts = ['{"a":1}', '{"a": 1}', '{"a":  1}', '{\n  "a": 1\n}', '{\n\n"a": 1}']
    by_setting = {"none": 1, "blank": 2}
    for setting, number in by_setting.items():
        settings = StructuredOutputsConfig(json_whitespace=setting)
        assert [await takes(city, t, settings) for t in texts] == [i < number for i in range(5)]
    lines = StructuredOutputsConfig(json_whitespace="lines")
    assert [await takes(city, t, lines) for t in texts] == [True, True, False, True, False]
    wanted = StructuredOutputs(json=city, disable_any_whitespace=True)
    assert [await takes(wanted, text) for text in texts] == [True] + [False] * 4
    assert not await takes(StructuredOutputs(json_object=True), '{\n"a": 1}')


async def test_a_regex_is_refused_with_what_it_lacks_and_where(takes) -> None:
    for regex, message in [
        ("ab(?=c)d", r"structured_outputs.regex: .*look-around.*: '\(\?=' at character 3$"),
        ("a{4294967295}", "repeats a piece at most 100,000"),
        ("(", r"invalid regex .*unclosed group: '\(' at character 1$"),
    ]:
        with pytest.raises(RequestError, match=message):
            await takes(StructuredOutputs(regex=regex), "a")
    inner = {"properties": {"a": {"items": {"type": "string", "pattern": "x(?<!y)"}}}}
    with pytest.raises(
        RequestError, match=r"json: properties.a.items.pattern: .*look-around.*'\(\?<!'"
    ):
        await takes(inner, "a")
    for schema, place in [
        ({"allOf": [{"not": {}}]}, "allOf[0].not"),
        ({"properties": {"a": {"format": "no such"}}}, "properties.a.format"),
        ({"items": {"uniqueItems": True, "type": "array"}}, "items.uniqueItems"),
    ]:
        with pytest.raises(RequestError) as caught:
            await takes(schema, "a")
        assert f": {place}: " in str(caught.value)
    assert place_of('Unimplemented keys: ["not"]', {"properties": {"not": {}}}) == ""


@pytest.mark.parametrize("way", [{"regex": r"[^\s\S]"}, {"grammar": "start: start"}])
async def test_what_no_text_fits_is_refused_in_words(way: dict[str, str], takes) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.\w+: no text fits it$"):
        await takes(StructuredOutputs(**way), "")


async def test_schemas_nested_too_deep_are_refused_at_the_door(takes) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match=f"nested deeper than {MAX_DEPTH}"):
        await takes(schema, "a")


async def test_a_grammar_says_its_texts_whatever_they_hold(takes) -> None:
    """Signs of a schema or a repetition within texts and comments are none."""
    grammar = 'start: "%json {" A "{9999999}" # {9999999} "\nA: /[{}]{2}\\/%json/ // "\n'
    assert await takes(StructuredOutputs(grammar=grammar), "%json {{}/%json{9999999}")
    for grammar, message in [
        ('start: "a"{1000000}', "repeats a piece"),
        ('start: %json {"maximum": -1e999}', "maximum must be a number of 64 bits, got -inf"),
        ('start: %json {"maximum": NaN}', "NaN is no number of JSON"),
        ('root ::= "a"{2,1000000}', "repeats a piece"),
    ]:
        with pytest.raises(RequestError, match=message):
            await takes(StructuredOutputs(grammar=grammar), "a")
