"""The contract of autoscalers as tests that run on any autoscaler.

In a suite of your own:

    class TestMine(AutoscalerContract):
        autoscaler = MyAutoscaler

From a command line, without a file: `pytest --aioserve-autoscaler mine.py:Mine`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of autoscalers needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.fleet.routing import AutoscalerInterface
from aioserve.testing.autoscalers import rules
from aioserve.testing.autoscalers.toy_fleet import AutoscalerSubject

__all__ = ["AutoscalerContract", "AutoscalerSubject"]


class AutoscalerContract:
    """Derive a class `Test...` that sets `autoscaler`, and `options` if it needs some."""

    autoscaler: ClassVar[type[AutoscalerInterface]]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def subject(self) -> AutoscalerSubject:
        """What is tested; the pytest plugin puts the autoscalers of the command line here."""
        return AutoscalerSubject(self.autoscaler, self.options)

    def test_answers_are_whole_numbers(self, subject: AutoscalerSubject) -> None:
        """Each answer is a whole number of at least 0, also where no replica serves."""
        rules.check_answers(subject)

    def test_time_and_chance_are_its_own(self, subject: AutoscalerSubject) -> None:
        """Its code calls no clock and no dice of the process, and does not sleep."""
        rules.check_foreign_calls(subject)

    def test_equal_calls_give_equal_answers(self, subject: AutoscalerSubject) -> None:
        """The same calls are made twice, while replicas die and start."""
        rules.check_same_again(subject)

    def test_answers_do_not_depend_on_hashes_of_strings(self, subject: AutoscalerSubject) -> None:
        """The same calls are made in two processes with different seeds of hashes."""
        rules.check_hash_order(subject)

    def test_a_start_takes_its_time(self, subject: AutoscalerSubject) -> None:
        """The same load has about the same answer while replicas start."""
        rules.check_startup(subject)

    def test_a_fleet_grows_with_its_load(self, subject: AutoscalerSubject) -> None:
        """Few requests are late, minutes after the load has grown fourfold."""
        rules.check_growth(subject)

    def test_a_fleet_stands_at_its_bounds(self, subject: AutoscalerSubject) -> None:
        """An overloaded fleet stands at its most, and an idle one comes down to its least."""
        rules.check_bounds(subject)

    def test_a_steady_load_makes_it_flap_within_the_bound(self, subject: AutoscalerSubject) -> None:
        """The number of replicas changes its direction a bounded number of times in an hour."""
        rules.check_steady(subject)

    def test_old_knowledge_makes_it_flap_within_the_bound(self, subject: AutoscalerSubject) -> None:
        """What replicas report is 15 s old."""
        rules.check_old_knowledge(subject)

    def test_replicas_that_report_nothing_are_kept(self, subject: AutoscalerSubject) -> None:
        """Replicas report nothing, and requests are served in time all the same."""
        rules.check_missing_knowledge(subject)

    def test_replicas_that_die_are_replaced(self, subject: AutoscalerSubject) -> None:
        """The fullest replica dies three times under load, and few requests are late."""
        rules.check_deaths(subject)

    def test_an_idle_fleet_is_not_paid_for(self, subject: AutoscalerSubject) -> None:
        """Replica-hours follow a load that comes and goes."""
        rules.check_price(subject)

    def test_an_answer_costs_in_proportion(self, subject: AutoscalerSubject) -> None:
        """The lines that an answer runs grow with the number of replicas at most, up to 1,000."""
        rules.check_cost(subject)

    def test_memory_does_not_grow(self, subject: AutoscalerSubject) -> None:
        """Requests that have ended leave nothing behind in the autoscaler."""
        rules.check_memory(subject)


class TestGivenAutoscalers(AutoscalerContract):
    """The autoscalers of the command line."""
