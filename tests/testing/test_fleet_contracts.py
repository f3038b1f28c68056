"""The contracts of routers and of autoscalers pass those that ship and catch planted bugs."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from aioserve.fleet.routing import (
    available_autoscalers,
    available_routers,
    load_autoscaler,
    load_router,
)
from aioserve.testing.autoscaler_contract import AutoscalerContract, AutoscalerSubject
from aioserve.testing.router_contract import RouterContract, RouterSubject
from tests.slow import mostly_slow
from tests.testing import broken_autoscalers, broken_routers

COSTLY = (  # of a planted bug that others catch they are not asked
    "test_a_decision_costs_in_proportion",
    "test_answers_do_not_depend_on_hashes_of_strings",
)


class Kind(NamedTuple):
    """What is tested, by which contract."""

    contract: type[Any]
    subject: Callable[[type[Any]], Any]
    load: Callable[[str], type[Any]]

    def rules(self) -> list[str]:
        found = [name for name in vars(self.contract) if name.startswith("test_")]
        return sorted(found, key=lambda name: name in COSTLY)

    def broken_rules(self, tested: type[Any]) -> Iterator[str]:
        """What each broken rule says of it."""
        for name in self.rules():
            try:
                getattr(self.contract(), name)(self.subject(tested))
            except Exception as error:
                yield str(error)


ROUTERS = Kind(RouterContract, RouterSubject, load_router)
AUTOSCALERS = Kind(AutoscalerContract, AutoscalerSubject, load_autoscaler)
SHIPPED = [
    *((ROUTERS, name) for name in available_routers()),
    *((AUTOSCALERS, name) for name in available_autoscalers()),
]
CAUGHT_BY = {
    **{broken: (ROUTERS, words) for broken, words in broken_routers.CAUGHT_BY.items()},
    **{broken: (AUTOSCALERS, words) for broken, words in broken_autoscalers.CAUGHT_BY.items()},
}
# One that moves requests, one that watches times.
ONE_OF_A_KIND = ("llumnix", "slo_attainment")
FEW = ("AlwaysFirst", "LeavesOneOut", "Fraction", "NeverGrows")  # of the planted bugs


@pytest.mark.parametrize(
    ("kind", "name"),
    mostly_slow(SHIPPED, but=[each for each in SHIPPED if each[1] in ONE_OF_A_KIND]),
)
def test_one_that_ships_keeps_its_contract(kind: Kind, name: str) -> None:
    assert list(kind.broken_rules(kind.load(name))) == []


@pytest.mark.parametrize(
    "broken",
    mostly_slow(CAUGHT_BY, but=[b for b in CAUGHT_BY if b.__name__ in FEW]),
    ids=lambda broken: broken.__name__,
)
def test_a_planted_bug_is_caught_by_its_own_rule(broken: type[Any]) -> None:
    (kind, words), said = CAUGHT_BY[broken], []
    for each in kind.broken_rules(broken):
        said.append(each)
        if re.search(words, each, re.DOTALL):
            return
    pytest.fail(f"caught by {said}")
