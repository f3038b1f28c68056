"""Whether answers are what the OpenAPI document says. Knows all routes, admin's too."""

import functools
import json
import re
from typing import Any
from urllib.parse import quote

import jsonschema_rs

from aioserve.server.openapi import OpenAPIDocument
from aioserve.server.routes import admin_routes, all_routes, page_routes


@functools.cache
def document() -> dict[str, Any]:
    """Its objects are closed: nothing is sent that it does not tell of."""
    routes = (*all_routes(), *page_routes(), *admin_routes())
    made = OpenAPIDocument(lambda: routes, lambda: ["embedded"], ignores_unknown=False).build()
    for component in made["components"]["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    return made


@functools.cache
def registry() -> jsonschema_rs.Registry:
    """The document for validators: each would read all of it."""
    return jsonschema_rs.Registry([("urn:document", document())])


@functools.cache
def templates() -> dict[str, re.Pattern[str]]:
    """The routes of the document, and what their paths look like: a parameter may hold slashes."""
    longest_first = sorted(document()["paths"], key=len, reverse=True)
    return {route: re.compile(re.sub(r"{\w+}", ".+", route)) for route in longest_first}


@functools.cache
def route_of(path: str) -> str:
    """The route of a path; empty if there is none."""
    return next((route for route, like in templates().items() if like.fullmatch(path)), "")


@functools.cache
def validators(method: str, route: str, status: int, media_type: str) -> list[Any]:
    """Of the answer, or of the data of its events and of those that are no JSON; none if the route
    has no such method.
    """
    told = document()["paths"][route].get(method.lower(), {}).get("responses", {})
    if not told:
        return []
    assert str(status) in told, f"add {status} to {method} {route} in aioserve/server/routes.py"
    schema = told[str(status)]["content"][media_type]["schema"]
    words = (route, method.lower(), "responses", status, "content", media_type, "schema")
    place = "/".join(quote(str(word).replace("/", "~1")) for word in ("paths", *words))
    schemas: list[Any] = [{"$ref": f"urn:document#/{place}"}]
    if media_type == "text/event-stream":
        place = f"urn:document#/{place}/properties/data/anyOf"
        num_texts = len(schema["properties"]["data"]["anyOf"]) - 1
        texts = [{"$ref": f"{place}/{1 + i}"} for i in range(num_texts)]
        schemas = [{"$ref": f"{place}/0/contentSchema"}, {"anyOf": texts} if texts else False]
    return [jsonschema_rs.validator_for(schema, registry=registry()) for schema in schemas]


def check_answer(method: str, path: str, status: int, content_type: str, body: bytes) -> None:
    """Raises if a route that is in the document may not answer so."""
    route, media_type = route_of(path.partition("?")[0]), content_type.partition(";")[0]
    checks = validators(method, route, status, media_type) if route else []
    if not checks:
        return
    of_answer, *of_texts = checks
    if media_type == "application/json":
        of_answer.validate(json.loads(body))
    elif media_type == "application/x-ndjson":
        for line in body.splitlines():
            of_answer.validate(json.loads(line))
    elif media_type != "text/event-stream":
        of_answer.validate(body.decode())
    else:
        for event in body.decode().removesuffix("\n\n").split("\n\n"):
            *name, data = event.split("\n")
            assert all(line.startswith("event: ") for line in name)
            data = data.removeprefix("data: ")
            if data.startswith("{"):
                of_answer.validate(json.loads(data))
            else:
                of_texts[0].validate(data)
