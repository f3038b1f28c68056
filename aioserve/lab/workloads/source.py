"""Where workloads come from: a YAML file that describes one, or a trace; and cutting.

Knows file names and options of the command line; leaves formats to others.
"""

from pathlib import Path

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.workloads.predictions import AnyPrediction, with_predictions
from aioserve.lab.workloads.reply_limit import ReplyLimit
from aioserve.lab.workloads.synthetic import generate
from aioserve.lab.workloads.synthetic_spec import read_spec
from aioserve.lab.workloads.traces import SUFFIXES, read_trace
from aioserve.lab.workloads.workload import Workload
from aioserve.shipped import find_workload


class WorkloadSource(msgspec.Struct, frozen=True, kw_only=True):
    """A workload file and what to do with it. Times in seconds."""

    path: str  # or a name in `configs/workloads/`
    time_scale: float = 1.0
    start: float = 0.0
    duration: float | None = None
    limit: int | None = None  # requests
    min_turns: int = 1  # of the conversations that are kept
    copies: int = 1  # crowds of such clients, each with texts of its own
    reply_limit: ReplyLimit = ReplyLimit()  # what clients allow for a reply
    rate: float | None = None  # of the arrivals of a trace that has none, per second
    prediction: AnyPrediction | None = None  # of each reply's length, as a hint

    @property
    def is_trace(self) -> bool:
        """Whether other seeds would only change token ids."""
        return Path(self.path).suffix in SUFFIXES and self.rate is None

    def load(self, seed: int) -> Workload:
        """The requests for this seed. Raises `ConfigError` that says what is wrong where."""
        path = find_workload(self.path)
        if path.suffix in SUFFIXES:
            workload = read_trace(self.path, seed, self.rate)
        elif self.rate is not None:
            raise ConfigError(f"workload {self.path}: --rate is for traces without arrivals")
        elif path.suffix in (".yaml", ".yml"):
            workload = generate(read_spec(path), seed, path.name)
        else:
            raise ConfigError(
                f"workload {self.path}: expected .yaml (a description), .csv (Azure, BurstGPT, "
                "lengths) or .jsonl (Mooncake, Qwen-Bailian, sessions of agents or a request log), "
                f"got {path.suffix or 'no suffix'!r}"
            )
        return self.cut(workload)

    def cut(self, workload: Workload) -> Workload:
        """The part that is wanted, at the speed that is wanted."""
        if self.start or self.duration is not None or self.limit is not None:
            workload = workload.cut(start=self.start, duration=self.duration, limit=self.limit)
        if self.min_turns > 1:
            workload = workload.conversations(self.min_turns)
        if self.copies > 1:
            workload = workload.times(self.copies)
        if self.reply_limit != workload.reply_limit:
            workload = msgspec.structs.replace(workload, reply_limit=self.reply_limit)
        if self.prediction is not None:
            workload = with_predictions(workload, self.prediction)
        return workload if self.time_scale == 1 else workload.scaled(self.time_scale)
