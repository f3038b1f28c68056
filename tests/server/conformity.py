"""Whether answers are what the OpenAPI document says. Knows all routes, admin's too."""

import functools
import json
import re
from typing import Any

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
def responses(method: str, path: str) -> dict[str, Any]:
    """By status, what a route may answer; empty if there is no such route."""
    paths = document()["paths"]
    for template in sorted(paths, key=len, reverse=True):  # a parameter may hold slashes
        if re.fullmatch(re.sub(r"{\w+}", ".+", template), path):
            return paths[template].get(method.lower(), {}).get("responses", {})
    return {}


@functools.cache
def validators(method: str, path: str, status: int, media_type: str) -> list[Any]:
    """Of the answer, or of the data of its events and of those that are no JSON."""
    told = responses(method, path)
    assert str(status) in told, f"add {status} to {method} {path} in aioserve/server/routes.py"
    schema = told[str(status)]["content"][media_type]["schema"]
    schemas = [schema]
    if media_type == "text/event-stream":
        json_data, *texts = schema["properties"]["data"]["anyOf"]
        schemas = [json_data["contentSchema"], {"anyOf": texts} if texts else False]
    components = {"components": document()["components"]}
    return [jsonschema_rs.validator_for({"allOf": [schema], **components}) for schema in schemas]


def check_answer(method: str, path: str, status: int, content_type: str, body: bytes) -> None:
    """Raises if a route that is in the document may not answer so."""
    path = path.partition("?")[0]
    if not responses(method, path):
        return
    media_type = content_type.partition(";")[0]
    of_answer, *of_texts = validators(method, path, status, media_type)
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
