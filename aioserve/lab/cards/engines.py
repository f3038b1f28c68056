"""What measured runs of engines say beside a card's tables: host times, and how right they are.

`errors.csv` has the errors of whole runs that were predicted; `python -m aioserve reproduce vllm
--errors` writes it. Knows sources of step times by what they say of themselves; predicts nothing.
"""

import csv
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from aioserve.errors import ConfigError

ERRORS = Path(__file__).with_name("errors.csv")
#: Measures of a run that the head of a report states, in its words.
MEASURES: Mapping[str, str] = {
    "e2e_mean": "mean end to end time",
    "e2e_p99": "its p99",
    "itl_mean": "mean time per token",
    "tpot_mean": "mean time per token",
    "ttft_mean": "mean TTFT",
    "ttft_p99": "its p99",
}


class Host(msgspec.Struct, frozen=True):
    """The milliseconds that an engine's host adds to each step, from a version on."""

    engine: str
    since: tuple[int, ...]  # its version
    one_ms: float  # of an engine on one card
    several_ms: float  # of an engine that tells the processes of several cards
    launch_ms: float  # of a layer that is launched kernel by kernel, outside of CUDA graphs
    depth: int  # steps under way: 2 under asynchronous scheduling
    one_source: str  # on what part of which runs the first two numbers were fitted
    several_source: str


#: One default per engine and version. The numbers of vLLM are those of `reproduce.vllm.stages`:
#: with asynchronous scheduling, which hides the host's work behind the card's. The published files
#: do not say whether these runs scheduled so; from vLLM 0.14 on that is the default.
HOSTS = (
    Host(
        "vllm",
        (0, 15),
        0.0,
        1.4,
        0.345,
        2,
        "fitted to four runs on one H100 of vLLM 0.15, asynchronous by default",
        "fitted to one run on four H100 of vLLM 0.15, asynchronous by default",
    ),
)
#: Engines by the names that a card has for them, as the words for what a source is of end.
ENGINES: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
#: Models whose attention is kept out of CUDA graphs, as some of it looks at a chunk of the context.
LAUNCHED = ("Llama4ForConditionalGeneration",)


def host_of(engine: str, version: str, num_cards: int) -> tuple[float, str]:
    """Return the milliseconds that the host adds to each step, and where the number comes from; of
    an engine of which no run has been compared, 0 and words that say so.
    """
    host = _find_host(engine, version)
    if host is None:
        return 0.0, f"no run of {engine} {version} has been compared"
    if num_cards == 1:
        return host.one_ms, host.one_source
    return host.several_ms, host.several_source


def least_ms_of(engine: str, version: str, architecture: str, num_layers: int) -> float:
    """Return the milliseconds that launching the kernels of a step takes, below which no step is:
    of a model whose layers are captured in CUDA graphs, 0.
    """
    host = _find_host(engine, version)
    return host.launch_ms * num_layers if host and architecture in LAUNCHED else 0.0


def depth_of(engine: str, version: str) -> int:
    """Return how many steps the engine has under way: that of the runs to which the host's time was
    fitted; 1 of an engine of which no run has been compared.
    """
    host = _find_host(engine, version)
    return host.depth if host else 1


def _find_host(engine: str, version: str) -> Host | None:
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    known = [host for host in HOSTS if host.engine == engine and host.since <= numbers]
    return max(known, key=lambda each: each.since, default=None)


class RunError(msgspec.Struct, frozen=True):
    """The error of one measure of whole runs, predicted by one source: a line of `errors.csv`."""

    source: str  # a name that is part of what the source of step times says of itself
    engine: str  # that ran, a key of `ENGINES`
    runs: str  # the runs that were predicted, in words
    cards: str  # on which they were measured, as the source calls them, with blanks between
    metric: str
    rows: int
    median_error: float  # the median of the absolute errors over the rows, as a share


def errors_of_runs(source: str, machine: str, engine: str = "") -> str:
    """Return a sentence on how right predictions of whole runs were that were made with step times
    of this `source`, and whether they were of this `machine`; of step times of another `engine`, a
    key of `ENGINES`, that nothing is known; "" where none of the source was compared.
    """
    own = [error for error in read_errors() if error.source in source]
    shown = [error for error in own if error.metric in MEASURES]
    if not shown:
        return ""
    first = shown[0]
    if engine and engine != first.engine:
        return (
            f"How right such predictions are is known of {ENGINES[first.engine]} alone: no run of "
            f"{ENGINES.get(engine, engine)} has been compared with one."
        )
    listed = [f"{MEASURES[error.metric]} {error.median_error:.1%}" for error in shown]
    same = any(card in machine for card in first.cards.split())
    beyond = "" if same else "; no run on this card has been compared"
    return (
        f"So predicted, {first.runs} were off, at the median of {first.rows}, by: "
        f"{', '.join(listed)}{beyond}."
    )


@lru_cache(maxsize=1)
def read_errors() -> tuple[RunError, ...]:
    """Return the lines of `errors.csv`. Raises `ConfigError`."""
    try:
        with ERRORS.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        return tuple(msgspec.convert(lines, list[RunError], strict=False))
    except (OSError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"cannot read {ERRORS}: {error}") from error
