"""Faults of what binds a reply are told by the field that the client sent."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import HERMES, saying

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
}


def response_format(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": form}


def function(schema: Any) -> dict[str, Any]:
    first = {"type": "function", "function": {"name": "ok", "parameters": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "x", "parameters": schema, "strict": True}}
    return {"tools": [first, tool], "tool_choice": "required"}


WAYS: list[tuple[str, str, Any]] = [
    ("/v1/completions", "response_format.json_schema.schema", response_format),
    ("/v1/chat/completions", "response_format.json_schema.schema", response_format),
    ("/v1/chat/completions", "tools[1].function.parameters", function),
    (
        "/v1/chat/completions",
        "tools[1].function.parameters",
        lambda schema: {**function(schema), "tool_choice": "auto"},
    ),
    (
        "/v1/responses",
        "text.format.schema",
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    ),
    (
        "/v1/responses",
        "tools[0].parameters",
        lambda schema: {
            "tools": [{"type": "function", "name": "x", "parameters": schema}],
            "tool_choice": "required",
        },
    ),
    (
        "/v1/messages",
        "output_config.format.schema",
        lambda s: {"output_config": {"format": {"type": "json_schema", "schema": s}}},
    ),
    (
        "/v1/messages",
        "output_format.schema",
        lambda s: {"output_format": {"type": "json_schema", "schema": s}},
    ),
    (
        "/v1/messages",
        "tools[0].input_schema",
        lambda s: {"tools": [{"name": "x", "input_schema": s}], "tool_choice": {"type": "any"}},
    ),
    ("/v1/completions", "structured_outputs.json", lambda s: {"structured_outputs": {"json": s}}),
    ("/v1/responses", "structured_outputs.json", lambda s: {"structured_outputs": {"json": s}}),
    ("/v1/messages", "structured_outputs.json", lambda s: {"structured_outputs": {"json": s}}),
]
FAULTS = [
    ({"minimum": 10**20}, "minimum", "no number between"),
    ({"type": "string", "pattern": "a(?=b)"}, "pattern", "look-around"),
    ({"not": {"type": "string"}}, "not", "Unimplemented keys"),
]


async def test_a_fault_in_a_schema_names_the_field_that_was_sent(tmp_path: Path) -> None:
    async with saying("x", tmp_path, HERMES) as server:
        for path, field, put in WAYS:
            for fault, keyword, reason in FAULTS:
                schema = {"type": "object", "properties": {"a": fault}, "required": ["a"]}
                answer = await server.request("POST", path, json={**ASKED[path], **put(schema)})
                error = answer.json()["error"]
                assert answer.status == 400, (path, field, error)
                assert reason in error["message"]
                if path == "/v1/messages":  # whose errors have no param
                    assert error["message"].startswith(field), error
                else:
                    assert error["param"].startswith(field), error
                assert f"properties.a.{keyword}" in error["message"], error
                if field.startswith("structured"):
                    continue
                assert "structured_outputs" not in error["message"], error


async def test_a_tag_and_any_json_name_response_format(tmp_path: Path) -> None:
    async with saying("x", tmp_path, HERMES) as server:
        form = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a(?!b)"}}
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {**ASKED[path], "response_format": form}
            answer = await server.request("POST", path, json=body)
            error = answer.json()["error"]
            assert (answer.status, error["param"]) == (400, "response_format.format")
            assert "look-around" in error["message"]
            assert "'(?!' at character 2" in error["message"]
