"""From a step's outputs to what each reader gets: text, streams, and the lines of logs.

Knows what a reader is told when a step or a policy fails. Knows no settings and no scheduler.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from aioserve.engine.metrics import RequestCounts
from aioserve.engine.step_loop import FAULTS, FailureLog, StepObserver
from aioserve.engine.stream import Claims, RequestStream, Samples, SampleState, wants_only_end
from aioserve.errors import GrammarLimitError, PolicyError, RequestFailedError, RequestRejectedError
from aioserve.outputs import EngineCoreOutput, FinishReason, NewTokens, RequestOutput, RequestTimes
from aioserve.params import SamplingParams
from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.engine.detokenizer import ByteLevelDetokenizer, MakeDetokenizer
    from aioserve.engine.request_log import RequestLog
    from aioserve.engine.stop_strings import StopStringMatcher
    from aioserve.engine.tracing import Tracing
    from aioserve.engine.window_detokenizer import Detokenizer

# Turns tokens into text for the readers, and finds stop strings in it. One loop over a step's
# outputs; it runs while the next step computes. Knows no scheduler: ids of requests that a stop
# string has ended are returned to the caller.

# The logger of `log_request`, which is loaded once its lines are wanted.
_lines = logging.getLogger("aioserve.engine.request_log")


class RequestState(SampleState):
    """The state of a request whose reader wants text, in this process."""

    __slots__ = ("detokenizer", "index", "is_final_only", "is_plain", "merged", "stops", "stream")

    def __init__(
        self,
        request: Request,
        samples: Samples,
        index: int,
        stream: RequestStream,
        detokenizer: "Detokenizer | ByteLevelDetokenizer | None",
        *,
        waits_for_end: bool,
    ) -> None:
        super().__init__(request, samples, waits_for_end=waits_for_end)
        params = request.sampling_params
        self.index = index
        self.stream = stream
        self.detokenizer = detokenizer
        self.stops = _find_stops(params) if params.stop_strings else None
        self.is_final_only = params.output_kind == "final_only"
        #: Neither may its text be held back, nor is there more to say with most of its tokens.
        is_told = params.logprobs is not None or params.prompt_logprobs is not None
        self.is_plain = self.stops is None and not self.is_final_only and not is_told
        self.merged: RequestOutput | None = None

    def deliver(self, output: EngineCoreOutput, now: float) -> FinishReason | None:
        if self.is_plain and output.finish_reason is None:  # most tokens
            self.num_output_tokens += len(output.new_token_ids)
            detokenizer = self.detokenizer
            text = "" if detokenizer is None else detokenizer.append(output.new_token_ids)
            stream, request = self.stream, self.request
            if stream.takes_texts and stream.put_text(self.index, text):
                return None
            stream.put(
                RequestOutput(
                    request_id=self.samples.request_id,
                    index=self.index,
                    text=text,
                    token_ids=output.new_token_ids,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_output_tokens=self.num_output_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
            return None
        made = self.make_output(output)
        reason = made.finish_reason
        if reason is not None:
            arrival = self.request.arrival_time
            made.times = RequestTimes(arrival, now, self.first_token_time, self.scheduled_time)
        if self.merged is not None:
            self.merged.merge(made)
            made = self.merged
        if self.is_final_only and reason is None:
            self.merged = made
        else:
            self.stream.put(made)
        return reason

    def fail(self, error: BaseException) -> None:
        self.stream.fail(error)

    def make_output(self, output: EngineCoreOutput) -> RequestOutput:
        """Return the new tokens and their text, cut at a stop string."""
        new = NewTokens(output.new_token_ids, output.new_logprobs)
        if self.waits_for_end:  # then no log probabilities were asked for
            new = NewTokens(self.request.output_token_ids)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if self.stops is not None:
            is_last = finish_reason is not None
            text, stop, num_kept = self._append_to_stop(self.stops, new.token_ids, is_last)
            if stop is not None:
                finish_reason, stop_reason = FinishReason.STOP, stop
                new = new.first(num_kept)
        else:
            text = self._append(new.token_ids, finish_reason is not None)
        return self._output(output, new, text, finish_reason, stop_reason)

    def _output(
        self,
        output: EngineCoreOutput,
        new: NewTokens,
        text: str,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.samples.request_id,
            index=self.index,
            text=text,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            prompt_logprobs=(
                None if output.prompt_logprobs is None else [None, *output.prompt_logprobs]
            ),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.request.num_cached_tokens,
            embedding=output.embedding,
        )

    def _append(self, token_ids: list[int], is_last: bool) -> str:
        self.num_output_tokens += len(token_ids)
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.append(token_ids)
        return text + self.detokenizer.flush() if is_last else text

    def _append_to_stop(
        self, stops: "StopStringMatcher", token_ids: list[int], is_last: bool
    ) -> tuple[str, str | None, int]:
        """Return the text that can be told, the stop string that ends it, if one does, and after
        how many tokens: some may have come at once, and those behind the end were never asked for.
        """
        text, num_tokens = "", len(token_ids)
        for place in range(max(num_tokens, 1)):  # the end may come without a token
            piece = self._append(token_ids[place : place + 1], is_last and place >= num_tokens - 1)
            if self.num_output_tokens > self.request.sampling_params.min_tokens:
                piece, stop = stops.append(piece)
                if stop is not None:
                    return text + piece + stops.flush(), stop, place + 1
            text += piece
        return (text + stops.flush() if is_last else text), None, num_tokens


def _find_stops(params: SamplingParams) -> "StopStringMatcher":
    from aioserve.engine.stop_strings import StopStringMatcher

    include_stop = params.include_stop_str_in_output
    return StopStringMatcher(params.stop_strings, include_stop=include_stop)


class OutputProcessor(StepObserver):
    """All requests that have a reader, and the delivery to them."""

    def __init__(
        self,
        tokenizer: object,
        metrics: RequestCounts,
        request_log: "RequestLog | None" = None,
        tracing: "Tracing | None" = None,
        *,
        clock: Callable[[], float],
        may_wait: bool = True,
    ) -> None:
        """`tokenizer` is None if no request will ask for text; `clock` returns seconds. `may_wait`:
        requests keep their tokens up to date, so that at the end they can be read there; else
        outputs bring them all.
        """
        self._metrics = metrics
        # What hears of the end of each request, by what the log calls it.
        self._observers: list[tuple[str, Callable[[SampleState, int, FinishReason, float], None]]]
        self._observers = [("metrics", metrics.on_finished)]
        if tracing is not None:
            self._observers.append(("tracing", tracing.on_finished))
        self._observers.append(("the line of a request", _log_if_read_here))
        if request_log is not None:
            self._observers.append(
                ("the request log", lambda state, n, *_: request_log.write(state.request, n))
            )
        #: Called with each sequence when a step has it for the first time, or it ends before that.
        self.left_queue: Callable[[Request], None] = lambda request: None
        self._failures = FailureLog(clock)
        self._may_wait = may_wait
        self._states: dict[str, SampleState] = {}
        self.claims = Claims()
        # By which special tokens are shown; the usual ones are made before the first request.
        self._make_detokenizer: dict[tuple[bool, tuple[int, ...]], MakeDetokenizer] = {}
        if tokenizer is not None:
            from aioserve.engine.detokenizer import DetokenizerChoice

            self._detokenizers = DetokenizerChoice(tokenizer)
            for skip in (False, True):
                make = self._detokenizers.choose(skip_special_tokens=skip)
                self._make_detokenizer[skip, ()] = make

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: SampleState) -> None:
        """Register the reader of one sample."""
        self._states[state.request.request_id] = state

    def add_request(
        self, request: Request, samples: Samples, index: int, stream: RequestStream
    ) -> None:
        """Register the reader of one sample, which wants text unless it says otherwise."""
        params, detokenizer = request.sampling_params, None
        if params.detokenize:
            shown = (params.skip_special_tokens, params.kept_special_tokens)
            make = self._make_detokenizer.get(shown)
            if make is None:
                skip, kept = shown
                make = self._detokenizers.choose(skip_special_tokens=skip, kept=kept)
                self._make_detokenizer[shown] = make
            detokenizer = make(request.token_ids)
        waits = self._may_wait and wants_only_end(params)
        self.add(RequestState(request, samples, index, stream, detokenizer, waits_for_end=waits))

    def reader_of(self, request_id: str) -> SampleState | None:
        """Return the reader of a request; None once it is gone. A later request may have the same
        id.
        """
        return self._states.get(request_id)

    def reader_ids(self) -> list[str]:
        """Return the requests whose readers have not been told of an end."""
        return list(self._states)

    def ended_among(self, request_ids: Iterable[str] | None) -> list[str]:
        """Of the given requests, or of all: those that the scheduler has ended and whose readers
        have not been told.
        """
        states = self._states
        return [
            request_id
            for request_id in (list(states) if request_ids is None else request_ids)
            if request_id in states and states[request_id].request.status.is_finished
        ]

    def set_num_cached_tokens(self, request_id: str, num_tokens: int) -> None:
        """Note how many tokens of a prompt another process found in the prefix cache."""
        if (state := self._states.get(request_id)) is not None:
            state.request.num_cached_tokens = num_tokens

    def set_first_token_time(self, request_id: str, time: float) -> None:
        """Note when, in seconds of the clock, another process had a first token that it tells late:
        with the last one.
        """
        if (state := self._states.get(request_id)) is not None:
            state.first_token_time = time

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        """Note when requests entered the batch for the first time."""
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.request_id)
            if state is not None and state.scheduled_time is None:
                state.scheduled_time = now
                self.left_queue(state.request)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], now: float) -> list[str]:
        """Deliver one step's outputs; return the ids that a stop string has ended."""
        stopped = []
        states, num_tokens = self._states, 0
        last, count = 0.0, 0  # of requests in a row that had their last token at the same time
        for core_output in outputs:
            state = states.get(core_output.request_id)
            if state is None:
                continue  # its reader has left, or a stop string ended it in the step before
            last_time, state.last_token_time = state.last_token_time, now
            if last_time is None:
                is_known = state.first_token_time is not None
                if not is_known and (
                    core_output.new_token_ids or core_output.embedding is not None
                ):
                    state.first_token_time = now
                self._observe_prompt(state, now)
            else:
                if last_time != last and count:
                    self._metrics.on_next_tokens(now - last, count)
                    count = 0
                last = last_time
                count += 1
            num_tokens += len(core_output.new_token_ids)
            if state.waits_for_end and core_output.finish_reason is None:
                continue
            try:
                reason = state.deliver(core_output, now)
            except FAULTS as error:
                reason = self._fail_alone(state, error)
            if reason is not None:
                if core_output.finish_reason is None:
                    stopped.append(core_output.request_id)
                self._finish(state, reason, now)
        self._metrics.num_generation_tokens += num_tokens
        if count:
            self._metrics.on_next_tokens(now - last, count)
        return stopped

    def end_requests(self, request_ids: Iterable[str], reason: FinishReason, now: float) -> None:
        """Tell readers that their requests were ended from outside; held-back text comes out."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                told = reason
                try:
                    state.deliver(EngineCoreOutput(request_id, [], reason), now)
                except FAULTS as error:
                    told = self._fail_alone(state, error)
                self._finish(state, told, now)

    def end_stopped(self, num_tokens: Mapping[str, int], now: float) -> list[str]:
        """Readers elsewhere have found a stop string in the last of `num_tokens` tokens of these
        requests; returns the ids of those that lived.
        """
        ended = [request_id for request_id in num_tokens if request_id in self._states]
        for request_id in ended:
            state = self._states[request_id]
            state.num_output_tokens = num_tokens[request_id]
            self._finish(state, FinishReason.STOP, now)
        return ended

    def fail_requests(
        self, request_ids: Iterable[str] | None, error: BaseException, now: float
    ) -> None:
        """Give readers an error instead of more tokens; None: all of them."""
        is_rejected = isinstance(error, RequestRejectedError)
        reason = FinishReason.REJECTED if is_rejected else FinishReason.ERROR
        for request_id in list(self._states) if request_ids is None else request_ids:
            if (state := self._states.get(request_id)) is not None:
                self._tell(state, error)
                self._finish(state, reason, now)

    def drop(self, samples: Samples, now: float) -> list[str]:
        """Forget a request whose reader has left; return the ids of samples that still lived."""
        if self.claims.samples_of(samples.request_id) is not samples:
            return []  # it has ended; its ids may be another's
        dropped = [sample_id for sample_id in samples.ids if sample_id in self._states]
        for sample_id in dropped:
            self._finish(self._states[sample_id], FinishReason.ABORT, now)
        self.claims.release(samples)
        return dropped

    def _fail_alone(self, state: SampleState, error: BaseException) -> FinishReason:
        """Return the tokens of this request could not be made into what its reader wants."""
        self._failures.log("delivering a request's tokens", error)
        failure = RequestFailedError(
            f"the tokens of this request could not be delivered ({type(error).__name__})"
        )
        failure.__cause__ = error
        self._tell(state, failure)
        return FinishReason.ERROR

    def _tell(self, state: SampleState, failure: BaseException) -> None:
        try:
            state.fail(failure)
        except FAULTS as error:  # its reader is gone; the other readers are to be told
            self._failures.log("telling a reader of a failure", error)

    def _observe_prompt(self, state: SampleState, now: float) -> None:
        try:
            self._metrics.on_prompt_computed(state, now)
        except FAULTS as error:
            self._failures.log("metrics", error)

    def _finish(self, state: SampleState, reason: FinishReason, now: float) -> None:
        """Forget a request whose reader has been told, and tell the observers of its end. An
        observer that raises is only logged.
        """
        del self._states[state.request.request_id]
        if state.scheduled_time is None:
            self.left_queue(state.request)
        state.samples.num_live -= 1
        if state.samples.num_live == 0:
            try:
                self.claims.release(state.samples)
            except FAULTS as error:
                self._failures.log("letting go of an adapter", error)
        num_tokens = state.num_output_tokens
        if state.waits_for_end:  # it may end without an output
            num_tokens = state.request.num_output_tokens
        for name, on_finished in self._observers:
            try:
                on_finished(state, num_tokens, reason, now)
            except FAULTS as error:
                self._failures.log(name, error)


def _log_if_read_here(
    state: SampleState, num_tokens: int, reason: FinishReason, now: float
) -> None:
    if state.is_read_here and _lines.isEnabledFor(logging.INFO):
        from aioserve.engine.request_log import log_request

        log_request(state, num_tokens, reason, now)


class OutputRouter:
    """The router of outputs to their readers, called by the engine task while the next step
    computes.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        clock: Callable[[], float],
    ) -> None:
        self._output_processor = output_processor
        self._clock = clock
        self._failures = FailureLog(clock)
        #: By client that is another process: sends off what was delivered for it.
        self.send_off: dict[int, Callable[[], None]] = {}

    def deliver(self, client_index: int, outputs: list[EngineCoreOutput]) -> list[str]:
        """Hand a step's outputs to the readers of one client; returns the ids that a stop string
        has ended.
        """
        stopped = self._output_processor.process_outputs(outputs, self._clock())
        if (send_off := self.send_off.get(client_index)) is not None:
            try:
                send_off()
            except FAULTS as error:  # of that client alone: its connection ends
                self._failures.log(f"sending outputs to client {client_index}", error)
        return stopped

    def expire(self, request_ids: list[str]) -> None:
        """End the outputs of requests whose deadline has passed."""
        self._output_processor.end_requests(request_ids, FinishReason.TIMEOUT, self._clock())

    def fail(self, request_ids: list[str] | None, cause: BaseException) -> None:
        """These requests, of all if None, lost their step or policy, or were rejected: those that
        have ended by that are told so. An id may be another request's by now.
        """
        # An error of ours says what it should. Any other may quote anything: clients get its type,
        # the log and Python callers (as __cause__) get it all.
        error: BaseException = cause
        if not isinstance(cause, RequestRejectedError):
            is_ours = isinstance(cause, (PolicyError, RequestFailedError))
            words = f"the step that served this request failed ({type(cause).__name__})"
            error = GrammarLimitError.of(str(cause) if is_ours else words)
            error.__cause__ = cause
        ended = self._output_processor.ended_among(request_ids)
        self._output_processor.fail_requests(ended, error, self._clock())
