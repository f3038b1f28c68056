"""Grammars of calls as tags: an argument is bound to its schema, as the text in its tag."""

import json

import pytest

from aioserve.config import ModelConfig
from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.features.formats import Function, Reply, SaidCall, load_format
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs
from tests.server.scripted import make_model

FORMATS = ["qwen3_coder", "seed_oss", "glm", "glm47", "minimax_m2", "deepseek_v32", "deepseek_v4"]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
PROPERTIES = {
    "text": {"type": "string"},
    "int": {"type": "integer", "minimum": 0},
    "is": {"type": "boolean"},
    "word": {"enum": ["red", "blue"]},
    "one": {"const": "x y"},
    "mixed": {"enum": [1, "one"]},
    "point": POINT,
    "list": {"type": "array", "items": {"type": "string"}},
    "maybe": {"type": ["string", "null"]},
    "maybe_word": {"anyOf": [{"enum": ["red"]}, {"type": "null"}]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "text_or_point": {"anyOf": [{"type": "string"}, POINT]},
    "far": {"$ref": "#/$defs/far"},
    "short": {"type": "string", "minLength": 2, "maxLength": 4},
    "path": {"type": "string", "pattern": "^[a-z]+/\\d$"},
    "near": {"type": "string", "pattern": "b+"},
    "any": {},
    "day": {"type": "string", "format": "date"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [],
    "additionalProperties": False,
    "$defs": {"far": {"type": "boolean"}},
}
GOOD = {
    "text": ["hello\n </param <x> ünï\n", "", "5", "[1]", "true"],
    "int": [5],
    "is": [True, False],
    "word": ["red"],
    "one": ["x y"],
    "mixed": [1, "one"],
    "point": [{"x": 1}],
    "list": [[], ["x", "</parameter>\n</function>", "</arg_value>"]],
    "maybe": ["abc", "true", None],
    "maybe_word": ["red", None],
    "either": ["abc", 7, "[1]"],
    "text_or_point": ["abc", {"x": 1}, "5"],
    "far": [True],
    "short": ["abc", "a\nb"],
    "path": ["abc/1"],
    "near": ["abc", "b"],
    "any": ["x", 5, {"x": 1}],
    "day": ["tomorrow"],  # a format is not bound
}
BAD = {
    "int": ["five", 5.5, -1],
    "is": ["maybe", 1],
    "word": ["green", "red1"],
    "one": ["x"],
    "mixed": ["two"],
    "point": [{"x": "1"}, {}, "x"],
    "list": [[1], "x"],
    "maybe_word": ["blue"],
    "text_or_point": [{"x": "1"}],
    "far": ["maybe"],
    "short": ["a", "abcde"],
    "path": ["abc/12", "1"],
    "near": ["ac"],
    "unknown": [1],
}


@pytest.fixture(scope="module")
def info():
    return ModelInfo(ModelConfig())


@pytest.fixture(scope="module")
def compiler(info):
    return GrammarCompiler(info)


def plain(text):
    return json.dumps(text, ensure_ascii=False)


async def taker(info, compiler, format_, functions, literal=plain, is_parallel=True):
    """Whether a text is calls by the format's grammar."""
    grammar = f"start: calls\n{format_.grammar(functions, is_parallel, literal)}"
    bound = StructuredOutputs(grammar=grammar)
    await compiler.check(bound)

    def takes(text):
        ids = info.tokenizer.encode(text, add_special_tokens=False)
        matcher = compiler.matcher(bound)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


def written(format_, *calls):
    """As JSON, where the format would write what Python prints."""

    class Json(format_):
        said = staticmethod(json.dumps)

    return Json.write(Reply(calls=[SaidCall("do", said) for said in calls]))


@pytest.mark.parametrize("name", FORMATS)
async def test_an_argument_is_bound_to_its_schema_and_read_back(name, info, compiler):
    format_ = load_format(name)
    functions = [Function("do", SCHEMA)]
    takes = await taker(info, compiler, format_, functions)
    for key, value in ((key, value) for key, values in GOOD.items() for value in values):
        text = written(format_, {key: value})
        assert takes(text), (key, value)
        reader = format_(functions)
        events = [*reader.append(text), *reader.flush()]
        said = json.loads("".join(event.text for event in events[1:]))
        if (key, value) not in (("any", 5), ("maybe", "true")):
            assert said == {key: value}
    for key, value in ((key, value) for key, values in BAD.items() for value in values):
        if name.startswith("deepseek") and key == "text_or_point":
            continue  # it says itself that it is a text
        assert not takes(written(format_, {key: value})), (key, value)
    assert takes(written(format_, {"text": "a", "int": 1}, {}))
    assert not takes(written(format_, {"int": 1, "text": "a"}))  # in the order of the schema


async def test_what_is_required_must_stand_and_forms_of_a_schema_hold(info, compiler):
    format_ = load_format("qwen3_coder")
    either = {
        "anyOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"$ref": "#/$defs/b"},
        ],
        "properties": {"c": {"type": "string"}},
        "$defs": {"b": {"properties": {"b": {"type": "boolean"}}, "required": ["b", "new"]}},
    }
    takes = await taker(info, compiler, format_, [Function("do", either)])
    assert takes(written(format_, {"c": "x", "a": 1}))
    assert takes(written(format_, {"b": True, "new": "x"}))
    assert not takes(written(format_, {"c": "x"}))
    assert not takes(written(format_, {"b": True}))
    assert not takes(written(format_, {"a": 1, "b": True, "new": "x"}))


async def test_arguments_that_no_property_names_and_that_none_may_name(info, compiler):
    format_ = load_format("minimax_m2")
    takes = await taker(info, compiler, format_, [Function("do", {"type": "object"})])
    assert takes(written(format_, {}))
    assert takes(written(format_, {"a b": "x\n", "c": 1}))
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    takes = await taker(info, compiler, format_, [Function("do", numbers)], is_parallel=False)
    assert takes(written(format_, {"a": 1}))
    assert not takes(written(format_, {"a": "x"}))
    assert not takes(written(format_, {"a": 1}, {"a": 1}))
    names = {"properties": {"a>b": {}, "no": False, "long": {"type": "string", "maxLength": 10**6}}}
    for each in ("minimax_m2", "deepseek_v32"):
        takes = await taker(info, compiler, load_format(each), [Function("do", names)])
        assert takes(written(load_format(each), {"long": "x" * 3000}))
        assert not takes(written(load_format(each), {"no": "x"}))
    closed = [Function("do", {"additionalProperties": False})]
    assert not (await taker(info, compiler, format_, closed))(written(format_, {"a": 1}))


async def test_a_token_inside_of_a_tag_ends_a_text(tmp_path):
    token = "\uff5cDSML\uff5c"
    info = ModelInfo(ModelConfig(model=make_model(tmp_path, "x", token)))
    chat_format = ChatFormat(info.tokenizer, "deepseek_v32", "none")
    assert chat_format.literal(f"</{token}invoke>").count("<[") == 1
    format_ = load_format("deepseek_v32")
    compiler = GrammarCompiler(info)
    takes = await taker(info, compiler, format_, [Function("do", SCHEMA)], chat_format.literal)
    for text in ("a </b> <", "", "</"):
        assert takes(written(format_, {"text": text, "int": 5}))
    assert takes(written(format_, {"short": "</a", "path": "a/1"}))
    assert not takes(written(format_, {"short": "abcde"}))
    assert not takes(written(format_, {"int": "x"}))


def test_a_schema_whose_rules_would_take_megabytes_is_refused():
    """Each property that refers to a definition takes all definitions with it."""
    chain = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(200)
    }
    properties = {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(200)}
    schema = {"type": "object", "$defs": chain, "properties": properties}
    with pytest.raises(ValueError, match="more than 262,144 characters"):
        load_format("qwen3_coder").grammar([Function("f", schema)], True, plain)
