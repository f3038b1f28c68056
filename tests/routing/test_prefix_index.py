"""The prefix index against an answer by brute force, its memory, and replicas that go."""

import random
from collections import OrderedDict

from aioserve.fleet.routing import PrefixIndex
from aioserve.kv_cache.block_pool import AllBlocksCleared, BlockRemoved, BlockStored


def block(*path: int) -> bytes:
    """A hash that stands for a block and all before it, as real ones do."""
    return bytes(path)


def chain(*path: int) -> list[bytes]:
    return [block(*path[: i + 1]) for i in range(len(path))]


def test_the_index_says_what_a_search_of_every_replica_says() -> None:
    """Random events, gaps in prefixes and replicas that come back included."""
    rng = random.Random(0)
    index = PrefixIndex()
    truth: dict[str, set[bytes]] = {f"r{i}": set() for i in range(5)}

    def held(name: str, hashes: list[bytes]) -> int:
        count = 0
        while count < len(hashes) and hashes[count] in truth[name]:
            count += 1
        return count

    for _ in range(3000):
        name = rng.choice(list(truth))
        hashes = chain(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        draw = rng.random()
        if draw < 0.6:
            truth[name].add(hashes[-1])
            index.apply(name, BlockStored(hashes[-1], None, []))
        elif draw < 0.95:
            truth[name].discard(hashes[-1])
            index.apply(name, BlockRemoved(hashes[-1]))
        else:
            truth[name].clear()
            if rng.random() < 0.5:
                index.apply(name, AllBlocksCleared())
            else:
                index.forget(name)
        wanted = chain(*(rng.randrange(3) for _ in range(rng.randrange(7))))
        best = max(held(name, wanted) for name in truth)
        count, names = index.longest(wanted)
        assert count == best
        assert set(names) == ({n for n in truth if held(n, wanted) == best} if best else set())
        assert {n: index.num_blocks(n, wanted) for n in truth} == {
            n: held(n, wanted) for n in truth
        }
        assert len(index) == sum(map(len, truth.values()))


def test_of_a_replica_with_too_many_blocks_the_oldest_are_forgotten() -> None:
    index, kept = PrefixIndex(max_blocks=10), OrderedDict[bytes, None]()
    for number in range(100):
        for name in ("a", "b"):
            index.add(name, block(number))
        kept[block(number)] = None
        if len(kept) > 10:
            kept.popitem(last=False)
        assert len(index) == 2 * len(kept)
    for number in range(90, 100):  # those that it has, again: nobody has to go for them
        index.add("a", block(number))
    assert [n for n in range(100) if index.longest([block(n)])[0]] == list(range(90, 100))
    assert len(index) == 20


def test_a_replica_that_is_forgotten_leaves_nothing_and_its_place_to_the_next() -> None:
    index = PrefixIndex()
    for round_ in range(50):  # names of their own, as of pods that are replaced
        name = f"pod {round_}"
        for number in range(20):
            index.add(name, block(number))
        assert index.longest([block(0)]) == (1, [name])
        index.forget(name)
        index.forget(name)
    assert len(index) == 0
    assert not index._holders
    assert len(index._names) == 1
