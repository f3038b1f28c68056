"""Classes of service on one engine: far fewer late requests under overload."""

from collections.abc import Sequence

import numpy as np

from aioserve.lab.reproduce.claims.claim import Claim, Finding
from aioserve.lab.reproduce.claims.sarathi import STEPS
from aioserve.lab.reproduce.claims.simulate import configure, make_workload, measure
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels, Slo

CLASSES = {
    "interactive": ({"slo_ttft": 6.0, "slo_tpot": 0.05}, Slo(ttft=6.0)),
    "minutes": ({"offline": True}, Slo(e2e=600.0)),
}
RATES = {"on": 12.0, "off": 3.0}  # requests a second; the engine can do about eight


def _run(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    spec = {
        "arrivals": {
            "kind": "on_off",
            "rate_on": RATES["on"],
            "on_seconds": 120,
            "rate_off": RATES["off"],
            "off_seconds": 240,
        },
        "num_requests": 4000,
        "classes": [
            {
                "name": name,
                "share": 0.5,
                "hints": hints,
                "prompt": {"kind": "lognormal", "median": 1020, "sigma": 1.0, "max": 7000},
                "output": {"kind": "lognormal", "median": 129, "sigma": 0.9, "min": 4, "max": 1000},
            }
            for name, (hints, _) in CLASSES.items()
        ],
    }
    levels = ServiceLevels(None, {name: slo for name, (_, slo) in CLASSES.items()})

    def late(policy: str, options: dict[str, float], seed: int) -> float:
        config = configure(
            policy,
            STEPS,
            scheduler__options=options,
            scheduler__max_num_seqs=128,
            scheduler__max_num_batched_tokens=4096,
            cache__num_kv_blocks=27_000,
            model__max_model_len=8192,
        )
        run = measure(config, make_workload(spec, seed, "classes"), progress, levels)
        return float(1 - np.nanmean(run.is_good))

    own = [late("zoo.qoserve", {"ttft": 6.0, "ttlt": 600.0}, seed) for seed in seeds]
    base = [late("chunked_prefill", {"chunk_size": 512}, seed) for seed in seeds]
    runs = [a / b for a, b in zip(own, base, strict=True)]
    return [Finding("share of late requests, QoServe / Sarathi-FCFS", (0.0, 0.1), runs)]


CLAIM = Claim(
    name="qoserve",
    title="Deadlines, slack and relegation make late requests rarer by an order of magnitude",
    source="Niyama (QoServe, ASPLOS'26), arXiv 2503.22562, 2025, abstract",
    setting="Azure's traces of 2023 in classes of service, bursts beyond the capacity: "
    "violations lower by an order of magnitude than under current strategies.",
    here="Two classes, first tokens within 6 s and whole replies within 600 s; lengths are "
    "drawn to the medians of Azure's conversations (1,020 and 129 tokens), arrivals "
    "alternate between 1.5 and 0.4 times the capacity; the step times are those of the "
    "claim `sarathi`.",
    run=_run,
)
