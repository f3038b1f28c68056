"""The contract of routers as tests that run on any router.

In a suite of your own:

    class TestMine(RouterContract):
        router = MyRouter

From a command line, without a file: `pytest --aioserve-router mine.py:Mine`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of routers needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.fleet.routing import BaseRouter
from aioserve.testing.routers import rules
from aioserve.testing.routers.toy_fleet import RouterSubject

__all__ = ["RouterContract", "RouterSubject"]


class RouterContract:
    """Derive a class `Test...` that sets `router`, and `options` if it needs some."""

    router: ClassVar[type[BaseRouter]]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def subject(self) -> RouterSubject:
        """What is tested; the pytest plugin puts the routers of the command line here."""
        return RouterSubject(self.router, self.options)

    def test_it_asks_for_what_it_reads(self, subject: RouterSubject) -> None:
        """What its code reads of replicas and prefixes, `uses_reports` and `uses_prefixes` say."""
        rules.check_reads(subject)

    def test_time_and_chance_are_its_own(self, subject: RouterSubject) -> None:
        """Its code calls no clock and no dice of the process, and does not sleep."""
        rules.check_foreign_calls(subject)

    def test_equal_calls_give_equal_answers(self, subject: RouterSubject) -> None:
        """The same calls are made twice, while replicas come and go."""
        rules.check_same_again(subject)

    def test_answers_do_not_depend_on_hashes_of_strings(self, subject: RouterSubject) -> None:
        """The same calls are made in two processes with different seeds of hashes."""
        rules.check_hash_order(subject)

    def test_it_leaves_requests_as_they_are(self, subject: RouterSubject) -> None:
        """A request and its hints are the same before and after the router has seen them."""
        rules.check_hints(subject)

    def test_no_replica_is_starved_or_flooded(self, subject: RouterSubject) -> None:
        """Equal requests go to a full fleet, and each replica gets a share within the bound."""
        rules.check_shares(subject)

    def test_one_beginning_floods_no_replica(self, subject: RouterSubject) -> None:
        """The prompts of all requests begin alike, which sends no crowd to one replica."""
        rules.check_one_beginning(subject)

    def test_old_knowledge_floods_no_replica(self, subject: RouterSubject) -> None:
        """What the router knows of its replicas is half a second old."""
        rules.check_old_knowledge(subject)

    def test_replicas_that_report_nothing_are_neither_starved_nor_flooded(
        self, subject: RouterSubject
    ) -> None:
        """Two of ten replicas report nothing; then none reports anything."""
        rules.check_missing_knowledge(subject)

    def test_nothing_is_lost_when_replicas_die_and_come_back(self, subject: RouterSubject) -> None:
        """The sender notices the deaths at once; then, a second later."""
        rules.check_churn(subject)

    def test_requests_that_move_are_neither_lost_nor_moved_to_and_fro(
        self, subject: RouterSubject
    ) -> None:
        """Of a router that splits or migrates requests, while replicas die and come back."""
        rules.check_moves(subject)

    def test_an_idle_fleet_serves(self, subject: RouterSubject) -> None:
        """When replicas have died and come back, a fleet without load still serves a request."""
        rules.check_idle(subject)

    def test_sessions_stay_if_that_is_promised(self, subject: RouterSubject) -> None:
        """A session stays at its replica while that lives and others come and go."""
        rules.check_sessions(subject)

    def test_a_decision_costs_in_proportion(self, subject: RouterSubject) -> None:
        """The lines that a decision runs grow with the number of replicas at most, up to 1,000."""
        rules.check_cost(subject)

    def test_memory_does_not_grow(self, subject: RouterSubject) -> None:
        """Requests and sessions that have ended leave nothing behind in the router."""
        rules.check_memory(subject)


class TestGivenRouters(RouterContract):
    """The routers of the command line."""
