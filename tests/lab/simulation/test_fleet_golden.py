"""The routers that were there before the seam decide what they decided: replica by replica.

`python -m tests.lab.simulation.test_fleet_golden` writes `fleet_golden.json` anew, where that is
what a change is for.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from aioserve.lab.comparison.candidates import load_candidates
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import simulated
from aioserve.lab.workloads.synthetic import WorkloadSource
from tests.slow import mostly_slow

RECORDED = Path(__file__).with_name("fleet_golden.json")
LOADS = {"breakdown": 4, "agents": 7}  # replicas; the first of them fails and is slow
ROUTERS = ("round_robin", "least_work", "two_choices", "prefix", "session")
CASES = [f"{load} {router}" for load in LOADS for router in ROUTERS]


def decided(case: str) -> dict[str, Any]:
    """The replica of each request, by its number, and a digest of when each token came."""
    load, router = case.split()
    workload = WorkloadSource(path=load, limit=400, time_scale=0.25).load(0)
    (candidate,) = load_candidates(["chunked_prefill"])
    config = simulated(candidate.config, workload.longest)
    outcome = simulate_fleet(config, workload, Fleet(LOADS[load], router))
    times = b"".join(request.token_times.tobytes() for request in outcome.requests)
    return {
        "replicas": "".join("-" if place < 0 else str(place) for place in outcome.replica_of),
        "times": blake2b(times, digest_size=8).hexdigest(),
        "resent": outcome.num_resent,
        "cached": sum(request.num_cached_tokens for request in outcome.requests),
    }


@pytest.mark.parametrize(
    "case", mostly_slow(CASES, but=["breakdown two_choices", "breakdown prefix", "agents session"])
)
def test_a_router_decides_what_it_decided(case: str) -> None:
    assert decided(case) == json.loads(RECORDED.read_text())[case]


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({case: decided(case) for case in CASES}, indent=1) + "\n")
