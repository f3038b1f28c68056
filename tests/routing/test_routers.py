"""What each of the plain routers promises."""

from collections import Counter

import pytest

from aioserve.fleet.routing import Dispatcher, RoutedRequest, available_routers, make_dispatcher
from aioserve.kv_cache.block_pool import BlockStored

SIZE = 16


class Clock:
    """A time that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def fleet(router: str, *work: int, seed: int = 0) -> Dispatcher:
    """Replicas r0, r1, ... and the tokens of work that each has been sent."""
    dispatcher = make_dispatcher(router, seed=seed, clock=Clock())
    for i, amount in enumerate(work):
        dispatcher.join(f"r{i}")
        dispatcher.assign(RoutedRequest(num_tokens=2 * amount), f"r{i}").has_started(0.0)
        assert dispatcher.work_of(f"r{i}") == amount  # half of what is held
    return dispatcher


def asking(num_blocks: int, session: str = "") -> RoutedRequest:
    hashes = [bytes([i]) for i in range(num_blocks)]
    return RoutedRequest(
        num_tokens=num_blocks * SIZE, block_hashes=hashes, block_size=SIZE, session=session
    )


def test_round_robin_takes_turns() -> None:
    dispatcher = fleet("round_robin", 9, 0, 0)
    chosen = [dispatcher.choose(asking(1)) for _ in range(5)]
    assert chosen == ["r0", "r1", "r2", "r0", "r1"]


def test_least_work_takes_the_first_with_the_least() -> None:
    assert fleet("least_work", 3, 1, 2, 1).choose(asking(1)) == "r1"


def test_two_choices_never_takes_the_busiest_of_many() -> None:
    chosen, again = (
        Counter(dispatcher.choose(asking(1)) for _ in range(2000))
        for dispatcher in (fleet("two_choices", 0, 1, 2, 3, seed=3) for _ in range(2))
    )
    assert chosen["r3"] == 0
    assert chosen["r0"] == pytest.approx(1000, rel=0.1)  # it is in half of the pairs
    assert chosen == again


def test_the_holder_of_the_longest_prefix_is_chosen_until_waiting_there_costs_more() -> None:
    dispatcher = fleet("prefix", 100, 0, 0)
    for number in range(8):
        dispatcher.on_kv_event("r0", BlockStored(bytes([number]), None, []))
    for number in range(2):
        dispatcher.on_kv_event("r1", BlockStored(bytes([number]), None, []))
    # At r0 6 blocks of 16 tokens less are to be computed than at r1, where there is less to do.
    assert dispatcher.choose(asking(8)) == "r1"
    dispatcher.assign(RoutedRequest(num_tokens=8), "r1").has_started(0.0)
    assert dispatcher.choose(asking(8)) == "r0"
    dispatcher.leave("r0")
    assert dispatcher.choose(asking(8)) == "r1"
    assert dispatcher.choose(asking(8), {"r1"}) == "r2"  # the holder is not among them


def test_of_equal_holders_the_one_with_less_work_is_chosen() -> None:
    dispatcher = fleet("prefix", 50, 20, 0)
    for name in ("r0", "r1"):
        for number in range(8):
            dispatcher.on_kv_event(name, BlockStored(bytes([number]), None, []))
    assert dispatcher.choose(asking(8)) == "r1"


def test_a_conversation_stays_and_moves_only_if_its_replica_goes() -> None:
    dispatcher = fleet("session", *[0] * 10)
    names = [f"conversation {number}" for number in range(1000)]
    before = {name: dispatcher.choose(asking(1, name)) for name in names}
    avoiding = {name: dispatcher.choose(asking(1, name), {"r4"}) for name in names}
    dispatcher.leave("r4")
    after = {name: dispatcher.choose(asking(1, name)) for name in names}
    moved = {name for name in names if before[name] != after[name]}
    assert moved == {name for name in names if before[name] == "r4"}
    assert avoiding == after
    assert min(Counter(before.values()).values()) > 50  # of 100 that are due to each
    assert fleet("session", 2, 1).choose(asking(1)) == "r1"  # no session: the least work
    dispatcher.join("r4")
    assert {name: dispatcher.choose(asking(1, name)) for name in names} == before


@pytest.mark.parametrize("name", available_routers())
def test_every_router_takes_a_fleet_of_one(name: str) -> None:
    assert fleet(name, 7).choose(asking(2, "s")) == "r0"
