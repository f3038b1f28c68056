"""Requests at random for a toy fleet, the same in every run.

Knows prompts, sessions and hints. Knows no replica.
"""

import random
from collections.abc import Iterator

from aioserve.request import Hints
from aioserve.routing import RoutedRequest

BLOCK_SIZE = 16
#: Requests per second and replica that fill most of its seats.
FULL = 13.0


def prompt(*names: int | str) -> tuple[bytes, ...]:
    """A block of a prompt for each name; what follows another beginning is another block."""
    return tuple(repr(names[: i + 1]).encode() for i in range(len(names)))


def equal_requests(count: int, rate: float) -> Iterator[tuple[float, RoutedRequest]]:
    """Requests with nothing in common and nothing that sets one apart, at `rate` per second."""
    rng, now = random.Random("equal"), 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        yield now, _request(number, prompt(*(f"{number}.{i}" for i in range(8))))


def one_beginning(count: int, rate: float) -> Iterator[tuple[float, RoutedRequest]]:
    """Requests of which all prompts begin alike, for the greater part."""
    rng, now = random.Random("hot"), 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        yield now, _request(number, prompt(*range(6), f"{number}.6", f"{number}.7"))


def conversations(count: int, rate: float, seed: int = 0) -> Iterator[tuple[float, RoutedRequest]]:
    """Turns of conversations of all kinds: clients, priorities, deadlines, classes, lengths."""
    rng, now = random.Random(f"{seed} conversations"), 1.0
    turns: dict[int, int] = {}
    for number in range(count):
        now += rng.expovariate(rate)
        session = rng.randrange(max(count // 6, 1))
        turn = turns[session] = turns.get(session, 0) + 1
        hints: Hints = {"session": f"s{session}", "slo_class": rng.choice(["chat", "batch", "x"])}
        if rng.random() < 0.5:
            hints |= {"predicted_output_tokens": rng.randrange(1, 400), "slo_ttft": rng.random()}
            hints |= {"slo_tpot": 0.2 * rng.random()}
        yield (
            now,
            _request(
                number,
                prompt(session % 5, *(f"{session}.{i}" for i in range(2 * turn))),
                session=f"s{session}" if rng.random() < 0.8 else "",
                user=f"u{session % 7}",
                priority=rng.randrange(-1, 3),
                deadline=now + 30 * rng.random() if rng.random() < 0.2 else None,
                hints=hints,
                adapter=rng.choice(["", "", "a", "b"]),
            ),
        )


def _request(number: int, hashes: tuple[bytes, ...], **fields: object) -> RoutedRequest:
    return RoutedRequest(
        request_id=f"q{number}",
        num_tokens=BLOCK_SIZE * len(hashes) + number % BLOCK_SIZE,
        max_tokens=256,
        block_hashes=hashes,
        block_size=BLOCK_SIZE,
        **fields,  # type: ignore[arg-type]
    )
