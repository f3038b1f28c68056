"""What is known of a fleet besides what its clients saw: how busy, how even, at what price.

Knows one run at a time, and the price that its plan states. Judges nothing.
"""

from aioserve.lab.simulation.fleet_outcome import FleetOutcome
from aioserve.lab.simulation.fleet_plan import Fleet

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


def fleet_totals(outcome: FleetOutcome, fleet: Fleet, totals: dict[str, float]) -> dict[str, float]:
    """One number each, to stand beside `totals`. Prices are in the currency of the fleet's."""
    seconds = max(outcome.end, 1e-9)
    busy = outcome.busy_seconds
    mean = sum(busy) / len(busy)
    paid = outcome.replica_seconds
    found = {
        "busy_share": sum(busy) / max(paid, 1e-9),
        "busiest_to_mean": max(busy) / max(mean, 1e-9),
        "resent": float(outcome.num_resent),
    }
    if fleet.autoscaling is not None:
        found["replicas"] = paid / seconds
    if fleet.transfer_gb_per_second is not None:
        found["moved"] = float(outcome.num_moved)
    if fleet.price_per_hour is not None:
        price = fleet.price_per_hour * paid / seconds / SECONDS_PER_HOUR  # of a second
        for name in ("output", "total"):
            rate = max(totals[f"{name}_tokens_per_second"], 1e-9)
            found[f"price_per_million_{name}"] = MILLION * price / rate
    return found
