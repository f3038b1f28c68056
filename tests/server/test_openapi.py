"""The OpenAPI document: it tells of all routes and of what their decoders take, and is kept to.

That what is sent is what it says, every test of this folder shows: `Server.request` looks.
"""

from importlib import import_module

import jsonschema_rs
import schemathesis

import aioserve
from aioserve.server.app import build_app
from aioserve.server.fields import FIELDS
from aioserve.server.protocol import CompletionRequest
from aioserve.server.routes import LATER, all_routes

FOREIGN = [name for name, field in FIELDS.items() if field.is_foreign]


async def get_document(server):
    return (await server.get("/openapi.json")).json()


async def test_every_route_is_in_the_document(start_server):
    for is_enabled in (False, True):
        async with start_server(server={"enable_admin": is_enabled}) as server:
            document = await get_document(server)
            told = {
                (method.upper(), path)
                for path, operations in document["paths"].items()
                for method in operations
            }
            router = build_app(server.engine).router
            served = {
                (route.method, route.resource.canonical)
                for route in router.routes()
                if route.method != "HEAD"
            }
            missing = sorted(served - told)
            assert not missing, f"give these an entry in aioserve/server/routes.py: {missing}"
            assert told == served
            assert ("/admin/policy" in document["paths"]) == is_enabled
    assert document["info"]["version"] == aioserve.__version__
    schemathesis.openapi.from_dict(document).validate()


def test_routes_whose_modules_are_loaded_later_are_those_that_they_declare():
    declared = {
        (route.method, route.path, route.needs): module
        for module in LATER.values()
        for route in import_module(module).ROUTES
    }
    assert declared == LATER


BODIES = {route.path: dict(route.example) for route in all_routes() if route.example}


async def test_the_example_of_each_body_is_told_and_is_a_good_one(start_server):
    # The model is asked as a reranker is, whatever it says.
    scoring = {"score_template": "qwen3_reranker", "score_labels": "no,What"}
    async with start_server(scoring=scoring) as server:
        document = await get_document(server)
        for path, body in BODIES.items():
            content = document["paths"][path]["post"]["requestBody"]["content"]
            assert content["application/json"]["example"] == body
            answer = await server.request("POST", path, json=body)
            names_nothing = path in ("/v1/abort", "/v1/batches")
            assert answer.status == (404 if names_nothing else 200), (path, answer)


async def test_the_header_of_a_timeout_is_told_where_it_is_read(start_server):
    async with start_server() as server:
        document = await get_document(server)
        told = {
            path
            for path, operations in document["paths"].items()
            for operation in operations.values()
            if any(p["name"] == "X-Request-Timeout" for p in operation.get("parameters", ()))
        }
        answers = {
            path: await server.request(
                "POST", path, json=body, headers={"X-Request-Timeout": "soon"}
            )
            for path, body in BODIES.items()
        }
    assert told <= BODIES.keys()
    assert told == {path for path, answer in answers.items() if answer.status == 400}


def takes(document, path, field, value):
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    one = document["components"]["schemas"][name]["properties"][field]
    validator = jsonschema_rs.validator_for({"allOf": [one], "components": document["components"]})
    return validator.is_valid(value)


CHAT = "/v1/chat/completions"


async def test_it_says_what_the_types_of_fields_do_not(start_server):
    """Limits that are checked by hand, other names of fields, what is refused by name."""
    async with start_server(model={"served_model_name": "bard"}) as server:
        document = await get_document(server)
    for path, field, good, bad in (
        ("/v1/completions", "temperature", 0, -0.1),
        ("/v1/completions", "top_p", 1, 0),
        ("/v1/completions", "truncate_prompt_tokens", -1, 0),
        ("/v1/completions", "n", 128, 129),
        ("/v1/completions", "stop", ["a"] * 32, ["a"] * 33),
        ("/v1/completions", "stop", "", [""]),
        ("/v1/completions", "bad_words", ["a"], [" "]),
        ("/v1/completions", "logit_bias", {"5": 100}, {"5": 101}),
        ("/v1/completions", "logit_bias", {"-5": 1}, {"x": 1}),
        ("/v1/completions", "logprobs", 20, True),
        ("/v1/completions", "model", "bard", "embedded"),
        (CHAT, "suffix", "", "x"),
        ("/v1/completions", "metadata", {"any": ["thing"]}, ...),
        (CHAT, "logprobs", True, 5),
        (CHAT, "top_logprobs", 20, 21),
        (CHAT, "max_completion_tokens", 0, -1),
        ("/v1/completions", "prompt_logprobs", 20, 21),
        (CHAT, "spaces_between_special_tokens", True, False),
        ("/v1/messages", "max_tokens", 1, None),
        ("/v1/messages", "stop_sequences", ["a"] * 32, ["a"] * 33),
        ("/v1/responses", "max_output_tokens", None, 0),
        ("/v1/embeddings", "dimensions", 1, 0),
        ("/v1/embeddings", "truncate_prompt_tokens", -1, 0),
        ("/v1/embeddings", "endianness", "little", "big"),
    ):
        assert takes(document, path, field, good), (field, good)
        assert bad is ... or not takes(document, path, field, bad), (field, bad)


async def test_where_unknown_fields_are_ignored_it_says_so(start_server):
    async with start_server(server={"ignore_unknown_fields": True}) as server:
        document = await get_document(server)
    request = document["components"]["schemas"][CompletionRequest.__name__]
    assert "additionalProperties" not in request
    assert all(takes(document, "/v1/completions", name, "any") for name in FOREIGN)
    assert not takes(document, "/v1/completions", "guided_regex", "any")
