"""Bodies that `schemathesis` makes of the OpenAPI document, good ones and bad ones.

A bad one is refused, a good one may be, in words; whatever is answered is what the document says.
Most bodies are good but for one field: of several faults all but one would never be looked at.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from aioserve.server.routes import all_routes

# The loop is the subject of other tests.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# What is held as it is while one field varies.
GOOD: dict[str, dict[str, Any]] = {
    **{route.path: dict(route.example) for route in all_routes() if route.example},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/admin/pause": {"running": "keep"},
    "/admin/shadow": {"policy": "fcfs"},
}
# What changes the server for all others: these are not called at random.
CONTROLS = {
    f"/admin/{name}"
    for name in ("policy", "try_policy", "pause", "resume", "sleep", "wake", "reload", "shadow")
} | {"/admin/log_level"}
THIN = 180  # one body in so many of a field, of routes with large bodies; all in the slow test
FEW = ("/v1/chat/completions", "/v1/embeddings", "/admin/pause")  # of the routes in `make test`
LARGE = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def must_have_body(document: dict[str, Any], path: str) -> bool:
    return document["paths"][path]["post"]["requestBody"]["required"]


def of_one_field(document: dict[str, Any], path: str, field: str) -> Iterator[Case]:
    """What the edges of this field's schema suggest; the other fields stay as they are."""
    schema, schemas = body_schema(document, path), document["components"]["schemas"]
    name = next(name for name, each in schemas.items() if each is schema)
    held = {name: {"enum": [value]} for name, value in GOOD[path].items()}
    properties = {**held, field: schema["properties"][field]}
    schema = {**schema, "properties": properties, "required": list(properties)}
    post = {**document["paths"][path]["post"]}
    post.pop("parameters", None)  # headers would vary with every field
    narrow = {
        **document,
        "paths": {path: {"post": post}},
        "components": {**document["components"], "schemas": {**schemas, name: schema}},
    }
    api = schemathesis.openapi.from_dict(narrow)
    return api.iter_coverage_cases(
        api[path]["POST"],
        generation_modes=list(GenerationMode),
        generation_config=api.config.generation,
    )


def fields_of_its_own(document: dict[str, Any], path: str) -> Iterator[str]:
    """What must be there, and what is served and not told in the same words of an earlier route."""
    paths = list(GOOD)
    earlier = [body_schema(document, p)["properties"] for p in paths[: paths.index(path)]]
    for field, told in body_schema(document, path)["properties"].items():
        is_served = "Not served" not in told.get("description", "")  # other tests name each
        is_new = all(other.get(field) != told for other in earlier)
        if field in GOOD[path] or (is_served and is_new):
            yield field


def try_bodies(
    url: str, document: dict[str, Any], path: str, fields: Iterable[str], *, thin: int = 1
) -> dict[str, Counter[int]]:
    """How often which status came, by the field that varied."""
    schema = {**body_schema(document, path), "components": document["components"]}
    validator = jsonschema_rs.validator_for(schema)
    statuses: dict[str, Counter[int]] = {}
    with requests.Session() as session:
        for field in fields:
            statuses[field] = Counter()
            for case in itertools.islice(of_one_field(document, path, field), 0, None, thin):
                if case.method != "POST":
                    continue
                response = case.call(base_url=url, session=session)
                case.validate_response(response, checks=CHECKS)
                statuses[field][response.status_code] += 1
                is_lacking = response.request.body is None and not must_have_body(document, path)
                if not (is_lacking or is_good(response.request.body, validator)):
                    assert response.status_code in (400, 404), response.request.body
    return statuses


def is_good(sent: bytes | None, validator: jsonschema_rs.Validator) -> bool:
    try:
        return validator.is_valid(json.loads(sent or b""))
    except ValueError:
        return False


def served(path: str) -> int:
    """What a good body gets; none knows what could be aborted, run, loaded or unloaded."""
    names_nothing = path in ("/v1/abort", "/v1/batches") or path.endswith("load_lora_adapter")
    return 404 if names_nothing else 200


def try_at_random(url: str, document: dict[str, Any], *, num_examples: int) -> None:
    """All fields at once, and all routes."""
    api = schemathesis.openapi.from_dict(document)
    with requests.Session() as session:
        for result in api.get_all_operations():
            operation = result.ok()
            if operation.path in CONTROLS:
                continue
            modes = [GenerationMode.POSITIVE]
            if operation.body:
                modes.append(GenerationMode.NEGATIVE)

            @settings(
                derandomize=True,
                max_examples=num_examples,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.one_of(map(operation.as_strategy, modes)))
            def try_one(case: Case) -> None:
                checks = [*CHECKS, negative_data_rejection]
                case.call_and_validate(base_url=url, session=session, checks=checks)

            try_one()


@pytest.fixture
async def server(start_server, tmp_path):
    """Its model takes few tokens: where nothing else ends a reply, this does. A step takes the
    millisecond of `SIMULATED`, so that steps are under way while bodies come.
    """
    (tmp_path / "score.txt").write_text("{query} {document}")
    sections = {
        "model": {"max_model_len": 64},
        "server": {"enable_admin": True},
        "scoring": {"score_template": str(tmp_path / "score.txt"), "score_labels": "no,What"},
    }
    async with start_server(**sections) as server:
        yield server


@pytest.mark.parametrize("path", FEW)
async def test_a_body_that_the_document_does_not_allow_is_refused(server, path):
    document = (await server.get("/openapi.json")).json()
    fields = list(fields_of_its_own(document, path))
    statuses = await asyncio.to_thread(
        try_bodies, server.url, document, path, fields, thin=THIN if path in LARGE else 12
    )
    seen = sum(statuses.values(), Counter()).keys()
    # Nothing that is made of schemas alone is a conversation that makes sense.
    assert seen >= ({served(path), 400} if set(fields) - GOOD[path].keys() else {400})


@pytest.mark.slow
@pytest.mark.parametrize("path", GOOD)
async def test_every_body_that_the_document_does_not_allow_is_refused(server, path):
    document = (await server.get("/openapi.json")).json()
    fields = body_schema(document, path)["properties"]
    statuses = await asyncio.to_thread(try_bodies, server.url, document, path, fields)
    for field, seen in statuses.items():
        assert seen.keys() >= ({400} if field in GOOD[path] else {served(path), 400}), field


@pytest.mark.slow
async def test_many_bodies_at_random_are_answered_as_the_document_says(server):
    document = (await server.get("/openapi.json")).json()
    asked = {p for p, ways in document["paths"].items() if "requestBody" in ways.get("post", {})}
    others = {p for p, ways in document["paths"].items() if p not in asked and "post" in ways}
    assert asked - {"/v1/files"} == (GOOD.keys() | CONTROLS) - others  # a form, no JSON
    await asyncio.to_thread(try_at_random, server.url, document, num_examples=100)
