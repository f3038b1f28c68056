"""What each router promises, and that unknown ones are refused."""

from collections import Counter

import pytest

from aioserve.errors import ConfigError
from aioserve.kv_cache.events import BlockStored
from aioserve.routing import ROUTERS, Assignment, Replica, RoutedRequest, make_router

SIZE = 16


def replicas(*work: float) -> tuple[Replica, ...]:
    found = tuple(Replica(f"r{i}") for i in range(len(work)))
    for replica, amount in zip(found, work, strict=True):
        replica.work = amount
    return found


def asking(num_blocks: int, session: str = "") -> RoutedRequest:
    hashes = [bytes([i]) for i in range(num_blocks)]
    return RoutedRequest(num_blocks * SIZE, hashes, SIZE, session)


def test_round_robin_takes_turns() -> None:
    router, fleet = make_router("round_robin"), replicas(9, 0, 0)
    assert [router.choose(asking(1), fleet).place for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_work_takes_the_first_with_the_least() -> None:
    assert make_router("least_work").choose(asking(1), replicas(3, 1, 2, 1)).place == 1


def test_two_choices_never_takes_the_busiest_of_many() -> None:
    router, fleet = make_router("two_choices", seed=3), replicas(0, 1, 2, 3)
    chosen = Counter(router.choose(asking(1), fleet).place for _ in range(2000))
    assert chosen[3] == 0
    assert chosen[0] == pytest.approx(1000, rel=0.1)  # it is in half of the pairs
    again = make_router("two_choices", seed=3)
    assert chosen == Counter(again.choose(asking(1), fleet).place for _ in range(2000))
    assert router.choose(asking(1), replicas(5)).place == 0


def test_the_holder_of_the_longest_prefix_is_chosen_until_waiting_there_costs_more() -> None:
    router, fleet = make_router("prefix"), replicas(100, 0, 0)
    for number in range(8):
        router.on_kv_event("r0", BlockStored(bytes([number]), None, []))
    for number in range(2):
        router.on_kv_event("r1", BlockStored(bytes([number]), None, []))
    # At r0 6 blocks of 16 tokens less are to be computed than at r1, where there is less to do.
    assert router.choose(asking(8), fleet) == (1, 2 * SIZE)
    fleet[0].work = 6 * SIZE
    assert router.choose(asking(8), fleet) == (0, 8 * SIZE)
    router.forget("r0")
    assert router.choose(asking(8), fleet) == (1, 2 * SIZE)
    without = fleet[:1] + fleet[2:]
    assert router.choose(asking(8), without) == (1, 0)  # who holds it is not among them


def test_of_equal_holders_the_one_with_less_work_is_chosen() -> None:
    router, fleet = make_router("prefix"), replicas(50, 20, 0)
    for name in ("r0", "r1"):
        for number in range(8):
            router.on_kv_event(name, BlockStored(bytes([number]), None, []))
    assert router.choose(asking(8), fleet) == (1, 8 * SIZE)


def test_a_conversation_stays_and_moves_only_if_its_replica_goes() -> None:
    router, fleet = make_router("session"), replicas(*[0.0] * 10)
    names = [f"conversation {number}" for number in range(1000)]
    before = {n: fleet[router.choose(asking(1, n), fleet).place].name for n in names}
    fewer = tuple(replica for replica in fleet if replica.name != "r4")
    after = {n: fewer[router.choose(asking(1, n), fewer).place].name for n in names}
    moved = {n for n in names if before[n] != after[n]}
    assert moved == {n for n in names if before[n] == "r4"}
    assert min(Counter(before.values()).values()) > 50  # of 100 that are due to each
    assert router.choose(asking(1), replicas(2, 1)).place == 1  # no session: the least work


def test_work_is_what_was_sent_and_has_not_ended() -> None:
    (replica,) = replicas(0)
    first = Assignment(replica, RoutedRequest(100), 40)
    second = Assignment(replica, RoutedRequest(10), 0)
    assert replica.work == 60 + 50 + 10 + 5
    first.has_started()
    first.has_started()
    assert replica.work == 50 + 15
    second.has_ended()
    first.has_ended()
    first.has_ended()
    assert replica.work == 0


def test_an_unknown_router_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'prefx' \(did you mean 'prefix'\?\).*round_robin"):
        make_router("prefx")


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_takes_a_fleet_of_one(name: str) -> None:
    assert make_router(name).choose(asking(2, "s"), replicas(7)).place == 0
