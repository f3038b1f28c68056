"""One JSON line per request that has ended: when it came, how long it was, whose it was.

What `compare --workload FILE.jsonl` reads. No text and no tokens; those, and every
decision, are in the decision log.
"""

import logging
import weakref
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.request import Request, RequestStatus
from aioserve.support.files import begin_log
from aioserve.support.logs import BackgroundWriter, Gaps

logger = logging.getLogger(__name__)

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


class _LostLines(Gaps):
    """Says in the server's log that lines are missing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def begins(self, error: OSError) -> None:
        logger.error("request log %s loses lines: %s", self._path, error.strerror or error)

    def ends(self, num_lines: int, error: OSError) -> bytes:
        logger.warning("request log %s goes on; %d lines are lost", self._path, num_lines)
        return b""


class RequestLog:
    """Begins a new file; an older one of that name is kept beside it. A thread writes it: a disk or
    a reader that stands still holds up no request, and lines that find no room are counted.
    """

    def __init__(self, path: str, now: float) -> None:
        """`now` is the engine's clock, in seconds. Raises `ConfigError`."""
        self._path = path
        open_file = begin_log(path, "request log", 0o644)
        self._writer = BackgroundWriter(open_file, "requests", _LostLines(path))
        weakref.finalize(self, self._writer.close, 0.0)  # its thread ends with it in any case
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
        self._writer.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Idempotent; nothing can be written afterwards. Waits a moment for what reads the file."""
        if not self._writer.close():
            logger.error("request log %s lacks its end: its reader stands still", self._path)
