"""What a step brings back: tokens are appended, and requests end.

Knows stop tokens and length limits. Knows nothing about order or the next step.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput, TokenLogprobs
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.drafts import settle_drafts, take_drafts, until_stop
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.pooling import computed_by, end_pooled
from aioserve.scheduler.recompute import failed_rows, recompute_dependents
from aioserve.scheduler.request_table import Order, RequestTable


def take_results(
    book: RequestTable,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
    clock: Callable[[], float],
    order: Order,
) -> dict[int, EngineCoreOutputs]:
    """As `SchedulerInterface.update_from_output`; outputs bear the time of `clock` at the end.
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
    running = RequestStatus.RUNNING
    ends: dict[str, int] = {}  # how far each came, if any request is pooled
    for request, token_ids in sampled:
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
        new_logprobs = logprobs.get(request.request_id) if logprobs else None
        num_tokens = request.num_tokens + 1
        if (
            num_tokens <= request.num_target_tokens
            and num_tokens < request.max_total_tokens
            and len(token_ids) == 1
            and token_ids[0] not in request.stop_token_ids
        ):  # the hot path: one more token that ends nothing
            request.token_ids.append(token_ids[0])
            request.num_tokens = num_tokens
            output = EngineCoreOutput(request.request_id, token_ids, None, None, new_logprobs)
        else:
            output = _append_tokens(book, request, token_ids, new_logprobs)
            if output.finish_reason is not None:
                any_finished = True
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
    for request in requests if (of_rows := model_runner_output.row_values) else ():
        request.row_values = of_rows.get(request.request_id, request.row_values)
    if model_runner_output.draft_token_ids:
        take_drafts(book, requests, model_runner_output.draft_token_ids)
    now = clock()
    return {client: EngineCoreOutputs(outs, now) for client, outs in outputs.items()}


def _append_tokens(
    book: RequestTable,
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
) -> EngineCoreOutput:
    """Append sampled tokens up to the first that ends the request."""
    if request.sampling_params.max_tokens == 0:  # its prompt is computed: that was all
        book.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return EngineCoreOutput(request.request_id, [], request.status.finish_reason)
    if len(token_ids) > 1:
        token_ids = until_stop(request, token_ids)
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
