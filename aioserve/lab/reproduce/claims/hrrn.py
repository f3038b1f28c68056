"""Highest response ratio next on uncached work, against the longest prefix (sglang#32911)."""

from collections.abc import Sequence

from aioserve.lab.comparison.measures import quantile
from aioserve.lab.reproduce.claims.claim import Claim, Finding
from aioserve.lab.reproduce.claims.simulate import configure, make_workload, measure
from aioserve.lab.simulation.run import Progress

# A prefill node: what costs are prompt tokens and what they attend to. A large model, computed.
STEPS = {
    "step_base_ms": 20.0,
    "step_prefill_token_us": 30.0,
    "step_decode_us": 20.0,
    "step_query_context_ns": 0.5,
}
SPEC = {
    "arrivals": {
        "kind": "closed",
        "clients": 100,
        "think_seconds": {"kind": "constant", "value": 1},
    },
    "num_requests": 3000,
    "classes": [
        {
            "name": "session",
            "share": 0.85,
            "prompt": {"kind": "lognormal", "median": 2000, "sigma": 1.2, "max": 60000},
            "output": {"kind": "constant", "value": 2},
            "prefixes": {"count": 8, "length": {"kind": "uniform", "min": 1000, "max": 8000}},
            "session": {
                "turns": {"kind": "uniform", "min": 2, "max": 12},
                "think_seconds": {"kind": "lognormal", "median": 2, "sigma": 1.0},
            },
        },
        {
            "name": "document",
            "share": 0.15,
            "prompt": {"kind": "lognormal", "median": 30000, "sigma": 0.6, "max": 100000},
            "output": {"kind": "constant", "value": 2},
        },
    ],
}
#: What the pull request's table has of each policy over first come, first served: mean and p99.
PUBLISHED = {"hrrn": (0.309, 0.917), "lpm": (0.678, 3.526)}
POLICIES = {
    "fcfs": ("chunked_prefill", {"chunk_size": 16384}),
    "hrrn": ("hrrn", {"chunk_size": 16384}),
    "lpm": ("prefix_aged", {"chunk_size": 16384, "ageing": 0.0}),
}


def _run(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def ttft(name: str, seed: int) -> tuple[float, float]:
        policy, options = POLICIES[name]
        config = configure(
            policy,
            STEPS,
            scheduler__options=options,
            scheduler__max_num_batched_tokens=16384,
            scheduler__max_num_seqs=256,
            cache__num_kv_blocks=120_000,
            model__max_model_len=400_000,
        )
        times = measure(config, make_workload(SPEC, seed, "sessions"), progress).ttft
        return float(times.mean()), quantile(times, 0.99)

    base = [ttft("fcfs", seed) for seed in seeds]
    findings = []
    for name, published in PUBLISHED.items():
        own = [ttft(name, seed) for seed in seeds]
        for i, what in enumerate(("mean", "p99")):
            runs = [a[i] / b[i] for a, b in zip(own, base, strict=True)]
            label = f"TTFT {what}, {name} / first come"
            findings.append(Finding(label, (published[i], published[i]), runs))
    return findings


CLAIM = Claim(
    name="hrrn",
    title="The highest response ratio cuts waiting without a tail; the longest prefix grows one",
    source="sglang#32911, a merged pull request, 2026",
    setting="SGLang, GLM-5.2, one prefill and one decode node of eight B200 each, production "
    "traffic, 100 requests at a time.",
    here="The traffic is private. Here 100 clients hold conversations of 2 to 12 turns "
    "behind eight shared prefixes, beside documents of 30,000 tokens, on a prefill node"
    " of a large model whose step times are computed.",
    run=_run,
)
