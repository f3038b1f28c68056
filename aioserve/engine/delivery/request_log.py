"""One JSON line per request that has ended: when it came, how long it was, whose it was.

What `compare --workload FILE.jsonl` reads. No text and no tokens; those, and every
decision, are in the decision log.
"""

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.request import Request, RequestStatus

Count = Annotated[int, Meta(ge=1)]
_SERVED = RequestStatus.FINISHED_STOPPED


class RequestLogLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line: `{"arrival": 1.5, "prompt_tokens": 374, "output_tokens": 44}`."""

    arrival: Annotated[float, Meta(ge=0)]  # seconds since the log began
    prompt_tokens: Count
    output_tokens: Annotated[int, Meta(ge=0)]  # 0: an embedding
    priority: int = 0
    user: str = ""
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds


class RequestLog:
    """Begins a new file; a line is with the operating system once `write` returns."""

    def __init__(self, path: str, now: float) -> None:
        """`now` is the engine's clock, in seconds. Raises `ConfigError`."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write request log {path}: {error.strerror}") from error
        self._began = now
        self._encoder = msgspec.json.Encoder()

    def write(self, request: Request, num_output_tokens: int) -> None:
        """Note a request that has ended. One that got no token and no vector is left out."""
        is_pooled = request.pooling_params is not None
        if num_output_tokens == 0 and not (is_pooled and request.status is _SERVED):
            return
        timeout = None if request.deadline is None else request.deadline - request.arrival_time
        line = RequestLogLine(
            round(max(request.arrival_time - self._began, 0.0), 6),
            request.num_prompt_tokens,
            num_output_tokens,
            request.priority,
            request.user,
            timeout,
        )
        os.write(self._file, self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Idempotent; nothing can be written afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
