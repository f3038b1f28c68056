"""A hypothesis state machine that drives any scheduler through whatever a day may bring.

Knows what clients, the engine and the runner may do, in any order. What must be true then is
checked by `SchedulerHarness`.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

try:
    from hypothesis import HealthCheck, Phase, Verbosity, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the contract of scheduler policies needs {error.name}: pip install aioserve[test]"
    ) from error

from aioserve.errors import ConfigError, EngineOverloadedError, RequestError
from aioserve.request import RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.testing import traffic
from aioserve.testing.harness import SchedulerHarness
from aioserve.testing.violation import ContractViolation

DEFAULT_EXAMPLES = 100
STEPS_PER_EXAMPLE = 30
RARE_EVENTS = ("reset_prefix_cache", "wait", "fail_steps", "discard_step") * 3 + ("finish_all",)
BOOLEANS = st.booleans()
NUMBERS = st.integers(0, 12)
NAMES = st.one_of(*[st.none()] * 9, NUMBERS)


def accepted_settings(
    policy: type[SchedulerInterface], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a harness; with wider limits if the policy refuses those.

    Raises `ConfigError` if it refuses any, as for options that do not exist.
    """
    try:
        SchedulerHarness(policy, **settings)
        return dict(settings)
    except ConfigError:
        wide = {**settings, "max_num_batched_tokens": 2 * settings.get("max_model_len", 64)}
        wide.pop("long_prefill_token_threshold", None)
        SchedulerHarness(policy, **wide)
        return wide


class PolicyMachine(RuleBasedStateMachine):
    """Random arrivals, endings, failures and pools over one policy; see `run_machine`."""

    policy: type[SchedulerInterface]
    options: Mapping[str, Any]
    pipeline_depth: int

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._is_broken = False
        self._num_names = 0
        self._settings: dict[str, Any] = {}
        self._ignored = () if issubclass(self.policy, BaseScheduler) else traffic.EXTRAS

    @initialize(drawn=traffic.harness_settings())
    def begin(self, drawn: dict[str, Any]) -> None:
        wanted = self._without_extras(drawn) | {"pipeline_depth": self.pipeline_depth}
        if self.options:
            wanted["options"] = dict(self.options)
        self._settings = accepted_settings(self.policy, wanted)
        self.harness = SchedulerHarness(self.policy, **self._settings)

    # What clients do.

    @rule(drawn=st.lists(st.tuples(traffic.requests(), NAMES), min_size=1, max_size=6))
    def requests_arrive(self, drawn: list[tuple[dict[str, Any], int | None]]) -> None:
        """Now and then with an id that is in use, which is refused, or was, which is not."""
        for fields, old_name in drawn:
            request = self._without_extras(fields)
            length = self.harness.max_model_len - 1
            request["prompt_token_ids"] = request["prompt_token_ids"][:length]
            length = len(request["prompt_token_ids"])
            if "encoder_inputs" in request:
                items = [item for item in request["encoder_inputs"] if item.end <= length]
                request["encoder_inputs"] = tuple(items)
            if "deadline" in request:
                request["deadline"] += self.harness.now
            self._do("add_request", request_id=self._name(old_name), **request)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=2), is_list=BOOLEANS, was_stopped=BOOLEANS)
    def clients_leave(self, numbers: list[int], is_list: bool, was_stopped: bool) -> None:
        """In any state, twice, unknown; or a stop string was found in the text."""
        ids = [self._name(number) for number in numbers]
        status = RequestStatus.FINISHED_STOPPED if was_stopped else RequestStatus.FINISHED_ABORTED
        self._do("finish", request_ids=[*ids, ids[0]] if is_list else ids[0], status=status)

    # What the engine and the runner do.

    @rule(count=st.integers(1, 8))
    def steps_run(self, count: int) -> None:
        for _ in range(count):
            self._do("step")

    @precondition(lambda self: self.harness.num_in_flight < self.pipeline_depth)
    @rule()
    def a_step_is_planned(self) -> None:
        self._do("plan")

    @precondition(lambda self: self.harness.num_in_flight)
    @rule()
    def a_step_comes_back(self) -> None:
        self._do("receive")

    @rule(what=st.sampled_from(RARE_EVENTS))
    def something_rare_happens(self, what: str) -> None:
        """One rule for all of it, so that it stays rarer than ordinary steps."""
        if what == "finish_all":
            self._do("finish", request_ids=None)
        elif what == "wait":
            self._do("wait", seconds=4.0)
        elif what == "reset_prefix_cache" or self._can_fail(what):
            self._do(what)

    def teardown(self) -> None:
        """Arrivals stop. Everybody finishes or leaves, and the same events give the same plans."""
        if self._is_broken or not hasattr(self, "harness"):
            return
        ending = "abort_everything" if self._num_names % 3 == 2 else "run_until_idle"
        self._do(ending)
        self._replay()

    def _can_fail(self, failure: str) -> bool:
        if self._ignored or not self.harness.ledger.alive:
            return False
        num_in_flight = self.harness.num_in_flight
        return num_in_flight > 0 if failure == "fail_steps" else num_in_flight < self.pipeline_depth

    def _without_extras(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in self._ignored}

    def _name(self, number: int | None) -> str:
        """A new name, or one of those before it; r0 is nobody's until it is taken by accident."""
        if number is None:
            self._num_names += 1
            return f"r{self._num_names}"
        return f"r{max(self._num_names - number, 0)}"

    def _do(self, event: str, **fields: Any) -> None:
        self._events.append((event, fields))
        try:
            _apply(self.harness, event, fields)
        except Exception as error:
            self._is_broken = True
            error.add_note(self._script())
            raise

    def _script(self) -> str:
        """The events as a program that anybody can run."""
        lines = [f"harness = SchedulerHarness({self.policy.__name__}{_arguments(self._settings)})"]
        for event, fields in self._events:
            line = f"harness.{event}({_arguments(fields)[2:]})"
            lines.append(f"harness.now += {fields['seconds']}" if event == "wait" else line)
        return "To reproduce:\n\n" + "\n".join(_without_repeats(lines))

    def _replay(self) -> None:
        """Nothing but the events may matter: no clock, no hash order, no global dice."""
        again = SchedulerHarness(self.policy, **self._settings)
        for event, fields in self._events:
            try:
                _apply(again, event, fields)
            finally:  # an error that did not come the first time is a difference, too
                for planned, expected in zip(again.steps, self.harness.steps, strict=False):
                    if planned != expected:
                        raise ContractViolation(
                            f"step {expected.step_id}: the same events gave another plan the "
                            f"second time: {planned.num_scheduled_tokens} instead of "
                            f"{expected.num_scheduled_tokens}"
                        )


def _apply(harness: SchedulerHarness, event: str, fields: Mapping[str, Any]) -> None:
    if event == "wait":
        harness.now += fields["seconds"]
        return
    with suppress(EngineOverloadedError, RequestError):  # the harness checks that nothing remains
        getattr(harness, event)(**fields)


def _without_repeats(lines: list[str]) -> Iterator[str]:
    for line, repeats in groupby(lines):
        count = len(list(repeats))
        yield line if count == 1 else f"for _ in range({count}): {line}"


def _arguments(fields: Mapping[str, Any]) -> str:
    return "".join(
        f", {name}={getattr(value, '__name__', None) or _literal(value)}"
        for name, value in fields.items()
    )


def _literal(value: Any) -> str:
    return f"RequestStatus.{value.name}" if isinstance(value, RequestStatus) else repr(value)


def run_machine(
    policy: type[SchedulerInterface],
    options: Mapping[str, Any] | None = None,
    *,
    pipeline_depth: int = 1,
    max_examples: int = DEFAULT_EXAMPLES,
    shrink: bool = True,
) -> None:
    """Drive `policy` through `max_examples` random days; the same ones each time.

    Raises `ContractViolation`, after the shortest events that lead to it were found (`shrink`)
    and printed.
    """
    machine = type(
        f"{policy.__name__}Machine",
        (PolicyMachine,),
        {"policy": policy, "options": options or {}, "pipeline_depth": pipeline_depth},
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            verbosity=Verbosity.quiet,  # the note below says it better
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        ),
    )
