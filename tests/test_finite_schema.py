"""Schemas of which no value is finite: refused at the door, with the reference that is at fault."""

import pytest

from aioserve.config import EngineConfig, RunnerConfig, ServerConfig
from aioserve.features.grammars.schema import check_finite
from tests.server.bad_bodies import check
from tests.server.serving import running

SELF = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "required": ["next"],
    "additionalProperties": False,
}


def of(definition, **others):
    return {"$defs": {"a": definition, **others}, "$ref": "#/$defs/a"}


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
LEAF = {"type": "null"}


def holding(part):
    return {"type": "object", "properties": {"x": part}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        of({"type": "array", "items": A, "minItems": 1}),
        of({"type": "array", "prefixItems": [LEAF, A], "minItems": 2}),
        of(B, b=A),
        of({"anyOf": [holding(A), holding(B)]}, b=holding(A)),
        of({"type": "object", "additionalProperties": A, "minProperties": 1}),
        of({"allOf": [holding(LEAF), holding(A)]}),
        holding({"oneOf": [{"$ref": "#"}]}),
    ],
)
def test_a_schema_whose_values_never_end_is_told_by_its_reference(schema):
    with pytest.raises(ValueError, match="no value of the schema is finite: '#"):
        check_finite(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        holding({"anyOf": [{"$ref": "#"}, LEAF]}),
        of({"type": "array", "items": A}),
        of({"anyOf": [holding(B), LEAF]}, b=holding(A)),
        of({"anyOf": [holding(A), holding(B)]}, b=holding(LEAF)),
        of({"type": ["array", "null"], "items": A, "minItems": 1}),
        of({"const": 1}),
        {"$ref": "https://elsewhere.example/schema"},
        {"$ref": "#/no/such/place"},
    ],
)
def test_a_schema_with_a_finite_value_passes(schema):
    check_finite(schema)


def test_a_long_chain_of_references_is_looked_at_without_deep_recursion():
    for step in (1, -1):
        chain = {f"d{i}": holding({"$ref": f"#/$defs/d{i + step}"}) for i in range(4000)}
        chain["d4000"] = chain["d-1"] = LEAF
        check_finite({"$defs": chain, "$ref": "#/$defs/d2000"})


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_such_a_schema_is_refused_with_its_place_on_every_route():
    message = [{"role": "user", "content": "x"}]
    form = {"type": "json_schema", "name": "x", "schema": SELF}
    tool = {"type": "function", "function": {"name": "a", "parameters": SELF}}
    own = {"type": "function", "name": "a", "parameters": SELF}
    config = EngineConfig(
        runner=RunnerConfig(threads=1), server=ServerConfig(tool_call_parser="hermes")
    )
    async with running(config) as server:
        for path, body, param in (
            (
                "/v1/chat/completions",
                {"messages": message, "tools": [tool]},
                "tools[0].function.parameters",
            ),
            ("/v1/responses", {"input": "x", "tools": [own]}, "tools[0].parameters"),
            ("/v1/responses", {"input": "x", "text": {"format": form}}, "text.format.schema"),
            (
                "/v1/completions",
                {"prompt": "x", "structured_outputs": {"json": SELF}},
                "structured_outputs.json",
            ),
        ):
            error = check(await server.request("POST", path, json=body))
            assert error["param"] == param
            assert "no value of the schema is finite: '#'" in error["message"]
        tools = [{"name": "a", "input_schema": SELF}]
        body = {"messages": message, "max_tokens": 4, "tools": tools}
        error = check(await server.request("POST", "/v1/messages", json=body))
        assert "tools[0].input_schema: no value" in error["message"]
