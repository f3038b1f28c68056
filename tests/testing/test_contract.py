"""Every installed policy keeps the contract, and so does one that calls the verbs at random."""

from typing import Any

import pytest

from aioserve.errors import EngineOverloadedError
from aioserve.scheduler import Request, load_policy
from aioserve.testing.contract import PolicyContract, Subject
from policies.fcfs import FCFSScheduler
from tests.policy_names import SHIPPED
from tests.testing.hostile import HostileScheduler

# Fewer than strangers get by default: there are many policies here, and they share a base.
EXAMPLES = 2


@pytest.mark.parametrize("name", SHIPPED)
class TestInstalledPolicies(PolicyContract):
    @pytest.fixture
    def subject(self, name: str) -> Subject:
        return Subject(load_policy(name), max_examples=EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
class TestInstalledPoliciesAtLength(PolicyContract):
    @pytest.fixture
    def subject(self, name: str) -> Subject:
        return Subject(load_policy(name), max_examples=50)


@pytest.mark.slow
class TestHostileScheduler(PolicyContract):
    policy = HostileScheduler
    max_examples = 200
    test_no_step_wastes_what_requests_hold = None  # type: ignore[assignment] # chance wastes


@pytest.mark.slow
class TestOptions(PolicyContract):
    policy = load_policy("chunked_prefill")
    options: Any = {"chunk_size": 3}  # noqa: RUF012 - read only
    max_examples = 50


class RefusesMany(FCFSScheduler):
    def add_request(self, request: Request) -> None:
        if len(self.waiting) > 1:
            raise EngineOverloadedError("two are in line")
        super().add_request(request)


class TestWhoRefusesMany(PolicyContract):
    policy = RefusesMany
    max_examples = 3
