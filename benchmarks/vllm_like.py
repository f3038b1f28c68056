"""vLLM's scheduler beside aioserve's, with and without the preset `like: vllm`, on one clock.

    python benchmarks/vllm_like.py [--workload zoo-1-chat] [--blocks 1000] [--seeds 3]

Each order of requests is served three times on the same requests and step times: by vLLM's own
scheduler, whose waiting queue is sorted by that order before each step (the option `order` of the
scheduler `vllm`); by a policy of aioserve's with that order and `like: vllm`; and by the same
policy with aioserve's defaults. The KV blocks are few, so that requests are preempted. Shown are
means over all requests and seeds, and in brackets the difference to vLLM's, with the largest
difference of one seed. `--victims` shows the share of tokens that vLLM's scheduler computes in vain
on the lengths that `reproduce victims` assumes. Needs vLLM. The last line is JSON.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Args, Opt, Program

from aioserve.config import EngineConfig
from aioserve.config.load import LIKE
from aioserve.lab.reproduce.claims.scheduling import (
    VICTIMS_POLICY,
    VICTIMS_PUBLISHED,
    ShortestPromptScheduler,
    wasted,
)
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.synthetic import WorkloadSource, parse_prediction
from aioserve.lab.workloads.workload import Workload

program = Program(__doc__)

SHORTEST_PROMPT = f"{ShortestPromptScheduler.__module__}:{ShortestPromptScheduler.__name__}"
#: By name, aioserve's policy, the order for vLLM's queue, and what a command line would say of it.
ORDERS: dict[str, tuple[str, str | None]] = {
    "first come": ("chunked_prefill", None),
    "shortest prompt": (SHORTEST_PROMPT, SHORTEST_PROMPT),
    "shortest predicted reply": ("zoo.sjf", "zoo.sjf"),
}
MEASURES = ("TTFT, s", "end to end, s", "preemptions")


def configure(
    policy: str,
    options: dict[str, Any],
    preset: Sequence[tuple[str, Any]],
    args: Args,
) -> EngineConfig:
    """Return the settings of one candidate, alike in all but policy and preset."""
    overrides = [
        ("scheduler.policy", policy),
        ("scheduler.options", options),
        ("scheduler.max_num_seqs", args.seats),
        ("scheduler.max_num_batched_tokens", args.step_tokens),
        ("cache.num_kv_blocks", args.blocks),
        ("model.max_model_len", 4096),
        ("runner.profile", args.profile),
        *preset,
    ]
    return simulated(EngineConfig.load(None, overrides))


def measure(config: EngineConfig, workload: Workload) -> tuple[float, float, float]:
    """Return the `MEASURES` of a run."""
    outcome = simulate(config, workload)
    requests = [request for request in outcome.requests if request.is_finished]
    return (
        statistics.mean(request.ttft for request in requests),
        statistics.mean(request.end - request.arrival for request in requests),
        outcome.num_preemptions,
    )


def candidates(name: str, args: Args) -> dict[str, EngineConfig]:
    """Return the three that serve an order."""
    policy, order = ORDERS[name]
    options: dict[str, Any] = {}
    if policy == "chunked_prefill":
        options["chunk_size"] = args.step_tokens
    return {
        "vLLM": configure("vllm", {} if order is None else {"order": order}, (), args),
        "like: vllm": configure(policy, options, LIKE["vllm"], args),
        "aioserve's defaults": configure(policy, options, (), args),
    }


def show_victims(seeds: int) -> dict[str, Any]:
    """Print the shares beside those of the claim's own policy, which preempts the newest."""
    document = {}
    print("| KV blocks | vLLM | newest preempted, as the claim has it |\n|---|---|---|")
    for blocks in VICTIMS_PUBLISHED:
        shares = [
            statistics.mean(wasted(policy, {}, blocks, seed)[1] for seed in range(seeds))
            for policy in ("vllm", VICTIMS_POLICY)
        ]
        print(f"| {blocks} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
        document[str(blocks)] = shares
    return document


@program.command(
    workload=Opt("zoo-1-chat", "a file, or a shipped name"),
    limit=300,
    time_scale=1.0,
    blocks=1000,
    seats=64,
    step_tokens=2048,
    profile="zoo-1",
    seeds=3,
    victims=False,
)
def main(args: Args) -> dict[str, Any]:
    """Serve each order three times."""
    if args.victims:
        return show_victims(args.seeds)
    path = args.workload
    if not Path(path).exists():
        path = str(ROOT / f"configs/workloads/{path}.yaml")
    source = WorkloadSource(
        path=path,
        limit=args.limit,
        time_scale=args.time_scale,
        prediction=parse_prediction("exact"),
    )
    workloads = [source.load(seed) for seed in range(args.seeds)]
    document: dict[str, Any] = {}
    print("| order | | " + " | ".join(MEASURES) + " |\n|---|---|" + "---|" * len(MEASURES))
    for name in ORDERS:
        runs = {
            shown: [measure(config, workload) for workload in workloads]
            for shown, config in candidates(name, args).items()
        }
        for shown, rows in runs.items():
            cells = []
            for i in range(len(MEASURES)):
                own, theirs = [row[i] for row in rows], [row[i] for row in runs["vLLM"]]
                mean, base = statistics.mean(own), statistics.mean(theirs)
                cell = f"{mean:.4g}"
                if shown != "vLLM" and base:
                    worst = max(abs(a / b - 1) for a, b in zip(own, theirs, strict=True) if b)
                    cell += f" ({mean / base - 1:+.1%}, {worst:.1%})"
                cells.append(cell)
            print(f"| {name} | {shown} | " + " | ".join(cells) + " |", flush=True)
        document[name] = runs
    return document


if __name__ == "__main__":
    program.main()
