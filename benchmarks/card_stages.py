"""The stages of card.py: what is asked of a CUDA card, each by aioserve's own code.

A stage is a generator of parts. Wrong numbers are `WrongNumbersError`; what a part returns is kept
as found. The card can be a stand-in, which the tests have; its measurements then mean nothing.
"""

import asyncio
import cProfile
import importlib
import logging
import math
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from card_models import (
    CASES,
    PAGE_SIZE,
    Case,
    Reply,
    WrongNumbersError,
    check_logprobs,
    check_stats,
    examine,
    make_asks,
    score,
    serve,
)
from gpu import (
    SAMPLED,
    Loaded,
    Size,
    Steps,
    load_shape,
    measure_ceilings,
    measure_load,
)
from harness import LOADS, LoadShape
from steps import GREEDY
from torch import Tensor

from aioserve import SamplingParams
from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.gpu.cuda.attention import TorchDeviceAttention
from aioserve.gpu.cuda.device import Device
from aioserve.gpu.cuda.flashinfer_attention import FlashInferAttention, have_kernels
from aioserve.gpu.cuda.load import choose_draw
from aioserve.gpu.cuda.plan import Layout, Limits, WindowLimits, plan_padding, plan_step
from aioserve.gpu.cuda.runner import OverlappedRunner, SleepingOverlappedRunner
from aioserve.gpu.cuda.sampler import DrawColumns, draw, lowest_kept
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerSpec,
    StepInputs,
)
from aioserve.runner.batch import sampling_columns
from aioserve.runner.batch.sampling_columns import SamplingColumns

#: Of attention in bfloat16, relative to plain torch in float32: the worst head of the worst token.
MOST_ERROR = 0.03
MAX_MODEL_LEN = 8192


class WarnedError(Exception):
    """The code for cards has warned in a part that has worked."""


class Part(NamedTuple):
    """Something that is tried alone."""

    name: str
    work: Callable[[], dict[str, Any]]  # returns what it found
    is_setup: bool = False  # the parts behind it need it


class Amounts(NamedTuple):
    """The amounts that the stages try: requests, tokens, rows, draws and steps."""

    lengths: tuple[int, ...]  # of requests that decode, in attention
    prompts: tuple[int, ...]  # tokens of prompts in the same step
    sizes: tuple[int, ...]  # captured numbers of rows
    draws: int  # of one distribution
    vocab_size: int
    requests: int  # that overlap
    longest_prompt: int
    output_tokens: int
    blocks: int  # of the KV pool, too few for all of them
    seats: int
    speed: Size
    shape: str
    host_steps: int


REAL = Amounts(
    lengths=(1, 15, 16, 17, 100, 1000, 4001, 8000) * 4,
    prompts=(1000, 33, 2),
    sizes=(32, 8, 1),
    draws=20_000,
    vocab_size=128_256,
    requests=100,
    longest_prompt=600,
    output_tokens=60,
    blocks=500,
    seats=64,
    speed=Size(steps=40),
    shape="8b",
    host_steps=200,
)


class Card:
    """Where the stages run: the first CUDA card of this machine."""

    amounts = REAL

    @cached_property
    def device(self) -> Device:
        """The device, which is the current one."""
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA card")
        from aioserve.gpu.cuda.cuda_device import CudaDevice

        return CudaDevice()

    def driver(self) -> str:
        """Return version, memory, clock and power limit, as the driver tells them."""
        asked = "driver_version,memory.total,clocks.max.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return told.splitlines()[0]

    def runner(self, config: EngineConfig) -> OverlappedRunner:
        """Return the runner that `config` asks for."""
        return SleepingOverlappedRunner.on_cuda(config, ModelInfo(config.model))

    def forbid_waiting(self, launches: Callable[[], object]) -> None:
        """Run `launches`, and have torch raise where it would wait for the card."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            launches()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_parts(card: str, stage: str, skip: frozenset[str], write: Callable[..., None]) -> None:
    """Try the parts of a stage that are not in `skip`, on the card of that name (module:class)."""
    module, _, name = card.partition(":")
    on = getattr(importlib.import_module(module), name)()
    log = Log()
    logging.getLogger("aioserve").addHandler(log)
    for part in STAGES[stage](on):
        if part.name in skip:
            continue
        write(stage=stage, begin=part.name, is_setup=part.is_setup)
        log.clear()
        began = time.monotonic()
        try:
            with torch.inference_mode():
                found = part.work()
            log.check()
        except Exception as error:
            traceback.print_exc()
            write(stage=stage, part=part.name, error=_told(error, log), seconds=_since(began))
            if part.is_setup and not isinstance(error, WarnedError):
                return
            if "device" in vars(on) and on.device.is_lost():
                # What else this process would find means nothing. Another one goes on.
                print(f"the card can compute no more after {part.name!r}", file=sys.stderr)
                sys.exit(1)
        else:
            write(stage=stage, part=part.name, found=found, seconds=_since(began))


class Log(logging.Handler):
    """Warnings and errors that aioserve logs in a part."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        print(record.name, record.getMessage(), file=sys.stderr)

    def clear(self) -> None:
        """Forget all records, before the next part begins."""
        self._records.clear()

    def check(self) -> None:
        """Raise `WarnedError` if the code for cards has warned: it does something slower."""
        for record in self._records:
            if record.name.startswith("aioserve.gpu"):
                raise WarnedError(record.getMessage())

    def cause(self) -> str:
        """Return the last exception that was logged: a client is not told what failed a step."""
        errors = [r.exc_info[1] for r in self._records if r.exc_info and r.exc_info[1]]
        return _first_line(errors[-1]) if errors else ""


def _told(error: Exception, log: Log) -> str:
    """Return what an error says first, where in the project it was raised, and why."""
    if isinstance(error, WrongNumbersError):
        return f"wrong numbers: {error}"
    if isinstance(error, WarnedError):
        return f"it works, but warns: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if "/aioserve/" in frame.filename or frame is frames[-1]][-1]
    cause = f", after {why}" if (why := log.cause()) else ""
    return f"{_first_line(error)} ({Path(place.filename).name}:{place.lineno}){cause}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.300}"


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


# Versions.


def versions(card: Card) -> Iterator[Part]:
    """Import what the other stages import, each alone; ask the driver; use the card."""

    def imported(name: str) -> dict[str, Any]:
        return {name: getattr(importlib.import_module(name), "__version__", "?")}

    def product() -> dict[str, Any]:
        place = card.device.torch_device
        a = torch.arange(16.0, device=place).view(4, 4)
        total = float((a @ a).sum())
        if total != 3920.0:
            raise WrongNumbersError(f"a product of matrices sums to {total}, not to 3920")
        memory = card.device.card()
        return {"card": memory.name, "free GiB": round(memory.free / 2**30, 1)}

    yield Part("torch", lambda: imported("torch") | {"python": platform.python_version()})
    for name in ("transformers", "triton", "flashinfer"):
        yield Part(name, partial(imported, name))
    yield Part("driver", lambda: {"driver": card.driver()})
    yield Part("card", product)


# Attention.


class Kind(NamedTuple):
    """A kind of attention layers, for which flashinfer has kernels of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of values
    window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype = torch.bfloat16
    has_sinks: bool = False
    rope_dim: int = 0  # what keys have besides, in layers that keep latent states

    def __str__(self) -> str:
        if self.rope_dim:
            words = (
                f"{self.num_heads} heads on latent states of {self.head_dim} and {self.rope_dim}"
            )
        else:
            sinks = " with sinks," if self.has_sinks else ""
            words = f"{self.num_heads}/{self.num_kv_heads} heads{sinks} of {self.head_dim}"
        words += f", window {self.window}" if self.window else ""
        words += f", soft cap {self.softcap:g}" if self.softcap else ""
        return words + (", fp8 KV" if self.kv_dtype != torch.bfloat16 else "")

    def call_on(self, place: torch.device) -> AttentionCall:
        """Return the call of such a layer whose weights are at `place`."""
        # The scale of latent states is that of the keys that the model makes of them.
        scaling = 192**-0.5 if self.rope_dim else self.head_dim**-0.5
        sinks = torch.linspace(-2, 4, self.num_heads, device=place) if self.has_sinks else None
        options = AttentionOptions(
            scaling, sliding_window=self.window, softcap=self.softcap, sinks=sinks
        )
        return AttentionCall(self.num_heads, options)

    @property
    def spec(self) -> KVCacheSpec:
        """The KV cache of one such layer."""
        key_dim, is_latent = self.head_dim + self.rope_dim, self.rope_dim > 0
        layer = LayerSpec(self.num_kv_heads, key_dim, self.head_dim, is_latent)
        return KVCacheSpec((layer,), self.kv_dtype)


FP8 = torch.float8_e4m3fn
#: The kinds of well-known models first. From 4 query heads per KV head on, tensor cores decode.
KINDS = (
    Kind(32, 8, 128),  # Llama 3, Qwen3-8B, Mistral
    Kind(16, 8, 128),  # Qwen3-0.6B: decodes without tensor cores
    Kind(28, 4, 128),  # Qwen2.5-7B
    Kind(64, 8, 128),  # Llama 3 70B, Qwen3-32B
    Kind(32, 8, 64),  # Llama 3.2 1B
    Kind(32, 8, 128, window=100),
    Kind(32, 8, 128, kv_dtype=FP8),
    Kind(16, 8, 128, kv_dtype=FP8),
    Kind(16, 8, 256, softcap=2.0),  # Gemma 2, layers that see everything
    Kind(16, 8, 256, window=100, softcap=2.0),  # Gemma 2, the other layers
    Kind(16, 4, 256),
    Kind(14, 2, 64),  # Qwen2.5-0.5B
    Kind(64, 8, 64, has_sinks=True),  # gpt-oss, layers that see everything
    Kind(64, 8, 64, window=100, has_sinks=True),  # gpt-oss, the other layers
    Kind(32, 32, 96),  # Phi-3-mini: stored as heads of 128
    Kind(32, 32, 80),  # Phi-2: the same
    Kind(128, 1, 512, rope_dim=64),  # DeepSeek-V3
    Kind(16, 1, 512, rope_dim=64),  # DeepSeek-V2-Lite
    Kind(16, 2, 512),  # Gemma 4, layers that see everything
    Kind(20, 1, 512, rope_dim=64),  # GLM-4.7-Flash: the kernel is given 32 heads
)


def kernels(card: Card) -> Iterator[Part]:
    """Load the kernels of each kind, or compile them, which takes minutes without packed ones."""
    yield Part("flashinfer", _import_flashinfer, is_setup=True)
    for kind in KINDS:
        yield Part(str(kind), partial(_load_kernels, card, kind))


def _import_flashinfer() -> dict[str, Any]:
    import flashinfer

    return {"flashinfer": flashinfer.__version__}


def _load_kernels(card: Card, kind: Kind) -> dict[str, Any]:
    import flashinfer

    calls = [kind.call_on(card.device.torch_device)]
    have_kernels(flashinfer, kind.spec, calls, torch.bfloat16, card.device, MAX_MODEL_LEN)
    return {}


class Attentions:
    """Layers of some kinds twice, by flashinfer and by plain torch, over one KV cache that is full
    of random numbers.
    """

    def __init__(self, card: Card, kinds: Sequence[Kind], sizes: Sequence[int] = ()) -> None:
        """CUDA graphs of `sizes` rows may be captured with it."""
        import flashinfer

        amounts = card.amounts
        self.device, self.kinds = card.device, kinds
        place = self.device.torch_device
        lengths = (*amounts.lengths, *amounts.prompts)
        row_pages = -(-max(lengths) // PAGE_SIZE) + 1
        limits = Limits(
            num_rows=len(lengths),
            num_tokens=len(amounts.lengths) + sum(amounts.prompts),
            num_row_pages=row_pages,
            page_size=PAGE_SIZE,
            num_pages=row_pages * 4,
        )
        windows = {layer: kind.window for layer, kind in enumerate(kinds) if kind.window}
        own = None
        if windows:  # flashinfer gets the pages alone that such layers see, plain torch all
            own = WindowLimits(frozenset(windows), max(windows.values()), limits.num_pages)
        self._sizes = tuple(sorted(sizes))
        self._layout = Layout(replace(limits, windows=own))
        self._arena = torch.zeros(self._layout.size, dtype=torch.int32, device=place)
        self.arrays = self._layout.split(self._arena)
        spec = KVCacheSpec(
            tuple(layer for kind in kinds for layer in kind.spec.layers), kinds[0].kv_dtype
        )
        self._calls = [kind.call_on(place) for kind in kinds]
        self._fast = FlashInferAttention(
            flashinfer,
            spec,
            self._calls,
            self._layout.limits,
            self.device,
            torch.bfloat16,
            max_model_len=MAX_MODEL_LEN,
            capture_sizes=self._sizes,
            arrays=self.arrays,
        )
        self._plain = TorchDeviceAttention(spec, limits, self.device.torch_device)
        torch.manual_seed(0)
        fast, plain = self._fast.cache, self._plain.cache
        for index, layer in enumerate(spec.layers):
            # Without the zeros behind heads that are stored wider than they are.
            keys = fast.keys[index][..., : layer.key_head_dim]
            values = fast.values[index][..., : layer.value_head_dim]
            for cache in (keys,) if layer.is_latent else (keys, values):
                cache.copy_(torch.randn(cache.shape, device=place, dtype=torch.bfloat16))
            plain.keys[index], plain.values[index] = keys, values
        self._random = np.random.default_rng(0)
        self._buffer = self.device.host_buffer(self._layout.size)

    def step(self, lengths: Sequence[int], prompts: Sequence[int] = ()) -> StepInputs:
        """Return a step of decodes behind `lengths` tokens and whole prompts, on random pages."""
        counts = [1] * len(lengths) + list(prompts)
        seq_lens = np.array([*lengths, *prompts], dtype=np.int64)
        limits, rows = self._layout.limits, len(counts)
        shape = rows, limits.num_row_pages
        table = self._random.integers(0, limits.num_pages, shape).astype(np.int32)
        starts = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        tokens = np.zeros(int(starts[-1]), dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        names = [str(row) for row in range(rows)]
        step = StepInputs(
            names, np.arange(rows), tokens, tokens, tokens, starts, seq_lens, table, none, none
        )
        return replace(step, windows=step)

    def run(
        self, step: StepInputs, replay: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    ) -> float:
        """Return the worst error of the step's attention. `replay` stands for flashinfer's layers:
        it gets the queries of the padded step.
        """
        none = np.zeros(0, dtype=np.int64)
        sampling = SamplingColumns(1, 1).select(none, none)
        plan = plan_step(step, sampling, self._layout, self._buffer.array, self._sizes)
        self.device.stage(self._arena[: plan.num_words], self._buffer)
        fast, plain = (each.begin(plan, self.arrays) for each in (self._fast, self._plain))
        # Twice as long as K and V, so that some tokens matter more than others.
        queries = [
            2 * torch.randn(plan.num_tokens, kind.num_heads, kind.head_dim + kind.rope_dim)
            for kind in self.kinds
        ]
        queries = [query.bfloat16() for query in queries]
        on_device = [query.to(self.device.torch_device) for query in queries]
        found: list[Tensor] = []
        expected: list[Tensor] = []

        def attend() -> None:
            # First, as a kernel that writes nothing would else find the right numbers in memory
            # that plain torch has used.
            if replay is not None:
                found.extend(replay(on_device))
            else:
                for layer, call in enumerate(self._calls):
                    found.append(fast.attend(layer, on_device[layer], call.options))
            for layer, call in enumerate(self._calls):
                expected.append(plain.attend(layer, on_device[layer], call.options))

        self.device.launch(attend)
        self.device.record().wait()
        num_tokens = int(step.query_start_loc[-1])
        return max(
            _worst(one[:num_tokens], other[:num_tokens])
            for one, other in zip(found, expected, strict=True)
        )

    def capture(self, size: int) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Capture the layers for `size` rows of one token. What is returned replays them."""
        place = self.device.torch_device
        plan = plan_padding(self._layout, self._buffer.array, size)
        self.device.stage(self._arena[: plan.num_words], self._buffer)
        step = self._fast.begin(plan, self.arrays)

        def zeros(num_heads: int, dim: int) -> Tensor:
            return torch.zeros(size, num_heads, dim, dtype=torch.bfloat16, device=place)

        queries = [zeros(kind.num_heads, kind.head_dim + kind.rope_dim) for kind in self.kinds]
        results = [zeros(kind.num_heads, kind.head_dim) for kind in self.kinds]

        def work() -> None:
            for layer, call in enumerate(self._calls):
                results[layer].copy_(step.attend(layer, queries[layer], call.options))

        captured = self.device.capture(work)
        self.device.record().wait()

        def replay(own: Sequence[Tensor]) -> list[Tensor]:
            for query, given in zip(queries, own, strict=True):
                query.copy_(given)
            captured()
            return results

        return replay


def _worst(found: Tensor, expected: Tensor) -> float:
    """Return the greatest error of a head of a token, relative to what it should be."""
    wide = expected.float()
    errors = (found.float() - wide).norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-6)
    worst = errors.max().item()
    return math.inf if math.isnan(worst) else worst


def _check_error(error: float) -> dict[str, Any]:
    if error > MOST_ERROR:
        raise WrongNumbersError(
            f"the worst head is off by {error:.3g} of its length from plain torch, at most "
            f"{MOST_ERROR} is allowed"
        )
    return {"error": error}


def attention(card: Card) -> Iterator[Part]:
    """Compare each kind with plain torch: decodes alone, and decodes beside prompts."""
    amounts = card.amounts

    @lru_cache(maxsize=1)
    def layers(kind: Kind) -> Attentions:
        return Attentions(card, [kind])

    def compare(kind: Kind, prompts: Sequence[int]) -> dict[str, Any]:
        both = layers(kind)
        return _check_error(both.run(both.step(amounts.lengths, prompts)))

    for kind in KINDS:
        yield Part(f"decodes, {kind}", partial(compare, kind, ()))
        yield Part(f"decodes and prompts, {kind}", partial(compare, kind, amounts.prompts))


def graphs(card: Card) -> Iterator[Part]:
    """Replay captured attention with lengths, pages and numbers of rows far from the capture's."""
    amounts = card.amounts
    together = [(0, 5), (8, 9), (1,), (6,), (12, 13), (14,), (16,), (19,)]
    pairs = [[KINDS[number] for number in numbers] for numbers in together]

    def replayed(kinds: Sequence[Kind]) -> dict[str, Any]:
        both = Attentions(card, kinds, amounts.sizes)
        replays = {size: both.capture(size) for size in amounts.sizes}
        errors = []
        for turn in range(3):
            for size, replay in replays.items():
                lengths = amounts.lengths[turn : turn + size]
                lengths = lengths[: max(1, size - turn)]  # padded, but for the first turn
                errors.append(both.run(both.step(lengths), replay))
        return _check_error(max(errors))

    for kinds in pairs:
        name = " beside ".join(map(str, kinds))
        yield Part(name, partial(replayed, kinds))


# Drawing tokens.


class Limit(NamedTuple):
    """A way in which tokens are drawn: its name, and the settings of a request that asks for it."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


LIMITS = (
    Limit("greedy", temperature=0),
    Limit("temperature"),
    Limit("top-k", top_k=12),
    Limit("top-p", top_p=0.9),
    Limit("top-k and top-p", top_k=12, top_p=0.9),
    Limit("min-p", min_p=0.2),
)


def sampler(card: Card) -> Iterator[Part]:
    """Draw by the card's kernels and by the CPU: the same tokens, and the right frequencies."""
    amounts = card.amounts
    choose = choose_draw(card.device)

    def on_card(logits: Tensor, columns: DrawColumns) -> Tensor:
        place = card.device.torch_device
        names = ("temperature", "top_k", "top_p", "min_p_floor", "keys")
        moved = columns._replace(**{name: getattr(columns, name).to(place) for name in names})
        return choose(logits.to(place), moved).cpu()

    def same_tokens(limit: Limit) -> dict[str, Any]:
        torch.manual_seed(0)
        logits = 3 * torch.randn(32, amounts.vocab_size)
        columns = _columns(limit, 32)
        same = (on_card(logits, columns) == draw(logits, columns)).float().mean().item()
        if same < 0.96:  # log and exp may differ in the last bit, which rarely decides
            raise WrongNumbersError(f"{same:.0%} of the tokens are those of the CPU, not 96%")
        return {"same tokens": same}

    def frequencies(limit: Limit) -> dict[str, Any]:
        return {"chi-square": _check_frequencies(on_card, limit, amounts.draws)}

    for limit in LIMITS:
        yield Part(f"{limit.name}: the tokens of the CPU", partial(same_tokens, limit))
        if limit.temperature:
            yield Part(f"{limit.name}: frequencies", partial(frequencies, limit))


def _columns(limit: Limit, num_rows: int) -> DrawColumns:
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 1 << 32, (num_rows, 2), dtype=np.uint32)
    keys = sampling_columns.row_keys(seeds, np.arange(num_rows)).view(np.int32)
    ones = torch.ones(num_rows)
    floor = math.log(limit.min_p) if limit.min_p else -math.inf
    return DrawColumns(
        temperature=ones * limit.temperature,
        top_k=ones.int() * limit.top_k,
        top_p=ones * limit.top_p,
        min_p_floor=ones * floor,
        keys=torch.from_numpy(np.ascontiguousarray(keys.T)),
        has_top_k=limit.top_k > 0,
        has_top_p=limit.top_p < 1,
    )


def _check_frequencies(
    on_card: Callable[[Tensor, DrawColumns], Tensor], limit: Limit, num_draws: int
) -> float:
    """Return chi-square per degree of freedom of draws from 40 tokens, by their exact shares."""
    logits = torch.linspace(2, -2, 40)
    columns = _columns(limit, num_draws)
    drawn = on_card(logits.repeat(num_draws, 1), columns)
    scaled = ((logits - logits.max()) / limit.temperature)[None]
    floor = torch.maximum(
        columns.min_p_floor[:1], lowest_kept(scaled, columns.top_k[:1], columns.top_p[:1])
    )
    shares = (scaled[0].double().exp() * (scaled[0] >= floor)).double()
    expected = shares / shares.sum() * num_draws
    counts = torch.bincount(drawn, minlength=40).double()
    kept = expected > 0
    if outside := int(counts[~kept].sum()):
        raise WrongNumbersError(f"{outside} of {num_draws} draws are outside of {limit.name}")
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = max(1, int(kept.sum()) - 1)
    most = freedom + 5 * math.sqrt(2 * freedom)
    if chi_square > most:
        raise WrongNumbersError(
            f"chi-square of {num_draws} draws is {chi_square:.0f}, at most {most:.0f} is allowed"
        )
    return chi_square / freedom


# Overlapped requests.


OVERLAP_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,  # four to a KV head: tensor cores decode
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # so that a token depends on what came before it
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def overlap(card: Card) -> Iterator[Part]:
    """Serve 100 requests with preemption, two steps in flight and CUDA graphs; then compute how
    likely their tokens are, one step at a time without graphs.
    """
    amounts, replies = card.amounts, list[Reply]()
    with tempfile.TemporaryDirectory() as folder:

        def settings(depth: int, num_blocks: int, **runner: Any) -> EngineConfig:
            return EngineConfig(
                model=ModelConfig(model=folder, dtype="bfloat16", skip_tokenizer_init=True),
                cache=CacheConfig(
                    block_size=PAGE_SIZE, num_kv_blocks=num_blocks, enable_prefix_caching=False
                ),
                scheduler=SchedulerConfig(max_num_seqs=amounts.seats, pipeline_depth=depth),
                runner=RunnerConfig(**runner),
            )

        def model() -> dict[str, Any]:
            from transformers import AutoConfig, AutoModelForCausalLM

            torch.manual_seed(0)
            config = AutoConfig.for_model("llama", **OVERLAP_SHAPE)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            made.save_pretrained(folder)
            return {}

        def generate() -> dict[str, Any]:
            runner = card.runner(config := settings(2, amounts.blocks))
            began = time.monotonic()
            asks = make_asks(
                ({"temperature": 0}, {"temperature": 0.8}),
                amounts.requests,
                longest=amounts.longest_prompt,
                num_tokens=amounts.output_tokens,
                vocab_size=OVERLAP_SHAPE["vocab_size"],
            )
            found, stats = asyncio.run(serve(config, runner, asks))
            replies.extend(found)
            check_stats(config, stats)
            lengths = {len(reply.token_ids) for reply in found}
            if lengths != {amounts.output_tokens}:
                raise WrongNumbersError(f"replies have {sorted(lengths)} tokens")
            return {"preemptions": stats.num_preemptions, "seconds": _since(began)}

        def scored() -> dict[str, Any]:
            config = settings(1, 4 * amounts.blocks, enforce_eager=True)
            scores = asyncio.run(score(config, card.runner(config), replies))
            return check_logprobs(replies, scores)

        yield Part("model", model, is_setup=True)
        yield Part("depth 2, with graphs", generate, is_setup=True)
        yield Part("log probabilities, to depth 1 without graphs", scored)


# Paths of real models.


def models(card: Card) -> Iterator[Part]:
    """Serve small models of several kinds, and have the CPU say how likely their tokens are."""

    def examined(case: Case) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return examine(case, card.runner, Path(folder))

    for case in CASES:
        yield Part(case.name, partial(examined, case))


# Speed, and the host's time.


def speed(card: Card) -> Iterator[Part]:
    """Measure decodes and a prompt of a large model with random weights against their floors, and
    the loads W1 to W5, greedy and sampled.
    """
    amounts, size, loaded = card.amounts, card.amounts.speed, list[Loaded]()
    with tempfile.TemporaryDirectory() as folder:

        def load() -> dict[str, Any]:
            ceilings = measure_ceilings(card.device, is_rehearsal=amounts is not REAL)
            loaded.append(load_shape(amounts.shape, card.device, ceilings, size, Path(folder)))
            return {
                "copy TB/s": ceilings.bytes_per_second / 1e12,
                "bfloat16 TFLOP/s": ceilings.flops_per_second / 1e12,
                "start s": loaded[0].start_seconds,
            }

        def decodes(batch: int, depth: int, params: SamplingParams) -> dict[str, Any]:
            steps = Steps(loaded[0].executor, loaded[0].vocab_size)
            try:
                steps.seat(batch, size.context, 2 * size.steps, params)
                seconds = steps.seconds(size.steps, depth)
                busy = steps.busy_seconds(size.steps // 4)
            finally:
                steps.leave()
            idle = {} if busy is None else {"idle": max(0.0, 1 - busy / seconds)}
            return _of_floor(loaded[0].floor.seconds(batch, size.context), seconds) | idle

        def prefill() -> dict[str, Any]:
            steps = Steps(loaded[0].executor, loaded[0].vocab_size)
            try:
                seconds = steps.seconds(6, 2, size.prefill)
            finally:
                steps.leave()
            return _of_floor(loaded[0].floor.seconds(0, 0, size.prefill), seconds)

        def engine(shape: LoadShape, params: SamplingParams) -> dict[str, Any]:
            return asyncio.run(measure_load(loaded[0], _divided(shape, size.of_loads), params))

        loads = {name: LOADS[name] for name in ("W1", "W2", "W3", "W4", "W5")}
        yield Part("load", load, is_setup=True)
        for batch in size.batches:
            yield Part(f"decode {batch}", partial(decodes, batch, 2, GREEDY))
        yield Part(f"prefill {size.prefill}", prefill)
        for name, shape in loads.items():
            yield Part(f"{name}: {shape.words}", partial(engine, shape, GREEDY))
        for batch in size.batches:
            yield Part(f"decode {batch}, sampled", partial(decodes, batch, 2, SAMPLED))
        for name, shape in loads.items():
            yield Part(f"{name}, sampled", partial(engine, shape, SAMPLED))
        for batch in size.batches:
            yield Part(f"decode {batch}, no overlap", partial(decodes, batch, 1, GREEDY))


def _divided(shape: LoadShape, by: int) -> LoadShape:
    """Return a load with fewer streams and tokens, for a rehearsal."""
    return LoadShape(
        -(-shape.streams // by),
        -(-shape.input_tokens // by),
        -(-shape.output_tokens // by),
        -(-shape.prefix_tokens // by),
        shape.per_stream,
    )


def _of_floor(least: float, seconds: float) -> dict[str, Any]:
    return {"ms": 1e3 * seconds, "floor ms": 1e3 * least, "of floor": least / seconds}


HOST_SHAPE = "tiny"


def host(card: Card) -> Iterator[Part]:
    """Time what the host does for steps of a tiny model, and check that it never waits."""
    amounts, size, loaded = card.amounts, card.amounts.speed, list[Loaded]()
    small = size._replace(context=min(size.context, 256), prefill=min(size.prefill, 1024))
    with tempfile.TemporaryDirectory() as folder:

        def load() -> dict[str, Any]:
            ceilings = measure_ceilings(card.device, is_rehearsal=True)
            loaded.append(load_shape(HOST_SHAPE, card.device, ceilings, small, Path(folder)))
            return {"start s": loaded[0].start_seconds}

        def seat(batch: int, params: SamplingParams) -> Steps:
            steps = Steps(loaded[0].executor, loaded[0].vocab_size)
            try:
                steps.seat(batch, small.context, amounts.host_steps, params)
            except Exception:
                steps.leave()  # what other parts need is not kept by this one
                raise
            return steps

        def times(batch: int, params: SamplingParams) -> dict[str, Any]:
            steps = seat(batch, params)
            try:
                found = host_seconds(steps, amounts.host_steps // 2)
            finally:
                steps.leave()
            return {f"{name} us": 1e6 * seconds for name, seconds in found.items()}

        def profile(batch: int) -> dict[str, Any]:
            steps = seat(batch, SAMPLED)
            try:
                return host_profile(steps, amounts.host_steps // 2)
            finally:
                steps.leave()

        def waits(batch: int) -> dict[str, Any]:
            steps = seat(batch, SAMPLED)
            try:
                card.forbid_waiting(lambda: steps.seconds(amounts.host_steps // 2, 2))
            finally:
                steps.leave()
            return {}

        yield Part("load", load, is_setup=True)
        for batch in (size.batches[0], size.batches[-1]):
            yield Part(f"{batch} streams", partial(times, batch, GREEDY))
            yield Part(f"{batch} streams, sampled", partial(times, batch, SAMPLED))
            yield Part(f"{batch} streams, profile", partial(profile, batch))
            yield Part(f"{batch} streams, waiting", partial(waits, batch))


def host_seconds(steps: Steps, num_steps: int) -> dict[str, float]:
    """Return median seconds of the host in `launch` and, once the device is done, in `finish`."""
    executor = steps.executor
    spent: dict[str, list[float]] = {"launch": [], "finish": []}
    for step in [steps.decode() for _ in range(num_steps)]:
        began = time.perf_counter()
        launched = executor.launch(step)
        spent["launch"].append(time.perf_counter() - began)
        assert launched is not None, "a step with tokens"
        for part in launched.parts:
            part.event.wait()
        began = time.perf_counter()
        executor.finish(launched)
        spent["finish"].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def host_profile(steps: Steps, num_steps: int, num_functions: int = 12) -> dict[str, float]:
    """Return microseconds of a step in the functions that take most, without what they call."""
    executor, profiler = steps.executor, cProfile.Profile()
    for step in [steps.decode() for _ in range(num_steps)]:
        profiler.enable()
        launched = executor.launch(step)
        profiler.disable()
        assert launched is not None, "a step with tokens"
        executor.finish(launched)
    spent: dict[str, float] = {}
    for (path, line, function), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        place = f"{Path(path).name}:{line} " if line else ""
        spent[place + function] = own / num_steps * 1e6
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:num_functions])


STAGES: dict[str, Callable[[Card], Iterator[Part]]] = {
    stage.__name__: stage
    for stage in (versions, kernels, attention, graphs, sampler, overlap, models, speed, host)
}
