"""What VTC would have given on the machine that was measured under first come, first served.

The artifact of "Fairness in Serving Large Language Models" (Sheng et al., OSDI'24) has what S-LoRA
did on one A10G with every request of its workloads. A profile is fitted to the files of first
come, first served alone, and the runs under (weighted) VTC are predicted: this project's engine,
KV cache and clock, the artifact's rounds and counters as a policy. Files of VTC are read for their
arrivals, and for what is printed beside the prediction.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.calibration import write_profile
from aioserve.lab.outcomes import Outcome, Session, as_workload, fit_outcomes, read_outcomes
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import Progress, simulated
from aioserve.runner.step_times import StepTimeModel
from aioserve.scheduler import (
    BaseScheduler,
    PeakMemory,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)

MOST_CLIENTS = 4096  # whose counters are kept: more only while that many have requests


class PromptRoundsScheduler(BaseScheduler):
    """Whole prompts in rounds, then decodes; admission by peak memory, order by FCFS or VTC."""

    runs_whole_prompts = True

    class Options(PolicyOptions):
        order: Literal["fcfs", "vtc"] = "fcfs"
        pool_tokens: PositiveInt | None = None  # KV tokens (default: what the KV cache holds)
        round_tokens: PositiveInt = 3072  # most prompt tokens of a round of several prompts
        decode_steps: PositiveInt = (
            10  # steps of decodes after a round before the next is looked for
        )
        client_tokens: int = (
            0  # tokens of the pool that each client in the batch takes (its adapter)
        )
        sees_late: bool = False  # a request that comes while others run is seen one step later
        input_weight: PositiveFloat = 1.0  # charge for a prompt token
        output_weight: PositiveFloat = 2.0  # charge for a generated token
        weights: dict[str, PositiveFloat] = {}  # noqa: RUF012 - share by client; 1 if not named

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: dict[str, float] = defaultdict(float)  # virtual tokens, by client
        self._num_decodes = 0  # steps since the last round
        self._ran: set[str] = set()  # ids of the requests of the last step
        self._come: dict[str, Request] = {}  # since the last step; not seen yet
        self._late: dict[str, Request] = {}  # in the step before that; not seen yet

    def order(self, request: Request) -> float:
        if request.num_computed_tokens == 0:
            self._come[request.request_id] = request
        return request.arrival_time

    def schedule(self) -> SchedulerOutput:
        running = self.running
        self._charge_for_ends({request.request_id for request in running})
        self._see_arrivals()
        step = self.new_step()
        if not running or self._num_decodes >= self.options.decode_steps:
            num_admitted = num_tokens = 0
            peak, users = PeakMemory(running), {request.user for request in running}
            most = peak.peak  # no less than the peak, which is computed only where that matters
            while (request := self._next()) is not None:
                num_tokens += request.num_tokens
                if num_admitted and num_tokens > self.options.round_tokens:
                    break
                users.add(request.user)
                most += max(request.max_total_tokens, request.num_tokens + 1)
                if (running or num_admitted) and most >= (pool := self._pool(len(users))):
                    most = peak.with_request(request)
                    if most >= pool:
                        break
                if not step.admit(request, whole=True):
                    break
                num_admitted += 1
                peak.add(request)
                self._charge(request.user, self.options.input_weight * request.num_tokens)
            if num_admitted:
                self._num_decodes = 0
                self._ran = {request.request_id for request in self.running}
                return step.output()
        for request in running:
            step.run(request)
            self._charge(request.user, self.options.output_weight)
        self._num_decodes += 1
        self._ran = {request.request_id for request in self.running}
        return step.output()

    def _pool(self, num_users: int) -> int:
        """Return the tokens that a batch with requests of so many clients may have."""
        pool: int = self.options.pool_tokens or self.kv_cache.num_slots
        pool -= self.options.client_tokens * num_users
        return pool

    def _next(self) -> Request | None:
        """Return the request that is to enter next, if one is there to be seen."""
        if self.options.order == "fcfs":
            request = next(iter(self.waiting), None)
            return None if request is None or self._is_unseen(request) else request
        seen = [request for request in self.waiting.heads() if not self._is_unseen(request)]
        return min(seen, key=lambda r: (self.served[r.user], r.order_key), default=None)

    def _is_unseen(self, request: Request) -> bool:
        return request.request_id in self._come or request.request_id in self._late

    def _see_arrivals(self) -> None:
        """Put requests that have arrived into their lines. A client of which none waited is lifted
        to the lowest counter of the others that wait.
        """
        seen = {**self._late}
        if self.options.sees_late and self.running:
            self._late, self._come = self._come, {}
        else:
            seen |= self._come
            self._late, self._come = {}, {}
        if not seen:
            return
        waiting = {request.user: request for request in self.waiting.heads()}
        present = {u: r for u, r in waiting.items() if not self._is_unseen(r)}
        standing = {u for u, r in present.items() if r.request_id not in seen}
        for request in seen.values():
            user = request.user
            if user not in standing and present.get(user) is request:
                others = [self.served[u] for u in standing if u != user]
                self.served[user] = max(self.served[user], min(others, default=0.0))
                standing.add(user)
        if len(self.served) > MOST_CLIENTS:
            self._forget_the_absent()

    def _forget_the_absent(self) -> None:
        """Drop counters of clients without requests, those that came first; the artifact, which has
        27 clients, keeps all.
        """
        present = {request.user for request in (*self.waiting, *self.running)}
        absent = [user for user in self.served if user not in present]
        for user in absent[: len(self.served) - MOST_CLIENTS * 15 // 16]:
            del self.served[user]

    def _charge_for_ends(self, running: set[str]) -> None:
        """The artifact charges all that run once more whenever a request ends."""
        if self._ran - running:
            for request in self.running:
                self._charge(request.user, self.options.output_weight)

    def _charge(self, user: str, virtual_tokens: float) -> None:
        self.served[user] += virtual_tokens / self.options.weights.get(user, 1.0)


# The runs: a profile and sessions of first come, first served in, runs under both orders out.


Floats = npt.NDArray[np.float64]

POLICY = "aioserve.lab.reproduce.vtc:PromptRoundsScheduler"
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
    """Return the outcomes in a folder by file name without `.csv` or `.csv.gz`, as
    `overload.fcfs`.
    """
    found = {
        path.name.removesuffix(".gz").removesuffix(".csv"): read_outcomes(
            path, extra_prompt_tokens=EXTRA_PROMPT_TOKENS
        )
        for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])
    }
    if not any(name.endswith(".fcfs") for name in found):
        raise ConfigError(f"{folder} has no file NAME.fcfs.csv of outcomes")
    return found


def find_targets(logs: dict[str, list[Outcome]], sessions: dict[str, Session]) -> list[Target]:
    """Return every workload of the logs. Where VTC was measured, its file has the arrivals; else
    that of first come, first served. A session is that of the workload's own file of first come,
    first served if it is as long, else of the file whose length is nearest.
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
    profile: str, target: Target, order: str, *, jitter: float, host_factor: float, seed: int
) -> EngineConfig:
    """Return the artifact's server: its pool, its rounds, and how much longer than on average its
    session's host takes.
    """
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
        ("runner.step_host_factor", host_factor),
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
        """Make a run of the measured outcomes of its requests."""
        return cls(
            np.array([outcome.first for outcome in outcomes]),
            np.array([outcome.end for outcome in outcomes]),
            np.array([outcome.arrival_s for outcome in outcomes]),
        )

    def finished(self, window: float) -> int:
        """Return requests that had their last token within the first `window` seconds."""
        return int((self.end <= window).sum())

    @property
    def ttft(self) -> Floats:
        """Seconds from the arrival of each request to its first token."""
        return self.first - self.arrival


class Prediction(msgspec.Struct, frozen=True):
    """A target with its runs: under VTC and first come, first served, with as many seeds. In
    `sessions` are pairs of the same, with the hosts of the quickest and the slowest session.
    """

    target: Target
    vtc: list[Run]
    fcfs: list[Run]
    sessions: list[tuple[Run, Run]]


def predict(
    folder: Path,
    *,
    num_runs: int = 5,
    jitter: float = 0.01,
    speed: float = 1.0,
    names: Sequence[str] = (),
    num_jobs: int = 1,
    begin: Callable[[int], Progress] = lambda total: lambda count: None,
) -> tuple[StepTimeModel, dict[str, Session], list[Prediction]]:
    """Return the profile, the sessions by file, and the predictions of all targets (or of `names`).

    Times of steps vary by `jitter`, another way in each of the `num_runs`. `speed` divides what
    the host takes in every session: 1.03 is a machine that is 3% quicker. That a run under VTC is
    of the session that its target names is a guess, so two more runs have the extreme sessions.
    `begin` is told how many requests are simulated in all, and what it returns how many more are
    done. Raises `ConfigError`.
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
    factors = [session.host_factor for session in found]
    with TemporaryDirectory() as scratch:
        profile = str(Path(scratch) / "profile.yaml")
        write_profile(model, profile)
        runs = [
            (
                make_config(
                    profile, target, order, jitter=jitter, host_factor=factor / speed, seed=seed
                ),
                as_workload(target.arrivals, target.name, seed),
                None,
            )
            for target in targets
            for order in ("vtc", "fcfs")
            for seed, factor in [
                *((seed, target.session.host_factor) for seed in range(num_runs)),
                *((0, factor) for factor in (min(factors), max(factors))),
            ]
        ]
        progress = begin(sum(len(workload.requests) for _, workload, _ in runs))
        outcomes = _as_runs(simulate_all(runs, num_jobs, progress))
        predictions = []
        for target in targets:
            vtc, fcfs = ([next(outcomes) for _ in range(num_runs + 2)] for _ in range(2))
            extremes = list(zip(vtc[num_runs:], fcfs[num_runs:], strict=True))
            predictions.append(Prediction(target, vtc[:num_runs], fcfs[:num_runs], extremes))
    return model, sessions, predictions


def _as_runs(outcomes: Iterator[Any]) -> Iterator[Run]:
    for outcome in outcomes:
        arrival, first, end = outcome.served_times("a simulated run")
        yield Run(first, end, arrival)


# Predictions beside what was measured, as tables and as plain data. A value that was measured and
# not published is None.


Value = Callable[[Run], float]
Places = npt.NDArray[np.bool_]  # which requests are a client's


class Row(msgspec.Struct, frozen=True):
    """One quantity of one workload: the mean over the runs, beside the measured value. The range is
    that of the runs and of those with the quickest and the slowest host of all sessions.
    """

    name: str
    measured: float | None
    predicted: float
    least: float
    most: float

    @property
    def error(self) -> float | None:
        """The predicted value minus the measured one, as a share of that; None without one."""
        return self.predicted / self.measured - 1 if self.measured else None


class Table(msgspec.Struct, frozen=True):
    """The measured and the predicted numbers of one workload under one policy."""

    workload: str
    policy: str
    window: float  # seconds
    requests: int
    session_of: str  # the file whose host speed the runs have
    host_factor: float
    rows: list[Row]


def tabulate(prediction: Prediction) -> Table:
    """Return all rows of one workload: totals, then each client with enough requests."""
    target = prediction.target
    measured = None if target.measured is None else Run.of(target.measured)
    fcfs = None if target.measured_fcfs is None else Run.of(target.measured_fcfs)
    rows: list[Row] = []

    def add(name: str, value: Value) -> None:
        values = [value(run) for run in prediction.vtc]
        ends = [*values, *(value(run) for run, _ in prediction.sessions)]
        is_there = None if measured is None else value(measured)
        rows.append(Row(name, is_there, float(np.mean(values)), min(ends), max(ends)))

    window = target.window
    add("end of run, s", lambda run: float(run.end.max()))
    add(f"finished by {window:.0f} s", lambda run: float(run.finished(window)))
    add(f"requests/s until {window:.0f} s", lambda run: run.finished(window) / window)
    add("TTFT mean, s", lambda run: float(run.ttft.mean()))
    add("TTFT p50, s", lambda run: float(np.median(run.ttft)))
    clients = np.array([outcome.client for outcome in target.arrivals])
    for client in sorted(set(clients), key=lambda name: (len(name), name)):
        own = clients == client
        if own.sum() < min(MIN_REQUESTS, len(own) / 4):
            continue
        label = f"client {client} ({own.sum()} requests)"
        add(f"{label}: finished", _finished(own, window))
        add(f"{label}: TTFT mean, s", _mean_ttft(own))
        add(f"{label}: TTFT p50, s", _median_ttft(own))
        pairs = [*zip(prediction.vtc, prediction.fcfs, strict=True), *prediction.sessions]
        ends = [float(a.ttft[own].mean() / b.ttft[own].mean()) for a, b in pairs]
        ratios = ends[: len(prediction.vtc)]
        known = None
        if measured is not None and fcfs is not None:
            known = float(measured.ttft[own].mean() / fcfs.ttft[own].mean())
        name = f"{label}: TTFT mean, VTC/FCFS"
        rows.append(Row(name, known, float(np.mean(ratios)), min(ends), max(ends)))
    return Table(
        target.name,
        "weighted VTC" if target.weights else "VTC",
        window,
        len(target.arrivals),
        target.session_of,
        target.session.host_factor,
        rows,
    )


def _finished(own: Places, window: float) -> Value:
    return lambda run: float((run.end[own] <= window).sum())


def _mean_ttft(own: Places) -> Value:
    return lambda run: float(run.ttft[own].mean())


def _median_ttft(own: Places) -> Value:
    return lambda run: float(np.median(run.ttft[own]))


def render(table: Table) -> str:
    """Return the table for a terminal."""
    width = max(len(row.name) for row in table.rows)
    lines = [
        f"{table.workload}: {table.requests} requests under {table.policy}, host as in "
        f"{table.session_of} (factor {table.host_factor:.3f})",
        f"{'':{width}}  {'measured':>9}  {'predicted':>9}  {'runs and sessions':>18}  {'error':>7}",
    ]
    for row in table.rows:
        measured = "-" if row.measured is None else _number(row.measured)
        spread = f"{_number(row.least)} .. {_number(row.most)}"
        error = "" if row.error is None else f"{100 * row.error:+.1f}%"
        lines.append(
            f"{row.name:{width}}  {measured:>9}  {_number(row.predicted):>9}  {spread:>18}  "
            f"{error:>7}".rstrip()
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:#.4g}".rstrip(".")


def summary(tables: list[Table]) -> str:
    """Return how far the predictions lie from what is published of them, in a few lines."""
    kinds = {
        "end of run": "end of run",
        "finished": "finished by",
        "TTFT mean of clients": "TTFT mean, s",
        "ratio to FCFS of clients": "VTC/FCFS",
    }
    lines = []
    for title, mark in kinds.items():
        errors = [
            abs(row.error)
            for table in tables
            for row in table.rows
            if mark in row.name and row.error is not None and _is_of(title, row)
        ]
        if errors:
            lines.append(
                f"{title}: {len(errors)} published, mean absolute error "
                f"{100 * float(np.mean(errors)):.2f}%, largest {100 * max(errors):.2f}%"
            )
    return "\n".join(lines) or "Nothing of what is predicted is published in this folder."


def _is_of(title: str, row: Row) -> bool:
    return row.name.startswith("client") == title.endswith("clients")


def as_document(tables: list[Table]) -> list[dict[str, Any]]:
    """Return the tables as plain data, errors included."""
    return [
        {
            **msgspec.to_builtins(table),
            "rows": [{**msgspec.to_builtins(row), "error": row.error} for row in table.rows],
        }
        for table in tables
    ]


# A picture of times to first token, client by client, as SVG.


WIDTH, LEFT, RIGHT, ROW = 900, 330, 40, 22
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.range{stroke:#4078c0;stroke-width:6;stroke-linecap:round;opacity:.35}"
    ".predicted{fill:#4078c0}.measured{fill:none;stroke:#c0392b;stroke-width:2}"
)


Scale = Callable[[float], float]  # from seconds to a place on the axis


def draw(tables: list[Table]) -> str:
    """Return one line for each client of each workload, on a logarithmic axis of seconds."""
    lines = [
        (table, row) for table in tables for row in table.rows if row.name.endswith("TTFT mean, s")
    ]
    values = [v for _, row in lines for v in (row.least, row.most, row.measured) if v]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    height = 70 + ROW * (len(lines) + len(tables))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20">Mean time to first token under VTC, seconds</text>',
        f'<circle class="measured" cx="{LEFT + 300}" cy="16" r="5"/>'
        f'<text class="small" x="{LEFT + 310}" y="20">measured</text>'
        f'<circle class="predicted" cx="{LEFT + 380}" cy="16" r="3.5"/>'
        f'<text class="small" x="{LEFT + 390}" y="20">predicted; range over sessions</text>',
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="34" y2="{height - 28}"/>'
            f'<text class="small" x="{at:.1f}" y="{height - 12}" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    y = 34.0
    shown: Table | None = None
    for table, row in lines:
        if table is not shown:
            shown, y = table, y + ROW
            parts.append(
                f'<text x="10" y="{y:.0f}">{escape(table.workload)} '
                f'<tspan class="small">{table.policy}</tspan></text>'
            )
        y += ROW
        parts.append(_line(row, x, y))
    return "\n".join([*parts, "</svg>", ""])


def _line(row: Row, x: Scale, y: float) -> str:
    name = escape(row.name.removesuffix(": TTFT mean, s").replace("TTFT mean, s", "all requests"))
    middle = y - 4
    marks = [
        f'<text class="small" x="{LEFT - 12}" y="{y:.0f}" text-anchor="end">{name}</text>',
        f'<line class="range" x1="{x(row.least):.1f}" x2="{x(row.most):.1f}" y1="{middle:.1f}" '
        f'y2="{middle:.1f}"/>',
        f'<circle class="predicted" cx="{x(row.predicted):.1f}" cy="{middle:.1f}" r="3.5"/>',
    ]
    if row.measured:
        marks.append(
            f'<circle class="measured" cx="{x(row.measured):.1f}" cy="{middle:.1f}" r="6"/>'
        )
    return "".join(marks)
