"""How well simulation agrees with reality: the same requests on both, at several loads.

    python benchmarks/fidelity.py [--time-scales 3 2 0.6] [--seeds 3] [--requests 200] [--again]
        [--workload configs/workloads/mixed.yaml] [--profile FILE] [--model DIR] CONFIG...

Runs every configuration live, calibrates the model before and after each load (unless `--profile`
names a profile: a shared machine is not as fast in one minute as in the next), and simulates. First
table: simulated over live, per load and measure. Second: each configuration against the first;
where the live difference is distinguishable from noise, does the simulated one point the same way?
`--again` runs everything live a second time and asks the same of that: no simulation can agree with
a machine better than the machine does with itself. Wants it otherwise idle. The last line is JSON.
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
from aioserve.lab.calibration import Measurements, calibrate, measure, write_profile
from aioserve.lab.comparison.candidates import Candidate, load_candidates
from aioserve.lab.comparison.document import Document, compare
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload

CONFIGS = [
    f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "hrrn", "mlfq", "latency_budget")
]
GOAL = 0.15  # relative error that the simulation should stay within, in these measures
MEASURES = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99")]
MEASURES += [("totals", "output_tokens_per_second")]
PAIRED = [*MEASURES, ("e2e", "p50"), ("gap", "p99")]  # whose differences are compared
NUM_KV_BLOCKS = 4096  # the same on both sides: the default depends on the runner


def value(result: dict[str, Any], measure_name: str, statistic: str) -> float:
    """One number of one configuration's result."""
    if measure_name == "totals":
        return float(result["totals"][statistic])
    return float(result["durations"][measure_name][statistic])


def run(
    candidates: list[Candidate], workloads: list[Workload], label: str, *, is_live: bool
) -> Document:
    """Every candidate on every workload."""
    gc.collect()
    total = len(candidates) * sum(len(workload.requests) for workload in workloads)
    with tqdm(total=total, desc=label, unit="req", disable=not sys.stderr.isatty()) as bar:
        return compare(candidates, workloads, is_live=is_live, progress=bar.update)


def together(before: Measurements, after: Measurements) -> Measurements:
    """Both, as one."""
    return before._replace(
        steps=before.steps + after.steps, first_tokens=before.first_tokens + after.first_tokens
    )


def ratios(label: str, what: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Per configuration and measure: live, simulated, and their ratio; printed as they come.

    `what` is "simulated", or "again" for a second live run in its place.
    """
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
                    what: b,
                }
            )
            unit, scale = ("", 1.0) if measure_name == "totals" else ("ms", 1e3)
            mark = " " if abs(b / a - 1) <= GOAL else "*"
            cells.append(f"{scale * a:8.1f}{unit} {b / a:5.2f}{mark}")
        print(f"{label:>10}  {what:9} {real['name']:16}" + "".join(f"{c:>18}" for c in cells))
    return rows


def directions(label: str, what: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Where the live difference to the first configuration is sure: is the simulated one alike?"""
    found = []
    pairs = list(zip(live["results"], simulated["results"], strict=True))
    for real, model in pairs[1:]:
        for measure_name, statistic in PAIRED:
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
                    what: b["value"],
                    "agree": a["value"] * b["value"] > 0,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How well simulation agrees with reality.")
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--workload", default="configs/workloads/mixed.yaml")
    parser.add_argument("--time-scales", type=float, nargs="+", default=[3.0, 2.0, 0.6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--again", action="store_true", help="run live a second time, too")
    parser.add_argument("--profile", help="step times (default: calibrate on the spot)")
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--threads", type=int, help="of the model (default: one per core)")
    args = parser.parse_args()
    overrides: list[tuple[str, Any]] = [("cache.num_kv_blocks", NUM_KV_BLOCKS)]
    if args.model is not None:
        overrides.append(("model.model", args.model))
    if args.threads is not None:
        overrides.append(("runner.threads", args.threads))
    config = EngineConfig.load(None, overrides)
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or str(Path(folder) / "profile.yaml")
        before = asyncio.run(measure(config)) if args.profile is None else None
        cells = "".join(f"{' '.join(pair)[:17]:>18}" for pair in MEASURES)
        print(f"{'load':>10}  {'live, and so many times that':26}{cells}")
        rows: dict[str, list[dict[str, Any]]] = {"simulated": []}
        pairs: dict[str, list[dict[str, Any]]] = {"simulated": []}
        if args.again:
            rows["again"], pairs["again"] = [], []
        for scale in args.time_scales:
            source = WorkloadSource(path=args.workload, time_scale=scale, limit=args.requests)
            workloads = [source.load(seed) for seed in range(args.seeds)]
            label = f"{len(workloads[0].requests) / workloads[0].duration:.1f} req/s"
            candidates = load_candidates(args.configs, overrides)
            live = run(candidates, workloads, label, is_live=True)
            if before is not None:
                after = asyncio.run(measure(config))
                step_time = calibrate(together(before, after))
                write_profile(step_time, profile)
                print(f"{label:>10}  calibrated: {step_time.error}")
                before = after
            candidates = load_candidates(args.configs, [*overrides, ("runner.profile", profile)])
            for what in rows:
                other = run(candidates, workloads, label, is_live=what == "again")
                rows[what] += ratios(label, what, live, other)
                pairs[what] += directions(label, what, live, other)
    print(
        f"\n* off by more than {GOAL:.0%}; live differences that are sure, and these differences:"
    )
    for what in pairs:
        for pair in pairs[what]:
            sign = "agrees" if pair["agree"] else "DIFFERS"
            print(
                f"{pair['load']:>10}  {what:9} {pair['pair']:32} {pair['measure']:32}"
                f"{pair['live']:+10.4f} {pair[what]:+10.4f}  {sign}"
            )
    for what in rows:
        within = [abs(row[what] / row["live"] - 1) <= GOAL for row in rows[what]]
        agree = [pair["agree"] for pair in pairs[what]]
        print(
            f"{what}: {sum(within)} of {len(within)} within {GOAL:.0%}; "
            f"{sum(agree)} of {len(agree)} agree"
        )
    print(json.dumps({"measures": rows, "directions": pairs}))


if __name__ == "__main__":
    main()
