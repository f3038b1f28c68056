"""A hypothesis state machine that drives any scheduler through whatever a day may bring.

Draws pools, limits and requests, small enough to be crowded, and what clients, the engine and the
runner may do, in any order. What must be true then is checked by `SchedulerHarness`.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

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
        f"the contract of scheduler policies needs {error.name}: pip install pytest hypothesis"
    ) from error

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.params import PoolingParams, StructuredOutputs
from aioserve.request import (
    CACHE_SECONDS,
    MAX_TEXT,
    OFFLINE,
    PREDICTED_OUTPUT_TOKENS,
    PROGRAM,
    READING_SPEED,
    SESSION,
    SLO_CLASS,
    SLO_TPOT,
    SLO_TTFT,
    TOOL,
    EncoderInput,
    RequestStatus,
)
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.testing.calls import refusals
from aioserve.testing.harness import FAILURES, SchedulerHarness, sound_policies
from aioserve.testing.ledger import VOCAB_SIZE, guess
from aioserve.testing.story import Failure, explained

SOMETIMES = st.sampled_from([False, False, True])
RARELY = st.sampled_from([False] * 9 + [True])
#: Of harness settings, requests and events, what only a `BaseScheduler` has to understand.
EXTRAS = (
    "drafter",
    "encoder_chunk_tokens",
    "encoder_inputs",
    "kv_connector",
    "max_encoder_tokens",
    "max_loras",
    "num_host_slots",
    "num_lookahead_tokens",
    "num_spare_window_blocks",
    "num_state_slots",
    "pooling_params",
    "window",
)

#: The settings of schedulers that are choices, as `victim`: by name, what may be chosen.
CHOICES = {
    name: get_args(kind)
    for name, kind in get_type_hints(SchedulerConfig).items()
    if get_origin(kind) is Literal
}


# Hints that requests carry: a client may state all of them, so a policy meets all of them.

Value = str | bool | int | float

_LARGE = 2**63 - 1024  # about the largest number that is taken, and one that a float holds
_NUMBERS: tuple[Value, ...] = (0, -1, 1e-300, _LARGE, -_LARGE, "soon", True)
_TEXTS: tuple[Value, ...] = ("", "x" * MAX_TEXT, 7, 0.5, False)

#: By name, what a client usually states: of the names that tools share, and of three others that
#: policies of aioserve and its documentation read.
USUAL: Mapping[str, tuple[Value, ...]] = {
    SESSION: ("s1", "s2"),
    PROGRAM: ("p1", "p2"),
    SLO_CLASS: ("chat", "batch"),
    SLO_TTFT: (2.0, 20),
    SLO_TPOT: (1.5, 0.05),
    PREDICTED_OUTPUT_TOKENS: (3, 12.5),
    READING_SPEED: (0.5, 5),
    TOOL: ("search", "shell"),
    OFFLINE: (True, False),
    CACHE_SECONDS: (3, 30.0),
    "fairness_id": ("f1", "f2"),
    "type": ("api", "chat"),
    "steps_to_next_use": (0, 3),
}

#: By name, what a client may state as well: no number is too large, and no value of a wrong kind.
STRANGE: Mapping[str, tuple[Value, ...]] = {
    name: _NUMBERS if isinstance(usual[0], int | float) and name != OFFLINE else _TEXTS
    for name, usual in USUAL.items()
}


#: By name, what a client states that can wait: its requests have to be served all the same.
PATIENT: Mapping[str, tuple[Value, ...]] = {
    SLO_TTFT: (61.0, 90, 600.0),
    SLO_TPOT: (10.0, 61.0),
    PREDICTED_OUTPUT_TOKENS: (1000, 100_000),
    READING_SPEED: (0.01, 1000),
}


@st.composite
def harness_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `SchedulerHarness`: pools from exactly one request's worth upwards."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.sampled_from([8, 20, 40]))
    least_blocks = -(-(max_model_len - 1) // block_size)  # the last token needs no slot
    settings: dict[str, Any] = {
        "num_blocks": least_blocks + draw(st.integers(0, 15)),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.sampled_from([8, 8, 3, 1])),
        "max_num_batched_tokens": draw(st.sampled_from([80, 80, max_model_len, 7, 1])),
        **{name: draw(st.sampled_from(choices)) for name, choices in CHOICES.items()},
    }
    if draw(SOMETIMES):
        settings["long_prefill_token_threshold"] = draw(st.sampled_from([3, 7]))
    if draw(SOMETIMES):
        settings["enable_prefix_caching"] = draw(st.booleans())
        settings["watermark"] = draw(st.sampled_from([0.0, 0.2]))
        settings["step_seconds"] = 0.01
    if draw(SOMETIMES):
        settings["queue_timeout"] = draw(st.sampled_from([1e6, 10.0]))
        settings["max_waiting_requests"] = draw(st.sampled_from([1000, 2]))
    if draw(SOMETIMES):
        settings["max_encoder_tokens"] = draw(st.sampled_from([4, 9]))
        settings["encoder_cache_tokens"] = draw(st.sampled_from([4, 5, 9]))
        settings["encoder_chunk_tokens"] = draw(st.sampled_from([0, 1, 3]))
    settings["max_loras"] = 1 + settings["num_blocks"] % 3
    if draw(SOMETIMES):
        settings["kv_connector"] = draw(st.sampled_from(["memory", "disk"]))
        settings["num_host_slots"] = draw(st.sampled_from([40, 10, 2]))
    if draw(SOMETIMES):
        settings["num_state_slots"] = draw(st.sampled_from([24, 9, 4, 1]))
    if draw(SOMETIMES):
        settings["drafter"] = guess
        settings["num_lookahead_tokens"] = draw(st.sampled_from([0, 3]))
    if draw(SOMETIMES):
        settings["window"] = draw(st.sampled_from([1, 3, 9, 24]))
        settings["num_spare_window_blocks"] = draw(st.sampled_from([0, 3, 12]))
    return settings


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `SchedulerHarness.add_request`, but for the name.

    Cut the prompt to what the harness takes. Times are in seconds from now.
    """
    length = draw(st.sampled_from([40, 30, 20, 10])) - draw(st.integers(0, 9))
    num_common, tail = draw(st.sampled_from([40, 0, 5, 13])), draw(st.integers(0, 20))
    request: dict[str, Any] = {
        "prompt_token_ids": [
            i // 5 if i < num_common else (tail * 7 + i * i) % VOCAB_SIZE for i in range(length)
        ]
    }
    if tail > 14:
        request["adapter_id"] = f"a{length % 3}"
    if draw(SOMETIMES):
        request["max_tokens"] = draw(st.integers(1, 6))
    if draw(SOMETIMES):
        request |= draw(_IDENTITIES)
    if draw(SOMETIMES):
        request["hints"] = dict(draw(_HINTS))
    if draw(SOMETIMES):
        request |= draw(_STOPS)
        request["min_tokens"] = min(request["min_tokens"], request.get("max_tokens", 3))
    elif draw(SOMETIMES):
        request |= draw(_STRUCTURED)
    if draw(RARELY):
        request["deadline"] = draw(st.sampled_from([0.1, 3.0, 12.0]))
    if draw(st.booleans()):
        request["encoder_inputs"] = draw(_ENCODER_INPUTS)
    return request


_IDENTITIES = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "user": st.sampled_from(["", "ann", "bob"]),
        "client_index": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "", "salt"]),
        "pooling_params": st.sampled_from(
            [None, None, PoolingParams(pooling="mean"), PoolingParams(pooling="last")]
        ),
    }
)

#: Usual ones three times as often as strange ones. None changes what is answered.
_HINTS = st.lists(
    st.sampled_from(
        [(name, value) for name, values in USUAL.items() for value in values] * 3
        + [(name, value) for name, values in STRANGE.items() for value in values]
    ),
    max_size=4,
)

_STOPS = st.fixed_dictionaries(
    {
        "eos_token_ids": st.sampled_from([(), (0,), tuple(range(8))]),
        "stop_token_ids": st.sampled_from([(), (1,), tuple(range(5, 15))]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 3),
    }
)


#: Tokens that are forced at the beginning, in the middle, to the end, never; an end that goes on.
_STRUCTURED = st.fixed_dictionaries(
    {
        "structured_outputs": st.sampled_from(
            [StructuredOutputs(choice=c) for c in (("abcdefgh",), ("abcd", "abefgh", "ab"), ("",))]
        ),
        "eos_token_ids": st.sampled_from([(0,), (0, 49)]),
        "arrival_time": st.sampled_from([0.0, 0.0, -5.0]),  # then it waited for its grammar
    }
)


def _encoder_inputs(gaps_and_contents: list[tuple[int, int]]) -> tuple[EncoderInput, ...]:
    items, position = [], 0
    for gap, content in gaps_and_contents:
        # A content has one size, of one to four tokens; contents repeat. Some run whole.
        name, is_whole = f"image-{content}", content in (2, 5)
        item = EncoderInput(position + gap, content % 4 + 1, name, whole=is_whole)
        items.append(item)
        position = item.end
    return tuple(items)


_ENCODER_INPUTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=4
).map(_encoder_inputs)


# A hypothesis state machine that drives any scheduler through whatever a day may bring. Knows what
# clients, the engine and the runner may do, in any order. What must be true then is checked by
# `SchedulerHarness`.


DEFAULT_EXAMPLES = 100
STEPS_PER_EXAMPLE = 30
RARE_EVENTS = (
    *("reset_prefix_cache", "wait", "fail_steps", "discard_step", "switch_policy") * 3,
    *("fail_switch", "finish_all"),
)
BOOLEANS = st.booleans()
NUMBERS = st.integers(0, 12)
NAMES = st.one_of(*[st.none()] * 9, NUMBERS)


def accepted_settings(
    policy: type[SchedulerInterface], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a harness; with wider limits if the policy refuses those.

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
    tolerates_errors: bool
    failures: ClassVar[list[Failure]]  # the first is the one to tell: others are it, again

    def __init__(self) -> None:
        super().__init__()
        self._is_broken = False
        self._num_names = 0
        self._ignored = () if issubclass(self.policy, BaseScheduler) else EXTRAS

    @initialize(drawn=harness_settings())
    def begin(self, drawn: dict[str, Any]) -> None:
        wanted = self._without_extras(drawn) | {"pipeline_depth": self.pipeline_depth}
        if self.tolerates_errors:
            wanted["tolerates_errors"] = True
        if self.options:
            wanted["options"] = dict(self.options)
        self.harness = SchedulerHarness(self.policy, **accepted_settings(self.policy, wanted))

    # What clients do.

    @rule(drawn=st.lists(st.tuples(requests(), NAMES), min_size=1, max_size=6))
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
            for name in ("arrival_time", "deadline"):
                if name in request:
                    request[name] += self.harness.now
            self._do("add_request", request_id=self._name(old_name), **request)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=2), is_list=BOOLEANS, was_stopped=BOOLEANS)
    def clients_leave(self, numbers: list[int], is_list: bool, was_stopped: bool) -> None:
        """End requests in any state, twice, or unknown ones; or by a stop string in the text."""
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

    @precondition(lambda self: len(self.harness.store) > 0)
    @rule(fails=BOOLEANS)
    def blocks_come(self, fails: bool) -> None:
        self._do("blocks_come", fails=fails)

    @rule(what=st.sampled_from(RARE_EVENTS), number=NUMBERS)
    def something_rare_happens(self, what: str, number: int) -> None:
        """One rule for all of it, so that it stays rarer than ordinary steps."""
        if what == "finish_all":
            self._do("finish", request_ids=None)
        elif what == "wait":
            self._do("wait", seconds=4.0)
        elif what == "switch_policy":
            self._switch(number)
        elif what == "fail_switch":
            if not self._ignored:
                self._do("fail_switch", where=list(FAILURES)[number % len(FAILURES)])
        elif what == "reset_prefix_cache" or self._can_fail(what):
            self._do(what)

    def teardown(self) -> None:
        """Arrivals stop. All requests finish or leave, and the same events give the same plans."""
        if self._is_broken or not hasattr(self, "harness"):
            return
        ending = "abort_everything" if self._num_names % 3 == 2 else "run_until_idle"
        self._do(ending)
        if self.harness.turned_away and self.harness.step_seconds < 1 and not self.tolerates_errors:
            self._do("ask_again")  # where steps are quick: no limit of seconds is late by itself
        self._do("check_repeatable")

    def _switch(self, number: int) -> None:
        """Switch to a shipped policy, or to the policy under test, be it in charge or not."""
        others = sound_policies()
        if self._ignored or self.tolerates_errors:
            return  # others would not raise, and so make it less of a test
        if number < len(others):
            self._do("switch_policy", policy=others[number])
        else:
            self._do("switch_policy", policy=self.policy, options=dict(self.options))

    def _can_fail(self, failure: str) -> bool:
        if self._ignored or not self.harness.ledger.alive:
            return False
        if failure == "discard_step" and self.tolerates_errors:
            return False  # it fails by itself
        num_in_flight = self.harness.num_in_flight
        return num_in_flight > 0 if failure == "fail_steps" else num_in_flight < self.pipeline_depth

    def _without_extras(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in self._ignored}

    def _name(self, number: int | None) -> str:
        """Return a new name, or one of those before it; r0 is free until it is taken by
        accident.
        """
        if number is None:
            self._num_names += 1
            return f"r{self._num_names}"
        return f"r{max(self._num_names - number, 0)}"

    def _do(self, call: str, **arguments: Any) -> None:
        try:
            with suppress(*refusals(self.harness)):  # the harness checks that nothing remains
                getattr(self.harness, call)(**arguments)
        except Exception as error:
            self._is_broken = True
            self.failures.append(Failure(self.harness, error))
            raise


def run_machine(
    policy: type[SchedulerInterface],
    options: Mapping[str, Any] | None = None,
    *,
    pipeline_depth: int = 1,
    max_examples: int = DEFAULT_EXAMPLES,
    shrink: bool = True,
    tolerates_errors: bool = False,
) -> None:
    """Drive `policy` through `max_examples` random days; the same ones each time.

    With `tolerates_errors` it may raise: its requests end with an error, and nothing else may go
    wrong. Raises `ContractViolation` with its story, if `shrink` that of the simplest events that
    were found in a few seconds.
    """
    failures: list[Failure] = []
    machine = type(
        f"{policy.__name__}Machine",
        (PolicyMachine,),
        {
            "policy": policy,
            "options": options or {},
            "pipeline_depth": pipeline_depth,
            "tolerates_errors": tolerates_errors,
            "failures": failures,
        },
    )
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=STEPS_PER_EXAMPLE,
                deadline=None,
                database=None,
                verbosity=Verbosity.quiet,
                derandomize=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],  # its way to simpler events took minutes
            ),
        )
    except Exception:
        if not failures:
            raise
    if failures:
        error = explained(failures[0], simplest=shrink)
        raise error from error.__cause__
