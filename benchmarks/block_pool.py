"""What the KV cache's blocks cost: microseconds per block of requests that come, hit and go.

    python benchmarks/block_pool.py                  # by age, and by ranks that a policy states
    python benchmarks/block_pool.py --against main   # or a directory: ratios by age, in turns

Requests of 32 blocks come one after the other, and each frees its blocks before the next but three
comes. `new`: none is found, so that each block evicts one. `half`: the first 16 are found again
among those of 40 prefixes. `all`: every block is found, as none was evicted. Counted are finding,
taking, making findable and freeing, not the hashing of tokens. By ranks, each request has one of
eight. CPU time; the last line is JSON.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import against

from aioserve.kv_cache import BlockPool

KINDS = ("new", "half", "all")
SIZE = 32  # blocks of a request
NUM_PREFIXES = 40
NUM_HELD = 3  # requests that hold blocks beside the newest
NUM_BLOCKS = 4096


class Case(NamedTuple):
    """How much of each request the pool has, and whether it evicts by rank."""

    kind: str
    by_rank: bool = False


class PoolWork:
    """A full pool of blocks, and requests that come, hit and go."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pool = BlockPool(NUM_BLOCKS)
        self._rng = random.Random(1)
        self._held: deque[tuple[list[bytes], list[int]]] = deque()
        self._num_made = 0
        self._check = 0
        self._rank = None
        if case.by_rank:
            from aioserve.kv_cache.retention import Ranking  # an older checkout has none

            ranking = Ranking(self.pool)
            ranking.begin()
            self._rank = ranking.rank
        self.round(NUM_BLOCKS // SIZE)

    def _contents(self) -> list[bytes]:
        self._num_made += 1
        num_found = {"new": 0, "half": SIZE // 2, "all": SIZE}[self.case.kind]
        prefix = self._rng.randrange(NUM_PREFIXES)
        old = [b"%016d" % (prefix * SIZE + i) for i in range(num_found)]
        first = 10**9 + self._num_made * SIZE
        return old + [b"%016d" % (first + i) for i in range(SIZE - num_found)]

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are requests. Returns CPU seconds, and the sum of the block ids handed out."""
        ready = [(self._contents(), self._rng.randrange(8)) for _ in range(num_units)]
        began = time.thread_time()
        for contents, rank in ready:
            self._serve(contents, rank)
        return time.thread_time() - began, self._check

    def _serve(self, contents: list[bytes], rank: int) -> None:
        pool, found = self.pool, []
        for content in contents:
            block_id = pool.lookup(content)
            if block_id is None:
                break
            found.append(block_id)
        pool.touch(found)
        new = pool.allocate(SIZE - len(found))
        pool.register(new, contents[len(found) :])
        self._check += sum(new)
        self._held.append((contents, found + new))
        if len(self._held) > NUM_HELD:
            gone, block_ids = self._held.popleft()
            pool.free(reversed(block_ids))
            if self._rank is not None:
                self._rank(gone, rank)

    def close(self) -> None:
        """Does nothing: a pool holds no resources to give back."""


def make_work(case: list[object]) -> PoolWork:
    """The work of a case that is given as plain data."""
    return PoolWork(Case(str(case[0]), bool(case[1])))


def measure(case: Case, num_rounds: int) -> float:
    """Measure a case: microseconds per block, the median of the rounds."""
    work = PoolWork(case)
    gc.collect()
    gc.disable()
    rounds = [work.round(100)[0] for _ in range(num_rounds)]
    gc.enable()
    return round(1e6 * statistics.median(rounds) / (100 * SIZE), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--case", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--against", metavar="REV_OR_DIR", help="compare with another checkout")
    parser.add_argument("--tolerance", type=float, default=0.03, help="by which one may be slower")
    parser.add_argument("--starts", type=int, default=5, help="of both sides, for each case")
    parser.add_argument("--rounds", type=int, default=40, help="of each start")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # be one side
    args = parser.parse_args()
    if args.turns:
        against.take_turns(make_work)
        return 0
    if args.against is None:
        rows = []
        print(f"{'us per block':12}{'by age':>10}{'by rank':>10}")
        for kind in args.case:
            by_age, by_rank = (measure(Case(kind, ranks), args.rounds) for ranks in (False, True))
            rows.append({"case": kind, "by_age_us": by_age, "by_rank_us": by_rank})
            print(f"{kind:12}{by_age:10.3f}{by_rank:10.3f}", flush=True)
        print(json.dumps(rows))
        return 0
    cases = [(kind, list(Case(kind))) for kind in args.case]
    with against.checkout(args.against) as other:
        script = Path(__file__).resolve()
        found = against.compare(
            script,
            cases,
            other,
            num_starts=args.starts,
            num_rounds=args.rounds,
            tolerance=args.tolerance,
        )
        return against.report(found, args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
