"""Published results of fleets: which replica gets a request."""

from collections.abc import Sequence

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest
from aioserve.lab.comparison.measures import quantile
from aioserve.lab.reproduce.claims.claim import (
    LLAMA_8B,
    Claim,
    Finding,
    configure,
    make_workload,
    measure_fleet,
    ratios,
)
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import Progress

# Routers that published results are measured against: nothing for users to choose.


class VllmRouter(BaseRouter):
    """vLLM v1's data parallel load balancing: the least of 4 x waiting + running. What was sent and
    is not reported yet counts as waiting there, too.
    """

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        def score(replica: ReplicaView) -> int:
            unreported = max(replica.num_sent - replica.num_running - replica.num_waiting, 0)
            return 4 * (replica.num_waiting + unreported) + replica.num_running

        return min(replicas, key=score)


# The product of tokens to compute and batch size brings first tokens sooner than queues do.


VLLM = "aioserve.lab.reproduce.claims.routing:VllmRouter"
LMETRIC_NUM_REPLICAS = 8
LMETRIC_SPEC = {
    "arrivals": {"kind": "gamma", "rate": 9.0, "cv": 2.0},
    "num_requests": 2400,
    "classes": [
        {
            "name": "chat",
            "prompt": {"kind": "lognormal", "median": 500, "sigma": 1.0, "max": 8000},
            "output": {"kind": "lognormal", "median": 200, "sigma": 0.7, "max": 1000},
            "prefixes": {
                "count": 40,
                "length": {"kind": "uniform", "min": 1000, "max": 6000},
                "zipf": 1.2,
            },
            "session": {
                "turns": {"kind": "uniform", "min": 1, "max": 8},
                "think_seconds": {"kind": "lognormal", "median": 8, "sigma": 0.8, "max": 60},
            },
        }
    ],
}


def _run_lmetric(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def means(router: str, seed: int) -> tuple[float, float]:
        config = configure(
            "chunked_prefill",
            LLAMA_8B,
            scheduler__options={"chunk_size": 2048},
            scheduler__max_num_seqs=256,
            scheduler__max_num_batched_tokens=2048,
            cache__num_kv_blocks=20_000,
            model__max_model_len=131_072,
        )
        fleet = Fleet(LMETRIC_NUM_REPLICAS, router, knowledge_delay=0.05)
        run = measure_fleet(config, make_workload(LMETRIC_SPEC, seed, "chat"), fleet, progress)
        return float(run.ttft.mean()), float(run.tpot[run.tpot > 0].mean())

    base = [means(VLLM, seed) for seed in seeds]
    own = [means("lmetric", seed) for seed in seeds]
    ttft, tpot = ratios(own, base)
    return [
        Finding("mean TTFT, LMetric / vLLM", (0.08, 0.08), ttft),
        Finding("mean TPOT, LMetric / vLLM", (0.79, 0.79), tpot),
    ]


LMETRIC = Claim(
    name="lmetric",
    title="Tokens to compute times batch size routes better than vLLM's queue lengths",
    source="LMetric, OSDI'26, arXiv 2603.15202, abstract",
    setting="Real workloads of chatbots, API calls and coding agents: time to first token 92% "
    "lower and time per token 21% lower than with the router of vLLM v1.",
    here="The abstract names neither traces, models and rates nor the statistic: these are means. "
    "Eight replicas with computed step times serve conversations over 40 beginnings of 1,000 to "
    "6,000 tokens, some of them hot, in bursts, at a rate at which the baseline is busy and keeps "
    "up. vLLM's router is that of its data parallel front end: four times the waiting requests and "
    "once the running ones. Both hear of replicas 50 ms later.",
    run=_run_lmetric,
)


# Exploiting cached prefixes and exploring for others cuts latency against round robin.


PREBLE_NUM_REPLICAS = 4
# Mistral-7B on an A6000, computed from 768 GB/s and half of 155 TFLOPS: 14.5 GB of weights a step,
# 14.5 GFLOP a token, 128 KiB of KV cache a token.
PREBLE_STEPS = {
    "step_base_ms": 19.0,
    "step_prefill_token_us": 190.0,
    "step_decode_us": 30.0,
    "step_context_token_us": 0.17,
    "step_query_context_ns": 3.4,
}
PREBLE_NUM_KV_BLOCKS = 14_000  # 30 GB
PREBLE_TOOLS = {
    "arrivals": {"kind": "poisson", "rate": 16.0},
    "num_requests": 2000,
    "classes": [
        {
            "name": "tools",
            "prompt": {"kind": "lognormal", "median": 240, "sigma": 0.5, "max": 1200},
            "output": {"kind": "lognormal", "median": 38, "sigma": 0.5, "max": 200},
            "prefixes": {
                "count": 800,
                "length": {"kind": "lognormal", "median": 1500, "sigma": 0.3, "max": 4000},
                "zipf": 1.1,
            },
        }
    ],
}
PREBLE_DOCUMENTS = {
    "arrivals": {"kind": "poisson", "rate": 0.8},
    "num_requests": 500,
    "classes": [
        {
            "name": "documents",
            "prompt": {"kind": "lognormal", "median": 400, "sigma": 0.5, "max": 2000},
            "output": {"kind": "lognormal", "median": 16, "sigma": 0.5, "max": 100},
            "prefixes": {
                "count": 60,
                "length": {"kind": "lognormal", "median": 20_000, "sigma": 0.3, "max": 40_000},
                "zipf": 0.0,
            },
        }
    ],
}
PREBLE_WORKLOADS = {"tools": PREBLE_TOOLS, "documents": PREBLE_DOCUMENTS}


def _run_preble(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    config = configure(
        "chunked_prefill",
        PREBLE_STEPS,
        scheduler__options={"chunk_size": 2048},
        scheduler__max_num_seqs=128,
        scheduler__max_num_batched_tokens=2048,
        cache__num_kv_blocks=PREBLE_NUM_KV_BLOCKS,
        model__max_model_len=131_072,
    )

    def latencies(router: str, words: str, seed: int) -> tuple[float, float]:
        fleet = Fleet(PREBLE_NUM_REPLICAS, router, knowledge_delay=0.05)
        run = measure_fleet(
            config, make_workload(PREBLE_WORKLOADS[words], seed, words), fleet, progress
        )
        return float(run.e2e.mean()), quantile(run.e2e, 0.99)

    findings = []
    for words in PREBLE_WORKLOADS:
        own = [latencies("preble", words, seed) for seed in seeds]
        for baseline in ("round_robin", "least_work"):
            base = [latencies(baseline, words, seed) for seed in seeds]
            mean, p99 = ratios(own, base)
            name = baseline.replace("_", " ")
            findings += [
                Finding(f"{words}: mean latency, Preble / {name}", (1 / 14.5, 1 / 1.5), mean),
                Finding(f"{words}: p99 latency, Preble / {name}", (0.1, 0.5), p99),
            ]
    return findings


PREBLE = Claim(
    name="preble",
    title="Exploiting cached prefixes and exploring for others cuts latency",
    source="Preble, ICLR'25, arXiv 2407.00023, abstract",
    setting="Tools, programs, virtual agents, videos and long documents on two to eight GPUs, "
    "Mistral-7B and Llama-3-70B: 1.5 to 14.5 times lower on average latency and 2 to 10 times "
    "lower p99 than SGLang, which shares requests out in turn.",
    here="Two of the workloads on four replicas with step times computed for Mistral-7B on an "
    "A6000. Requests for tools draw one of 800 beginnings of 1,500 tokens (median) by Zipf 1.1, "
    "questions one of 60 documents of 20,000. Lengths, numbers of beginnings and rates are chosen "
    "here: the baseline is busy and keeps up; at half the rate of tools the mean latency is 0.83 "
    "of round robin's. Preble's local queue and its growing of hot prefixes are left out. The "
    "load-based baseline sends to the least work.",
    run=_run_preble,
)
