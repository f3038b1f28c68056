"""What VTC would have given on the machine that was measured under first come, first served.

The artifact of "Fairness in Serving Large Language Models" (Sheng et al., OSDI'24) has what S-LoRA
did on one A10G with every request of its workloads. A profile is fitted to the files of first come,
first served alone, and the runs under (weighted) VTC are predicted: this project's engine, KV cache
and clock, the artifact's rounds and counters as a policy. Files of VTC are read for their arrivals,
and for what is printed beside the prediction.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.calibration.measurement import write_profile
from aioserve.lab.outcomes.fit import Session, fit_outcomes
from aioserve.lab.outcomes.reader import Outcome, as_workload, read_outcomes
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import simulated
from aioserve.runner.profile import StepTimeModel

Floats = npt.NDArray[np.float64]

POLICY = "aioserve.lab.reproduce.prompt_rounds:PromptRoundsScheduler"
# The facts of the artifact's server that the files do not tell, from its source.
POOL_TOKENS = 10_000
CLIENT_TOKENS = 32  # of the pool, for the adapter of each client in the batch
EXTRA_PROMPT_TOKENS = 2  # that the server puts before each prompt
WEIGHTS = {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}  # of the clients of the weighted workload
# Runs whose last arrivals are as far apart, as a share, were made in different sessions.
SAME_LENGTH = 0.05
MIN_REQUESTS = 100  # of a client that gets a line of its own


class Target(msgspec.Struct, frozen=True):
    """One workload of which VTC's outcome is predicted."""

    name: str
    arrivals: list[Outcome]
    weights: dict[str, float]  # empty: plain VTC
    session_of: str  # the file of first come, first served that tells the speed of the session
    session: Session
    measured: list[Outcome] | None  # under VTC; None: not published here, or kept back
    measured_fcfs: list[Outcome] | None  # the same arrivals, first come, first served

    @property
    def window(self) -> float:
        """Seconds until the clients stop to ask, to the nearest minute."""
        return 60.0 * round(self.arrivals[-1].arrival_s / 60)


def read_logs(folder: Path) -> dict[str, list[Outcome]]:
    """The outcomes in a folder by file name without `.csv`, as `overload.fcfs`."""
    found = {
        path.name.removesuffix(".csv"): read_outcomes(path, extra_prompt_tokens=EXTRA_PROMPT_TOKENS)
        for path in sorted(folder.glob("*.csv"))
    }
    if not any(name.endswith(".fcfs") for name in found):
        raise ConfigError(f"{folder} has no file NAME.fcfs.csv of outcomes")
    return found


def find_targets(logs: dict[str, list[Outcome]], sessions: dict[str, Session]) -> list[Target]:
    """Every workload of the logs. Where VTC was measured, its file has the arrivals; else that of
    first come, first served. A session is that of the workload's own file of first come, first
    served if it is as long, else of the file whose length is nearest.
    """
    targets = []
    for name in sorted({file.rpartition(".")[0] for file in logs}):
        fcfs = logs.get(f"{name}.fcfs")
        weighted = logs.get(f"{name}.wvtc")
        vtc = weighted or logs.get(f"{name}.vtc")
        arrivals = vtc or fcfs
        assert arrivals is not None
        own = f"{name}.fcfs"
        if own not in sessions or not _as_long(logs[own], arrivals):
            own = min(sessions, key=lambda file: _length_ratio(logs[file], arrivals))
        is_same = fcfs is not None and len(fcfs) == len(arrivals)
        targets.append(
            Target(
                name,
                arrivals,
                WEIGHTS if weighted else {},
                own,
                sessions[own],
                vtc,
                fcfs if is_same else None,
            )
        )
    return targets


def _length_ratio(log: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    a, b = log[-1].arrival_s, other[-1].arrival_s
    return max(a, b) / min(a, b)


def _as_long(log: Sequence[Outcome], other: Sequence[Outcome]) -> bool:
    return _length_ratio(log, other) < 1 + SAME_LENGTH


def make_config(
    profile: str, target: Target, order: str, *, jitter: float, speed: float, seed: int
) -> EngineConfig:
    """The artifact's server: its pool, its rounds, and `speed` times its session's host."""
    options: dict[str, Any] = {
        "order": order,
        "pool_tokens": POOL_TOKENS,
        "client_tokens": CLIENT_TOKENS,
        "sees_late": True,
        "weights": target.weights,
    }
    overrides: list[tuple[str, Any]] = [
        ("runner.profile", profile),
        ("runner.seed", seed),
        ("runner.step_host_factor", target.session.host_factor / speed),
        ("runner.step_cold_ms", target.session.cold_ms),
        ("runner.step_jitter", jitter),
        ("scheduler.policy", POLICY),
        ("scheduler.options", options),
        ("scheduler.max_num_seqs", 1024),
        ("scheduler.max_num_batched_tokens", 8192),
        ("scheduler.max_waiting_requests", 10**6),
        ("cache.num_kv_blocks", 2 * POOL_TOKENS // 16),  # the policy's pool is what is short
        ("cache.enable_prefix_caching", False),
        ("cache.watermark", 0.0),
        ("model.max_model_len", 4096),
    ]
    return simulated(EngineConfig.load(None, overrides))


class Run(msgspec.Struct, frozen=True):
    """The results of one run, measured or simulated; arrays are in the order of the arrivals."""

    first: Floats  # seconds at which each request had its first token
    end: Floats  # and its last
    arrival: Floats

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Run":
        """A run that was measured."""
        return cls(
            np.array([outcome.first for outcome in outcomes]),
            np.array([outcome.end for outcome in outcomes]),
            np.array([outcome.arrival_s for outcome in outcomes]),
        )

    def finished(self, window: float) -> int:
        """Requests that had their last token within the first `window` seconds."""
        return int((self.end <= window).sum())

    @property
    def ttft(self) -> Floats:
        """Seconds from the arrival of each request to its first token."""
        return self.first - self.arrival


class Prediction(msgspec.Struct, frozen=True):
    """A target with its runs: under VTC and first come, first served, with as many seeds."""

    target: Target
    vtc: list[Run]
    fcfs: list[Run]


def predict(
    folder: Path,
    *,
    num_runs: int = 5,
    jitter: float = 0.01,
    speed: float = 1.0,
    names: Sequence[str] = (),
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
) -> tuple[StepTimeModel, dict[str, Session], list[Prediction]]:
    """The profile, the sessions by file, and the predictions of all targets (or of `names`).

    Times of steps vary by `jitter`, another way in each of the `num_runs`. `speed` divides what
    the host takes in every session: 1.03 is a machine that is 3% quicker. Raises `ConfigError`.
    """
    logs = read_logs(folder)
    files = [file for file in logs if file.endswith(".fcfs")]
    source = f"fitted to {sum(len(logs[file]) for file in files)} outcomes in {folder.name}"
    model, found = fit_outcomes([logs[file] for file in files], source)
    sessions = dict(zip(files, found, strict=True))
    targets = find_targets(logs, sessions)
    if unknown := set(names) - {target.name for target in targets}:
        raise ConfigError(
            f"{folder} has no workload {', '.join(sorted(unknown))}; it has "
            f"{', '.join(target.name for target in targets)}"
        )
    targets = [target for target in targets if not names or target.name in names]
    with TemporaryDirectory() as scratch:
        profile = str(Path(scratch) / "profile.yaml")
        write_profile(model, profile)
        runs = [
            (
                make_config(profile, target, order, jitter=jitter, speed=speed, seed=seed),
                as_workload(target.arrivals, target.name, seed),
                None,
            )
            for target in targets
            for order in ("vtc", "fcfs")
            for seed in range(num_runs)
        ]
        outcomes = _as_runs(simulate_all(runs, num_jobs, progress))
        predictions = [
            Prediction(
                target,
                [next(outcomes) for _ in range(num_runs)],
                [next(outcomes) for _ in range(num_runs)],
            )
            for target in targets
        ]
    return model, sessions, predictions


def _as_runs(outcomes: Iterator[Any]) -> Iterator[Run]:
    for outcome in outcomes:
        requests = outcome.requests
        if unserved := sum(not request.is_finished for request in requests):
            raise ConfigError(f"{unserved} requests of a simulated run were not served")
        yield Run(
            np.array([request.token_times[0] for request in requests]),
            np.array([request.end for request in requests]),
            np.array([request.arrival for request in requests]),
        )
