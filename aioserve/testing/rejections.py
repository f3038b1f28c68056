"""The rule of rejections: what is turned away now is served when it comes again to an idle engine.

`reject` and a full queue tell a client to ask again, so no kind of request may be turned away for
ever; what can never run is refused as such. Knows requests and how they come. Knows no policy.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from aioserve.errors import EngineOverloadedError
from aioserve.outputs import FinishReason
from aioserve.request import Request
from aioserve.testing.hinted import TIMES
from aioserve.testing.violation import ContractViolation

MAX_RETRY_SECONDS = 86_400.0  # a guess: a client that is sent away for longer does not come back
#: How often a client asks again; it waits twice as long each time, as clients do.
NUM_TRIES = 6
MAX_KINDS = 4  # of requests that come again: the newest of each, which takes some steps


class Harness(Protocol):
    """What this module needs of a harness."""

    turned_away: list[tuple[Request, float]]  # and after how many seconds each may ask again

    @property
    def where(self) -> str:
        """The newest step, as messages begin."""

    @property
    def finished(self) -> dict[str, FinishReason]:
        """Why each request ended, of those that have."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], **fields: Any) -> Request:
        """Add a request."""

    def wait(self, seconds: float) -> None:
        """Time passes without a step."""

    def run_until_idle(self) -> None:
        """Step until every request has ended."""


def states_times(request: Request) -> bool:
    """Whether the request says how soon it is needed: it may be turned away for being late."""
    return request.deadline is not None or any(name in request.hints for name in TIMES)


def ask_again(harness: Harness) -> None:
    """One token of prompt like each kind of request that was turned away comes to the idle engine,
    and states no time. Raises `ContractViolation` if that is turned away to the end.
    """
    for request, retry_after in _kinds(harness.turned_away):
        seconds = retry_after
        for number in range(NUM_TRIES):
            harness.wait(seconds)
            if _is_served(harness, f"{request.request_id}.{number}", request):
                break
            seconds = max(2 * seconds, 1.0)
        else:
            raise ContractViolation(
                f"{harness.where}: {request.request_id} was told to ask again in "
                f"{retry_after:.3g} s, and one token of prompt like it was turned away {NUM_TRIES} "
                f"times by an idle engine, the last time {seconds / 2:.3g} s after the one before: "
                "what can never run is refused with RequestError by add_request()"
            )


def _kinds(turned_away: list[tuple[Request, float]]) -> Iterator[tuple[Request, float]]:
    """The newest request of each kind, of some kinds."""
    found = {repr(_fields(request)): (request, seconds) for request, seconds in turned_away}
    yield from list(found.values())[-MAX_KINDS:]


def _is_served(harness: Harness, name: str, like: Request) -> bool:
    try:
        harness.add_request(name, [1], max_tokens=1, **_fields(like))
    except EngineOverloadedError:
        return False
    harness.run_until_idle()
    return harness.finished[name] is not FinishReason.REJECTED


def _fields(request: Request) -> dict[str, Any]:
    """What a client says of a request, but for the times that it states."""
    hints = {name: value for name, value in request.hints.items() if name not in TIMES}
    fields = {
        "priority": request.priority,
        "user": request.user,
        "adapter_id": request.adapter_id,
        "hints": hints,
    }
    return {name: value for name, value in fields.items() if value}
