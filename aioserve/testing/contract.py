"""The contract of `SchedulerInterface` as tests that run on any policy.

In a suite of your own:

    class TestMine(PolicyContract):
        policy = MyScheduler
        options = {"chunk_size": 16}

From a command line, without a file: `pytest --aioserve-policy mypkg.mod:MyScheduler`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of scheduler policies needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.scheduler import SchedulerInterface
from aioserve.testing.client_rules import ClientRules
from aioserve.testing.rules import PolicyRules
from aioserve.testing.state_machine import DEFAULT_EXAMPLES, run_machine
from aioserve.testing.subject import USERS, Subject, add_crowd, arrive

__all__ = ["PolicyContract", "Subject"]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
class PolicyContract(ClientRules, PolicyRules):
    """Derive a class `Test...` that sets `policy`, and `options` if it needs them."""

    policy: ClassVar[type[SchedulerInterface]]
    options: ClassVar[Mapping[str, Any]] = {}
    max_examples: ClassVar[int] = DEFAULT_EXAMPLES  # of random traffic, at each pipeline depth

    @pytest.fixture
    def subject(self) -> Subject:
        """What is tested; the pytest plugin puts the policies of the command line here."""
        return Subject(self.policy, self.options, self.max_examples)

    # What a policy may cost: others wait with it.

    def test_no_step_wastes_what_requests_hold(self, subject: Subject, pipeline_depth: int) -> None:
        """Too little for all, at small and large budgets: no request is preempted from which none
        gains, and no half prompt sits on its blocks while the step has room, unless it is offline
        work beside online requests.
        """
        for num_tokens, num_seats, num_blocks in ((7, 4, 20), (64, 2, 12), (64, 8, 16)):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                max_num_seqs=num_seats,
                max_model_len=40,
                max_num_batched_tokens=num_tokens,
                watermark=0,
                forbids_waste=True,
            ) as harness:
                add_crowd(harness, 14)
                harness.run_until_idle()

    def test_time_and_chance_are_the_policys_own(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """A crowd is served once more, while the clocks, dice and sleep of the process are watched
        for calls of the policy.
        """
        with subject.harness(
            pipeline_depth=pipeline_depth, num_blocks=16, max_num_seqs=3, max_model_len=40
        ) as harness:
            add_crowd(harness, 12)
            harness.run_until_idle()
            harness.check_own_time()

    def test_schedule_costs_in_proportion_to_the_requests(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """By lines that run, not by seconds; without steps in flight, which change nothing."""
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_cost()

    def test_memory_does_not_grow_with_requests_that_have_ended(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """By bytes behind the policy's attributes, after some requests and after many more; without
        steps in flight, which change nothing.
        """
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_memory()

    # What takes long.

    def test_no_rule_is_broken_under_random_traffic(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Arrivals with every hint, ends, failures, switches and pools at random: the same ones in
        every run.
        """
        run_machine(
            subject.policy,
            subject.options,
            pipeline_depth=pipeline_depth,
            max_examples=subject.max_examples,
            shrink=subject.shrink,
        )

    def test_plans_are_the_same_in_every_process(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Strings have other hashes in each, and so other places in sets."""
        if pipeline_depth > 1:
            return  # it takes two processes
        with subject.harness(num_blocks=16, max_num_seqs=3, max_model_len=40) as harness:
            for i in range(8):
                arrive(harness, f"r{i}", [i] * (2 + 9 * i % 23), max_tokens=9, user=USERS[i % 4])
            harness.run_until_idle()
            harness.check_hash_order()


class TestGivenPolicies(PolicyContract):
    """What `--aioserve-policy` adds to a pytest run: the plugin fills in `subject`."""
