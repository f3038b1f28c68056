"""A step whose tokens are sampled, until the batch has them: the part that is never done twice.

Knows what was sampled and found; knows nothing about how.
"""

import time
from dataclasses import dataclass

from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch.input_batch import InputBatch, kept_logprobs
from aioserve.runner.cpu.prompts import Looked
from aioserve.runner.cpu.sampler import SampledTokens
from aioserve.runner.spec_decode.draft_rows import DraftRows
from aioserve.runner.unsound import failed_requests


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What the forward pass and the sampler have made of the rows of a step."""

    inputs: StepInputs
    sampled: SampledTokens
    looked: Looked | None  # if prompts are looked at
    is_masked: bool
    started: float

    def keep(
        self, batch: InputBatch, drafts: DraftRows, *, takes_guesses: bool
    ) -> ModelRunnerOutput:
        """Enter the tokens into the batch, and guess what comes next if it `takes_guesses`."""
        inputs, sampled, drafter = self.inputs, self.sampled, drafts.drafter
        token_ids = batch.append(inputs, sampled.token_ids)
        guesses: dict[str, list[int]] = {}
        if drafter is not None:
            seconds = time.perf_counter() - self.started
            drafter.length.stepped(len(inputs.req_ids), len(inputs.positions), seconds)
        if takes_guesses and (self.is_masked or drafter is not None):
            guesses = drafts.guesses(inputs, batch)
        failed = batch.failures(inputs)
        if sampled.failed:
            rows = failed_requests(sampled.failed, inputs.sampling.tolist(), token_ids)
            failed |= {inputs.req_ids[row]: why for row, why in rows.items()}
        told, vectors = ({}, {}) if self.looked is None else self.looked.keep(failed)
        if failed:  # what was sampled for them means nothing
            token_ids = [
                [] if req_id in failed else own
                for req_id, own in zip(inputs.req_ids, token_ids, strict=True)
            ]
        logprobs = kept_logprobs(inputs, sampled.logprobs, token_ids)
        return ModelRunnerOutput(
            inputs.req_ids, token_ids, logprobs, guesses, failed, told, vectors
        )
