"""The policy lab: the same engine and policies on a virtual clock."""

from aioserve.lab.simulation.run import VirtualClockEventLoop

__all__ = ["VirtualClockEventLoop"]
