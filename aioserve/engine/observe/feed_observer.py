"""Notes what a scheduler does, for the page that shows it live: a few list entries per step.

Observes the step loop only while a page looks, and changes nothing there. Knows no event loop and
no socket: `engine.observe.live_feed` makes frames of its notes.
"""

from collections.abc import Callable, Mapping, Sequence

from aioserve.config import SchedulerConfig
from aioserve.engine.observe.frames import (
    Back,
    Came,
    Ended,
    Events,
    Planned,
    Stands,
    Switched,
    Waits,
)
from aioserve.engine.observe.shown_id import shown_id
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.step_loop import StepObserver

# While no more requests than this wait, each step is asked why; of more, each frame is. So a long
# queue costs as much as a short one. A guess: 10 us per step.
MAX_ASKED_EACH_STEP = 64

_STATES = {
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.PAUSED: "paused",
}


class FeedObserver(StepObserver):
    """Notes of one engine, between two frames. If it fails, it hears no more, and the server goes
    on.
    """

    def __init__(
        self,
        scheduler: Callable[[], SchedulerInterface],
        policy: BaseScheduler,
        clock: Callable[[], float],
    ) -> None:
        """`scheduler` returns the engine's, which a switch of the policy may replace; `policy` is
        the one that plans now, and has the requests that are there already.
        """
        self.began = clock()
        self.kv_cache = policy.kv_cache
        self.pool = policy.kv_cache.pool
        self._scheduler = scheduler
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._requests: dict[int, Request] = {}
        self._num_told = 0
        self._rows: dict[str, int] = {}  # tokens by request, of the last step
        self._row_numbers: list[int] = []  # of these: an id may be another's by now
        self._reasons: dict[int, str] = {}  # as told last
        self._is_to_ask = False  # why requests wait, after the next step, however many they are
        self._clear()
        for request in policy.get_requests():
            self.on_added(request, self.began)
        self._came.clear()  # pictures have them

    def _clear(self) -> None:
        self._came: list[Came] = []
        self._planned: list[Planned] = []
        self._back: list[Back] = []
        self._waits: list[Waits] = []
        self._ended: list[Ended] = []
        self._switched: list[Switched] = []

    # What is told.

    @property
    def has_events(self) -> bool:
        """Whether anything happened since they were taken."""
        steps, requests = self._planned or self._back, self._came or self._ended or self._waits
        return bool(steps or requests or self._switched)

    def take_events(self) -> Events:
        """What happened since the last call."""
        events = Events(
            came=self._came,
            planned=self._planned,
            back=self._back,
            waits=self._waits,
            ended=self._ended,
            switched=self._switched,
        )
        self._clear()
        self._is_to_ask = True
        return events

    def picture(self) -> tuple[list[Stands], list[int]]:
        """Where each request stands, and the rows of the last step. What the next events tell comes
        after it only if the last were taken just before.
        """
        reasons = self._reasons
        stands = [
            Stands(
                self._describe(number, request),
                _STATES.get(request.status, "queued"),
                reasons.get(number, ""),
                request.num_computed_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
            )
            for number, request in self._requests.items()
        ]
        return stands, self._row_numbers

    def since_began(self, time: float) -> float:
        """Milliseconds from the beginning to a time of the clock."""
        return round(1e3 * (time - self.began), 2)

    # What is noted.

    def on_added(self, request: Request, now: float) -> None:
        self._num_told = number = self._num_told + 1
        self._numbers[request.request_id] = number
        self._requests[number] = request
        self._came.append(self._describe(number, request))

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        num_running, num_waiting = self._scheduler().get_request_counts()
        if num_waiting and (self._is_to_ask or num_waiting <= MAX_ASKED_EACH_STEP):
            self._note_reasons(output.step_id)
        rows, numbers = output.num_scheduled_tokens, self._numbers
        if not (rows or output.preempted_req_ids):
            return
        joined: list[int] = []
        left: list[int] = []
        tokens: list[tuple[int, int]] = []
        if rows is not self._rows:  # steps that run the same rows share them
            before, after = self._row_numbers, [numbers[row] for row in rows]
            joined = _without(after, before)
            left = _without(before, after)
            self._rows, self._row_numbers = rows, after
        if output.total_num_scheduled_tokens != len(rows):
            tokens = [(numbers[row], count) for row, count in rows.items() if count != 1]
        self._planned.append(
            Planned(
                output.step_id,
                self.since_began(now),
                joined,
                left,
                tokens,
                [(numbers[n.request_id], n.num_computed_tokens) for n in output.scheduled_new_reqs],
                _numbers_of(output.preempted_req_ids, numbers, output.paused_req_ids),
                output.total_num_scheduled_tokens,
                num_running,
                num_waiting,
                self.pool.num_used_blocks,
                self._encoded(output) if output.scheduled_encoder_inputs else [],
                _numbers_of(output.paused_req_ids, numbers),
            )
        )

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        counts = list(map(len, result.sampled_token_ids))
        tokens: list[tuple[int, int]] = []
        if counts.count(1) != len(counts):
            numbers = self._numbers
            tokens = [
                (numbers[row], count)
                for row, count in zip(result.req_ids, counts, strict=True)
                if count != 1 and row in numbers
            ]
        self._back.append(Back(output.step_id, self.since_began(now), tokens))

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        for request_id in request_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                request = self._requests.pop(number)
                self._ended.append(
                    Ended(number, self.since_began(now), str(reason), request.num_output_tokens)
                )

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        self._switched.append(Switched(self.since_began(now), settings.policy, settings.options))

    # How.

    def _describe(self, number: int, request: Request) -> Came:
        return Came(
            number,
            shown_id(request.request_id),
            request.user,
            request.priority,
            request.num_prompt_tokens,
            request.sampling_params.max_tokens,
            self.since_began(request.arrival_time),
        )

    def _encoded(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        found = []
        for row, places in output.scheduled_encoder_inputs.items():
            items = self._requests[self._numbers[row]].encoder_inputs
            found.append((self._numbers[row], sum(items[place].num_tokens for place in places)))
        return found

    def _note_reasons(self, step_id: int) -> None:
        """Note, right after a step, why each waiting request waits, where that has changed."""
        self._is_to_ask = False
        numbers, told = self._numbers, self._reasons
        reasons = {
            numbers[request_id]: str(reason)
            for request_id, reason in self._scheduler().get_wait_reasons().items()
        }
        self._waits += [
            Waits(number, step_id, reason)
            for number, reason in reasons.items()
            if told.get(number) != reason
        ]
        self._reasons = reasons


def _numbers_of(
    request_ids: Sequence[str], numbers: Mapping[str, int], but: Sequence[str] = ()
) -> list[int]:
    return [numbers[i] for i in request_ids if i in numbers and i not in but]


def _without(numbers: list[int], others: list[int]) -> list[int]:
    gone = set(others)
    return [number for number in numbers if number not in gone]
