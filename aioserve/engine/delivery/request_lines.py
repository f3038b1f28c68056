"""One line in the log per request that has ended, and, if asked for, one with its prompt.

The fields stand in a fixed order. Knows nothing of text, but that of a prompt which it is given.
"""

import logging
from typing import Any

import msgspec

from aioserve.engine.samples import SampleState
from aioserve.outputs import FinishReason
from aioserve.params import SamplingParams

logger = logging.getLogger(__name__)

MAX_PROMPT_CHARACTERS = 10_000  # of a prompt in the log


class RequestLine(msgspec.Struct, frozen=True):
    """What the log says of a request; `--log-format json` has these as fields."""

    request_id: str
    client: str  # its address; "-": none is known
    key: str  # the name of the key that it came with; "-": none was asked for
    model: str  # or adapter
    prompt_tokens: int
    cached_tokens: int  # of these
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
    """It has ended, at `now` in seconds of the engine's clock."""
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
