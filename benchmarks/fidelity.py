"""How well simulation agrees with reality: the same requests on both, at several loads.

    python benchmarks/fidelity.py [--time-scales 2 1 0.6] [--seeds 3] [--requests 200]
        [--workload configs/workloads/mixed.yaml] [--profile FILE] [--model DIR] CONFIG...

Calibrates the model on this machine (unless `--profile` names a profile), then runs every
configuration live and simulated. First table: simulated over live, per load and measure. Second:
each configuration against the first; where the live difference is distinguishable from noise, does
the simulated one point the same way? Wants an otherwise idle machine. The last line is JSON.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from aioserve.config import EngineConfig
from aioserve.lab.calibrate import calibrate, measure, write_profile
from aioserve.lab.compare import Candidate, Document, compare, load_candidates
from aioserve.lab.source import WorkloadSource
from aioserve.lab.workload import Workload

CONFIGS = [
    f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "hrrn", "mlfq", "latency_budget")
]
MEASURES = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2e", "p50")]
MEASURES += [("gap", "p99"), ("totals", "output_tokens_per_second")]
GOAL = 0.15  # relative error that the simulation should stay within
NUM_KV_BLOCKS = 4096  # the same on both sides: the default depends on the runner


def value(result: dict[str, Any], measure_name: str, statistic: str) -> float:
    """One number of one configuration's result."""
    if measure_name == "totals":
        return float(result["totals"][statistic])
    return float(result["durations"][measure_name][statistic])


def run(
    candidates: list[Candidate], workloads: list[Workload], label: str
) -> tuple[Document, Document]:
    """The same live and simulated."""
    total = 2 * len(candidates) * sum(len(workload.requests) for workload in workloads)
    with tqdm(total=total, desc=label, unit="req", disable=not sys.stderr.isatty()) as bar:
        simulated = compare(candidates, workloads, progress=bar.update)
        gc.collect()
        return compare(candidates, workloads, is_live=True, progress=bar.update), simulated


def ratios(label: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Per configuration and measure: live, simulated, and their ratio; printed as they come."""
    rows = []
    for real, model in zip(live["results"], simulated["results"], strict=True):
        cells = []
        for measure_name, statistic in MEASURES:
            a, b = value(real, measure_name, statistic), value(model, measure_name, statistic)
            rows.append(
                {
                    "load": label,
                    "config": real["name"],
                    "measure": f"{measure_name} {statistic}",
                    "live": a,
                    "simulated": b,
                }
            )
            unit, scale = ("", 1.0) if measure_name == "totals" else ("ms", 1e3)
            mark = " " if abs(b / a - 1) <= GOAL else "*"
            cells.append(f"{scale * a:8.1f}{unit} {b / a:5.2f}{mark}")
        print(f"{label:>10}  {real['name']:16}" + "".join(f"{cell:>18}" for cell in cells))
    return rows


def directions(label: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Where the live difference to the first configuration is sure: is the simulated one alike?"""
    found = []
    pairs = list(zip(live["results"], simulated["results"], strict=True))
    for real, model in pairs[1:]:
        for measure_name, statistic in MEASURES:
            a = real["against_first"]["differences"][measure_name].get(statistic)
            b = model["against_first"]["differences"][measure_name].get(statistic)
            if a is None or b is None or not a["is_distinguishable"]:
                continue
            found.append(
                {
                    "load": label,
                    "pair": f"{real['name']} against {pairs[0][0]['name']}",
                    "measure": f"{measure_name} {statistic}",
                    "live": a["value"],
                    "simulated": b["value"],
                    "agree": a["value"] * b["value"] > 0,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How well simulation agrees with reality.")
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--workload", default="configs/workloads/mixed.yaml")
    parser.add_argument("--time-scales", type=float, nargs="+", default=[2.0, 1.0, 0.6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--profile", help="step times (default: calibrate on the spot)")
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--threads", type=int, help="of the model (default: one per core)")
    args = parser.parse_args()
    overrides: list[tuple[str, Any]] = [("cache.num_kv_blocks", NUM_KV_BLOCKS)]
    if args.model is not None:
        overrides.append(("model.model", args.model))
    if args.threads is not None:
        overrides.append(("runner.threads", args.threads))
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile
        if profile is None:
            profile = str(Path(folder) / "profile.yaml")
            step_time = calibrate(asyncio.run(measure(EngineConfig.load(None, overrides))))
            write_profile(step_time, profile)
            print(f"calibrated: {step_time.error}")
        candidates = load_candidates(args.configs, [*overrides, ("runner.profile", profile)])
        cells = "".join(f"{' '.join(pair)[:17]:>18}" for pair in MEASURES)
        print(f"{'load':>10}  {'live, sim/live':16}{cells}")
        rows, pairs = [], []
        for scale in args.time_scales:
            source = WorkloadSource(path=args.workload, time_scale=scale, limit=args.requests)
            workloads = [source.load(seed) for seed in range(args.seeds)]
            label = f"{len(workloads[0].requests) / workloads[0].duration:.1f} req/s"
            live, simulated = run(candidates, workloads, label)
            rows += ratios(label, live, simulated)
            pairs += directions(label, live, simulated)
    print(
        f"\n* off by more than {GOAL:.0%}; live differences that are sure, and the simulated ones:"
    )
    for pair in pairs:
        sign = "agrees" if pair["agree"] else "DIFFERS"
        print(
            f"{pair['load']:>10}  {pair['pair']:32} {pair['measure']:32}"
            f"{pair['live']:+10.4f} {pair['simulated']:+10.4f}  {sign}"
        )
    within = [abs(row["simulated"] / row["live"] - 1) <= GOAL for row in rows]
    agree = [pair["agree"] for pair in pairs]
    print(f"{sum(within)} of {len(within)} within {GOAL:.0%}; {sum(agree)} of {len(agree)} agree")
    print(json.dumps({"measures": rows, "directions": pairs}))


if __name__ == "__main__":
    main()
