"""Step times from tables of measured operators: the step-time source `operators`.

Reads the tables that LLMServingSim's profiler writes (casys-kaist/LLMServingSim): dense layers by
tokens, attention by (chunk, context, decodes, context of decodes), layers by sequence, experts.
Anybody who has profiled a card in that form can simulate it. A step is the sum of its kernels.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.lab.cards.engines import errors_of_runs
from aioserve.lab.workloads.traces import read_table
from aioserve.runner.step_times import Prefills, StepTimeOptions, StepTimeSource
from aioserve.scheduler.output import StepFeatures
from aioserve.support.files import read_struct

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Whole = Annotated[int, Meta(ge=1)]
Curve = Callable[[float], float]

#: How often one layer of the model runs each operator; others run once a step.
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
PER_STEP = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
#: Without them a table is not one of a decoder's step.
NEEDED = ("qkv_proj", "o_proj", *PER_SEQUENCE)
#: What a compiler fuses into the kernels beside it: the time of a kernel of its own, which is what
#: one token takes, is not paid.
FUSED = frozenset({"layernorm", "qk_norm", "rotary_emb", "act_fn", "final_layernorm"})
#: The sizes at which vLLM captures CUDA graphs; smaller steps are padded to the next of them.
GRAPH_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
BYTES = 2  # of an element of what travels between cards


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a model's `config.json` that its steps depend on."""

    num_hidden_layers: Whole
    hidden_size: Whole
    num_experts: int = 0  # 0: no mixture of experts
    num_experts_per_tok: int = 0


class OperatorTimes(StepTimeSource):
    """The sum of the measured kernels of a step, and of what travels between cards."""

    # A card's kernels go up and down by some percent where libraries change their algorithms.
    unevenness = 0.1

    class Options(StepTimeOptions, frozen=True, kw_only=True):
        tables: str  # path of the tables without "-dense.csv" and the like, or with ".gz" behind
        model: str  # a `config.json`, or the directory that has it
        tensor_parallel: Whole = 1  # cards that share each layer; the tables are of one of them
        ranks: Whole = 1  # engines in step that share the experts, each with its part of the rows
        link_gb_s: Positive | None = None  # of what travels between cards, in one direction
        link_us: NonNegative = 0.0  # more for each phase of a collective
        compiled: bool = True  # norms, activations and rotations are fused into their neighbours
        graphs: bool = True  # steps of up to 512 tokens are padded to the next captured size

    def __init__(self, options: Any) -> None:
        """Read the tables. Raises `ConfigError` that names the file, and the line of a fault."""
        super().__init__(options)
        self._options: OperatorTimes.Options = options
        path = Path(options.model)
        path = path / "config.json" if path.is_dir() else path
        self._shape = read_struct(path, "config of a model", ModelShape)
        self._by_tokens = _read_curves(_table(options.tables, "dense"), "tokens")
        self._by_sequences = _read_curves(_table(options.tables, "per_sequence"), "sequences")
        known = {*PER_LAYER, *PER_STEP, *PER_SEQUENCE}
        there = {*self._by_tokens, *self._by_sequences}
        if unknown := sorted(there - known):
            raise ConfigError(
                f"{options.tables}: unknown layer {unknown[0]}; known: {', '.join(sorted(known))}"
            )
        if missing := sorted(set(NEEDED) - there):
            raise ConfigError(f"{options.tables}: the tables lack the layer {missing[0]}")
        self._attention = AttentionTable(_table(options.tables, "attention"))
        self._experts: ExpertTable | None = None
        if self._shape.num_experts:
            self._experts = ExpertTable(_table(options.tables, "moe"))
        self._layers = self._shape.num_hidden_layers
        if options.tensor_parallel * options.ranks > 1 and options.link_gb_s is None:
            raise ConfigError(
                "operators: link_gb_s must say how fast the cards' link is, as there are several"
            )
        if options.ranks > 1 and self._experts is None:
            raise ConfigError("operators: ranks share experts, and this model has none")
        if options.compiled:
            for name in FUSED & self._by_tokens.keys():
                self._by_tokens[name] = _above(self._by_tokens[name])
        #: Attention of next to nothing: what it takes to start a kernel.
        self._floor = self._attention(self._attention.least_chunk, 0, 0, 0)
        self._dense_us = lru_cache(maxsize=None)(self._dense)
        self._shared_us = lru_cache(maxsize=None)(self._shared)
        name = Path(options.tables).name
        self.machine = name
        self.source = f"operator tables {name}"

    def errors_of_runs(self) -> str:
        """Return a sentence on how right whole runs were that were predicted by such tables."""
        return errors_of_runs(self.source, self.machine)

    def seconds(self, features: StepFeatures, prefills: Prefills) -> float:
        """Return the sum over the layers; of several ranks, that of the one that takes longest."""
        chunks = [(n, end - n) for n, end in prefills]
        context = features.num_context_tokens - sum(end for _, end in prefills)
        # Draft tokens, which are no row of their own, go through the dense layers.
        drafts = features.num_prefill_tokens - sum(n for n, _ in prefills)
        ranks = self._options.ranks
        if ranks == 1:
            return 1e-6 * self._rank_us(features.num_decodes, context, chunks, drafts)
        num_tokens = features.num_prefill_tokens + features.num_decodes
        mean = context / features.num_decodes if features.num_decodes else 0.0
        worst, most = 0.0, 0
        for num_decodes, own in _shares(features.num_decodes, chunks, ranks):
            worst = max(worst, self._rank_us(num_decodes, mean * num_decodes, own, drafts))
            most = max(most, num_decodes + sum(n for n, _ in own) + drafts)
        return 1e-6 * (worst + self._shared_us(num_tokens, most))

    def _rank_us(
        self, num_decodes: int, context: float, chunks: Sequence[tuple[int, int]], drafts: int
    ) -> float:
        """Return microseconds of one engine's own kernels. Each chunk is a pair: its tokens, and
        those before it.
        """
        num_rows = num_decodes + len(chunks)
        if not num_rows:
            return 0.0
        num_tokens = num_decodes + sum(n for n, _ in chunks) + drafts
        us = self._dense_us(num_tokens)
        for name in PER_SEQUENCE:
            us += self._by_sequences[name](num_rows)
        return us + self._layers * self._attention_us(num_decodes, context, chunks)

    def _attention_us(
        self, num_decodes: int, context: float, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """Return microseconds of attention in one layer. The tables have one chunk beside decodes
        of equal context: the chunk that takes longest is looked up beside them, the others add
        what they take alone, without the start of a kernel.
        """
        mean = context / num_decodes if num_decodes else 0.0
        if not chunks:
            return self._attention(0, 0, num_decodes, mean)
        alone = sorted((self._attention(n, before, 0, 0), n, before) for n, before in chunks)
        _, n, before = alone[-1]
        beside = self._attention(n, before, num_decodes, mean)
        return beside + sum(max(us - self._floor, 0.0) for us, _, _ in alone[:-1])

    def _dense(self, num_tokens: int) -> float:
        """Return microseconds of all layers that see tokens one by one, and of what the cards of
        one engine exchange.
        """
        padded = self._padded(num_tokens)
        us = sum([self._by_tokens[name](padded) for name in PER_STEP if name in self._by_tokens])
        for name, times in PER_LAYER.items():
            if name in self._by_tokens:
                us += self._layers * times * self._by_tokens[name](padded)
        if self._experts is not None and self._options.ranks == 1:
            us += self._layers * self._experts_us(padded, 1)
        if (cards := self._options.tensor_parallel) > 1:
            # One after attention and one after the products behind it: a ring, in 2 (n - 1) phases.
            us += self._layers * 2 * 2 * (cards - 1) * self._phase_us(padded / cards)
        return us

    def _phase_us(self, num_tokens: float) -> float:
        """Return microseconds of a phase in which a card sends `num_tokens` rows to another."""
        options = self._options
        sent = num_tokens * self._shape.hidden_size * BYTES
        return options.link_us + sent / (1e3 * (options.link_gb_s or math.inf))

    def _shared(self, num_tokens: int, most: int) -> float:
        """Return microseconds of the experts, which ranks share, of `num_tokens` in all; the rank
        with the `most` of them decides how much is gathered before and scattered after.
        """
        ranks, phase = self._options.ranks, self._phase_us(self._padded(most))
        num_tokens = max(num_tokens, ranks)  # a rank without rows runs an empty one
        return self._layers * (self._experts_us(num_tokens, ranks) + 2 * (ranks - 1) * phase)

    def _experts_us(self, num_tokens: int, ranks: int) -> float:
        """Return microseconds of one layer of experts, whose router is taken as even."""
        assert self._experts is not None
        num_experts, chosen = self._shape.num_experts, self._shape.num_experts_per_tok
        active = num_experts * (1 - (1 - chosen / num_experts) ** num_tokens) / ranks
        return self._experts(num_tokens / ranks, active)

    def _padded(self, num_tokens: int) -> int:
        if not self._options.graphs or num_tokens > GRAPH_SIZES[-1]:
            return num_tokens
        return GRAPH_SIZES[bisect_left(GRAPH_SIZES, num_tokens)]


def _shares(
    num_decodes: int, chunks: Sequence[tuple[int, int]], ranks: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the decodes and the chunks of each rank: decodes evenly, each chunk, the longest first,
    to the rank that has the fewest tokens of chunks.
    """
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for chunk in sorted(chunks, reverse=True):
        min(own, key=lambda had: sum(n for n, _ in had)).append(chunk)
    for i in range(ranks):
        yield (num_decodes + i) // ranks, own[i]


# The tables: lines of a CSV file, with a header, perhaps packed by gzip.


def _table(tables: str, kind: str) -> Path:
    """Return the file of a kind of operators. Raises `ConfigError` if there is none."""
    plain = Path(f"{tables}-{kind}.csv")
    packed = Path(f"{plain}.gz")
    if not plain.is_file() and packed.is_file():
        return packed
    if not plain.is_file():
        raise ConfigError(f"no operator table {plain}, and no {packed.name} beside it")
    return plain


class _Line(msgspec.Struct, frozen=True):
    """The column that every table has."""

    time_us: NonNegative


class _TokensLine(_Line, frozen=True):
    layer: str
    tokens: Whole


class _SequencesLine(_Line, frozen=True):
    layer: str
    sequences: Whole


class _AttentionLine(_Line, frozen=True):
    prefill_chunk: Annotated[int, Meta(ge=0)]
    kv_prefill: Annotated[int, Meta(ge=0)]
    n_decode: Annotated[int, Meta(ge=0)]
    kv_decode: Annotated[int, Meta(ge=0)]


class _ExpertsLine(_Line, frozen=True):
    tokens: Whole
    activated_experts: Whole


def _read_lines(path: Path, kind: type[Any]) -> list[Any]:
    """Return the lines as structs. Raises `ConfigError` that names file and line."""
    found = [line for _, line in read_table(path, kind, "operator table")]
    if not found:
        raise ConfigError(f"operator table {path} has no lines")
    return found


def _read_curves(path: Path, by: str) -> dict[str, Curve]:
    """Return a curve for each layer of a table of dense layers or of layers by sequence."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in _read_lines(path, _TokensLine if by == "tokens" else _SequencesLine):
        points[line.layer].append((getattr(line, by), line.time_us))
    return {layer: _curve(path, layer, found) for layer, found in points.items()}


def _curve(path: Path, layer: str, points: list[tuple[float, float]]) -> Curve:
    """Return a curve that is straight between its points: they lie 16 tokens apart where a product
    takes as long as it has tiles. Before the first it has that point's value; behind the last it
    grows in proportion, as products that are bound by computing do.
    """
    points = sorted(points)
    if any(a == b for (a, _), (b, _) in pairwise(points)):
        raise ConfigError(f"operator table {path}: {layer} has two times for one size")
    xs, ys = [x for x, _ in points], [y for _, y in points]

    def curve(x: float) -> float:
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1] * x / xs[-1]
        i = bisect_right(xs, x)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])

    return curve


def _above(curve: Curve) -> Curve:
    """Return what a kernel takes beyond its start, which a fused one does not have."""
    start = curve(1)
    return lambda x: max(curve(x) - start, 0.0)


class AttentionTable:
    """Microseconds of attention in one layer, by chunk, tokens before it, decodes, their context.

    The grid is not whole: each chunk has contexts of its own, and so on. A place is looked up axis
    by axis, between the two values that the table has there: straight between them, since the work
    is linear in rows and context, and bent as a power of the chunk, since it is not in that.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if decodes alone, or chunks alone, are not in the table."""
        nested: dict[int, Any] = {}
        for line in _read_lines(path, _AttentionLine):
            by_context = nested.setdefault(line.prefill_chunk, {}).setdefault(line.kv_prefill, {})
            by_context.setdefault(line.n_decode, {})[line.kv_decode] = line.time_us
        decodes = nested.pop(0, {}).get(0, {})
        if not decodes:
            raise ConfigError(f"operator table {path} has no decodes without a prompt")
        if not nested or any(0 not in by_context for by_context in nested.values()):
            raise ConfigError(f"operator table {path} has no prompts from their first token on")
        if any(0 not in of_chunk[0] for of_chunk in nested.values()):
            raise ConfigError(f"operator table {path} has no prompts without decodes")
        self._decodes = _as_axes(decodes, 2)
        self._chunks = _as_axes(nested, 4)
        self.least_chunk: int = min(nested)

    def __call__(self, chunk: int, before: int, num_decodes: int, context: float) -> float:
        """Return microseconds for one chunk of a prompt, `before` tokens behind its start, beside
        decodes of `context` tokens each; `chunk` 0 stands for decodes alone.
        """
        if chunk < 1:
            return _at(self._decodes, (num_decodes, context))
        return _at(self._chunks, (chunk, before, num_decodes, context), bent=True)


class ExpertTable:
    """Microseconds of a layer of experts, by tokens and by how many experts get one."""

    def __init__(self, path: Path) -> None:
        nested: dict[int, dict[int, float]] = {}
        for line in _read_lines(path, _ExpertsLine):
            nested.setdefault(line.activated_experts, {})[line.tokens] = line.time_us
        self._axes = _as_axes(nested, 2)

    def __call__(self, num_tokens: float, active: float) -> float:
        """Return microseconds for `num_tokens` tokens and `active` active experts."""
        return max(_at(self._axes, (active, num_tokens)), 0.0)


#: Rising places of an axis, and what stands at each: the next axis, or microseconds.
_Axes = tuple[list[int], list[Any]]


def _as_axes(nested: dict[int, Any], depth: int) -> _Axes:
    places = sorted(nested)
    if depth == 1:
        return places, [nested[place] for place in places]
    return places, [_as_axes(nested[place], depth - 1) for place in places]


def _at(axes: Any, point: tuple[float, ...], *, bent: bool = False) -> float:
    """Return the value at a point, axis by axis. Before an axis's first place its value there
    holds; behind the last one the line through the last two goes on.
    """
    if not point:
        return float(axes)
    places, values = axes
    x, rest = point[0], point[1:]
    if x <= places[0] or len(places) == 1:
        return _at(values[0], rest)
    i = min(bisect_left(places, x), len(places) - 1)
    right: float = _at(values[i], rest)
    if x == places[i]:
        return right
    left: float = _at(values[i - 1], rest)
    if bent and 0 < left < right and x < places[-1]:
        power: float = _log_share(x, places[i - 1], places[i])
        return left * math.exp(power * math.log(right / left))
    share: float = (x - places[i - 1]) / (places[i] - places[i - 1])
    return left + (right - left) * share


def _log_share(x: float, low: float, high: float) -> float:
    return math.log(x / low) / math.log(high / low)
