"""Tables of a card and a model, from the measured operators of the package `aiconfigurator-core`.

The package composes a step of operators that were timed on the card under a serving engine; it is
asked once for each place of the tables. Where it leaves a part of a model out, its own operators on
a stand-in model price that part. docs/cards.md says what else is left out.
"""

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, did_you_mean, one_line
from aioserve.lab.cards import engines, tables
from aioserve.lab.cards.engines import depth_of, host_of, least_ms_of
from aioserve.lab.cards.tables import (
    CardTables,
    TableOptions,
    TableStepTimes,
    rising_curve,
    rising_grid,
)
from aioserve.runner.step_times import StepTimeOptions
from aioserve.scheduler.output import StepFeatures
from aioserve.support.kept_files import user_cache

PACKAGE = "aiconfigurator_core"
EXTRA = "aiconfigurator-core"

#: Places of the tables: tokens of a step, rows, tokens of a prompt and before it, contexts.
#: Where a tile of products is full, the step after it has a place of its own.
FULL = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
TOKENS = tuple(sorted({
    *(1, 2, 4), *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64),
    *range(1152, 2049, 128), *range(2304, 4097, 256), *range(5120, 16385, 1024),
    *(n + 1 for n in FULL),
}))  # fmt: skip
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CHUNKS = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
BEFORE = (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CONTEXTS = (1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: Largest steps for which the size of the KV cache is asked; the rows beside them.
STEP_SIZES, MOST_ROWS = (512, 2048, 8192, 32768), 256
#: Steps by which the tables are compared with the package, drawn evenly by the logarithm.
NUM_CHECKED = 400

Count = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(ge=0)]
#: KV heads of one card up to which attention of rows that decode was measured, by the engine; under
#: other engines as many were measured as models have.
MOST_KV_HEADS = {"vllm": 8}
#: Models whose layers with experts have one more, which every token runs; the package has none.
SHARED_EXPERT = ("Llama4ForConditionalGeneration",)
#: Tokens of a step up to which an engine computes that expert beside the others, in a CUDA stream
#: of its own, so that it takes no time: VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD of vLLM.
MOST_BESIDE = {"vllm": 256}
#: Options that change no table.
BESIDE = ("graph_sizes", "busy_watts", "idle_watts")


class Card(StepTimeOptions, frozen=True, kw_only=True):
    """A card under an engine with a model: options of the source `card`."""

    card: str  # as the package calls it: h100_sxm
    model: str  # its name on a hub, a folder with a config.json, or that file
    tp: Count = 1  # cards that share each layer
    ep: Count = 1  # of a mixture of experts: cards that share out the experts
    engine: str = "vllm"
    version: str | None = None  # of the engine (default: the newest that was measured whole)
    weights: str | None = None  # element type of matrix products (default: the model's own)
    experts: str | None = None  # element type of a mixture's experts (default: that of `weights`)
    attention: str | None = None  # that of attention's projections (default: that of `weights`)
    kv: str | None = None  # element type of the KV cache (default: the model's own)
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    graph_sizes: tuple[Count, ...] = ()  # as those of `TableStepTimes`
    busy_watts: Number | None = None  # of all cards together (default: the limits of their boards)
    idle_watts: Number = 0.0

    @property
    def words(self) -> str:
        """The card and the model, for heads of reports."""
        count = f"{self.tp} x " if self.tp > 1 else ""
        kinds = [f"weights {self.weights}"] if self.weights else []
        kinds += [f"experts {self.experts}"] if self.experts else []
        kinds += [f"attention {self.attention}"] if self.attention else []
        kinds += [f"KV {self.kv}"] if self.kv else []
        return ", ".join([f"{self.model} on {count}{self.card}", *kinds])


class CardStepTimes(TableStepTimes):
    """A measured card, under the name `card`: tables made when it is asked for."""

    Options: type[StepTimeOptions] = Card

    def __init__(self, options: Card) -> None:
        beside = (*BESIDE, *StepTimeOptions.__struct_fields__)
        own = {f.name: f.default for f in msgspec.structs.fields(Card) if f.name in beside}
        made = measured(msgspec.structs.replace(options, **own))
        given = {name: getattr(options, name) for name in beside}
        if options.busy_watts is None:
            del given["busy_watts"]
        super().__init__(msgspec.structs.replace(made, **given))
        self._usual_host_ms = made.host_ms

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Return the source with these options; where they do not say `host_ms`, it is that of the
        engine (`engines.HOSTS`). Raises `ConfigError` that names what is wrong.
        """
        made = super().from_options(options)
        if "host_ms" not in options:
            made.rates = msgspec.structs.replace(made.rates, host_ms=made._usual_host_ms)
        return made


@lru_cache(maxsize=16)
def measured(card: Card) -> TableOptions:
    """Return the tables of a card, and what they are of. They take seconds to make, and are kept in
    the user's cache for the next process. Raises `ConfigError` that lists what there is, where the
    package has no such card, model or element type.
    """
    check_installed()
    kept = _kept(card)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(kept.read_bytes(), type=TableOptions)
    made = _measure(card)
    with contextlib.suppress(OSError):  # then it is made again
        kept.parent.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_bytes(msgspec.msgpack.encode(made))
        half.replace(kept)
    return made


def _kept(card: Card) -> Path:
    """Return the file that keeps the tables of a card, by all that they are made of."""
    config = Path(card.model) / "config.json" if Path(card.model).is_dir() else Path(card.model)
    stated = config.read_bytes() if config.is_file() else b""
    places = (TOKENS, ROWS, CHUNKS, BEFORE, CONTEXTS, STEP_SIZES, NUM_CHECKED)
    parts = repr((version(EXTRA), places, card)).encode()
    modules = (__file__, tables.__file__, engines.__file__)
    code = [Path(str(file)).read_bytes() for file in modules]
    name = sha256(b"\0".join([parts, stated, *code])).hexdigest()[:24]
    return user_cache("cards") / f"{name}.msgpack"


def _measure(card: Card) -> TableOptions:
    package = _Package(card)
    made = CardTables(
        dense_ms=rising_curve(TOKENS, [package.dense(n) for n in TOKENS]),
        head_ms=rising_curve(ROWS, [package.head(n) for n in ROWS]),
        prefill_ms=rising_grid(
            CHUNKS, BEFORE, [[package.prompt(n, b) for b in BEFORE] for n in CHUNKS]
        ),
        decode_ms=rising_grid(
            ROWS, CONTEXTS, [[package.rows(n, c) for c in CONTEXTS] for n in ROWS]
        ),
        kv_tokens=package.kv_tokens(card.gpu_memory_utilization),
    )
    host_ms, host = host_of(card.engine, package.version, card.tp)
    options = TableOptions(
        tables=made,
        machine=f"{card.words}, {card.engine} {package.version}",
        engine=card.engine,
        source=f"measured operators of {EXTRA} {version(EXTRA)}",
        host_ms=host_ms,
        host=host,
        depth=depth_of(card.engine, package.version),
        least_ms=least_ms_of(card.engine, package.version, package.architecture, package.layers),
        busy_watts=package.watts(),
    )
    return msgspec.structs.replace(options, error=package.compared(TableStepTimes(options)))


def models() -> list[str]:
    """Return the names of models whose configurations come with the package."""
    from aiconfigurator_core.sdk.common import DefaultHFModels

    return sorted(DefaultHFModels)


def databases() -> Mapping[str, Mapping[str, list[str]]]:
    """Return by card and engine the versions of which the package has tables."""
    from aiconfigurator_core.sdk.perf_database import get_supported_databases

    found = get_supported_databases()
    return {card: {e: list(v) for e, v in own.items() if v} for card, own in found.items() if own}


def check_installed() -> None:
    """Raises `ConfigError` if the package is not there."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"cards are measured by {EXTRA}, which is not installed: pip install "
            f"'aioserve-engine[cards]' (or {EXTRA}); ready profiles work without it"
        )


class _Package:
    """One card and model, as the package composes their steps; times in milliseconds."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.version = _find_version(card)
        self._model = find_model(card.model)
        with quiet():
            from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

            try:
                self._shape = get_model_config_from_model_path(self._model)
                self._engine = self._compile(self._model)
                self._varying_prompt = self._varying(
                    self._prompt_operators(512, 0), self._prompt_operators(512, 8192)
                )
                self._varying_rows = self._varying(
                    self._row_operators(8, 64), self._row_operators(8, 8192)
                )
                self._left_out = self._find_left_out()
            except Exception as error:
                raise _refused(card, error) from error

    @property
    def architecture(self) -> str:
        """The architecture of the model, as its `config.json` states it."""
        return str(self._shape["architecture"])

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self._shape["layers"])

    def _compile(self, model: str, **changes: Any) -> Any:
        from aiconfigurator_core.sdk.engine import EngineHandle

        arguments = {**self._arguments, **changes}
        return EngineHandle.compile(model, self.card.card, self.card.engine, **arguments)

    def _compile_config(self, config: Mapping[str, Any]) -> Any:
        """Return the engine of a stand-in model with this `config.json`."""
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
            return self._compile(folder)

    @property
    def _arguments(self) -> dict[str, Any]:
        card = self.card
        tp, ep = card.tp, card.ep
        if tp % ep:
            raise ConfigError(f"ep must divide tp, which is {tp}, got {ep}")
        return {
            "backend_version": self.version,
            "tp_size": tp,
            "moe_ep_size": ep,
            "moe_tp_size": tp // ep,
            "gemm_quant_mode": card.weights,
            "moe_quant_mode": card.experts or card.weights,
            "kvcache_quant_mode": card.kv,
        }

    def watts(self) -> float:
        """Return the power limits of the boards together; 0 where the package states none."""
        from aiconfigurator_core.sdk.perf_database import load_system_spec

        stated = load_system_spec(self.card.card).get("gpu", {}).get("power") or 0.0
        return float(stated) * self.card.tp

    def dense(self, num_tokens: int) -> float:
        """Return all that is neither attention nor output head: the longer of what the package has
        for prompts and for decodes, which differ by a few percent.
        """
        operators = self._prompt_operators(num_tokens, 0)
        longest = self._rest(operators, self._varying_prompt)
        if num_tokens <= ROWS[-1]:
            rows = self._row_operators(num_tokens, 1024)
            longest = max(longest, self._rest(rows, self._varying_rows))
        return longest + self._left_out.ms(num_tokens)

    def head(self, num_rows: int) -> float:
        """Return the milliseconds that the output heads of `num_rows` rows take."""
        operators = self._row_operators(num_rows, 1024)
        return sum(ms for name, ms in operators.items() if _is_head(name))

    def prompt(self, num_tokens: int, before: int) -> float:
        """Return the milliseconds of attention of a prompt."""
        operators = self._prompt_operators(num_tokens, before)
        return sum(operators[name] for name in self._varying_prompt)

    def rows(self, num_rows: int, context: int) -> float:
        """Return the milliseconds of attention of rows that decode. With more KV heads than were
        measured, it is that of the largest measured number at a context that is longer by the same
        factor, so that as many bytes are read.
        """
        left_out = self._left_out
        engine = left_out.fewer_heads or self._engine
        operators = self._row_operators(num_rows, round(context * left_out.times_longer), engine)
        return sum(operators[name] for name in self._varying_rows)

    def kv_tokens(self, utilization: float) -> tuple[tuple[int, int], ...]:
        """Return how many tokens the KV cache holds beside steps of several sizes."""
        from aiconfigurator_core.sdk.memory import estimate_kv_cache

        kind = "of_free" if self.card.engine == "trtllm" else "of_total"
        found: list[tuple[int, int]] = []
        for size in STEP_SIZES:
            with quiet():
                try:
                    estimate = estimate_kv_cache(
                        self._model,
                        self.card.card,
                        self.card.engine,
                        max_num_tokens=size,
                        max_batch_size=MOST_ROWS,
                        memory_fraction_kind=kind,
                        memory_fraction_value=utilization,
                        **self._arguments,
                    )
                except Exception as error:
                    if found:  # it holds no steps of that size, and some of a smaller one
                        break
                    raise _refused(self.card, error) from error
            held = estimate["total_kv_size_bytes"]
            share = max(1 - self._left_out.bytes / held, 0.0)
            found.append((size, int(estimate["total_kv_size_tokens"] * share)))
        return tuple(found)

    def compared(self, made: TableStepTimes) -> str:
        """Return how far the tables are from the package on steps between their places: steps of
        decodes, of one prompt, and of both.
        """
        rng = random.Random("steps that the tables are compared by")
        errors = []

        def draw(least: int, most: int) -> int:
            return round(math.exp(rng.uniform(math.log(least), math.log(most))))

        for number in range(NUM_CHECKED):
            rows, context = draw(1, 512), draw(16, 16384)
            tokens, before = draw(16, 8192), draw(16, 32768)
            rows, tokens = rows if number % 3 else 0, tokens if number % 3 != 1 else 0
            theirs = self.rows(rows, context) if rows else 0.0
            theirs += self.prompt(tokens, before) if tokens else 0.0
            num_rows = rows + (1 if tokens else 0)
            theirs += self.dense(rows + tokens) + self.head(num_rows)
            theirs = max(theirs, made.options.least_ms)
            prefills = [(tokens, before + tokens)] if tokens else []
            num_context = rows * context + sum(end for _, end in prefills)
            ours = made.seconds(StepFeatures.of(rows, num_context, prefills), prefills)
            errors.append(abs(1e3 * ours / theirs - 1))
        errors.sort()
        return (
            f"tables against their source: median {errors[NUM_CHECKED // 2]:.1%}, largest "
            f"{errors[-1]:.1%} of {NUM_CHECKED} steps"
        )

    def _find_left_out(self) -> "_LeftOut":
        """Return what the package leaves out of this model."""
        card, shape, found = self.card, self._shape, _LeftOut()
        attention = card.attention or card.weights
        if attention != card.weights:
            other = self._compile(self._model, gemm_quant_mode=attention)
            found.parts.append(_Part(other, 1, _is_projection))
            found.parts.append(_Part(self._engine, -1, _is_projection))
            head, queries, keys = (shape[name] for name in ("d", "n", "n_kv"))
            weights = shape["hidden_size"] * head * (2 * queries + 2 * keys) * self.layers
            found.bytes += weights / card.tp * (_size_of(attention) - _size_of(card.weights))
        if self.architecture in SHARED_EXPERT:
            layers = sum(shape["extra_params"].moe_layer_freq)
            engine = self._compile_config(_plain_decoder(shape, layers))
            found.parts.append(_Part(engine, 1, _is_ffn, MOST_BESIDE.get(card.engine, 0)))
            weights = 3 * shape["hidden_size"] * shape["moe_inter_size"] * layers
            found.bytes += weights / card.tp * _size_of(card.weights)
        config, most = shape["raw_config"], MOST_KV_HEADS.get(card.engine)
        heads = config.get("num_key_value_heads")
        if most is not None and heads and heads > most * card.tp and "kv_lora_rank" not in config:
            fewer = {**config, "num_key_value_heads": most * card.tp}
            found.fewer_heads = self._compile_config(fewer)
            found.times_longer = heads / (most * card.tp)
        return found

    def _prompt_operators(self, num_tokens: int, before: int) -> dict[str, float]:
        operators, _ = self._engine.run_static_per_op(
            batch_size=1, isl=num_tokens + before, osl=1, prefix=before, mode="static_ctx"
        )
        return {name: ms for name, ms, *_ in operators}

    def _row_operators(self, num_rows: int, context: int, engine: Any = None) -> dict[str, float]:
        operators = (engine or self._engine).decode_step_per_op(num_rows, max(context - 1, 1), 2)
        return {name: ms for name, ms, *_ in operators}

    @staticmethod
    def _varying(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
        """Return the operators whose time depends on the context: the attention, however called."""
        return [name for name in one if one[name] != other[name]]

    @staticmethod
    def _rest(operators: Mapping[str, float], attention: list[str]) -> float:
        return sum(
            ms for name, ms in operators.items() if name not in attention and not _is_head(name)
        )


def _is_head(name: str) -> bool:
    return "logits" in name


def _is_projection(name: str) -> bool:
    """Return whether an operator projects to queries, keys and values, or back from attention."""
    return name.endswith(("qkv_gemm", "proj_gemm"))


def _is_ffn(name: str) -> bool:
    """Return whether an operator is one of the feed-forward part of a plain decoder's layers."""
    return name.endswith(("ffn1_gemm", "act_gate", "ffn2_gemm"))


def _size_of(kind: str | None) -> float:
    """Return the bytes of a weight of this element type. Raises `KeyError` for an unknown one."""
    from aiconfigurator_core.sdk.common import GEMMQuantMode

    return float(GEMMQuantMode[kind or "bfloat16"].value.memory)


def _plain_decoder(shape: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the `config.json` of a plain decoder of this shape, whose feed-forward part is as wide
    as one expert.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["moe_inter_size"],
        "max_position_embeddings": shape["context"],
        "num_attention_heads": shape["n"],
        "num_hidden_layers": layers,
        "num_key_value_heads": shape["n_kv"],
        "head_dim": shape["d"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape["vocab"],
    }


class _Part(NamedTuple):
    """Operators of a stand-in model, which count in steps of more than `most_beside` tokens."""

    engine: Any
    sign: int  # 1, or -1 for what they stand in for
    belongs: Callable[[str], bool]  # whether an operator of this name is one of them
    most_beside: int = 0


class _LeftOut:
    """The parts of a model that the package leaves out, and the bytes of their weights on each
    card; and the engine that prices rows with more KV heads than were measured.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.bytes = 0.0
        self.fewer_heads: Any = None  # an engine with as many KV heads as were measured
        self.times_longer = 1.0  # by which contexts are multiplied there

    def ms(self, num_tokens: int) -> float:
        """Return the milliseconds that the parts take in a step of `num_tokens` tokens."""
        found = 0.0
        for engine, sign, belongs, most_beside in self.parts:
            if num_tokens > most_beside:
                operators, _ = engine.run_static_per_op(
                    batch_size=1, isl=num_tokens, osl=1, prefix=0, mode="static_ctx"
                )
                found += sign * sum(ms for name, ms, *_ in operators if belongs(name))
        return found


def find_model(name: str) -> str:
    """Return what the package calls a model, or the folder of its `config.json`. A name is taken
    without regard to `Meta-` and `-Instruct`, which change no step. Raises `ConfigError`.
    """
    path = Path(name)
    if path.name == "config.json" and path.is_file():
        return str(path.parent)
    if (path / "config.json").is_file():
        return str(path)
    if path.suffix == ".json" or name.startswith((".", "/")):
        raise ConfigError(f"there is no config.json of a model at {name}")
    known = models()
    alike = [each for each in known if _plain(each) == _plain(name)]
    if name in known or alike:
        return name if name in known else alike[0]
    raise ConfigError(
        f"{EXTRA} has no configuration of model {name!r}{did_you_mean(name, known)}; give a "
        f"config.json, or one of: {', '.join(known)}"
    )


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-instruct")


def _find_version(card: Card) -> str:
    """Return the version of the engine. Raises `ConfigError` for what was not measured."""
    with quiet():
        known = databases()
        from aiconfigurator_core.sdk.perf_database import get_version_slots

        if card.card not in known:
            raise ConfigError(
                f"{EXTRA} has no tables of card {card.card!r}{did_you_mean(card.card, known)}; it "
                f"has those of {', '.join(sorted(known))}"
            )
        engines = known[card.card]
        if card.engine not in engines:
            raise ConfigError(
                f"{EXTRA} has no tables of {card.card} under {card.engine}; it has those under "
                f"{', '.join(sorted(engines))}"
            )
        slots = get_version_slots(card.card, card.engine) or {}
    versions = sorted(set(slots.values()))
    if card.version is not None and card.version not in versions:
        raise ConfigError(
            f"{EXTRA} has no whole tables of {card.card} under {card.engine} {card.version}; it "
            f"has those under {', '.join(versions) or 'none'}"
        )
    if card.version is None and "current" not in slots:
        raise ConfigError(f"{EXTRA} has no whole tables of {card.card} under {card.engine}")
    return card.version or slots["current"]


def _refused(card: Card, error: Exception) -> ConfigError:
    from aiconfigurator_core.sdk import common

    if isinstance(error, ConfigError):
        return error
    if isinstance(error, KeyError):
        kinds = [*common.GEMMQuantMode.__members__]
        caches = [*common.KVCacheQuantMode.__members__]
        return ConfigError(
            f"{EXTRA} knows no element type {error} for {card.words}; weights may be "
            f"{', '.join(kinds)}, kv may be {', '.join(caches)}"
        )
    return ConfigError(f"{EXTRA} has no step times of {card.words}: {one_line(error)}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep to itself what the package says of each table that it reads."""
    logger = logging.getLogger(PACKAGE)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
