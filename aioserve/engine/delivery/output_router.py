"""What comes of steps, on its way from the engine task to the readers.

Knows what a reader is told when a step or a policy fails. Knows no settings and no scheduler.
"""

from collections.abc import Callable

from aioserve.engine.delivery.output_processor import OutputProcessor
from aioserve.errors import GrammarLimitError, PolicyError, RequestFailedError, RequestRejectedError
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.step_loop import FAULTS, FailureLog


class OutputRouter:
    """Called by the engine task while the next step computes."""

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
