"""Outputs of an engine in another process, made into text for the readers of this one.

Knows no line: what a stop string has ended is returned, for the engine to be told.
"""

from collections.abc import Mapping

import msgspec

from aioserve.engine.clock import Clock
from aioserve.engine.output_processor import OutputProcessor
from aioserve.engine.stream import SampleState
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.workers.messages import Stopped, ToWorker


class _StopCounts:
    """Counts nothing but the tokens of those that a stop string has ended: the engine does."""

    def __init__(self) -> None:
        self.num_generation_tokens = 0
        self.num_tokens: dict[str, int] = {}

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        pass

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        pass

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        if reason is FinishReason.STOP:
            self.num_tokens[state.request.request_id] = num_output_tokens


class RemoteDelivery:
    """All requests that have a reader here."""

    def __init__(self, tokenizer: object, clock: Clock) -> None:
        self._counts = _StopCounts()
        self._clock = clock
        self.processor = OutputProcessor(tokenizer, self._counts, clock=clock, may_wait=False)

    def deliver(self, said: ToWorker) -> Stopped | None:
        """To their readers; what the engine has to be told."""
        now = self._clock()
        for request_id, num_tokens in said.num_cached_tokens.items():
            self.processor.set_num_cached_tokens(request_id, num_tokens)
        for request_id, seconds in said.since_first_token.items():
            self.processor.set_first_token_time(request_id, now - seconds)
        outputs = said.outputs
        if said.vectors:
            outputs = [_with_vector(output, said.vectors) for output in outputs]
        told = None
        if stopped := self.processor.process_outputs(outputs, now):
            counted = self._counts.num_tokens
            told = Stopped({sample_id: counted[sample_id] for sample_id in stopped})
        self._counts.num_tokens.clear()
        return told


def _with_vector(output: EngineCoreOutput, vectors: Mapping[str, bytes]) -> EngineCoreOutput:
    import numpy as np

    if output.request_id not in vectors:
        return output
    vector = np.frombuffer(vectors[output.request_id], dtype="<f4").astype(np.float32)
    return msgspec.structs.replace(output, embedding=vector)
