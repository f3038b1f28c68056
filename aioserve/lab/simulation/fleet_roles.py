"""Roles of the replicas of a simulated fleet that is scaled: each keeps one replica at least.

Knows seats. Does not know how many replicas are wanted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from aioserve.lab.simulation.fleet_seat import Seat


def missing_roles(seats: Sequence[Seat], present: Sequence[Seat]) -> list[str]:
    """Roles of `seats` that none of `present` has, in order; replicas that do all have none."""
    found = {seat.role for seat in present}
    return [
        role for role in dict.fromkeys(seat.role for seat in seats) if role and role not in found
    ]


def first_of_roles(seats: Sequence[Seat], missing: Sequence[str]) -> list[Seat]:
    """The same seats, the first one of each of the missing roles before all others."""
    ahead = [
        next(seat for seat in seats if seat.role == role)
        for role in missing
        if any(seat.role == role for seat in seats)
    ]
    return [*ahead, *(seat for seat in seats if seat not in ahead)]


def spare(seats: Sequence[Seat]) -> Iterator[Seat]:
    """Those of the seats that can go, in order, with one of each role left."""
    left = Counter(seat.role for seat in seats)
    for seat in seats:
        if not seat.role or left[seat.role] > 1:
            left[seat.role] -= 1
            yield seat
