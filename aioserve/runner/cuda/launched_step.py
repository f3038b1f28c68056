"""Steps on their way to and from a device, and what comes of them when their results are read.

Knows plans and host memory; launches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aioserve.outputs import ModelRunnerOutput, TokenLogprobs
from aioserve.runner.batch.grammar_rows import Standing
from aioserve.runner.cuda.device import Event, HostBuffer
from aioserve.runner.cuda.host_blocks import Copied
from aioserve.runner.cuda.plan import StepPlan
from aioserve.runner.cuda.prompts import PromptPlan
from aioserve.runner.cuda.sampler import SamplePlan
from aioserve.runner.low_rank import TokenAdapters
from aioserve.runner.unsound import failed_requests
from aioserve.scheduler.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Asked:
    """Parts of the inputs of a step that most steps do not have."""

    prompts: PromptPlan | None
    adapters: Sequence[TokenAdapters]  # of the T, of the S, of the pieces of `prompts`; or none


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way; `result` may be read after `event`."""

    plan: StepPlan
    sampling: SamplePlan
    event: Event
    result: HostBuffer
    began: float
    standing: list[Standing]  # of its sampled rows that have a grammar
    failed: dict[str, str]
    prompts: PromptPlan | None
    prompt_words: HostBuffer | None  # of `prompts`


@dataclass(frozen=True, slots=True)
class LaunchedParts:
    """What was launched of a step: all of it, or parts of it one after another."""

    step: SchedulerOutput
    parts: list[LaunchedStep]
    lost: dict[str, str]  # requests that are in none of the parts, and why
    copied: Copied | None  # what a KV connector has it copy


def make_output(
    step: LaunchedStep,
    kept: list[list[int]],
    failed: dict[int, str],
    logprobs: dict[int, TokenLogprobs],
    of_prompts: dict[str, list[TokenLogprobs]],
    guesses: dict[str, list[int]],
) -> ModelRunnerOutput:
    """The output of a step that was read. `kept`: by row. `failed` and `logprobs`: by place among
    the S, of which a row's first were kept.
    """
    req_ids, rows = step.plan.inputs.req_ids, step.plan.sampled.tolist()
    for row, why in failed_requests(failed, rows, kept).items():
        step.failed.setdefault(req_ids[row], why)
    kept = [[] if req_id in step.failed else own for req_id, own in zip(req_ids, kept, strict=True)]
    by_request: dict[str, list[TokenLogprobs]] = {}
    for place, entry in logprobs.items():
        entries = by_request.setdefault(req_ids[rows[place]], [])
        if len(entries) < len(kept[rows[place]]):
            entries.append(entry)
    return ModelRunnerOutput(req_ids, kept, by_request, guesses, step.failed, of_prompts)
