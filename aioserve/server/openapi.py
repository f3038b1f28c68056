"""The OpenAPI document of the routes: made of what they declare and of what decoders refuse.

Knows JSON Schema, and which limits are known without a model. Knows no route.
"""

import asyncio
import http
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import cleandoc
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from aioserve.errors import (
    EngineOverloadedError,
    KeyLimitError,
    RequestTimeoutError,
    UnknownKeyError,
    UnknownModelError,
)
from aioserve.params import (
    BIAS_RANGE,
    MAX_BAD_WORD_CHARACTERS,
    MAX_ENTRIES,
    POOLING_RANGES,
    RANGES,
    WAYS,
    Range,
    StructuredOutputs,
)
from aioserve.server.body import Route
from aioserve.server.errors import TIMEOUT_HEADER, status_of, style_of, styles
from aioserve.server.fields import FIELDS, Unserved
from aioserve.server.protocol import ErrorResponse, ModelRequest
from aioserve.server.running import DOCUMENT
from aioserve.support import __version__

Schema = dict[str, Any]

_REFS = "#/components/schemas/"
_ANY_ROUTE = (403, 415, 500)  # a foreign name or origin, a body of another type, our mistake
_ANY_BODY = (400, 408, 413)  # not what was asked for, too slow, too long


class OpenAPIDocument:
    """The document of one application, made when it is first asked for, and when models change."""

    def __init__(
        self,
        routes: Callable[[], Sequence[Route]],
        models: Callable[[], Sequence[str]],
        *,
        ignores_unknown: bool,
        needs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`routes` are asked for when the document is. `ignores_unknown`: whether the setting of
        that name is on. `models`: the names that are served, asked each time. `needs`: which key a
        path needs, where the server has keys.
        """
        self._needs = needs
        self._load_routes = routes
        self._models = models
        self._ignores_unknown = ignores_unknown
        self._encoded: tuple[list[str], bytes] | None = None  # of which names

    @cached_property
    def _routes(self) -> Sequence[Route]:
        return self._load_routes()

    def encoded(self) -> bytes:
        """Return the OpenAPI document as JSON, built again when the served models change."""
        models = list(self._models())
        if self._encoded is None or self._encoded[0] != models:
            self._encoded = models, msgspec.json.encode(self.build())
        return self._encoded[1]

    def build(self) -> Schema:
        """Return the OpenAPI document as dicts, lists and strings."""
        types = list(dict.fromkeys(_types(self._routes)))
        schemas, components = msgspec.json.schema_components(types, ref_template=_REFS + "{name}")
        schema_of = dict(zip(types, schemas, strict=True))
        self._finish(components, schema_of)
        paths: dict[str, Schema] = {}
        for route in self._routes:
            operation = _operation(route, schema_of)
            if self._needs.get(route.documented_path, "nothing") != "nothing":
                operation["security"] = [{name: []} for name in _schemes(route.path)]
            paths.setdefault(route.documented_path, {})[route.method.lower()] = operation
        document: Schema = {
            "openapi": "3.1.0",
            "info": {"title": "aioserve", "version": __version__},
            "paths": paths,
            "components": {"schemas": components},
        }
        if self._needs:
            document["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                **{
                    style.key_header: {"type": "apiKey", "in": "header", "name": style.key_header}
                    for style in styles()
                    if style.key_header
                },
            }
        return document

    def _finish(self, components: dict[str, Schema], schema_of: Mapping[Any, Schema]) -> None:
        """Say what the structs do not: what is refused, what is always there, and limits."""
        bodies = {r.body.served: r.body for r in self._routes if r.body is not None}
        sent = set(_reached([schema_of[struct] for struct in bodies], components))
        for name, component in components.items():
            component["description"] = _told(component.get("description", ""))
            if name in sent:
                if self._ignores_unknown:
                    component.pop("additionalProperties", None)
                component.update(_ONE_WAY if name == StructuredOutputs.__name__ else {})
            elif "properties" in component:  # a field with a default is there all the same
                fields = component["properties"].items()
                defaults = [key for key, schema in fields if "default" in schema]
                component["required"] = [*component["required"], *defaults]
                for key in defaults:
                    del component["properties"][key]["default"]
        for struct, decoder in bodies.items():
            properties = components[schema_of[struct]["$ref"].removeprefix(_REFS)]["properties"]
            for name, schema in properties.items():
                called = _CALLED.get(name, name)
                _limit(called, schema)
                if called == "max_tokens" and "prompt_logprobs" in properties:
                    _allow_zero(schema)
            if issubclass(struct, ModelRequest):
                properties["model"] = {"enum": [*self._models(), None], "default": None}
            for name in decoder.hints:
                properties[name] = {"description": "A label or hint: changes nothing."}
            for name, what in decoder.skipped.items():
                properties[name] = {"description": f"Passed over: {what} run at a vendor's."}
            for name, field in decoder.unserved.items():
                ignored = self._ignores_unknown and FIELDS[name].is_foreign
                properties[name] = {} if ignored else _refusal(field)


async def serve_document(request: web.Request) -> web.Response:
    """GET /openapi.json. Made in a thread, as it takes as long as some steps."""
    body = await asyncio.to_thread(request.app[DOCUMENT])
    return web.Response(body=body, content_type="application/json")


ROUTES = (Route("GET", "/openapi.json", serve_document, "This document.", dict[str, Any]),)


def _schemes(path: str) -> Sequence[str]:
    """Return how a key may be shown there."""
    style = style_of(path)
    own = "" if style is None else style.key_header
    return ("bearer", own) if own else ("bearer",)


def _types(routes: Sequence[Route]) -> Iterator[Any]:
    yield from (ErrorResponse, *(style.error for style in styles()))
    for route in routes:
        yield from (route.answer, *route.events)
        if route.body is not None:
            yield route.body.served
        if route.form is not None:
            yield route.form


def _operation(route: Route, schema_of: Mapping[Any, Schema]) -> Schema:
    media_types = route.media_types or [_media_type(route.answer)]
    content = {media_type: {"schema": schema_of[route.answer]} for media_type in media_types}
    if route.events and route.stream_type == "text/event-stream":
        content[route.stream_type] = {"schema": _event(route.events, schema_of)}
    elif route.events:
        lines = [schema_of[event] for event in route.events]
        content[route.stream_type] = {"schema": {"description": "One line.", "anyOf": lines}}
    responses = {str(s): _response(s, content) for s in route.statuses}
    style = style_of(route.path)
    error = ErrorResponse if style is None else style.error
    for status in _error_statuses(route):
        content = {"application/json": {"schema": schema_of[error]}}
        responses.setdefault(str(status), _response(status, content))
    tell_when = {503, *(status_of(e, route.path) for e in (EngineOverloadedError, KeyLimitError))}
    for status in tell_when & {int(s) for s in responses}:
        seconds = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
        responses[str(status)]["headers"] = {"Retry-After": seconds}
    operation: Schema = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": responses,
    }
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        schema = schema_of[route.body.served]
        example = {"example": dict(route.example)} if route.example else {}
        operation["requestBody"] = {
            "required": not route.may_lack_body,
            "content": {"application/json": {"schema": schema, **example}},
        }
    if route.form is not None:
        content = {"multipart/form-data": {"schema": schema_of[route.form]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


_TIMEOUT_PARAMETER: Schema = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "Seconds, as the field timeout: of the two the smaller counts.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


def _parameters(route: Route) -> list[Schema]:
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", route.path)
    ]
    if route.query is not None:
        properties = msgspec.json.schema(route.query)["$defs"][route.query.__name__]["properties"]
        parameters += ({"name": n, "in": "query", "schema": s} for n, s in properties.items())
    if RequestTimeoutError in route.raises and route.body is not None:
        parameters.append(_TIMEOUT_PARAMETER)
    return parameters


def _error_statuses(route: Route) -> list[int]:
    statuses = {*_ANY_ROUTE, *(status_of(error, route.path) for error in route.raises)}
    if route.needs != "nothing":
        statuses.add(status_of(UnknownKeyError, route.path))
    if EngineOverloadedError in route.raises:
        statuses.add(status_of(KeyLimitError, route.path))
    if route.body is not None or route.form is not None:
        statuses.update(_ANY_BODY)
    if route.body is not None:
        if issubclass(route.body.served, ModelRequest):
            statuses.add(status_of(UnknownModelError, route.path))
    return sorted(statuses)


def _response(status: int, content: Schema) -> Schema:
    is_known = status in {*http.HTTPStatus}
    phrase = http.HTTPStatus(status).phrase if is_known else "Overloaded"
    return {"description": phrase, "content": content}


def _media_type(answer: Any) -> str:
    return "text/plain" if answer is str else "application/json"


def _event(events: Sequence[Any], schema_of: Mapping[Any, Schema]) -> Schema:
    """Return one event of a stream: 3.1 leaves open what the schema of a stream is about."""
    texts = [schema_of[event] for event in events if "$ref" not in schema_of[event]]
    structs = [schema_of[event] for event in events if "$ref" in schema_of[event]]
    json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": structs}}
    return {
        "description": "One event; the data is JSON.",
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "anyOf": [json, *texts]},
        },
        "required": ["data"],
    }


def _reached(schemas: Sequence[Any], components: Mapping[str, Schema]) -> Iterator[str]:
    """Yield the names of all components that these are made of."""
    todo, seen = list(schemas), set()
    while todo:
        schema = todo.pop()
        if isinstance(schema, Mapping):
            todo += schema.values()
            name = str(schema.get("$ref", "")).removeprefix(_REFS)
            if name in components and name not in seen:
                seen.add(name)
                todo.append(components[name])
                yield name
        elif isinstance(schema, list):
            todo += schema


def _told(docstring: str) -> str:
    """Return the first paragraph, without what is for readers of the code."""
    first = " ".join(cleandoc(docstring).partition("\n\n")[0].split())
    return re.sub(r" (Raises|Build it) .*", "", first)


# Limits. The decoder knows types; the numbers that make sense are known to `SamplingParams`.

#: The names of its fields on some routes.
_CALLED = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
}
#: Of `StructuredOutputs`: one of its fields, and not two.
_ONE_WAY: Schema = {
    "oneOf": [
        {"required": [way], "properties": {way: {"not": {"enum": [None, False]}}}} for way in WAYS
    ]
}
_RANGES: Mapping[str, Range] = {**RANGES, **POOLING_RANGES}
_ENTRIES: Mapping[str, Schema] = {
    "stop": {"minLength": 1},
    "bad_words": {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARACTERS, "pattern": r"\S"},
}


def _limit(name: str, schema: Schema) -> None:
    """Narrow a field of that name to what `SamplingParams` takes."""
    for kind in schema.get("anyOf", [schema]):
        match kind.get("type"):
            case "integer" | "number" if name in _RANGES:
                kind.update(_numbers(_RANGES[name]))
            case "array" if name in MAX_ENTRIES:
                kind["maxItems"] = MAX_ENTRIES[name]
                kind["items"].update(_ENTRIES.get(name, {}))
            case "object" if name == "logit_bias":
                kind["propertyNames"] = {"pattern": r"^-?[0-9]+$"}
                kind["additionalProperties"].update(_numbers(BIAS_RANGE))


def _allow_zero(schema: Schema) -> None:
    """Allow a `max_tokens` of 0, where the prompt alone may be asked about."""
    for kind in schema.get("anyOf", [schema]):
        if "minimum" in kind:
            kind["minimum"] = 0


def _numbers(numbers: Range) -> Schema:
    """Bounds; those that floats have anyway are left out."""
    schema: Schema = {}
    if numbers.other_than is not None and numbers.other_than == numbers.ge:
        schema["exclusiveMinimum"] = numbers.ge
    else:
        schema["minimum"] = numbers.ge
        if numbers.other_than is not None:
            schema["not"] = {"const": numbers.other_than}
    if numbers.le < Range("", 0).le:
        schema["maximum"] = numbers.le
    return schema


def _refusal(field: Unserved) -> Schema:
    """Return the values that ask for nothing."""
    no_ops = [value for value in (None, False) if field.is_no_op(value)]
    instead = f" Use {field.instead}." if field.instead else ""
    values = [*no_ops, *(v for v in field.no_ops if v is not False)]
    return {"enum": values, "description": f"Not served.{instead}"}
