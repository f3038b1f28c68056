"""What `connections` relies on in aiohttp beyond its documentation.

An upgrade that changes any of it shows here, by name, before it shows in a server.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from aioserve.server.access.connections import Connection

#: Parameters of the methods that `Connection` overrides or calls, as aiohttp names them.
METHODS: dict[Callable[..., Any], str] = {
    web.RequestHandler.finish_response: "self, request, resp, start_time",
    web.RequestHandler.handle_error: "self, request, status=500, exc=None, message=None",
    web.RequestHandler.connection_made: "self, transport",
    web.RequestHandler.connection_lost: "self, exc",
    web.RequestHandler.data_received: "self, data",
    web.RequestHandler.resume_writing: "self",
    web.RequestHandler.close: "self",
    web.RequestHandler.force_close: "self",
    StreamReader.is_eof: "self",
}

#: Options that `Connection` gives to aiohttp's constructor.
OPTIONS = ("loop", "keepalive_timeout", "max_line_size", "max_field_size", "auto_decompress",
           "access_log")  # fmt: skip


def parameters_of(method: Callable[..., Any]) -> str:
    """The parameters with their defaults, without their types."""
    signature = inspect.signature(method)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=bare, return_annotation=signature.empty)
    return str(plain)[1:-1]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_a_method_takes_what_it_took(method: Callable[..., Any]) -> None:
    assert parameters_of(method) == METHODS[method]


def test_the_constructor_takes_what_it_is_given() -> None:
    parameters = inspect.signature(web.RequestHandler).parameters
    assert next(iter(parameters)) == "manager"
    assert [name for name in OPTIONS if name not in parameters] == []
    required = {name for name, p in parameters.items() if p.default is p.empty}
    assert required == {"manager", "loop"}


def test_an_answer_is_finished_by_a_coroutine_that_tells_whether_the_client_has_gone() -> None:
    finish = web.RequestHandler.finish_response
    assert inspect.iscoroutinefunction(finish)
    returned = inspect.signature(finish).return_annotation
    assert "tuple" in str(returned)
    assert "bool" in str(returned)


async def test_a_body_counts_its_bytes_whether_they_were_read_or_not() -> None:
    body = StreamReader(Mock(), 2**16, loop=asyncio.get_running_loop())
    assert body.total_bytes == 0
    body.feed_data(b"twelve bytes")
    assert body.total_bytes == 12
    assert await body.read(5) == b"twelv"
    assert body.total_bytes == 12
    body.feed_eof()
    assert body.is_eof()


def test_a_head_that_is_too_long_is_an_error_of_its_own() -> None:
    assert issubclass(LineTooLong, HttpProcessingError)


def test_connection_overrides_what_aiohttp_has_and_adds_no_name_of_it() -> None:
    """A method of ours that aiohttp comes to have would be called by it."""
    theirs = set(dir(web.RequestHandler))
    overridden = {name for name in vars(Connection) if name in theirs and not name.startswith("__")}
    assert overridden == {
        "connection_lost", "connection_made", "data_received", "finish_response", "handle_error",
        "resume_writing",
    }  # fmt: skip
