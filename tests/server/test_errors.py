"""Errors survive the wire."""

import pytest

from aioserve.errors import (
    AioserveError,
    EngineOverloadedError,
    EngineUnavailableError,
    ForbiddenError,
    GrammarLimitError,
    KeyLimitError,
    PolicyError,
    RequestError,
    RequestFailedError,
    RequestIdInUseError,
    UnknownKeyError,
    UnknownModelError,
)
from aioserve.server.errors import UnknownFieldError, from_wire, to_wire
from aioserve.server.protocol import ErrorInfo


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("bad", param="n"), 400),
        (UnknownModelError("what?", param="model"), 404),
        (UnknownFieldError("what?", param="tempratur"), 400),
        (RequestIdInUseError("taken"), 409),
        (UnknownKeyError("who?"), 401),
        (ForbiddenError("too urgent", param="priority"), 403),
        (KeyLimitError("enough"), 429),
        (EngineOverloadedError("full"), 429),
        (GrammarLimitError("too many states"), 400),
        (RequestFailedError("step"), 500),
        (EngineUnavailableError("loading", retry_after=3), 503),
    ],
)
def test_an_error_arrives_as_it_was_raised(error, status):
    sent_status, body = to_wire(error)
    assert sent_status == status
    received = from_wire(status, body.error, retry_after=3)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert getattr(received, "param", None) == getattr(error, "param", None)
    assert getattr(received, "retry_after", 3) == 3


@pytest.mark.parametrize("error", [PolicyError("a policy's fault"), ZeroDivisionError("secret")])
def test_other_errors_are_500_and_only_ours_are_described(error):
    status, body = to_wire(error)
    assert (status, body.error.code) == (500, "internal_error")
    assert ("secret" in body.error.message) is False
    assert (str(error) in body.error.message) is isinstance(error, AioserveError)
    assert type(from_wire(status, body.error)) is RequestFailedError


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (401, UnknownKeyError),
        (402, RequestError),
        (429, EngineOverloadedError),
        (413, RequestError),
        (502, RequestFailedError),
        (503, EngineUnavailableError),
    ],
)
def test_an_answer_that_is_not_ours_is_told_by_its_status(status, cls):
    assert type(from_wire(status, ErrorInfo(message="proxy", type="http_error"))) is cls
