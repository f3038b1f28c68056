"""How a request that is pooled ends: when all of its prompt is computed, and without a token.

Whatever the runner made of it: so a recorded step ends the same requests without its vectors.
"""

from aioserve.outputs import EngineCoreOutput, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.request_table import RequestTable


def computed_by(output: SchedulerOutput) -> dict[str, int]:
    """Tokens that are computed after a step, by request that it ran."""
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.request_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    return {name: before[name] + count for name, count in output.num_scheduled_tokens.items()}


def end_pooled(book: RequestTable, request: Request, result: ModelRunnerOutput) -> EngineCoreOutput:
    """Nothing is left to do for it, not even if it was preempted meanwhile."""
    status = RequestStatus.FINISHED_STOPPED
    book.finish(request, status)
    vector = result.pooled.get(request.request_id)
    return EngineCoreOutput(request.request_id, [], status.finish_reason, embedding=vector)
