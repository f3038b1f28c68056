"""What a format reads of a reply, in whatever pieces the reply comes."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from aioserve.features.formats import Event, joined


def read(reader: Any, pieces: Iterable[str]) -> list[Event]:
    """Return the events of a reply that comes in these pieces."""
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush())


def read_alike(make_reader: Callable[[], Any], text: str) -> tuple[list[Event], int]:
    """Return the events of a reply and how many of its calls are malformed. Asserts that they are
    the same whole, by characters, and cut at 20 times four random places.
    """
    rng = random.Random(0)
    cuts = [sorted(rng.choices(range(len(text) + 1), k=4)) for _ in range(20)]
    ways = [[text], list(text)]
    ways += [[text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)] for at in cuts]
    found = []
    for pieces in ways:
        reader = make_reader()
        found.append((read(reader, pieces), getattr(reader, "num_malformed", 0)))
    assert all(other == found[0] for other in found)
    return found[0]
