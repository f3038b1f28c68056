"""From an HTTP request to a decoded body: read, decoded strictly, refused with the field's path.

What every route with a body shares. Decodes in one pass, and refuses what nothing here honours by
`RequestError`. Knows nothing about what the body asks for. Last, what a `Route` says of itself.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import msgspec.inspect
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.engine import EngineClient
from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestIdInUseError,
    RequestTimeoutError,
    UnknownModelError,
)
from aioserve.server.access.access import ACCESS
from aioserve.server.errors import BodiesFullError, BodyTimeoutError, UnknownFieldError
from aioserve.server.fields import FIELDS, Hint, Skipped, Unserved, pass_over, rules_of
from aioserve.server.protocol import GenerationRequest, ModelRequest, RequestPart
from aioserve.server.running import ENGINE

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()

_MAX_SHOWN = 64  # characters of an unknown name

# Of msgspec's messages, which may quote what the client sent: so what they say is read at their
# beginning, and where at their end.
_AT = " - at `"
_PATH = re.compile(r"(?:key` in `)?\$\.?([^`]*)`")
_FIELD = re.compile(r"(?:^|\.)(\w+)")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `|$)", re.DOTALL)


class BodyDecoder(Generic[T]):
    """A decoder of the JSON bodies of one endpoint."""

    def __init__(self, request_type: type[T], route: str = "") -> None:
        """`route`: its name in `fields`, where what it does not serve is declared."""
        self.served = request_type
        rules = rules_of(route, request_type.__struct_fields__)
        self.unserved = {n: rule for n, rule in rules.items() if isinstance(rule, Unserved)}
        self.hints = tuple(n for n, rule in rules.items() if isinstance(rule, Hint))
        self.skipped = {n: rule.what for n, rule in rules.items() if isinstance(rule, Skipped)}
        # One struct for all names, so that one pass over the body finds them.
        fields: list[tuple[str, Any, Any]] = [(name, Any, None) for name in rules]
        name, bases = request_type.__name__, (request_type,)
        self._type: type[T] = msgspec.defstruct(name, fields, bases=bases, kw_only=True)  # type: ignore[assignment]
        self._decoder = msgspec.json.Decoder(self._type)
        self._get_unserved = values_of(*self.unserved)
        self._nothing = (None,) * len(self.unserved)
        self._get_skipped = values_of(*self.skipped)
        self._none_skipped = (None,) * len(self.skipped)

    def decode(self, body: bytes | bytearray, *, ignore_unknown: bool = False) -> T:
        """Return the request in `body`. Raises `RequestError` that names the path of what is wrong.

        With `ignore_unknown`, names that neither OpenAI nor vLLM nor SGLang has are ignored.
        """
        try:
            try:
                request = self._decoder.decode(body)
            except msgspec.ValidationError as error:
                if not (ignore_unknown and _UNKNOWN.match(str(error))):
                    raise
                known = _known_only(msgspec.json.decode(body), self._type)
                request = msgspec.convert(known, self._type, str_keys=True)
        except msgspec.ValidationError as error:
            raise _explain(str(error), self._type, self.served) from error
        except (ValueError, RecursionError) as error:  # malformed, not UTF-8, nested too deep
            raise RequestError(f"the body is not valid JSON: {error}") from error
        values = self._get_unserved(request)
        if values != self._nothing:
            self._refuse(values, ignore_unknown)
        return request

    def asked_in_vain(self, request: T) -> list[str]:
        """Return what a decoded body asks for that is passed over, in words."""
        values = self._get_skipped(request)
        if values == self._none_skipped:
            return []
        told = zip(self.skipped.values(), values, strict=True)
        return [what for what, value in told if value not in (None, [])]

    def _refuse(self, values: tuple[Any, ...], ignore_foreign: bool) -> None:
        for (name, field), value in zip(self.unserved.items(), values, strict=True):
            if field.is_no_op(value) or (ignore_foreign and FIELDS[name].is_foreign):
                continue
            instead = f": use {field.instead}" if field.instead else ""
            raise RequestError(f"{name} is not supported by this server{instead}", param=name)


def convert_part(value: Any, part: type[T], path: str, *, ignore_unknown: bool = False) -> T:
    """Return a part of a body, at `path`, that was decoded as plain JSON, as a struct. Raises
    `RequestError` that names the place.
    """
    try:
        return msgspec.convert(_known_only(value, part) if ignore_unknown else value, part)
    except msgspec.ValidationError as error:
        raise _explain(str(error), part, part, path) from error


def _explain(
    message: str, struct: type[msgspec.Struct], served: type[msgspec.Struct], root: str = ""
) -> RequestError:
    """Return what msgspec says of a `struct` at `root`, of which the fields of `served` can be
    offered.
    """
    inner, unknown, known = _path(message), _UNKNOWN.match(message), served.__struct_fields__
    path = ".".join(filter(None, (root, inner))) or None
    if unknown is None:
        return RequestError(message.replace("`$", f"`$.{root}") if root else message, param=path)
    name, holder = unknown[1][:_MAX_SHOWN], struct
    for name_of_part in _FIELD.findall(inner or ""):
        holder = _parts(holder)[name_of_part]
        known = holder.__struct_fields__
    near = get_close_matches(name, known, n=1)
    hint = f": did you mean {near[0]!r}?" if near else " (see --ignore-unknown-fields)"
    where = f" in {path}" if path is not None else ""
    return UnknownFieldError(
        f"unknown field {name!r}{where}{hint}", param=f"{path}.{name}" if path else name
    )


def decode_query(query: Mapping[str, str], query_type: type[T]) -> T:
    """Return a URL's query as a struct. Raises `RequestError` that names the parameter."""
    try:
        return msgspec.convert(dict(query), query_type, strict=False)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.match(str(error)):
            name = unknown[1][:_MAX_SHOWN]
            raise RequestError(f"unknown query parameter {name!r}", param=name) from error
        raise RequestError(str(error), param=_path(str(error))) from error


def values_of(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gets these attributes as a tuple; of fewer than two, the quick way would make
    none.
    """
    if len(names) > 1:
        return attrgetter(*names)
    return lambda struct: tuple(getattr(struct, name) for name in names)


def refuse_all_but(names: Collection[str], part: RequestPart, path: str) -> None:
    """Refuse fields of a part that must be empty here. Raises `RequestError`."""
    refused, get_values = _all_but(tuple(names), type(part))
    if not any(values := get_values(part)):
        return
    for name, value in zip(refused, values, strict=True):
        if value:
            raise RequestError(
                f"{path}.{name} is not supported by this server", param=f"{path}.{name}"
            )


@cache
def _all_but(
    names: tuple[str, ...], part: type[RequestPart]
) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """Return the other fields of a part, and what gets their values."""
    others = [name for name in part.__struct_fields__ if name not in names]
    return others, values_of(*others)


def check_stream_options(request: GenerationRequest) -> None:
    """Raises `RequestError` for options without a stream, and for what is not done."""
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise RequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


def _known_only(tree: Any, struct: Any) -> Any:
    """`tree` without what `struct`, and the parts inside of it, have no field for."""
    if isinstance(tree, list):
        return [_known_only(item, struct) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: _known_only(value, _parts(struct)[name]) if name in _parts(struct) else value
        for name, value in tree.items()
        if name in struct.__struct_fields__
    }


@cache
def _parts(struct: Hashable) -> dict[str, type[Any]]:
    """Return, by field of `struct`, the struct that its value is or holds."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    found = {field.encode_name: _struct_in(field.type) for field in info.fields}
    return {name: part for name, part in found.items() if part is not None}


def _struct_in(kind: Any) -> type[Any] | None:
    """Return the one struct among alternatives and items."""
    if isinstance(kind, msgspec.inspect.StructType):
        return kind.cls
    inner = getattr(kind, "types", None) or [getattr(kind, "item_type", None)]
    return next((part for part in map(_struct_in, filter(None, inner)) if part is not None), None)


def _path(message: str) -> str | None:
    """`messages[0].role` out of msgspec's message, or None if the whole body is wrong."""
    found = _PATH.match(message.rpartition(_AT)[2])
    parent = found.group(1) if found else ""
    if missing := _MISSING.match(message):
        return f"{parent}.{missing.group(1)}" if parent else missing.group(1)
    return parent or None


def check_path(path: str, param: str) -> None:
    """Raises `RequestError` for what no system takes as the name of a file."""
    if "\0" in path:
        raise RequestError(f"{param} must not hold a NUL character", param=param)


# Bytes of a body that may come whatever others keep: about as many wait in the buffer of its
# connection anyway, and most conversations are shorter.
SMALL_BODY = 2**16

RETRY_SECONDS = 1.0  # A guess: bodies come within a second, or hardly at all.


async def _read(request: web.Request) -> bytes | bytearray:
    """Return all of it, in time. Raises `HTTPRequestEntityTooLarge`, before it has come if its
    length is told, `BodyTimeoutError` and `BodiesFullError`.
    """
    length, limit = request.content_length, request.client_max_size
    if length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    if request.content.is_eof():  # all of it has come
        body = request.content.read_nowait()
        if len(body) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, len(body))
        return body
    seconds = request.app[ENGINE].config.access.body_timeout
    try:
        async with asyncio.timeout(seconds):
            return await _gather(request)
    except TimeoutError:
        raise BodyTimeoutError(f"the body took more than {seconds:g} s to come") from None


async def _gather(request: web.Request) -> bytearray:
    access, config = request.app[ACCESS], request.app[ENGINE].config
    limit, body = request.client_max_size, bytearray()
    of_all = config.access.max_bodies_mib * 2**20 // (config.server.api_workers or 1)
    try:
        while chunk := await request.content.readany():
            body += chunk
            access.body_bytes += len(chunk)
            if len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(body))
            if len(body) > SMALL_BODY and access.body_bytes > max(of_all, limit):
                raise BodiesFullError(
                    f"{access.body_bytes / 2**20:.0f} MiB of request bodies are being received, "
                    "more than the limit (--max-bodies-mib): try again",
                    RETRY_SECONDS,
                )
    finally:
        access.body_bytes -= len(body)
    return body


def _check_type(request: web.Request) -> None:
    """A browser lets any page send the types of forms and bodies without one, unasked. Raises
    `HTTPUnsupportedMediaType` for what is not declared to be JSON.
    """
    declared = request.headers.get(hdrs.CONTENT_TYPE)
    # Without parameters such as a charset. aiohttp would read it as a header of a mail, whose
    # brackets are comments, in one another: some thousand of them are an error of Python's.
    kind = (declared or "").partition(";")[0].strip().lower()
    if declared is None or not (kind == "application/json" or kind.endswith("+json")):
        got = "no Content-Type" if declared is None else f"{declared[:64]!r}"
        raise web.HTTPUnsupportedMediaType(
            reason=f"the body must have Content-Type application/json, got {got}; with curl: "
            "-H 'Content-Type: application/json'"
        )


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """Return the decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not
    here; `HTTPUnsupportedMediaType` for a body that is not declared to be JSON.
    """
    if request.can_read_body:
        _check_type(request)
    engine = request.app[ENGINE]
    ignore_unknown = engine.config.server.ignore_unknown_fields
    body = decoder.decode(await _read(request), ignore_unknown=ignore_unknown)
    if asked := decoder.asked_in_vain(body):
        pass_over(request, asked)
    if isinstance(body, ModelRequest) and body.model is not None:
        body.model = model_of(engine, body.model)
    return body


def model_of(engine: EngineClient, name: str) -> str:
    """Return the name of what serves a request for `name`: a model, an adapter, or the model where
    it serves every name. Raises `UnknownModelError`.
    """
    model = engine.config.model
    if name not in model.served_names:
        try:
            engine.adapters.check_name(name)
        except UnknownModelError:
            if not model.serves_every_name:
                raise
            return model.served_name
    return name


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return an answer with `body` as its JSON."""
    return web.Response(body=_encoder.encode(body), status=status, content_type="application/json")


# What is known about a route, whose module says it in `ROUTES`.


#: What is raised where the engine is asked, and where it generates.
NOT_NOW_ERRORS = (EngineOverloadedError, EngineDeadError)
GENERATION_ERRORS = (*NOT_NOW_ERRORS, RequestIdInUseError, RequestTimeoutError)


class Route(NamedTuple):
    """A route: all that is known about it."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # as aiohttp has it
    handler: Handler
    summary: str
    answer: Any  # its type: JSON, or text if it is `str`
    body: BodyDecoder[Any] | None = None
    form: type[RequestPart] | None = None  # its body, where that is multipart/form-data
    query: type[RequestPart] | None = None  # what its URL's query may hold; None: not looked at
    events: Sequence[Any] = ()  # types of what its stream may tell; text if a Literal
    stream_type: str = "text/event-stream"  # else lines of JSON
    raises: Sequence[type[AioserveError]] = ()  # besides what all routes with a body raise
    statuses: Sequence[int] = (200,)  # of the answer
    # Where the server has keys. "looker": an operator's; without keys, to be on this machine.
    needs: Literal["nothing", "key", "admin_key", "looker"] = "key"
    may_lack_body: bool = False  # then it is as if it were {}
    media_types: Sequence[str] = ()  # of the answer; none: JSON, or plain text if it is `str`
    example: Mapping[str, Any] = MappingProxyType({})  # a good body: for readers, and to be varied

    @property
    def documented_path(self) -> str:
        """The path as OpenAPI has it: without the patterns of parameters."""
        return documented(self.path)


def documented(path: str) -> str:
    """Return a path of aiohttp as OpenAPI has it: without the patterns of parameters."""
    return re.sub(r"{(\w+):[^}]*}", r"{\1}", path)
