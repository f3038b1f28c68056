"""BlockPool: every block is held, unused or evictable, and nothing else."""

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from aioserve.errors import InvariantError
from aioserve.kv_cache import BlockPool


def test_unused_blocks_are_handed_out_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    (cached,) = pool.allocate(1)
    pool.register([cached], [b"a"])
    pool.free([cached])
    assert cached not in pool.allocate(2)
    assert pool.lookup(b"a") == cached
    assert pool.allocate(1) == [cached]
    assert pool.lookup(b"a") is None


def test_eviction_takes_the_least_recently_freed_block() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register([block_id], [name])
    pool.free(reversed(blocks))  # tail first
    pool.touch([blocks[2]])  # somebody found the tail again
    assert pool.allocate(1) == [blocks[1]]
    assert pool.lookup(b"a") == blocks[0]


def test_a_shared_block_is_free_only_when_all_holders_have_gone() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register([block], [b"a"])
    pool.touch([block])
    pool.free([block])
    assert pool.num_free_blocks == 0
    pool.free([block])
    assert pool.num_free_blocks == 1


def test_the_first_block_of_a_content_wins() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register([first], [b"a"])
    pool.register([second], [b"a"])
    assert pool.lookup(b"a") == first
    pool.unregister(second)  # it never was in the index
    assert pool.lookup(b"a") == first


def test_clearing_the_index_loses_no_block() -> None:
    pool = BlockPool(4)
    held, freed = pool.allocate(2)
    pool.register([held], [b"a"])
    pool.register([freed], [b"b"])
    pool.free([freed])
    pool.clear_index()
    assert pool.lookup(b"a") is None
    assert pool.num_free_blocks == 3
    assert held not in pool.allocate(3)


def test_freeing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(InvariantError, match="block 0 is freed, but no request holds it"):
        pool.free([block])
    assert (pool.num_free_blocks, pool.ref_counts) == (1, [0])


def test_blocks_found_again_and_again_are_evicted_by_their_last_use() -> None:
    # Against a list in which a block that is found is unlinked at once.
    rng, pool = random.Random(0), BlockPool(6)
    blocks = pool.allocate(6)
    for block_id in blocks:
        pool.register([block_id], [b"%d" % block_id])
    pool.free(blocks)
    in_order, held = list(blocks), list[int]()
    for _ in range(5000):
        if in_order and (not held or rng.random() < 0.5):
            block_id = rng.choice(in_order)
            pool.touch([block_id])
            in_order.remove(block_id)
            held.append(block_id)
        else:
            block_id = held.pop(rng.randrange(len(held)))
            pool.free([block_id])
            in_order.append(block_id)
        assert pool.num_free_blocks == len(in_order)
        if in_order and rng.random() < 0.1:
            (block_id,) = pool.allocate(1)
            assert block_id == in_order.pop(0)
            pool.register([block_id], [b"%d" % block_id])
            held.append(block_id)
        assert len(pool.evictable) <= 3 * pool.num_blocks  # what is stale does not pile up
    pool.free(held)
    pool.clear_index()
    assert sorted(pool.allocate(6)) == sorted(blocks)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate(4), "4 KV blocks are asked for, 3 are free"),
        (lambda pool: pool.allocate(-1), "-1 KV blocks are asked for"),
        (lambda pool: pool.touch([0]), "block 0 is not held and has no content"),
        (lambda pool: pool.free([0]), "block 0 is freed, but no request holds it"),
        (lambda pool: pool.register([0], [b"a"]), "block 0 gets content, but no request holds it"),
        (lambda pool: pool.unregister(0), "block 0 loses its content, but no request holds it"),
    ],
)
def test_what_would_break_the_books_is_refused_and_changes_nothing(
    misuse: Callable[[BlockPool], object], message: str
) -> None:
    pool = BlockPool(3)
    with pytest.raises(InvariantError, match=message):
        misuse(pool)
    assert (pool.num_free_blocks, pool.ref_counts, pool.lookup(b"a")) == (3, [0, 0, 0], None)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_blocks_before_one_that_cannot_be_freed_are_free() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.free([first, first, second])
    assert pool.num_free_blocks == 2
    assert sorted(pool.allocate(2)) != sorted([first, second])


def test_the_books_are_guarded_under_optimization_too() -> None:
    program = "from aioserve.kv_cache import BlockPool; BlockPool(1).free([0])"
    result = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=100
    )
    assert "InvariantError: block 0 is freed, but no request holds it" in result.stderr
