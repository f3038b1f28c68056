"""Published results of one engine: which request goes first, which gives way, what is kept.

Each claim says where it stands, its setting, and what is otherwise here.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from aioserve.errors import ConfigError
from aioserve.lab.comparison.knee import Bound, search
from aioserve.lab.comparison.measures import quantile
from aioserve.lab.reproduce.claims.claim import (
    LLAMA_8B,
    Claim,
    Finding,
    candidate,
    configure,
    make_workload,
    measure,
    ratios,
)
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels, Slo
from aioserve.runner.step_times import make_step_times
from aioserve.scheduler import BaseScheduler, PolicyOptions, Request, SchedulerOutput

# Policies that claims need and that nothing else does.


class _Plain(BaseScheduler):
    """Decodes, running prompts, then prompts in order, in pieces: as vLLM has it since 2025."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class VictimScheduler(_Plain):
    """First come, first served; an option says which request is preempted."""

    class Options(PolicyOptions):
        rule: Literal["lifo", "random", "most_computed", "least_computed"] = "lifo"
        seed: int = 0

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = random.Random(self.options.seed)

    def victim(self) -> Request | None:
        running, rule = self.running, self.options.rule
        if not running:
            return None
        if rule == "random":
            return self.rng.choice(running)
        if rule == "lifo":
            return running[-1]
        pick = max if rule == "most_computed" else min
        return pick(running, key=lambda r: (r.num_computed_tokens, r.order_key))


class ShortestPromptScheduler(_Plain):
    """The shortest prompt goes first."""

    def order(self, request: Request) -> int:
        return request.num_prompt_tokens


# Capacity under a bound on the gap between tokens: chunked prefill against whole prompts first.


# Mistral-7B on an A100 of 80 GB, computed: 14.5 GB of weights and 131 kB of KV per token at 1.6
# TB/s, 14.5 GFLOP per token and 0.5 MFLOP per pair of tokens at 170 TFLOP/s. A decode of 32 rows of
# 4,096 tokens then takes 20 ms, as the paper's strict bound of 0.1 s, five times that, has it.
SARATHI_STEPS = {
    "step_base_ms": 9.0,
    "step_prefill_token_us": 85.0,
    "step_decode_us": 10.0,
    "step_context_token_us": 0.082,
    "step_query_context_ns": 3.0,
}
SARATHI_BLOCKS = 435_000 // 16  # what 57 GB hold
# openchat_sharegpt4 by the paper's table of medians and p90: prompts 1,730 and 5,696 tokens,
# replies 415 and 834.
SARATHI_SPEC = {
    "arrivals": {"kind": "poisson", "rate": 1.0},
    "num_requests": 400,
    "classes": [
        {
            "name": "chat",
            "prompt": {"kind": "lognormal", "median": 1730, "sigma": 0.93, "max": 7000},
            "output": {"kind": "lognormal", "median": 415, "sigma": 0.545, "max": 1192},
        }
    ],
}
SARATHI_BOUNDS = {"strict": (0.1, 512), "relaxed": (0.5, 2048)}  # seconds, and the paper's chunk


def _run_sarathi(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def capacity(policy: str, gap: float, seed: int, options: dict[str, int]) -> float:
        config = candidate(
            policy,
            SARATHI_STEPS,
            scheduler__options=options,
            scheduler__max_num_seqs=128,
            scheduler__max_num_batched_tokens=8192,
            cache__num_kv_blocks=SARATHI_BLOCKS,
            cache__enable_prefix_caching=False,
            model__max_model_len=8192,
        )
        bounds = [Bound("gap", "p99", gap), Bound("ttft", "p50", 2.0)]
        workload = make_workload(SARATHI_SPEC, seed, "chat")
        knee = search(config, [workload], None, bounds=bounds, tolerance=0.04, progress=progress)
        if knee.rate is None:
            raise ConfigError(f"{policy} has no capacity within a gap of {gap} s: {knee.note}")
        return knee.rate

    findings = []
    for name, (gap, chunk) in SARATHI_BOUNDS.items():
        runs = [
            capacity("chunked_prefill", gap, seed, {"chunk_size": chunk})
            / capacity("zoo.prefill_first", gap, seed, {})
            for seed in seeds
        ]
        findings.append(
            Finding(f"{name} bound, p99 gap {gap} s: capacity, Sarathi / vLLM", (1.01, 2.6), runs)
        )
    return findings


SARATHI = Claim(
    name="sarathi",
    title="Chunked prefill serves more requests within a bound on the gap between tokens",
    source="Sarathi-Serve, OSDI'24, figure 5 and abstract",
    setting="Mistral-7B on one A100, openchat_sharegpt4, Poisson arrivals, capacity within a "
    "p99 gap of 0.1 s (strict) or 0.5 s (relaxed), chunks of 512 and 2,048 tokens, 128 "
    "requests at a time: up to 2.6 times vLLM of 2023.",
    here="Lengths are drawn to the paper's medians and p90; step times are computed from the"
    " card's bandwidth and arithmetic and meet the one that the paper states. 400 "
    "requests where the paper has 2,048.",
    run=_run_sarathi,
)


# Highest response ratio next on uncached work, against the longest prefix (sglang#32911).


# A prefill node: what costs are prompt tokens and what they attend to. A large model, computed.
HRRN_STEPS = {
    "step_base_ms": 20.0,
    "step_prefill_token_us": 30.0,
    "step_decode_us": 20.0,
    "step_query_context_ns": 0.5,
}
HRRN_SPEC = {
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
HRRN_PUBLISHED = {"hrrn": (0.309, 0.917), "lpm": (0.678, 3.526)}
HRRN_POLICIES = {
    "fcfs": ("chunked_prefill", {"chunk_size": 16384}),
    "hrrn": ("hrrn", {"chunk_size": 16384}),
    "lpm": ("prefix_aged", {"chunk_size": 16384, "ageing": 0.0}),
}


def _run_hrrn(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def ttft(name: str, seed: int) -> tuple[float, float]:
        policy, options = HRRN_POLICIES[name]
        config = configure(
            policy,
            HRRN_STEPS,
            scheduler__options=options,
            scheduler__max_num_batched_tokens=16384,
            scheduler__max_num_seqs=256,
            cache__num_kv_blocks=120_000,
            model__max_model_len=400_000,
        )
        times = measure(config, make_workload(HRRN_SPEC, seed, "sessions"), progress).ttft
        return float(times.mean()), quantile(times, 0.99)

    base = [ttft("fcfs", seed) for seed in seeds]
    findings = []
    for name, published in HRRN_PUBLISHED.items():
        own = [ttft(name, seed) for seed in seeds]
        for what, number, runs in zip(("mean", "p99"), published, ratios(own, base), strict=True):
            label = f"TTFT {what}, {name} / first come"
            findings.append(Finding(label, (number, number), runs))
    return findings


HRRN = Claim(
    name="hrrn",
    title="The highest response ratio cuts waiting without a tail; the longest prefix grows one",
    source="sglang#32911, a merged pull request, 2026",
    setting="SGLang, GLM-5.2, one prefill and one decode node of eight B200 each, production "
    "traffic, 100 requests at a time.",
    here="The traffic is private. Here 100 clients hold conversations of 2 to 12 turns "
    "behind eight shared prefixes, beside documents of 30,000 tokens, on a prefill node"
    " of a large model whose step times are computed.",
    run=_run_hrrn,
)


# The shortest prompt first brings first tokens sooner (vllm#21558).


SHORTEST = "aioserve.lab.reproduce.claims.scheduling:ShortestPromptScheduler"
PLAIN = "aioserve.lab.reproduce.claims.scheduling:VictimScheduler"
# An 8B model on one card of the H100 class, computed: 16 GB of weights, 16 GFLOP a token.
SHORTEST_PREFILL_STEPS = {
    "step_base_ms": 8.0,
    "step_prefill_token_us": 40.0,
    "step_decode_us": 20.0,
    "step_query_context_ns": 1.5,
}
SHORTEST_PREFILL_SPEC = {
    "arrivals": {"kind": "poisson", "rate": 1e9},
    "num_requests": 50,
    "classes": [
        {
            "name": "prompts",
            "prompt": {"kind": "uniform", "min": 1000, "max": 19000},
            "output": {"kind": "constant", "value": 1},
        }
    ],
}


def _run_shortest_prefill(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def mean_ttft(policy: str, seed: int) -> float:
        config = configure(
            policy,
            SHORTEST_PREFILL_STEPS,
            scheduler__max_num_batched_tokens=8192,
            cache__num_kv_blocks=40_000,
            model__max_model_len=20_000,
        )
        workload = make_workload(SHORTEST_PREFILL_SPEC, seed, "prompts")
        return float(measure(config, workload, progress).ttft.mean())

    runs = [mean_ttft(SHORTEST, seed) / mean_ttft(PLAIN, seed) for seed in seeds]
    return [Finding("mean TTFT, shortest prompt first / first come", (0.80, 0.80), runs)]


SHORTEST_PREFILL = Claim(
    name="shortest-prefill",
    title="The shortest prompt first cuts the mean time to first token",
    source="vllm#21558, a pull request, 2025",
    setting="Llama-3.1-8B on vLLM, 50 prompts of 1,000 to 19,000 tokens (uniform) at once, "
    "replies of one token: mean TTFT 20% lower.",
    here="The card is not named; step times are computed for one of the H100 class. All "
    "prompts are in line when the first step begins; a real server tokenizes them one "
    "after the other, and begins with those that it has.",
    run=_run_shortest_prefill,
)


# Free blocks that admissions leave alone make preemptions rarer (vllm#44594).


# Qwen2.5-7B on a GB200, computed: 15 GB of weights and 57 kB of KV per token at 6.5 TB/s, 15 GFLOP
# per token at 1,200 TFLOP/s, and what a host adds to each step and row.
WATERMARK_STEPS = {
    "step_base_ms": 6.0,
    "step_prefill_token_us": 14.0,
    "step_decode_us": 15.0,
    "step_context_token_us": 0.009,
}
WATERMARK_BLOCKS = 299_584 // 16
#: By watermark: preemptions and output tokens a second.
WATERMARK_PUBLISHED = {
    0.0: (1065, 11582),
    0.02: (400, 12134),
    0.05: (187, 12167),
    0.10: (168, 11835),
}
WATERMARK_SPEC = {
    "arrivals": {"kind": "closed", "clients": 128},
    "num_requests": 450,
    "classes": [
        {
            "name": "random",
            "prompt": {"kind": "uniform", "min": 800, "max": 1200},
            "output": {"kind": "uniform", "min": 4000, "max": 6000},
        }
    ],
}


def _run_watermark(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def outcome(watermark: float, seed: int) -> tuple[float, float]:
        config = configure(
            "chunked_prefill",
            WATERMARK_STEPS,
            scheduler__options={"chunk_size": 8192},
            scheduler__max_num_seqs=256,
            scheduler__max_num_batched_tokens=8192,
            cache__num_kv_blocks=WATERMARK_BLOCKS,
            cache__enable_prefix_caching=False,
            cache__watermark=watermark,
            model__max_model_len=8192,
        )
        totals = measure(config, make_workload(WATERMARK_SPEC, seed, "random"), progress).totals
        return totals["preemptions"], totals["output_tokens_per_second"]

    runs = {share: [outcome(share, seed) for seed in seeds] for share in WATERMARK_PUBLISHED}
    base = WATERMARK_PUBLISHED[0.0]
    findings = [
        Finding(
            "preemptions without a watermark",
            (base[0], base[0]),
            [run[0] for run in runs[0.0]],
            is_ratio=False,
        )
    ]
    for share, published in WATERMARK_PUBLISHED.items():
        if not share:
            continue
        for i, values in enumerate(ratios(runs[share], runs[0.0])):
            what, ratio = ("preemptions", "output tokens/s")[i], published[i] / base[i]
            findings.append(Finding(f"{what}, watermark {share:g} / none", (ratio, ratio), values))
    return findings


WATERMARK = Claim(
    name="watermark",
    title="A few free blocks that admissions leave alone make preemptions rarer",
    source="vllm#44594, a merged pull request, 2026",
    setting="Qwen2.5-7B on a GB200 with vLLM, 299,584 tokens of KV cache, prefix caching off, "
    "450 requests of 800 to 1,200 tokens with replies of 4,000 to 6,000, 128 at a time.",
    here="The same numbers; step times are computed. This engine admits a prompt only if all"
    " of it fits, where vLLM admits its first chunk.",
    run=_run_watermark,
)


# Which request is preempted decides how much is computed again (vllm#54644).


VICTIMS_POLICY = "aioserve.lab.reproduce.claims.scheduling:VictimScheduler"
VICTIMS_STEPS = {"step_base_ms": 10.0, "step_prefill_token_us": 20.0, "step_decode_us": 20.0}
# 623,948 wasted tokens are 78.8% of all, so the rest is 167,900 tokens: 560 a request.
VICTIMS_PROMPT = {"kind": "lognormal", "median": 280, "sigma": 1.0, "max": 2000}
VICTIMS_OUTPUT = {"kind": "uniform", "min": 32, "max": 168}
#: By KV blocks: the share computed again under the baseline, and what is left of it.
VICTIMS_PUBLISHED = {1600: (0.322, 0.41), 800: (0.579, 0.60), 400: (0.788, 0.57)}


def _wasted(rule: str, blocks: int, seed: int, progress: Progress) -> tuple[float, float]:
    """Return tokens computed in vain, and their share of all that were computed."""
    return wasted(VICTIMS_POLICY, {"rule": rule, "seed": seed}, blocks, seed, progress)


def wasted(
    policy: str,
    options: dict[str, Any],
    blocks: int,
    seed: int,
    progress: Progress = lambda count: None,
) -> tuple[float, float]:
    """Return the same under a policy, on the lengths that the claim `victims` assumes."""
    spec = {
        "arrivals": {"kind": "poisson", "rate": 1e9},  # all at once
        "num_requests": 300,
        "classes": [{"name": "offline", "prompt": VICTIMS_PROMPT, "output": VICTIMS_OUTPUT}],
    }
    config = configure(
        policy,
        VICTIMS_STEPS,
        scheduler__options=options,
        scheduler__max_num_seqs=256,
        scheduler__max_num_batched_tokens=2048,
        cache__num_kv_blocks=blocks,
        cache__enable_prefix_caching=False,
        model__max_model_len=4096,
    )
    totals = measure(config, make_workload(spec, seed, "offline"), progress).totals
    return totals["wasted_tokens"], totals["wasted_share"]


def _run_victims(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    findings = []
    for blocks, (share, left) in VICTIMS_PUBLISHED.items():
        base = [_wasted("lifo", blocks, seed, progress) for seed in seeds]
        least = [_wasted("least_computed", blocks, seed, progress) for seed in seeds]
        cuts, _ = ratios(least, base)
        findings += [
            Finding(
                f"{blocks} blocks, newest preempted: share computed in vain",
                (share, share),
                [row[1] for row in base],
                is_ratio=False,
            ),
            Finding(f"{blocks} blocks: wasted tokens, least computed / newest", (left, left), cuts),
        ]
    steps = ("least_computed", "lifo", "random", "most_computed")
    for better, worse in pairwise(steps):
        runs = [
            _wasted(better, 800, s, progress)[0] / _wasted(worse, 800, s, progress)[0]
            for s in seeds
        ]
        name = f"800 blocks: wasted tokens, {better} / {worse}".replace("lifo", "newest")
        findings.append(Finding(name, (0.0, 0.99), runs))
    return findings


VICTIMS = Claim(
    name="victims",
    title="The request with the least computed tokens is the victim that wastes least",
    source="vllm#54644, a request for comments, 2026",
    setting="vLLM, a model of 0.5B parameters, 300 requests at once, pools of 1,600, 800 and "
    "400 KV blocks where 4,200 hold all; the order of four rules in an ablation.",
    here="The lengths are not published. Their mean follows from two numbers (623,948 wasted"
    " tokens are 78.8% of all); here prompts are log-normal around 280 tokens and "
    "replies uniform from 32 to 168, which leaves less to waste: vLLM 0.32's own scheduler wastes "
    "0.090, 0.133 and 0.127 of them, as much as is shown (`python benchmarks/vllm_predicted.py "
    "like --victims`). Prefix caching is off."
    " Where replies vary and prompts do not (16 to 64 tokens, replies of 64 to 1,000), "
    "the rule wastes as much as the baseline or a fifth more.",
    run=_run_victims,
)


# Classes of service on one engine: far fewer late requests under overload.


QOSERVE_CLASSES = {
    "interactive": ({"slo_ttft": 6.0, "slo_tpot": 0.05}, Slo(ttft=6.0)),
    "minutes": ({"offline": True}, Slo(e2e=600.0)),
}
QOSERVE_RATES = {"on": 12.0, "off": 3.0}  # requests a second; the engine can do about eight


def _run_qoserve(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    spec = {
        "arrivals": {
            "kind": "on_off",
            "rate_on": QOSERVE_RATES["on"],
            "on_seconds": 120,
            "rate_off": QOSERVE_RATES["off"],
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
            for name, (hints, _) in QOSERVE_CLASSES.items()
        ],
    }
    levels = ServiceLevels(None, {name: slo for name, (_, slo) in QOSERVE_CLASSES.items()})

    def late(policy: str, options: dict[str, float], seed: int) -> float:
        config = configure(
            policy,
            SARATHI_STEPS,
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


QOSERVE = Claim(
    name="qoserve",
    title="Deadlines, slack and relegation make late requests rarer by an order of magnitude",
    source="Niyama (QoServe, ASPLOS'26), arXiv 2503.22562, 2025, abstract",
    setting="Azure's traces of 2023 in classes of service, bursts beyond the capacity: "
    "violations lower by an order of magnitude than under current strategies.",
    here="Two classes, first tokens within 6 s and whole replies within 600 s; lengths are "
    "drawn to the medians of Azure's conversations (1,020 and 129 tokens), arrivals "
    "alternate between 1.5 and 0.4 times the capacity; the step times are those of the "
    "claim `sarathi`.",
    run=_run_qoserve,
)


# A time to live for KV blocks between the turns of agents: programs end earlier.


CONTINUUM_BLOCKS = 25_000  # 400,000 tokens
CONTINUUM_SPEC = {
    "arrivals": {"kind": "poisson", "rate": 0.5},
    "num_requests": 1500,
    "classes": [
        {
            "name": "agent",
            "prompt": {"kind": "lognormal", "median": 1500, "sigma": 0.8, "max": 6000},
            "output": {"kind": "lognormal", "median": 200, "sigma": 0.7, "min": 20, "max": 1500},
            "prefixes": {"count": 1, "length": {"kind": "constant", "value": 2000}},
            "program": {
                "stages": [{}],
                "rounds": {"kind": "uniform", "min": 6, "max": 16},
                "pause_seconds": {"kind": "lognormal", "median": 1.0, "sigma": 1.2, "max": 60},
            },
        }
    ],
}


def _run_continuum(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def outcome(policy: str, seed: int) -> tuple[float, float]:
        config = configure(
            policy,
            LLAMA_8B,
            scheduler__options={"chunk_size": 2048},
            scheduler__max_num_seqs=256,
            scheduler__max_num_batched_tokens=2048,
            cache__num_kv_blocks=CONTINUUM_BLOCKS,
            model__max_model_len=131_072,
        )
        run = measure(config, make_workload(CONTINUUM_SPEC, seed, "agents"), progress)
        return float(np.nanmean(run.program)), run.totals["prefix_hit_share"]

    base = [outcome("chunked_prefill", seed) for seed in seeds]
    own = [outcome("zoo.continuum", seed) for seed in seeds]
    delays, hits = ratios(own, base)
    return [
        Finding("mean completion of a program, Continuum / vLLM", (1 / 3.66, 1 / 1.12), delays),
        Finding("share of prompt tokens found cached, Continuum / vLLM", (1.01, 10.0), hits),
    ]


CONTINUUM = Claim(
    name="continuum",
    title="KV blocks that stay through calls of tools bring agents' programs to their end earlier",
    source="Continuum, arXiv 2511.02230, 2025",
    setting="SWE-Bench and BFCL with Llama-3.1-8B and 70B on vLLM: delays 1.12 to 3.66 times "
    "lower.",
    here="The traces are not published. Programs have 6 to 16 turns of 1,500 new tokens "
    "(median) and pauses of a second (median, some of a minute), at a rate near the "
    "capacity; the cache holds 400,000 tokens. That more of the prompts is found cached"
    " is the mechanism, not a number of the paper.",
    run=_run_continuum,
)


# Admitting what surely fits, against admitting what fits now (TensorRT-LLM#16827).


NO_EVICT_PROFILE = "h200-llama-3.1-70b-fp8-trtllm"
NO_EVICT_SPEC = {
    "arrivals": {"kind": "closed", "clients": 32},
    "num_requests": 128,
    "classes": [
        {
            "name": "long",
            "prompt": {"kind": "constant", "value": 16384},
            "output": {"kind": "constant", "value": 512},
        }
    ],
}
#: The policies of TensorRT-LLM: one admits a request if all running ones will fit at their limits,
#: the other one if its prompt fits, and preempts the newest when memory runs out.
NO_EVICT = ("zoo.peak_memory", {"lengths": "limit", "reserved": 0.0, "chunk_size": 8192})
MAX_UTILIZATION = ("chunked_prefill", {"chunk_size": 8192})
#: Output tokens/s, p99 of time per token in ms, p99 of end to end and median of TTFT in s, of both.
NO_EVICT_PUBLISHED = {
    "output tokens/s": (161.0, 95.7),
    "TPOT p99, ms": (122.0, 1111.0),
    "end to end p99, s": (150.0, 563.0),
    "TTFT p50, s": (35.8, 27.1),
}
#: Shares of the KV cache that the profile has: the report does not state its size.
NO_EVICT_POOLS = {1.0: "", 0.9: ", a tenth less KV cache"}


def _run_no_evict(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    """Run each policy once, as nothing of the load is random."""
    pool = make_step_times(NO_EVICT_PROFILE, {}).num_kv_tokens(8192, 32) or 0

    def outcome(policy: tuple[str, dict[str, Any]], share: float) -> list[float]:
        name, options = policy
        config = configure(
            name,
            NO_EVICT_PROFILE,
            scheduler__options=options,
            scheduler__max_num_seqs=2048,
            scheduler__max_num_batched_tokens=8192,
            cache__block_size=32,
            cache__num_kv_blocks=int(share * pool) // 32,
            model__max_model_len=17_000,
        )
        run = measure(config, make_workload(NO_EVICT_SPEC, seeds[0], "long"), progress)
        return [
            run.totals["output_tokens_per_second"],
            1e3 * quantile(run.tpot, 0.99),
            quantile(run.e2e, 0.99),
            quantile(run.ttft, 0.5),
        ]

    findings = []
    for share, words in NO_EVICT_POOLS.items():
        base, own = outcome(NO_EVICT, share), outcome(MAX_UTILIZATION, share)
        for i, (what, (before, after)) in enumerate(NO_EVICT_PUBLISHED.items()):
            alone = Finding(f"{what}{words}", (before, before), [base[i]], is_ratio=False)
            name, ratio = f"{what}, maximal utilization / none evicted{words}", after / before
            findings += [alone, Finding(name, (ratio, ratio), [own[i] / base[i]])]
    return findings


EVICTION = Claim(
    name="no-evict",
    title="Admitting what fits now, and evicting, is slower than admitting what surely fits",
    source="TensorRT-LLM#16827, an issue, 2026",
    setting="TensorRT-LLM 1.2.1 on one H200, Llama-3.3-70B in FP8, 128 requests of 16,384 tokens "
    "with replies of 512, 32 at a time: GUARANTEED_NO_EVICT against MAX_UTILIZATION.",
    here="Step times are those of a measured card (`h200-llama-3.1-70b-fp8-trtllm`, TensorRT-LLM "
    "1.3.0rc20; Llama 3.3 has the shape of 3.1), and nothing is fitted. The report states "
    "neither the KV cache nor the tokens of a step. Assumed: FP8 keys and values, as NVIDIA's "
    "checkpoint has them; nine tenths of what 72.7 GB of weights and 5.2 GB of the engine leave "
    "of 151 GB, which hold 23.9 whole requests; steps of 8,192 tokens; different prompts. Rows "
    "that name no policy are of the one that evicts none, `zoo.peak_memory` with the limits as "
    "lengths. The other one is `chunked_prefill`: like TensorRT-LLM's source, it admits a request "
    "if its prompt fits, and evicts the newest. As 16,384 of 16,896 tokens are prompt, it holds "
    "one request more at most, and evicts five times. The published 278 s more are one more "
    "prefill for each request, so another mechanism must evict; the report did not find it "
    "either, and three of its replies ended early under that policy.",
    run=_run_no_evict,
)
