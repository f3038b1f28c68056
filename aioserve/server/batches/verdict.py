"""What becomes of an answer to a line: it is kept, or the line is run again later.

A batch has time: what would send a client away for now, such as a full queue, makes a line wait.
"""

from typing import NamedTuple

import msgspec
from aiohttp import hdrs, web

from aioserve.errors import EngineDeadError, EngineOverloadedError, RequestIdInUseError
from aioserve.server.batches.protocol import LineResponse, LineResult
from aioserve.server.errors import status_of

#: Times that a line is run whose request was ended from outside, or has failed here.
MAX_TRIES = 3
MIN_WAIT, MAX_WAIT = 1.0, 30.0  # seconds until a line is run again

#: Not now: that says nothing of the line.
_NOT_NOW = {
    status_of(error, "") for error in (EngineOverloadedError, EngineDeadError, RequestIdInUseError)
}
_FAILED_HERE = ("request_failed", "internal_error", "request_aborted")
_TIMED_OUT = "request_timeout"


class Again(NamedTuple):
    """Run the line again after that time; `counts`: as one of its `MAX_TRIES`."""

    seconds: float
    counts: bool


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Body(msgspec.Struct):
    """What of an answer tells how it ended."""

    choices: list[_Choice] = []
    error: _Error | None = None
    incomplete_details: _Incomplete | None = None


class _Stated(msgspec.Struct):
    timeout: float | None = None


_body = msgspec.json.Decoder(_Body)
_stated = msgspec.json.Decoder(_Stated)
_encoder = msgspec.json.Encoder()


def again(response: web.Response, body: bytes) -> Again | None:
    """When to run the line with that body again; None: this is its answer."""
    if response.status in _NOT_NOW:
        told = response.headers.get(hdrs.RETRY_AFTER, "")
        seconds = float(told) if told.isdigit() else MIN_WAIT
        return Again(min(max(seconds, MIN_WAIT), MAX_WAIT), counts=False)
    ends = _ends(response)
    if ends & {"abort", *_FAILED_HERE}:
        return Again(MIN_WAIT, counts=True)
    if ends & {"timeout", _TIMED_OUT} and _stated.decode(body).timeout is None:
        return Again(MIN_WAIT, counts=True)  # of the queue: the server's limit, not the line's
    return None


def _ends(response: web.Response) -> set[str]:
    """How the choices of an answer ended, or the code of an error."""
    body = _body.decode(_bytes(response))
    found = {choice.finish_reason for choice in body.choices}
    if body.error is not None:
        found.add(body.error.code)
    if body.incomplete_details is not None:
        found.add(body.incomplete_details.reason)
    return {end for end in found if end is not None}


def is_failure(response: web.Response) -> bool:
    """Whether the answer belongs to the file of errors."""
    return response.status >= 400


def result_line(result_id: str, custom_id: str, request_id: str, response: web.Response) -> bytes:
    """The line of the output that tells an answer."""
    answer = LineResponse(
        status_code=response.status,
        request_id=request_id,
        body=msgspec.Raw(_bytes(response)),
    )
    return _encoder.encode(LineResult(id=result_id, custom_id=custom_id, response=answer)) + b"\n"


def _bytes(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body
