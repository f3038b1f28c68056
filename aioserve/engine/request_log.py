"""What is written of each request: the request log, and lines in the log of the process.

Neither has its text, but that of a prompt where the log is to have prompts.
"""

import logging
import weakref
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioserve.engine.stream import SampleState
from aioserve.outputs import FinishReason
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestStatus
from aioserve.support.logs import BackgroundWriter, Gaps

# One JSON line per request that has ended: when it came, how long it was, whose it was. What
# `compare --workload FILE.jsonl` reads. No text and no tokens; those, and every decision, are in
# the decision log.


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
    """The log of requests, in a new file; an older one of that name is kept beside it. A thread
    writes it: a disk or a reader that stands still holds up no request, and lines that find no room
    are counted.
    """

    def __init__(self, path: str, now: float) -> None:
        """`now` is the engine's clock, in seconds. Raises `ConfigError`."""
        from aioserve.support.files import begin_log

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


# One line in the log per request that has ended, and, if asked for, one with its prompt. The fields
# stand in a fixed order. Knows nothing of text, but that of a prompt which it is given.


logger = logging.getLogger(__name__)

MAX_PROMPT_CHARACTERS = 10_000  # of a prompt in the log


class RequestLine(msgspec.Struct, frozen=True):
    """The line of the log about a request; `--log-format json` has these as fields."""

    request_id: str
    client: str  # its address; "-": none is known
    key: str  # the name of the key that it came with; "-": none was asked for
    model: str  # or adapter
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in the prefix cache
    output_tokens: int
    ttft: float | None  # seconds to the first token; None: there was none
    seconds: float  # to the end
    finish: str  # reason

    def __str__(self) -> str:
        ttft = "-" if self.ttft is None else f"{self.ttft:.3f}"
        return (
            f"{self.request_id} client={self.client} key={self.key} model={self.model} "
            f"prompt={self.prompt_tokens} cached={self.cached_tokens} output={self.output_tokens} "
            f"ttft={ttft} seconds={self.seconds:.3f} finish={self.finish}"
        )


def log_request(
    state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
) -> None:
    """Log a request that has ended at `now`, in seconds of the engine's clock."""
    if not logger.isEnabledFor(logging.INFO):
        return
    request, origin, first = state.request, state.samples.origin, state.first_token_time
    line = RequestLine(
        request.request_id,
        origin.client or "-",
        request.spec.key_name or "-",
        origin.model or "-",
        request.num_prompt_tokens,
        request.num_cached_tokens,
        num_output_tokens,
        None if first is None else round(first - request.arrival_time, 6),
        round(now - request.arrival_time, 6),
        reason.value,
    )
    logger.info("%s", line, extra={"fields": msgspec.structs.asdict(line)})


def log_prompt(request_id: str, prompt: Any, params: SamplingParams) -> None:
    """Log a prompt word for word: only with --log-prompts."""
    text = msgspec.json.encode(prompt, enc_hook=repr).decode()
    if len(text) > MAX_PROMPT_CHARACTERS:
        text = f"{text[:MAX_PROMPT_CHARACTERS]}... ({len(text)} characters)"
    fields = {"request_id": request_id, "prompt": text, "max_tokens": params.max_tokens}
    logger.info(
        "%s prompt=%s max_tokens=%s", request_id, text, params.max_tokens, extra={"fields": fields}
    )
