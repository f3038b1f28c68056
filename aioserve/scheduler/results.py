"""What a step brings back: tokens are appended, and requests end.

Knows stop tokens, length limits, and how far a request has come with its verified drafts. Knows
nothing about order, the next step, or where drafts come from.

KV blocks can be found as soon as a step is planned that will write them. If a request of that step
then fails alone, requests admitted since may have begun behind blocks that were never written, and
their tokens mean nothing: they are computed again.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from aioserve.errors import PolicyError
from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput, NewTokens
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.table import Order, RequestTable


def take_results(
    book: RequestTable,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
    clock: Callable[[], float],
    order: Order,
) -> dict[int, EngineCoreOutputs]:
    """Do as `SchedulerInterface.update_from_output`; outputs bear the time of `clock` at the end.
    `order` is asked for requests that have to be computed again.
    """
    requests = book.land(scheduler_output)
    outputs: dict[int, list[EngineCoreOutput]] = {}
    client_index: int | None = None  # of `outs`; most engines have one client
    outs: list[EngineCoreOutput] = []
    any_finished = False
    sampled: Any = zip(requests, model_runner_output.sampled_token_ids, strict=True)
    if book.ended and (failed := failed_rows(requests, model_runner_output.failed)):
        for request in recompute_dependents(book, scheduler_output, requests, failed, order):
            output = EngineCoreOutput(request.request_id, [], request.status.finish_reason)
            outputs.setdefault(request.client_index, []).append(output)
    if book.stale:
        sampled = [row for row in sampled if row[0] not in book.stale]
    logprobs, of_prompts = model_runner_output.logprobs, model_runner_output.prompt_logprobs
    drafted = scheduler_output.scheduled_spec_decode_tokens
    are_plain = not (logprobs or of_prompts or drafted)
    running = RequestStatus.RUNNING
    ends: dict[str, int] = {}  # how far each came, if any request is pooled
    for request, token_ids in sampled:
        num_tokens = request.num_tokens + 1
        if (
            num_tokens <= request.num_target_tokens
            and num_tokens < request.max_total_tokens
            and len(token_ids) == 1
            and request.status is running
            and token_ids[0] not in request.stop_token_ids
        ):  # the hot path: one more token that ends nothing
            request.token_ids.append(token_ids[0])
            request.num_tokens = num_tokens
            new_logprobs = None if are_plain else logprobs.get(request.request_id)
            output = EngineCoreOutput(request.request_id, token_ids, None, None, new_logprobs)
        else:
            if request.status is not running and request.status.is_finished:
                continue
            if not token_ids:
                if request.pooling_params is None:
                    continue
                ends = ends or computed_by(scheduler_output)
                if ends[request.request_id] == request.num_tokens:
                    output = end_pooled(book, request, model_runner_output)
                    outputs.setdefault(request.client_index, []).append(output)
                    any_finished = True
                continue
            new = NewTokens(token_ids, logprobs.get(request.request_id))
            output = _append_tokens(book, request, new)
            if output.finish_reason is not None:
                any_finished = True
        if not are_plain:
            if of_prompts and request.request_id in of_prompts:
                found = of_prompts[request.request_id]
                output = msgspec.structs.replace(output, prompt_logprobs=found)
            if drafted and (drafts := drafted.get(request.request_id)):
                settle_drafts(book, request, len(drafts), len(token_ids) - 1)
        if request.client_index != client_index:
            client_index = request.client_index
            outs = outputs.setdefault(client_index, [])
        outs.append(output)
    if any_finished:
        book.drop_finished()
    if book.ended or book.stale:
        book.settle(requests)
    if model_runner_output.sat_out:
        _go_back(book, requests, model_runner_output.sat_out)
    for request in requests if (of_rows := model_runner_output.row_values) else ():
        request.row_values = of_rows.get(request.request_id, request.row_values)
    if model_runner_output.draft_token_ids:
        take_drafts(book, requests, model_runner_output.draft_token_ids)
    now = clock()
    return {client: EngineCoreOutputs(outs, now) for client, outs in outputs.items()}


def _go_back(book: RequestTable, requests: list[Request], sat_out: Collection[str]) -> None:
    """Let requests whose token was not sampled compute their last known token again. A step that
    was planned ahead, behind a token that is not there, samples nothing for them.
    """
    going_on = (RequestStatus.RUNNING, RequestStatus.PAUSED)
    for request in requests:
        is_known = request.status in going_on and request not in book.stale
        if is_known and request.request_id in sat_out:
            request.num_computed_tokens = request.num_tokens - 1
            request.num_target_tokens = request.num_tokens
            request.draft_token_ids = []


def _append_tokens(book: RequestTable, request: Request, new: NewTokens) -> EngineCoreOutput:
    """Append sampled tokens up to the first that ends the request."""
    if request.sampling_params.max_tokens == 0:  # its prompt is computed: that was all
        book.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return EngineCoreOutput(request.request_id, [], request.status.finish_reason)
    if len(new.token_ids) > 1:  # verified drafts may run past the end of a request
        new = new.first(num_until_end(request, new.token_ids))
    token_ids, logprobs = new.token_ids, new.logprobs
    request.token_ids += token_ids
    request.num_tokens = num_tokens = request.num_tokens + len(token_ids)
    if request.status in (RequestStatus.PREEMPTED, RequestStatus.PAUSED):
        book.waiting.num_tokens += len(token_ids)
    if request.num_target_tokens < num_tokens:
        # It was preempted with this token in flight, or reached its limit.
        request.num_target_tokens = min(num_tokens, request.max_total_tokens - 1)
    status = None
    if token_ids[-1] in request.stop_token_ids:
        if request.num_output_tokens > request.sampling_params.min_tokens:
            status = RequestStatus.FINISHED_STOPPED
            if token_ids[-1] in request.sampling_params.stop_token_ids:  # not for EOS
                request.stop_reason = token_ids[-1]
    if status is None and num_tokens >= request.max_total_tokens:
        status = RequestStatus.FINISHED_LENGTH_CAPPED
    if status is None:
        return EngineCoreOutput(request.request_id, token_ids, None, None, logprobs)
    book.finish(request, status)
    return EngineCoreOutput(
        request.request_id, token_ids, status.finish_reason, request.stop_reason, logprobs
    )


def num_until_end(request: Request, token_ids: list[int]) -> int:
    """Return how many of these new tokens are the request's: up to the first that ends it."""
    num_output = request.num_output_tokens
    for i, token_id in enumerate(token_ids, start=1):
        is_stop = token_id in request.stop_token_ids
        if is_stop and num_output + i > request.sampling_params.min_tokens:
            return i
    return min(len(token_ids), request.max_total_tokens - request.num_tokens)


def settle_drafts(book: RequestTable, request: Request, num_drafts: int, num_right: int) -> None:
    """Drafts were verified: all tokens but the newest are computed, the rest were wrong."""
    book.num_draft_tokens += num_drafts
    book.num_accepted_tokens += num_right
    request.num_draft_tokens += num_drafts
    request.num_accepted_tokens += num_right
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


def computed_by(output: SchedulerOutput) -> dict[str, int]:
    """Return tokens that are computed after a step, by request that it ran."""
    before = computed_before(output)
    return {name: before[name] + count for name, count in output.num_scheduled_tokens.items()}


def end_pooled(book: RequestTable, request: Request, result: ModelRunnerOutput) -> EngineCoreOutput:
    """End a request that is pooled, all of whose prompt is computed: without a token, whatever the
    runner made of it, and even if it was preempted meanwhile. So a recorded step ends the same
    requests without its vectors.
    """
    status = RequestStatus.FINISHED_STOPPED
    book.finish(request, status)
    vector = result.pooled.get(request.request_id)
    return EngineCoreOutput(request.request_id, [], status.finish_reason, embedding=vector)


def failed_rows(requests: Sequence[Request], named: Collection[str]) -> list[Request]:
    """Return which requests of a step that is back have failed: those that its result names, and
    those that were ended by an error since it was planned.
    """
    error = RequestStatus.FINISHED_ERROR
    return [r for r in requests if r.status is error or r.request_id in named]


def recompute_dependents(
    book: RequestTable,
    output: SchedulerOutput,
    requests: Sequence[Request],
    failed: Sequence[Request],
    order: Order,
) -> list[Request]:
    """After a step of these `requests`, let all wait anew that rest on what the `failed` were to
    compute; what this step and later ones bring for them is dropped. Returns the requests that the
    policy could not put in line, which have ended with an error.
    """
    size, computed = book.kv_cache.block_size, computed_before(output)
    lost: set[bytes] = set()
    for request in failed:
        lost.update(request.block_hashes[computed[request.request_id] // size :])
    found: dict[Request, RequestStatus | None] = {}
    for step, rows in ((output, requests), *book.in_flight):
        if not step.scheduled_new_reqs:  # only admissions begin behind blocks of others
            continue
        by_id = {request.request_id: request for request in rows}
        for data in step.scheduled_new_reqs:
            request, num_found = by_id[data.request_id], data.num_computed_tokens // size
            if not lost.isdisjoint(request.block_hashes[:num_found]):
                lost.update(request.block_hashes[num_found:])
                if request not in failed:
                    found[request] = None
    if not found:
        return []
    book.stale.update(found)
    for request in found:
        book.kv_cache.forget(request)
        if request.status is RequestStatus.PAUSED:
            book.drop_paused(request)
    running = {r: status for r, status in found.items() if r.status is RequestStatus.RUNNING}
    try:
        book.requeue(running, order)
    except PolicyError:  # none of them may run on, and there is no place for them in the line
        for request in running:
            book.finish(request, RequestStatus.FINISHED_ERROR)
        book.drop_finished()
        return list(running)
    for request in running:
        book.take_back(request)
    book.tell_preempted(running)
    return []


def computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request were computed before a step."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((d.request_id, d.num_computed_tokens) for d in output.scheduled_new_reqs)
    return computed
