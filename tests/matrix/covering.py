"""Few sets of features in which every pair that works comes together: a greedy covering array.

The algorithm is AETG's (Cohen et al., "The AETG System", 1997) with one candidate, and no chance.
"""

from collections.abc import Callable, Iterable

Pair = frozenset[str]


def covering(
    names: Iterable[str], pairs: Iterable[Pair], fits: Callable[[frozenset[str]], bool]
) -> list[frozenset[str]]:
    """Sets of `names` in which each of `pairs` is, whose own pairs are all among these, and which
    `fits` allows: every pair must fit by itself.
    """
    names, works = tuple(names), set(pairs)
    missing = set(works)
    found: list[frozenset[str]] = []
    while missing:
        most = max(sorted(missing, key=sorted), key=lambda pair: _gain(pair, missing, names))
        chosen = frozenset(most)
        while True:
            more = [
                name
                for name in names
                if name not in chosen
                and all(frozenset((name, other)) in works for other in chosen)
                and fits(chosen | {name})
            ]
            if not more:
                break
            gains = {name: _num_new(name, chosen, missing) for name in more}
            best = max(more, key=gains.__getitem__)
            if not gains[best]:
                break
            chosen |= {best}
        missing -= {pair for pair in missing if pair <= chosen}
        found.append(chosen)
    return found


def _num_new(name: str, chosen: frozenset[str], missing: set[Pair]) -> int:
    return sum(frozenset((name, other)) in missing for other in chosen)


def _gain(pair: Pair, missing: set[Pair], names: tuple[str, ...]) -> int:
    """How many pairs of either feature of `pair` with one of `names` are not covered yet."""
    return sum(frozenset((one, other)) in missing for one in pair for other in names)
