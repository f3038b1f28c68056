"""Guessed tokens of requests: taken for their next step, and settled when they were verified.

Knows how far a request has come and may go. Knows nothing about where guesses come from.
"""

from aioserve.request import Request, RequestStatus
from aioserve.scheduler.request_table import RequestTable


def until_stop(request: Request, token_ids: list[int]) -> list[int]:
    """Verified drafts may run past the end of a request: cut them there."""
    num_output = request.num_output_tokens
    for i, token_id in enumerate(token_ids, start=1):
        is_stop = token_id in request.stop_token_ids
        if is_stop and num_output + i > request.sampling_params.min_tokens:
            return token_ids[:i]
    return token_ids[: request.max_total_tokens - request.num_tokens]


def settle_drafts(book: RequestTable, request: Request, num_drafts: int, num_right: int) -> None:
    """Drafts were verified: all tokens but the newest are computed, the rest were wrong."""
    book.num_draft_tokens += num_drafts
    book.num_accepted_tokens += num_right
    if request.status in (RequestStatus.RUNNING, RequestStatus.PAUSED):
        request.num_computed_tokens = request.num_tokens - 1
        request.num_target_tokens = min(request.num_tokens, request.max_total_tokens - 1)


def take_drafts(book: RequestTable, requests: list[Request], drafts: dict[str, list[int]]) -> None:
    """Next time these requests verify guesses. If a step ahead already samples the token that the
    first of them is for, those behind it come behind that token, whatever it turns out to be; if
    the step ahead verifies drafts itself, these guesses come too late.
    """
    most = book.kv_cache.max_drafts
    for request in requests:
        guesses = drafts.get(request.request_id)
        if guesses and request.status is RequestStatus.RUNNING:
            num_ahead = request.num_computed_tokens + 1 - request.num_tokens
            num_known = request.num_tokens + num_ahead  # when the drafts are verified
            room = request.max_total_tokens - 1 - num_known
            if most is not None:
                room = min(room, most)
            if room > 0 and num_ahead < min(2, len(guesses)):
                request.draft_token_ids = guesses[num_ahead:][:room]
                request.num_target_tokens = num_known + len(request.draft_token_ids)
