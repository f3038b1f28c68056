"""What the engine's step loop tells its observers: five events and the end of a turn.

Whatever follows the engine (page, traces, shadow, metrics, KV events) derives from `StepObserver`
and overrides what it wants to hear. An event that no observer overrides costs one look at an empty
tuple. Knows nothing about what observers do with an event.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from aioserve.config import SchedulerConfig
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import SchedulerOutput
from aioserve.step_loop.failure_log import FAULTS

logger = logging.getLogger(__name__)


class StepObserver:
    """Base class of what follows an engine. Each method is called on the engine's loop; `now` is
    the time of the engine's clock, in seconds. An observer changes nothing in what it is shown.
    """

    #: What the observer raised: it hears nothing from then on. None: it works.
    error: BaseException | None = None

    def on_added(self, request: Request, now: float) -> None:
        """The scheduler has accepted a request."""

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        """A step was planned and, if it carries anything, handed to the runner."""

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """A step is back, and the scheduler has taken its result."""

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        """Requests have ended, for one and the same reason."""

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        """The policy of `settings` plans from now on."""

    def on_turn_end(self, now: float) -> None:
        """What the last steps brought is delivered, and the next step computes, if there is one."""


class Observers:
    """The observers of one engine, by event. Each attribute is what has to be called for an event:
    a tuple that is empty while no observer overrides the method of that name.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: list[StepObserver] = []
        self._gather()

    def __iter__(self) -> Iterator[StepObserver]:
        """The observers, in the order in which they subscribed."""
        return iter(self._all)

    def subscribe(self, observer: StepObserver) -> None:
        """Tell the observer of every event from now on. Raises `TypeError` for what is none."""
        if not isinstance(observer, StepObserver):
            raise TypeError(f"an observer is a StepObserver, got {observer!r:.100}")
        self._all = [*self._all, observer]
        self._gather()

    def unsubscribe(self, observer: StepObserver) -> None:
        """Tell the observer nothing any more. Idempotent."""
        self._all = [other for other in self._all if other is not observer]
        self._gather()

    def tell(self, methods: tuple[Callable[..., None], ...], *args: Any) -> None:
        """Call the methods of one event, with the time as the last argument. An observer that
        raises is told nothing any more, since what follows would not fit what it knows; no request
        is lost over it.
        """
        if not methods:
            return
        now = self._clock()
        for method in methods:
            try:
                method(*args, now)
            except FAULTS as error:
                observer: StepObserver = method.__self__  # type: ignore[attr-defined]
                observer.error = error
                self.unsubscribe(observer)
                name = type(observer).__name__
                logger.error("%s failed and hears no more: %r", name, error, exc_info=error)

    def tell_ended(self, request_ids: list[str], status: RequestStatus) -> None:
        """These requests have ended, if there are any."""
        if request_ids:
            self.tell(self.ended, request_ids, status.finish_reason or FinishReason.ERROR)

    def tell_ends(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Some of these outputs, by client, are the last of their requests."""
        ended: dict[FinishReason, list[str]] = {}
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.finish_reason is not None:
                    ended.setdefault(output.finish_reason, []).append(output.request_id)
        for reason, request_ids in ended.items():
            self.tell(self.ended, request_ids, reason)

    def _gather(self) -> None:
        self.added = self._overriding("on_added")
        self.planned = self._overriding("on_planned")
        self.back = self._overriding("on_back")
        self.ended = self._overriding("on_ended")
        self.switched = self._overriding("on_switched")
        self.turn_end = self._overriding("on_turn_end")

    def _overriding(self, name: str) -> tuple[Callable[..., None], ...]:
        own = getattr(StepObserver, name)
        return tuple(
            getattr(observer, name)
            for observer in self._all
            if getattr(type(observer), name) is not own
        )
