"""The contract of step-time sources as tests that run on any of them.

In a suite of your own:

    class TestMine(StepTimesContract):
        spec = "mine.py:Mine"
        options = {"card": "mine"}

From a command line, without a file: `pytest --aioserve-step-times mine.py:Mine`. The rules are
those that the simulator relies on; docs/step-times.md states each of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of step-time sources needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.runner.step_times import SideRates, StepTimeSource, make_step_times
from aioserve.scheduler.output import StepFeatures
from aioserve.testing.violation import StepTimesViolation

__all__ = ["StepTimesContract", "StepTimesSubject"]

#: A source may state that measured times go up and down, and by how much at most.
MOST_UNEVENNESS = 0.1
#: What steps of the rules have: tokens of a prompt, tokens before them, rows that decode, and the
#: context of each. Sizes at which kernels change their way stand beside their neighbours.
CHUNKS = (2, 16, 127, 128, 129, 512, 2000, 2048, 8192)
BEFORE = (0, 16, 1000, 8192, 65536)
ROWS = (1, 2, 7, 8, 9, 64, 100, 256, 512)
CONTEXTS = (1, 15, 16, 17, 512, 4096, 32768)


@dataclass(frozen=True)
class StepTimesSubject:
    """A source of step times that the contract tests."""

    source: StepTimeSource
    name: str

    @classmethod
    def named(cls, spec: str, options: Mapping[str, Any]) -> "StepTimesSubject":
        """Return the source that `spec` and options name. Raises `ConfigError`."""
        return cls(make_step_times(spec, dict(options)), spec)

    @property
    def kind(self) -> type[StepTimeSource]:
        """The class of the tested source."""
        return type(self.source)


@dataclass(frozen=True)
class Step:
    """The content of a step of the rules: rows that decode alike, and prompts."""

    num_decodes: int = 0
    context: int = 0  # of each row that decodes
    prefills: tuple[tuple[int, int], ...] = ()  # tokens of each prompt, and how many are before

    def __str__(self) -> str:
        words = [f"{n} tokens of a prompt after {before}" for n, before in self.prefills]
        if self.num_decodes:
            words.append(f"{self.num_decodes} decodes at {self.context} tokens of context")
        return " and ".join(words)

    @property
    def content(self) -> tuple[StepFeatures, list[tuple[int, int]]]:
        """The content of the step as a source gets it."""
        rows = [(n, before + n) for n, before in self.prefills]
        num_context = self.num_decodes * self.context + sum(end for _, end in rows)
        return StepFeatures.of(self.num_decodes, num_context, rows), rows


class StepTimesContract:
    """Derive a class `Test...` that sets `spec`, and `options` if the source needs some."""

    spec: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def subject(self) -> StepTimesSubject:
        """What is tested; the pytest plugin puts the sources of the command line here."""
        return StepTimesSubject.named(self.spec, self.options)

    def test_times_are_finite_and_not_negative(self, subject: StepTimesSubject) -> None:
        """The seconds of every step, and every side rate, are finite and at least 0."""
        for step in _steps():
            _seconds(subject, step)
        for name in SideRates.__struct_fields__:
            _check_number(subject, f"the side rate {name}", getattr(subject.source.rates, name))

    def test_equal_steps_take_equal_times(self, subject: StepTimesSubject) -> None:
        """A step takes the same when it is asked for again, after others, in another order."""
        steps = list(_steps())
        first = {step: _seconds(subject, step) for step in steps}
        for step in reversed(steps):
            if (again := _seconds(subject, step)) != first[step]:
                raise StepTimesViolation(
                    f"{subject.name}: {step} took {first[step]!r} s, and asked again {again!r} s"
                )

    def test_decodes_in_a_row_are_single_steps(self, subject: StepTimesSubject) -> None:
        """`seconds_of_decodes` gives to the last bit what `seconds` gives of each step."""
        for num_rows in ROWS:
            for context in CONTEXTS:
                for num_steps in (1, 3, 130):
                    _check_row_of_decodes(subject, num_rows, context, num_steps)

    def test_more_tokens_take_no_less_time(self, subject: StepTimesSubject) -> None:
        """A longer chunk at the same place, and more rows that decode."""
        for before in BEFORE:
            _check_rises(subject, [Step(prefills=((n, before),)) for n in CHUNKS])
        for context in CONTEXTS:
            _check_rises(subject, [Step(n, context) for n in ROWS])

    def test_more_context_takes_no_less_time(self, subject: StepTimesSubject) -> None:
        """The same chunk behind more tokens, and the same rows that decode at more context."""
        for n in CHUNKS:
            _check_rises(subject, [Step(prefills=((n, before),)) for before in BEFORE])
        for n in ROWS:
            _check_rises(subject, [Step(n, context) for context in CONTEXTS])

    def test_a_step_takes_no_less_than_its_parts(self, subject: StepTimesSubject) -> None:
        """A step with prompts and decodes takes as long as either of them alone, or longer."""
        for step in _mixed():
            _check_rises(subject, [Step(step.num_decodes, step.context), step])
            _check_rises(subject, [Step(prefills=step.prefills), step])
            _check_rises(subject, [Step(prefills=step.prefills[:1]), step])

    def test_the_order_of_rows_is_nothing(self, subject: StepTimesSubject) -> None:
        """The same prompts in another order take the same time, and the list is left as it is."""
        step = Step(8, 512, ((16, 0), (512, 1000), (129, 8192)))
        features, rows = step.content
        given = list(rows)
        there = subject.source.seconds(features, rows)
        back = subject.source.seconds(features, rows[::-1])
        if not math.isclose(there, back, rel_tol=1e-9):
            raise StepTimesViolation(
                f"{subject.name}: {step} took {there!r} s, and with its prompts in the other order "
                f"{back!r} s"
            )
        if rows != given:
            raise StepTimesViolation(f"{subject.name}: `seconds` changed the list of prompts")

    def test_memory_shrinks_with_the_steps(self, subject: StepTimesSubject) -> None:
        """The KV cache holds some tokens, no more of them beside larger steps; or none is told."""
        sizes = [subject.source.num_kv_tokens(n, 256) for n in (512, 2048, 8192)]
        known = [size for size in sizes if size is not None]
        if known and (len(known) < len(sizes) or min(known) < 1):
            raise StepTimesViolation(f"{subject.name}: num_kv_tokens gave {sizes}")
        if known != sorted(known, reverse=True):
            raise StepTimesViolation(
                f"{subject.name}: the KV cache holds more beside larger steps: {sizes}"
            )

    def test_unevenness_is_small(self, subject: StepTimesSubject) -> None:
        """What the source states of times that go up and down is a share from 0 to 0.1."""
        if not 0 <= subject.source.unevenness <= MOST_UNEVENNESS:
            raise StepTimesViolation(
                f"{subject.name}: unevenness is {subject.source.unevenness}, and may be "
                f"{MOST_UNEVENNESS} at most"
            )


def _steps() -> Iterator[Step]:
    """Yield steps of every kind."""
    yield from (Step(n, context) for n in ROWS for context in CONTEXTS)
    yield from (Step(prefills=((n, before),)) for n in CHUNKS for before in BEFORE)
    yield from _mixed()


def _mixed() -> Iterator[Step]:
    """Yield steps with prompts and decodes."""
    for num_rows in (1, 9, 256):
        for prefills in (((512, 0),), ((129, 8192), (16, 0)), ((2, 0),) * 40):
            yield Step(num_rows, 4096, prefills)


def _seconds(subject: StepTimesSubject, step: Step) -> float:
    found = subject.source.seconds(*step.content)
    _check_number(subject, str(step), found)
    return found


def _check_number(subject: StepTimesSubject, what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise StepTimesViolation(f"{subject.name}: {what}: {value!r} is no time")


def _check_rises(subject: StepTimesSubject, steps: Sequence[Step]) -> None:
    """Raise if a step takes less time than one before it that has less to do."""
    times = [_seconds(subject, step) for step in steps]
    most = 0
    for i, seconds in enumerate(times):
        if seconds < times[most] * (1 - subject.source.unevenness):
            raise StepTimesViolation(
                f"{subject.name}: {steps[i]} took {seconds!r} s, less than {steps[most]} with "
                f"{times[most]!r} s; the stated unevenness is {subject.source.unevenness}"
            )
        if seconds > times[most]:
            most = i


def _check_row_of_decodes(
    subject: StepTimesSubject, num_rows: int, context: int, num_steps: int
) -> None:
    at_once = subject.source.seconds_of_decodes(num_rows, num_rows * context, num_steps)
    singly = [_seconds(subject, Step(num_rows, context + i)) for i in range(num_steps)]
    if at_once != singly:
        raise StepTimesViolation(
            f"{subject.name}: {num_steps} steps in a row from {Step(num_rows, context)} took "
            f"{at_once} s by `seconds_of_decodes`, and one by one {singly} s"
        )


class TestGivenStepTimes(StepTimesContract):
    """The sources of the command line."""
