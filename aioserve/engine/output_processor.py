"""Turns tokens into text for the readers, and finds stop strings in it.

One loop over a step's outputs; it runs while the next step computes. Knows no scheduler: ids of
requests that a stop string has ended are returned to the caller.
"""

from collections.abc import Iterable

from aioserve.engine.detokenizer import Detokenizer, StopStringMatcher, make_decode
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.stream import RequestStream
from aioserve.outputs import EngineCoreOutput, FinishReason, RequestOutput
from aioserve.request import Request


class RequestState:
    """What delivery needs to know of one sample between two of its outputs."""

    def __init__(
        self, request: Request, stream: RequestStream, index: int, detokenizer: Detokenizer
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.stream = stream
        self.index = index
        self.detokenizer = detokenizer
        self.stops = StopStringMatcher(
            params.stop_strings, include_stop=params.include_stop_str_in_output
        )
        self.has_stops = bool(params.stop_strings)
        self.num_output_tokens = 0
        self.last_token_time: float | None = None

    def make_output(self, output: EngineCoreOutput) -> RequestOutput:
        """Text of the new tokens, cut at a stop string."""
        self.num_output_tokens += len(output.new_token_ids)
        text = self.detokenizer.append(output.new_token_ids)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if finish_reason is not None:
            text += self.detokenizer.flush()
        if self.has_stops:
            if self.num_output_tokens > self.request.sampling_params.min_tokens:
                text, stop = self.stops.append(text)
                if stop is not None:
                    finish_reason, stop_reason = FinishReason.STOP, stop
            if finish_reason is not None:
                text += self.stops.flush()
        return RequestOutput(
            request_id=self.stream.request_id,
            index=self.index,
            text=text,
            token_ids=output.new_token_ids,
            logprobs=output.new_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
        )


class OutputProcessor:
    """All requests that have a reader, and the delivery to them."""

    def __init__(self, tokenizer: object, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._states: dict[str, RequestState] = {}
        self._decode = {
            skip: make_decode(tokenizer, skip_special_tokens=skip) for skip in (False, True)
        }

    def __len__(self) -> int:
        return len(self._states)

    def add_request(self, request: Request, stream: RequestStream, index: int) -> None:
        """Register the reader of one sample."""
        decode = self._decode[request.sampling_params.skip_special_tokens]
        detokenizer = Detokenizer(decode, request.token_ids)
        self._states[request.request_id] = RequestState(request, stream, index, detokenizer)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], now: float) -> list[str]:
        """Deliver one step's outputs; return the ids that a stop string has ended."""
        stopped = []
        for core_output in outputs:
            state = self._states.get(core_output.request_id)
            if state is None:
                continue  # its reader has left, or a stop string ended it in the step before
            output = state.make_output(core_output)
            self._metrics.on_tokens(
                state.request, len(output.token_ids), state.last_token_time, now
            )
            state.last_token_time = now
            if output.finish_reason is not None:
                if core_output.finish_reason is None:
                    stopped.append(core_output.request_id)
                self._finish(state, output.finish_reason, now)
            state.stream.put(output)
        return stopped

    def end_requests(self, request_ids: Iterable[str], reason: FinishReason, now: float) -> None:
        """Tell readers that their requests were ended from outside; held-back text comes out."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                ending = EngineCoreOutput(request_id, [], reason)
                self._finish(state, reason, now)
                state.stream.put(state.make_output(ending))

    def fail_requests(
        self, request_ids: Iterable[str] | None, error: BaseException, now: float
    ) -> None:
        """Give readers an error instead of more tokens; None: all of them."""
        for request_id in list(self._states) if request_ids is None else request_ids:
            if (state := self._states.get(request_id)) is not None:
                self._finish(state, FinishReason.ERROR, now)
                state.stream.fail(error)

    def drop_requests(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Forget requests whose reader has left; return the ids that were still there."""
        dropped = [request_id for request_id in request_ids if request_id in self._states]
        for request_id in dropped:
            self._finish(self._states[request_id], FinishReason.ABORT, now)
        return dropped

    def _finish(self, state: RequestState, reason: FinishReason, now: float) -> None:
        del self._states[state.request.request_id]
        self._metrics.on_finished(state.request, state.num_output_tokens, reason, now)
