"""Faults as data, and small things around the real parts of a server that make them happen.

A `Fault` says what goes wrong where, and at the how many-th time; `Faults` holds those that are
still to come. `FaultyRunner`, `faulty` and `FaultyLines` ask it at each pass: around a runner,
around any method of any part, and at any line of a request's way (`points` lists them, made from
the code). Nothing here is for a server that serves.
"""

from aioserve.testing.faults.clients import CLIENTS, Client, Told
from aioserve.testing.faults.fault import (
    KINDS,
    RUNNER_KINDS,
    Fault,
    Faults,
    FaultyRunner,
    JumpingLoop,
    faulty,
    few_descriptors,
    open_descriptors,
)
from aioserve.testing.faults.lines import FaultyLines, Point, points

__all__ = [
    "CLIENTS",
    "KINDS",
    "RUNNER_KINDS",
    "Client",
    "Fault",
    "Faults",
    "FaultyLines",
    "FaultyRunner",
    "JumpingLoop",
    "Point",
    "Told",
    "faulty",
    "few_descriptors",
    "open_descriptors",
    "points",
]
