"""What a step takes on a machine: the seam between the simulator and what knows the machine.

A step-time source says seconds for the content of a step. It is found by name, by file, or as a
YAML file that names it with its options; the linear formula, which comes last, is one of them.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from aioserve.config import SimulatorConfig
from aioserve.errors import ConfigError, did_you_mean
from aioserve.scheduler.output import StepFeatures
from aioserve.support.files import read_yaml
from aioserve.support.parts import brought
from aioserve.support.plugins import Kind, convert_options, installed

#: Of a step's time that is not its prompts', the share that goes with the card's clock: the rest
#: waits for memory, whose clock is another one. A guess, between the two that bound it.
CLOCK_SHARE = 0.3
#: Of the watts of a step, those between steps left out, the share that the clock does not change;
#: the others go by its third power, since the voltage falls with it. A guess: with it, energy per
#: token is least at some 0.6 of the clock where prompts run, and falls further where decodes do.
STATIC_SHARE = 0.3

#: Of each row with more than one token, how many, and its length with them.
Prefills = Sequence[tuple[int, int]]
Rate = Annotated[float, Meta(ge=0)]


class SideRates(msgspec.Struct, frozen=True, kw_only=True):
    """The times that a simulated machine takes beside its steps, whatever they compute."""

    host_ms: Rate = 0.0  # of the engine's host, more for each step
    idle_ms: Rate = 0.0  # more for a step that finds the engine idle: it has to wake up
    cold_ms: Rate = 0.0  # more for the first step of a run
    jitter: Rate = 0.0  # standard deviation of a step's time, as a share of it
    encoder_token_us: Rate = 0.0  # per token of images that a step encodes
    kv_load_token_us: Rate = 0.0  # per token copied between the KV cache and host memory
    kv_read_token_us: Rate = 0.0  # per token read from a directory, beside steps


class StepTimeOptions(SideRates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a source's nested `Options`: typed, validated, unknown names refused."""


class StepTimeSource(ABC):
    """The base class of step-time sources: seconds for the content of a step."""

    Options: type[StepTimeOptions] = StepTimeOptions
    options: Any

    #: Where the numbers come from, and how well they fit what was measured: for heads of reports.
    source: str = ""
    error: str = ""
    #: What is simulated, as a card and a model: for heads of reports.
    machine: str = ""
    #: Where `host_ms` of its rates comes from, for heads of reports; "" where settings state it.
    host: str = ""
    #: Steps that the engine whose times these are has under way: 2 under asynchronous scheduling,
    #: which plans a step while the one before runs. The default of a simulated run.
    pipeline_depth: int = 1
    #: Watts that it draws while a step runs, and between steps; None: the source knows none.
    watts: tuple[float, float] | None = None
    #: The share by which a step may be shorter than one with less work, as measured times are that
    #: go up and down; the contract allows as much, and no more than 0.1.
    unevenness: float = 0.0

    def __init__(self, options: Any) -> None:
        """`options` are an instance of `Options`."""
        self.options = options
        self.rates: SideRates = options

    @abstractmethod
    def seconds(self, features: StepFeatures, prefills: Prefills) -> float:
        """Return the seconds of one step, without those of `rates`. `prefills` are the rows that
        `features` counts as prefills; rows that verify drafts are decodes there, and their draft
        tokens are prompt tokens.
        """

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """Return what `seconds` says of `num_steps` steps in a row, to the last bit, each with one
        token of the same `num_decodes` rows, the first of which reads `num_context_tokens`.
        """
        end = num_context_tokens + num_steps * num_decodes
        return [
            self.seconds(StepFeatures(0, num_decodes, context, 0), ())
            for context in range(num_context_tokens, end, num_decodes)
        ]

    def seconds_at(self, frequency: float, features: StepFeatures, prefills: Prefills) -> float:
        """Return the seconds of a step while the card's clock is this share of its highest: what
        prompts add goes with the clock, of the rest `CLOCK_SHARE` does. Assumed, not measured.
        """
        seconds = self.seconds(features, prefills)
        without = features._replace(num_prefill_tokens=0, num_query_context=0, num_prefills=0)
        fixed = min(self.seconds(without, ()), seconds)
        of_clock = seconds - fixed + CLOCK_SHARE * fixed
        return seconds - of_clock + of_clock / frequency

    def share_of_watts(self, frequency: float) -> float:
        """Return what a step draws at this share of the highest clock, as a share of what it draws
        at that. Assumed, not measured.
        """
        busy, idle = self.watts or (1.0, 0.0)
        moving = STATIC_SHARE + (1 - STATIC_SHARE) * frequency**3
        return (idle + (busy - idle) * moving) / busy

    def num_kv_tokens(self, max_step_tokens: int, max_rows: int) -> int | None:
        """Return how many tokens the KV cache of the machine holds, beside the memory that steps of
        `max_step_tokens` tokens and `max_rows` rows need; None if the source does not know.
        """
        return None

    def errors_of_runs(self) -> str:
        """Return a sentence on how right whole runs were that were predicted by this source, for
        heads of reports; "" where none was compared with a measured one.
        """
        return ""

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Return the source with these options. Raises `ConfigError` that names what is wrong."""
        owner = f"step-time source {cls.__name__}"
        return cls(convert_options(options, cls.Options, StepTimeOptions, owner))


# Finds sources: those of the core, of the parts and of other packages by name, those of users by
# file or module, and YAML files that say a source and its options.


GROUP = "aioserve.step_times"  # of entry points, by which other packages register sources
PROFILE_FOLDER = Path(__file__).parent / "profiles"
LINEAR = "linear"
LINEAR_FORMULA = "aioserve.runner.step_times:LinearStepTimes"
#: In a YAML file, the source that the other keys are options of; left out: the linear formula.
SOURCE_KEY = "step_times"


def available_step_times() -> dict[str, EntryPoint]:
    """Step-time sources by name; `ConfigError` if two packages claim one name."""
    own = {LINEAR: LINEAR_FORMULA, **brought("step times")}
    found = [EntryPoint(name, path, GROUP) for name, path in own.items()]
    return installed(GROUP, "step-time source", found)


_SOURCE = Kind(
    word="step-time source",
    words="step-time sources",
    interface=StepTimeSource,  # type: ignore[type-abstract]
    base="StepTimeSource",
    available=available_step_times,
)


def load_step_times(spec: str) -> type[StepTimeSource]:
    """Return the class of step-time sources that `spec` names; a file is read anew each time.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    # For the linear one, which most profiles are of, neither parts nor other packages are read.
    return _SOURCE.load(LINEAR_FORMULA if spec == LINEAR else spec)


def available_profiles() -> list[str]:
    """Return names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.yaml"))


def find_profile(name_or_path: str) -> Path | None:
    """Return the YAML file of a profile, by name or path; None if `name_or_path` is neither."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = PROFILE_FOLDER / f"{name_or_path}.yaml"
        return path if path.is_file() else None
    return path


def make_step_times(profile: str, given: dict[str, Any]) -> StepTimeSource:
    """Return the source that `profile` names: a shipped profile, a YAML file of one, or a source by
    name, by file or by module; the options `given` are laid over those of the file. Raises
    `ConfigError` that says what is wrong.
    """
    made = _make_step_times(profile, given)
    if "host_ms" in given:
        made.host = ""
    return made


def _make_step_times(profile: str, given: dict[str, Any]) -> StepTimeSource:
    path = find_profile(profile)
    if path is None:
        if _is_name(profile) and profile not in available_step_times():
            known = [*available_profiles(), *available_step_times()]
            raise ConfigError(
                f"unknown step-time profile {profile!r}{did_you_mean(profile, known)}; "
                f"available: {', '.join(available_profiles())}; sources with options of their "
                f"own (--card-model of a card): {', '.join(available_step_times())}; or give a "
                "path to a .yaml file, file.py:Class or package.module:Class"
            )
        return load_step_times(profile).from_options(given)
    stated = read_yaml(path, "step-time profile")
    if not isinstance(stated, dict):
        raise ConfigError(
            f"step-time profile {path} must hold a mapping, got {type(stated).__name__}"
        )
    spec = stated.pop(SOURCE_KEY, LINEAR)
    if not isinstance(spec, str):
        raise ConfigError(f"step-time profile {path}: {SOURCE_KEY} must be a name, got {spec!r}")
    file, colon, name = spec.partition(":")
    if file.endswith(".py") and (beside := path.parent / file).is_file():
        spec = f"{beside}{colon}{name}"
    kind = load_step_times(spec)
    try:
        return kind.from_options({**stated, **given})
    except ConfigError as error:
        raise ConfigError(f"step-time profile {path}: {error}") from error


def _is_name(spec: str) -> bool:
    """Return whether `spec` is neither a file nor a module: names of profiles have dots as well."""
    if ":" in spec or spec.endswith(".py"):
        return False
    return "." not in spec or not all(word.isidentifier() for word in spec.split("."))


def step_times(config: SimulatorConfig) -> StepTimeSource:
    """Return the source that the settings name, with those of its numbers replaced that they
    give.
    """
    prefix = "step_"
    given = {
        field.removeprefix(prefix): value
        for field in config.__struct_fields__
        if field.startswith(prefix) and (value := getattr(config, field)) is not None
    }
    return make_step_times(config.profile, {**config.profile_options, **given})


def machine_in_words(config: SimulatorConfig) -> str:
    """Return what is simulated, for heads of reports: the machine, where its step times come from,
    how well they fit, and how right whole runs were; "" where settings state them one by one.
    """
    times, usual = step_times(config), SimulatorConfig()
    host = times.rates.host_ms
    if times.machine:
        also = f", and {host:g} ms of the engine's host" if host or times.host else ""
        also += f" ({times.host})" if times.host else ""
        words = f"Steps take what they take on {times.machine}{also}: {times.source}"
    elif config.profile != usual.profile:
        words = f"Steps take what profile {config.profile} says"
        words += f": {times.source}" if times.source else ""
    else:
        stated = [n for n in config.__struct_fields__ if n.startswith(("step_", "profile_"))]
        if any(getattr(config, name) != getattr(usual, name) for name in stated):
            return ""
        return "Steps are of the default profile, not your machine: calibrate, or give --card."
    sentences = ["; ".join(filter(None, (words, times.error))) + ".", times.errors_of_runs()]
    return " ".join(filter(None, sentences))


# The linear formula. A profile says itself where its numbers come from.


Coefficient = Annotated[float, Meta(ge=0)]
#: (x, ms) with rising x: a curve that is straight between its points. Before the first point it has
#: that point's value, behind the last it goes on along the line from the first to the last.
Points = tuple[tuple[Coefficient, Coefficient], ...]


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time: a base, prefill tokens, decodes, context read, attention work, and rows that
    prefill, each at a rate; and two curves, for machines on which a rate cannot say it.
    """

    base_ms: Coefficient
    prefill_token_us: Coefficient
    decode_us: Coefficient
    context_token_us: Coefficient
    query_context_ns: Coefficient = 0.0
    prefill_us: Coefficient = 0.0  # per row with more than one token, whatever its length
    encoder_token_us: Coefficient = 0.0
    idle_ms: Coefficient = 0.0  # more for a step that finds the engine idle: it has to wake up
    kv_load_token_us: Coefficient = 0.0  # per token copied between the KV cache and host memory
    kv_read_token_us: Coefficient = 0.0  # per token read from a directory, beside steps
    prefill_ms: Points = ()  # more for a step with prompts, by the tokens of all of them together
    decode_ms: Points = ()  # more for a step with decodes, by their number
    host_factor: Coefficient = 1.0  # times `base_ms` and `decode_ms`: the speed of a session's host
    cold_ms: Coefficient = 0.0  # more for the first step of a run
    jitter: Coefficient = 0.0  # standard deviation of a step's time, as a share of it
    source: str = ""  # where the numbers come from: measured how and on what, or computed from what
    error: str = ""  # how well they fit, if they were measured
    host_ms: Coefficient = 0.0  # more for each step, whatever the speed of the host

    def __post_init__(self) -> None:
        for name in ("prefill_ms", "decode_ms"):
            places = [x for x, _ in getattr(self, name)]
            if any(a >= b for a, b in pairwise(places)):
                raise ValueError(f"the points of {name} must have rising first numbers")

    def seconds(self, features: StepFeatures) -> float:
        """Return the predicted duration of one step, without that of `SideRates`."""
        num_prefill_tokens, num_decodes, num_context, num_query_context, num_prefills = features
        fixed_ms = self._fixed_ms(num_decodes)
        if num_prefill_tokens and self.prefill_ms:
            fixed_ms += _on_curve(self.prefill_ms, num_prefill_tokens)
        return 1e-3 * fixed_ms + 1e-6 * (
            self.prefill_token_us * num_prefill_tokens
            + self.decode_us * num_decodes
            + self.context_token_us * num_context
            + 1e-3 * self.query_context_ns * num_query_context
            + self.prefill_us * num_prefills
        )

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """To the last bit what `seconds` says of `num_steps` steps in a row, each with one token of
        the same `num_decodes` rows, the first of which reads `num_context_tokens`.
        """
        base, rows = 1e-3 * self._fixed_ms(num_decodes), self.decode_us * num_decodes
        rate, end = self.context_token_us, num_context_tokens + num_steps * num_decodes
        return [
            base + 1e-6 * (rows + rate * context)
            for context in range(num_context_tokens, end, num_decodes)
        ]

    def _fixed_ms(self, num_decodes: int) -> float:
        """Return the milliseconds of the host for a step of this number of decodes, whatever their
        context.
        """
        if num_decodes and self.decode_ms:
            return self.host_factor * (self.base_ms + _on_curve(self.decode_ms, num_decodes))
        return self.host_factor * self.base_ms


def _on_curve(points: Points, x: float) -> float:
    """Return the value of the curve at `x`, in ms."""
    place = bisect_right(points, (x, math.inf))
    if place == 0:
        return points[0][1]
    before, value = points[place - 1]
    if place < len(points):
        after, next_value = points[place]
        return value + (next_value - value) * (x - before) / (after - before)
    first, first_value = points[0]
    slope = (value - first_value) / (before - first) if before > first else 0.0
    return value + slope * (x - before)


class LinearStepTimes(StepTimeSource):
    """The linear model as a step-time source, under the name `linear`."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self.source, self.error = model.source, model.error
        self.rates = SideRates(**{f: getattr(model, f) for f in SideRates.__struct_fields__})

    def seconds(self, features: StepFeatures, prefills: Prefills = ()) -> float:
        """Return the seconds of one step; the rates know sums over rows alone."""
        return self.model.seconds(features)

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """Return what `seconds` says of `num_steps` steps in a row, to the last bit."""
        return self.model.seconds_of_decodes(num_decodes, num_context_tokens, num_steps)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Return the source with these fields of `StepTimeModel`. Raises `ConfigError`."""
        try:
            return cls(msgspec.convert(options, StepTimeModel))
        except msgspec.ValidationError as error:
            from aioserve.support.mistakes import explain

            raise ConfigError(explain(error, StepTimeModel)) from error


def load_profile(name_or_path: str) -> StepTimeModel:
    """Return a linear profile by name, or from a YAML file. Raises `ConfigError` that says what is
    wrong.
    """
    found = make_step_times(name_or_path, {})
    if not isinstance(found, LinearStepTimes):
        raise ConfigError(f"step-time profile {name_or_path} is not one of the linear formula")
    return found.model
