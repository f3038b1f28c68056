"""Step times of a card from four tables: what is not attention, output heads, prompts, decodes.

The tables are small and say themselves where they come from. Every source of measured operators is
brought into this form, so that all of them are evaluated by the same code.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.lab.cards.engines import errors_of_runs
from aioserve.runner.step_times import Prefills, StepTimeOptions, StepTimeSource
from aioserve.scheduler.output import StepFeatures

Number = Annotated[float, Meta(ge=0)]
Numbers = Annotated[tuple[Number, ...], Meta(min_length=1)]


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds at rising places, straight between them. Before the first place it has the value
    there, behind the last it goes on along the last piece.
    """

    at: Numbers
    ms: Numbers

    def __post_init__(self) -> None:
        _check_rising("at", self.at)
        if len(self.at) != len(self.ms):
            raise ValueError(f"at has {len(self.at)} places and ms {len(self.ms)} values")
        if any(a > b for a, b in pairwise(self.ms)):
            raise ValueError("ms must not fall, since more work takes no less time")

    def value(self, x: float) -> float:
        """Return the milliseconds at `x`."""
        return _between(self.at, self.ms, x)


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds by two numbers, both of which rise: one line of `ms` for each place of `by`,
    with a value for each place of `at`.
    """

    by: Numbers
    at: Numbers
    ms: Annotated[tuple[Numbers, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check_rising("by", self.by)
        _check_rising("at", self.at)
        if len(self.ms) != len(self.by) or any(len(line) != len(self.at) for line in self.ms):
            raise ValueError("ms must have a line for each place of by, of a value for each of at")
        falls = [a > b for line in self.ms for a, b in pairwise(line)]
        falls += [a > b for lines in pairwise(self.ms) for a, b in zip(*lines, strict=True)]
        if any(falls):
            raise ValueError("ms must not fall, since more work takes no less time")


def rising_curve(at: Sequence[float], ms: Sequence[float]) -> Curve:
    """Return a curve of measured times. Where they fall although work rises, the curve has the mean
    of the neighbours at odds: isotonic regression, by pooling them (Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []  # a mean, and of how many
    for value in ms:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return Curve(tuple(at), tuple(mean for mean, count in pools for _ in range(count)))


def rising_grid(by: Sequence[float], at: Sequence[float], ms: Sequence[Sequence[float]]) -> Grid:
    """Return a grid of measured times; one that falls where work rises is lifted to the largest
    before it, along both axes.
    """
    lines = [tuple(accumulate(line, max)) for line in ms]
    columns = [tuple(accumulate(column, max)) for column in zip(*lines, strict=True)]
    return Grid(tuple(by), tuple(at), tuple(zip(*columns, strict=True)))


class CardTables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a card for the parts of a step, in milliseconds of all layers together."""

    dense_ms: Curve  # all that is neither attention nor output head, by the tokens of the step
    head_ms: Curve  # output heads, by the rows of the step, each of which samples one token
    prefill_ms: (
        Grid  # attention of one prompt: by its tokens in the step, at the tokens before them
    )
    decode_ms: Grid  # attention of rows with one token: by their number, at the context of each
    #: How many tokens the KV cache holds, by the tokens of the largest step.
    kv_tokens: tuple[tuple[int, int], ...] = ()


class TableOptions(StepTimeOptions, frozen=True, kw_only=True):
    """Tables, and what they are of: options of the source `tables`."""

    tables: CardTables
    machine: str = ""
    engine: str = ""  # whose steps they are, a key of `engines.ENGINES`; "": not stated
    source: str = ""
    error: str = ""
    host: str = ""  # where `host_ms` comes from
    depth: Annotated[int, Meta(ge=1, le=2)] = 1  # steps that the engine has under way
    busy_watts: Number = 0.0  # of all its cards together while a step runs; 0: not known
    idle_watts: Number = 0.0  # between steps
    #: Milliseconds that launching the kernels of a step takes: no step is shorter.
    least_ms: Number = 0.0
    #: Numbers of tokens to which the engine pads steps, for which it has captured graphs; a larger
    #: step is not padded.
    graph_sizes: tuple[Annotated[int, Meta(ge=1)], ...] = ()


class TableStepTimes(StepTimeSource):
    """A step takes the sum of its parts, as the tables have them. Prompts of one step share the
    launches of one: the attention of the smallest prompt counts once. Rows that decode at unequal
    contexts take what as many rows take at their mean.
    """

    Options: type[StepTimeOptions] = TableOptions

    def __init__(self, options: TableOptions) -> None:
        super().__init__(options)
        self.machine, self.source = options.machine, options.source
        self.error, self.host = options.error, options.host
        self.pipeline_depth = options.depth
        self._engine = options.engine
        if options.busy_watts:
            self.watts = options.busy_watts, options.idle_watts
        self._tables = options.tables
        self._graph_sizes = tuple(sorted(options.graph_sizes))
        self._least_ms = options.least_ms
        self._launch_ms = _power_between(self._tables.prefill_ms, 1, 0)
        self._fixed: dict[tuple[int, int], float] = {}  # by tokens and rows
        self._decodes: dict[int, tuple[Sequence[float], Sequence[float]]] = {}  # by rows

    def seconds(self, features: StepFeatures, prefills: Prefills) -> float:
        """Return the seconds of one step."""
        num_tokens, num_rows, num_context, _, num_prefills = features
        ms = self._fixed_ms(num_tokens + num_rows, num_rows + num_prefills)
        if num_tokens:
            grid, launch = self._tables.prefill_ms, self._launch_ms
            if prefills:
                ms += launch
                for num, end in sorted(prefills):
                    ms += max(_power_between(grid, num, end - num) - launch, 0.0)
                    num_context -= end
        if num_rows:
            ms += _between(*self._decode_line(num_rows), num_context)
        return 1e-3 * max(ms, self._least_ms)

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """Return what `seconds` says of `num_steps` steps in a row, to the last bit."""
        fixed, least = self._fixed_ms(num_decodes, num_decodes), self._least_ms
        at, ms = self._decode_line(num_decodes)
        found: list[float] = []
        context, end = num_context_tokens, num_context_tokens + num_steps * num_decodes
        while context < end:  # one piece of the curve after the other
            place = min(max(bisect_right(at, context), 1), len(at) - 1)
            if context < at[0] or len(at) == 1:
                found.append(1e-3 * max(fixed + ms[0], least))
                context += num_decodes
                continue
            before, value = at[place - 1], ms[place - 1]
            slope = (ms[place] - value) / (at[place] - before)
            stop = end if place == len(at) - 1 else min(end, math.ceil(at[place]))
            piece = range(context, max(stop, context + 1), num_decodes)
            found += [1e-3 * max(fixed + (value + slope * (x - before)), least) for x in piece]
            context = piece[-1] + num_decodes
        return found

    def num_kv_tokens(self, max_step_tokens: int, max_rows: int) -> int | None:
        """Return how many tokens the KV cache holds beside the memory that steps of
        `max_step_tokens` tokens need; the tables do not depend on the rows.
        """
        known = self._tables.kv_tokens
        if not known:
            return None
        sizes, tokens = zip(*known, strict=True)
        held = -_between(sizes, [-each for each in tokens], max_step_tokens)
        return max(int(held), 1)

    def errors_of_runs(self) -> str:
        """Return a sentence on how right whole runs were that were predicted by such tables."""
        return errors_of_runs(self.source, self.machine, self._engine)

    def _fixed_ms(self, num_tokens: int, num_rows: int) -> float:
        """Return the milliseconds of a step without its attention."""
        known = self._fixed.get((num_tokens, num_rows))
        if known is None:
            sizes = self._graph_sizes
            padded = sizes[place] if (place := _place(sizes, num_tokens)) < len(sizes) else 0
            tables = self._tables
            known = tables.dense_ms.value(max(num_tokens, padded)) + tables.head_ms.value(num_rows)
            self._fixed[num_tokens, num_rows] = known
        return known

    def _decode_line(self, num_rows: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return the attention of `num_rows` rows, at contexts of all of them together."""
        line = self._decodes.get(num_rows)
        if line is None:
            grid = self._tables.decode_ms
            columns = zip(*grid.ms, strict=True)
            ms = [_between(grid.by, column, num_rows) for column in columns]
            line = self._decodes[num_rows] = [num_rows * x for x in grid.at], ms
        return line


def _place(sizes: Sequence[int], x: int) -> int:
    """Return where the first of the rising `sizes` stands that is at least `x`."""
    return bisect_right(sizes, x - 1)


def _check_rising(name: str, places: Sequence[float]) -> None:
    if any(a >= b for a, b in pairwise(places)):
        raise ValueError(f"{name} must have rising numbers")


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """Return the value at `x`, straight between the places."""
    if x < at[0] or len(at) == 1:
        return values[0]
    place = min(max(bisect_right(at, x), 1), len(at) - 1)
    before, value = at[place - 1], values[place - 1]
    slope = (values[place] - value) / (at[place] - before)
    return value + slope * (x - before)


def _power_between(grid: Grid, num_tokens: float, before: float) -> float:
    """Return the attention of a prompt: straight in the tokens before it, a power of its own
    tokens, as work is linear in the former and between linear and quadratic in the latter.
    """
    sizes = grid.by
    if num_tokens <= sizes[0] or len(sizes) == 1:
        return _between(grid.at, grid.ms[0], before)
    place = min(bisect_right(sizes, num_tokens), len(sizes) - 1)
    low, high = (_between(grid.at, line, before) for line in grid.ms[place - 1 : place + 1])
    if low <= 0:
        share = (num_tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return low + share * (high - low)
    power = math.log(high / low) / math.log(sizes[place] / sizes[place - 1])
    return low * math.exp(power * math.log(num_tokens / sizes[place - 1]))


def write_tables(options: TableOptions, head: str) -> str:
    """Return the text of a profile with these tables, of four digits, below a comment."""
    tables = options.tables
    lines = [*(f"# {line}" for line in head.splitlines()), "step_times: tables"]
    for name in ("machine", "engine", "source", "error", "host"):
        lines.append(f"{name}: {json.dumps(getattr(options, name))}")
    lines.append(f"busy_watts: {options.busy_watts:g} # the limits of the boards")
    lines.append(f"host_ms: {options.host_ms:g}")
    if options.depth != 1:
        lines.append(f"depth: {options.depth} # steps under way, by asynchronous scheduling")
    if options.least_ms:
        lines.append(f"least_ms: {options.least_ms:g} # what launching the kernels of a step takes")
    lines.append("tables:")
    for name in ("dense_ms", "head_ms"):
        curve: Curve = getattr(tables, name)
        lines += [f"  {name}:", f"    at: {_row(curve.at)}", f"    ms: {_row(curve.ms)}"]
    for name in ("prefill_ms", "decode_ms"):
        grid: Grid = getattr(tables, name)
        lines += [f"  {name}:", f"    by: {_row(grid.by)}", f"    at: {_row(grid.at)}", "    ms:"]
        lines += [f"      - {_row(line)}" for line in grid.ms]
    lines.append(f"  kv_tokens: {json.dumps([list(each) for each in tables.kv_tokens])}")
    return "\n".join(lines) + "\n"


def _row(numbers: Sequence[float]) -> str:
    """Return numbers as YAML has a list, with four digits, or all where more is a whole number."""
    return "[" + ", ".join(f"{x:.0f}" if x >= 1000 else f"{x:.4g}" for x in numbers) + "]"
