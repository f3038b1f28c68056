"""How far a simulation is off where it was not calibrated: another policy, another load.

    python benchmarks/held_out.py [--loads 0.5 0.8 1.0 1.1] [--seeds 3] [--requests 120]
        [--workload configs/workloads/mixed.yaml] [--model DIR] [--threads N] CONFIG...

Finds the capacity of the first configuration (requests a second when all come at once, simulated),
runs every configuration live at each share of it with a decision log, twice, and simulates the same
requests with step times that are fitted to steps of a log:

    same         of this very policy and load: what calibration can do at best
    policy       of the first configuration at this load: the policy is held out
    load         of this policy at the lowest load: the load is held out
    live again   the second live run beside the first: no simulation agrees better than that

Printed are mean absolute percentage errors of TTFT, gap and end to end, over their mean, median and
p99 with all seeds pooled, and of the throughput: at the knee single runs are chaotic, and so are
both sides. Wants the machine otherwise idle. The last line is JSON.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.lab.calibration import write_profile
from aioserve.lab.comparison.candidates import load_candidates
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.logs.what_if import read_traffic
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import run_live, simulate, simulated
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload

CONFIGS = [f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "mlfq")]
NUM_KV_BLOCKS = 4096  # the same on both sides: the default depends on the runner
AT_ONCE = 1e-6  # time scale at which all requests come at one time
MEASURES = ("TTFT", "gap", "end to end", "tokens/s")

Floats = npt.NDArray[np.float64]


def measure(outcomes: list[RunOutcome]) -> dict[str, Floats]:
    """By measure: mean, median and p99 over all requests of all seeds; of the throughput one."""
    requests = [request for outcome in outcomes for request in outcome.requests]
    gaps = np.concatenate([np.diff(np.frombuffer(r.token_times)) for r in requests])
    values = {
        "TTFT": np.array([r.ttft for r in requests]),
        "gap": gaps,
        "end to end": np.array([r.end - r.arrival for r in requests]),
    }
    found = {
        name: np.array([np.mean(v), np.median(v), np.quantile(v, 0.99)])
        for name, v in values.items()
    }
    num_tokens = sum(len(r.token_times) for r in requests)
    found["tokens/s"] = np.array([num_tokens / sum(outcome.end for outcome in outcomes)])
    return found


def errors(live: dict[str, Floats], other: dict[str, Floats]) -> dict[str, float]:
    """By measure: the mean absolute error of `other` as a share of `live`."""
    return {name: float(np.mean(np.abs(other[name] / live[name] - 1))) for name in MEASURES}


class Bench:
    """The configurations, and the folder in which logs and profiles lie."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._overrides: list[tuple[str, Any]] = [("cache.num_kv_blocks", NUM_KV_BLOCKS)]
        if args.model is not None:
            self._overrides.append(("model.model", args.model))
        if args.threads is not None:
            self._overrides.append(("runner.threads", args.threads))

    def workloads(self, time_scale: float) -> list[Workload]:
        """The requests of each seed, in `time_scale` times their time."""
        source = WorkloadSource(
            path=self._args.workload, time_scale=time_scale, limit=self._args.requests
        )
        return [source.load(seed) for seed in range(self._args.seeds)]

    def live(self, config: str, time_scale: float) -> tuple[dict[str, Floats], str]:
        """What was measured, and a profile that is fitted to the steps of the first seed."""
        outcomes = []
        log = self._folder / "log"
        for seed, workload in enumerate(self.workloads(time_scale)):
            noted = [("scheduler.decision_log", str(log))] if seed == 0 else []
            outcomes.append(run_live(self._load(config, *noted), workload))
        profile = self._folder / f"{len(list(self._folder.iterdir()))}.yaml"
        write_profile(read_traffic(DecisionLog(str(log))).step_time, str(profile))
        return measure(outcomes), str(profile)

    def simulated(self, config: str, profile: str, time_scale: float) -> dict[str, Floats]:
        """What the same requests measure when steps take the time of that profile."""
        settings = simulated(self._load(config, ("runner.profile", profile)))
        return measure([simulate(settings, load) for load in self.workloads(time_scale)])

    def capacity(self, config: str, profile: str) -> tuple[float, float]:
        """Requests a second when all come at once, and the time scale that asks for as many."""
        once = self.workloads(AT_ONCE)
        outcomes = [
            simulate(simulated(self._load(config, ("runner.profile", profile))), load)
            for load in once
        ]
        rate = sum(len(o.requests) for o in outcomes) / sum(o.end for o in outcomes)
        asked = self.workloads(1.0)
        usual = sum(len(w.requests) for w in asked) / sum(w.duration for w in asked)
        return rate, usual / rate

    def _load(self, config: str, *more: tuple[str, Any]) -> EngineConfig:
        (candidate,) = load_candidates([config], [*self._overrides, *more])
        return candidate.config


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How far a simulation is off where it was not fit."
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--workload", default="configs/workloads/mixed.yaml")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--threads", type=int, help="of the model (default: one per core)")
    args = parser.parse_args()
    names = {config: Path(config).stem for config in args.configs}
    first, lowest = args.configs[0], min(args.loads)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        _, warm = bench.live(first, 1.0)
        rate, scale = bench.capacity(first, warm)
        print(f"capacity: {rate:.1f} requests/s under {names[first]}")
        measured, profiles, again = {}, {}, {}
        for load, config in itertools.product(args.loads, args.configs):
            measured[load, config], profiles[load, config] = bench.live(config, scale / load)
            again[load, config], _ = bench.live(config, scale / load)
        print(
            f"{'load':>5}  {'policy':16} {'predicted from':12}"
            + "".join(f"{m:>12}" for m in MEASURES)
        )
        for load, config in itertools.product(args.loads, args.configs):
            fitted = {"same": (load, config), "policy": (load, first), "load": (lowest, config)}
            for what, source in fitted.items():
                if what == "same" or source != (load, config):
                    found = bench.simulated(config, profiles[source], scale / load)
                    rows.append((load, names[config], what, errors(measured[load, config], found)))
            found = again[load, config]
            rows.append((load, names[config], "live again", errors(measured[load, config], found)))
        for load, name, what, found_errors in rows:
            cells = "".join(f"{100 * found_errors[m]:11.1f}%" for m in MEASURES)
            print(f"{load:5.2f}  {name:16} {what:12}{cells}")
        print("\nmeans over the policies")
        for load, what in itertools.product(args.loads, ("same", "policy", "load", "live again")):
            own = [e for at, _, kind, e in rows if at == load and kind == what]
            if own:
                cells = "".join(f"{100 * np.mean([e[m] for e in own]):11.1f}%" for m in MEASURES)
                print(f"{load:5.2f}  {'':16} {what:12}{cells}")
    keys = ("load", "policy", "predicted_from", "errors")
    print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
